"""`TrainState`: all values that training updates, as one pytree that is sharded, saved and restored."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmdkit import compat
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import user_code
from spmdkit.foundation.trees import common_dtype, describe, is_key, is_wide_float, named_leaves, path_name, summary
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import leaf_roles, lost_updates, rounding, trace_context
from spmdkit.step import rng as step_rng
from spmdkit.step.checks.replica_agreement import require_same


class Variables(NamedTuple):
    """The return value of `init` for a model with mutable state.

    Attributes:
        params: differentiated, and updated by the optimizer.
        state: returned by the loss in each step (batch statistics, counters); see `model_state` in the config.
    """

    params: Any
    state: Any


class Initial(NamedTuple):
    """The user's part of the state before the first step.

    Attributes:
        params, state: as in `Variables`.
        opt_state: the optimizer's state of a step with its own optimizer; None: that of the optimizer's init.
    """

    params: Any
    state: Any = None
    opt_state: Any = None


@dataclass(frozen=True)
class ReplicaCopy:
    """The parameters of a per-replica step. The local copy is typed varying, so that `jax.grad` returns the gradient of
    the replica. The update uses the originals, so that its result is provably the same on all replicas.

    Attributes:
        own: the parameters in the state (the same objects).
        whole: the originals, a tree of the same structure.
        before: the copy of the parameters before the update, which user code may still reference.
    """

    own: Any
    whole: Any
    before: ReplicaCopy | None = None

    def of(self, tree: Any) -> Any:
        """Returns `tree` with each local copy replaced by its original; other leaves are unchanged."""
        if tree is self.own:
            return self.whole  # leaves may be other objects than arrays in states that JAX builds
        pairs = list(zip(jax.tree.leaves(self.own), jax.tree.leaves(self.whole), strict=True))
        new = jax.tree.map(lambda x: next((original for copy, original in pairs if copy is x), x), tree)
        return new if self.before is None else self.before.of(new)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TrainState:
    """The training state after `step` steps.

    Attributes:
        step: int32[], completed steps, counted by the program regardless of the state that a step returns.
        params: the user's pytree.
        opt_state: state of the optax optimizer.
        model_state: mutable model state, or None.
        ema: exponential moving average of the parameters, in float32 or wider (a copy of quantized ones), or None.
        rng: uint32[2] (rbg: [4]), the data of the run's root key; managed by the program and constant.
        optimizer: the optax transformation (static).
        ema_decay: decay of `ema` (static).
        reducer: state of the config's reducer, one entry per call of `sk.value_and_grad` (reducer_state.py), or ().
        sync: state of the config's sync for all groups, or None. With groups, `params`, `opt_state`, `model_state` and
            `ema` are [groups, ...] (groups/groups.py).
        replica_copy: inside a per-replica step, the originals of the parameters; otherwise None. It follows the
            parameters leaf by leaf through the user's `jit` and `jax.tree.map`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    ema: Any
    rng: jax.Array
    optimizer: optax.GradientTransformationExtraArgs
    ema_decay: float | None = None
    reducer: tuple[Any, ...] = ()
    sync: Any = None
    replica_copy: ReplicaCopy | None = None

    def __repr__(self) -> str:
        step = self.step if isinstance(self.step, jax.core.Tracer) or self.step.is_deleted() else int(self.step)
        others = {"model_state": self.model_state, "ema": self.ema, "reducer": self.reducer or None, "sync": self.sync}
        more = "".join(f"; {name}: {summary(tree)}" for name, tree in others.items() if tree is not None)
        return (
            f"TrainState: step {step}\n  params: {summary(self.params)}\n  opt_state: {summary(self.opt_state)}{more}"
        )

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
        """Returns the array fields by name; for `replica_copy` only the originals."""
        arrays, static = self.tree_flatten()
        return list(zip(_KEYS, arrays, strict=True)), static

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
        """Returns the fields without names. JAX calls it in every step."""
        whole = None if self.replica_copy is None else self.replica_copy.of(self.params)
        return (*_arrays(self), whole), (self.optimizer, self.ema_decay)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, Any], arrays: Sequence[Any]) -> TrainState:
        """Returns the state built from these fields."""
        *arrays, whole = arrays
        step, params, opt_state, model_state, ema, rng, reducer, sync = arrays
        mirrored = None if whole is None else ReplicaCopy(params, whole)
        return cls(step, params, opt_state, model_state, ema, rng, *static, reducer, sync, mirrored)

    @property
    def key(self) -> jax.Array:
        """The random key of this step, the same on every replica: a function of (seed, step) and of the updates within
        the step."""
        return step_rng.step_key(self.rng, self.step)

    def replace(self, **changes: Any) -> TrainState:
        """Returns the state with some fields changed."""
        return dataclasses.replace(self, **changes)

    def apply_gradients(self, grads: Any, model_state: Any = None, **extra: Any) -> TrainState:
        """Returns the state after one optimizer update with the reduced gradient `grads`.

        Args:
            extra: arguments of optimizers that need more than a gradient, as in optax: `value=loss`; for a line search
                also `grad=grads` and `value_fn`, parameters -> loss over the full batch. The default step passes all.

        Layout: with ZeRO 1 to 3 the update runs on the fsdp shard of each leaf.

        Raises:
            ConfigError: `grads` does not have the structure of the parameters (for `optax.lookahead` of `params.fast`),
                differs between replicas (per-replica
                view), or the optimizer requires an argument that is missing.
        """
        context = trace_context.current()
        params = without_copies(self).params
        trained = leaf_roles.differentiated(params)
        grads = _checked_gradient(context, grads, trained)
        as_stored: Callable[[Any], Any] = lambda tree: jax.tree.map(lambda g, p: g.astype(p.dtype), tree, trained)
        grads = trace_context.shard_like_params(context, as_stored(grads), "update")
        roles = leaf_roles.roles_in(context, trained)
        is_read: Callable[[str], bool] = lambda path: roles.get(path) != "frozen" and path not in context.options.unread
        context.slots.record_update(leaf_roles.select(grads, is_read))
        if "grad" in extra:
            extra["grad"] = trace_context.shard_like_params(context, as_stored(extra["grad"]), "update")
        params = trace_context.shard_like_params(context, params, "update")
        with jax.named_scope(trace_context.OPTIMIZER):
            updates, opt_state = _updated(self.optimizer, grads, self.opt_state, params, extra)
            new_params = rounding.apply_updates(context, params, updates, self.key)
        context.slots.record_sizes(lambda: lost_updates.sizes_of_updates(context, params, updates))
        if roles:
            of_role: Callable[[Any, Any, Any, Any], Any] = lambda path, new, grad, old: {
                "overwritten": grad,  # exact, unlike the sum of the parameter and an update
                "frozen": old,
            }.get(roles.get(path_name(path), ""), new)
            new_params = jax.tree.map_with_path(of_role, new_params, grads, params)
        copy = None
        if self.replica_copy is not None:  # typed like the parameters before, so that a cond or a scan can return both
            copy = ReplicaCopy(compat.as_varying(new_params, REPLICA_AXES), new_params, self.replica_copy)
        new = self.replace(
            replica_copy=copy,
            step=self.step + 1,
            # The program resets both. A second update within the step draws from a key that no step uses.
            rng=self.rng if trace_context.current_examples() is None else step_rng.updated_root(self.rng),
            params=new_params if copy is None else copy.own,
            opt_state=opt_state,
            model_state=self.model_state if model_state is None else model_state,
        )
        return new.with_average()

    def with_average(self) -> TrainState:
        """Returns the state with the average of the parameters (`ema`) updated by the present ones."""
        if self.ema_decay is None:
            return self
        decay = self.ema_decay
        average: Callable[[Any, Any], Any] = lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype)
        of_leaf = lambda e, p: average(e, p) if is_wide_float(e.dtype) else p
        return self.replace(ema=jax.tree.map(of_leaf, self.ema, without_copies(self).params))


FIELDS = ("step", "params", "opt_state", "model_state", "ema", "rng", "reducer", "sync")
"""The train state fields that are sharded, saved and restored, in flattening order."""

_arrays = operator.attrgetter(*FIELDS)
_KEYS = tuple(map(jax.tree_util.GetAttrKey, (*FIELDS, "mirrored")))


def create(
    params: Any, model_state: Any, optimizer: Any, seed: int, ema_decay: float | None, opt_state: Any = None
) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params) if opt_state is None else opt_state,
        model_state=model_state,
        # In bfloat16 the increment of each step would be rounded away, and the average would never change.
        ema=None
        if ema_decay is None
        else jax.tree.map(
            lambda x: jnp.array(x, common_dtype(x.dtype, jnp.float32) if is_wide_float(x.dtype) else x.dtype), params
        ),
        rng=step_rng.root_data(seed),
        optimizer=optimizer,
        ema_decay=ema_decay,
    )


def _updated(optimizer: Any, grads: Any, opt_state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
    """Returns (updates, state) of the optimizer; raises ConfigError if it needs a named argument that is missing."""
    try:
        return optimizer.update(grads, opt_state, params, **extra)  # type: ignore[no-any-return]
    except (TypeError, UserCodeError) as error:
        text = str(error.__cause__ if isinstance(error, UserCodeError) else error)
        missing = re.search(r"(\w+)\(\) missing \d+ required keyword-only arguments?: (.*)", text)
        if missing is None:
            raise
        names = re.findall(r"'(\w+)'", missing[2])
        known = {"value": "loss", "grad": "grads", "value_fn": "the loss as a function of the parameters"}
        given = f"is given {', '.join(sorted(extra))}" if extra else "receives the gradient alone"
        raise ConfigError(
            f"apply_gradients: the optimizer needs {', '.join(names)} (optax's {missing[1]}) and {given}. Some "
            "optimizers need more than a gradient. Write state.apply_gradients(grads, "
            f"{', '.join(f'{name}={known.get(name, chr(46) * 3)}' for name in names)}) in the train_step; the default "
            "step of a loss_fn passes value, grad and value_fn."
        ) from error


def check_not_donated(state: Any, what: str) -> None:
    """Raises ConfigError for a donated state. In jaxlib 0.10.2 such a state crashes the process with SIGSEGV."""
    is_deleted: Callable[[Any], bool] = lambda x: hasattr(x, "is_deleted") and x.is_deleted()
    if any(map(is_deleted, jax.tree.leaves(state))):
        path = next(path for path, x in named_leaves(state) if is_deleted(x))
        raise ConfigError(
            f"{what}: the state was donated to an earlier step ('{path}' is deleted). A step donates its state: only "
            "the state that it returns can be used. Write `state, metrics = program.step(state, batch)`, and copy "
            "what you still need (jax.tree.map(jnp.copy, state)) before the step."
        )


def without_aliases(state: TrainState) -> TrainState:
    """Returns the state with a copy of each leaf that shares the memory of an earlier leaf (`params=state.ema`). A step
    donates the memory of each leaf, and memory that is donated twice ends the process."""
    leaves, structure = jax.tree.flatten(state)
    seen, aliases = set[Any](), list[int]()
    for i, leaf in enumerate(leaves):
        if (memory := _memory(leaf)) in seen:
            aliases.append(i)
        elif memory is not None:
            seen.add(memory)
    for i in aliases:
        leaves[i] = jnp.copy(leaves[i])
    return jax.tree.unflatten(structure, leaves) if aliases else state


def _memory(leaf: Any) -> Any:
    """Returns the address of an array's first shard in this process; None for other objects and empty arrays."""
    if not isinstance(leaf, jax.Array) or not leaf.size:
        return None
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return data.addressable_data(0).unsafe_buffer_pointer()


def without_copies(state: TrainState) -> TrainState:
    """Returns the state with each replica-local copy of a parameter replaced by the original."""
    return state if state.replica_copy is None else state.replica_copy.of(state.replace(replica_copy=None))


def _checked_gradient(context: trace_context.Context, grads: Any, params: Any) -> Any:
    if bool(jax.tree.structure(grads) != jax.tree.structure(params)):  # type: ignore[operator]
        found, expected = ([path for path, _ in named_leaves(tree)] for tree in (grads, params))
        missing, extra = [p for p in expected if p not in found], [p for p in found if p not in expected]
        words = [f"lacks {', '.join(missing[:4])}"] * bool(missing) + [f"also has {', '.join(extra[:4])}"] * bool(extra)
        raise ConfigError(
            f"apply_gradients: the gradient {' and '.join(words) or 'is another kind of tree than the parameters'}. "
            f"It must be a tree like the parameters ({', '.join(expected[:6])}). Differentiate with respect to "
            "state.params."
        )
    for (path, grad), (_, leaf) in zip(named_leaves(grads), named_leaves(params), strict=True):
        if jnp.shape(grad) != jnp.shape(leaf):
            raise ConfigError(
                f"apply_gradients: gradient {path} is {describe(grad)}, the parameter is {describe(leaf)}."
            )
    rule = "the reduction is missing. Replicas would diverge. Use sk.value_and_grad, or sk.pmean(grads) first."
    name: Callable[[Any], str] = lambda path: f"apply_gradients: gradient '{path_name(path)}'"
    at = user_code.calling_line() if context.inside else ""
    return jax.tree.map_with_path(lambda path, grad: require_same(context, grad, name(path), rule + at), grads)

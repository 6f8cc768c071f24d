"""`TrainState`: everything that training changes, as one pytree that shards, saves and restores as a whole."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from spmdkit.errors import ConfigError
from spmdkit.step import keys, scope
from spmdkit.tree import describe, named_leaves


class Variables(NamedTuple):
    """What `init` returns for a model with mutable state.

    Attributes:
        params: differentiated and updated by the optimizer.
        state: returned anew by the loss (batch statistics, counters); how replicas agree on it is `model_state`.
    """

    params: Any
    state: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training after `step` steps.

    Attributes:
        step: int32[], completed steps.
        params: the user's pytree.
        opt_state: of the optax optimizer.
        model_state: mutable model state, or None.
        ema: exponential moving average of the parameters, in float32 at least, or None.
        rng: uint32[2] (rbg: [4]), the data of the run's root key; never changes.
        optimizer: the optax transformation (static).
        ema_decay: decay of `ema` (static).
        reducer: what the config's reducer keeps from step to step: one entry for each call of `sk.value_and_grad`, in the order in which
            they are traced; empty where it keeps nothing. `spmdkit.step.reducer_state`.
        sync: what the config's sync keeps for all groups, or None. With groups, `params`, `opt_state`, `model_state` and `ema` are
            [groups, ...]. `spmdkit.step.groups`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    ema: Any
    rng: jax.Array
    optimizer: optax.GradientTransformationExtraArgs = field(metadata={"static": True})
    ema_decay: float | None = field(default=None, metadata={"static": True})
    reducer: tuple[Any, ...] = ()
    sync: Any = None

    @property
    def key(self) -> jax.Array:
        """The random key of this step, the same on every replica: a function of (seed, step)."""
        return keys.step_key(self.rng, self.step)

    def replace(self, **changes: Any) -> TrainState:
        """Returns the state with some fields changed."""
        return dataclasses.replace(self, **changes)

    def apply_gradients(self, grads: Any, model_state: Any = None, **extra: Any) -> TrainState:
        """Returns the state after one update of the optimizer with the reduced gradient `grads`.

        Args:
            extra: for optimizers that take more than a gradient, as in optax: `value=loss`; of a line search also `grad=grads` and
                `value_fn`, parameters -> loss over the whole batch. The default step gives all three.

        Layout: with ZeRO 1 to 3 the update runs on the fsdp shard of each leaf.

        Raises:
            ConfigError: `grads` is not shaped like the parameters, differs between replicas (per-replica dialect), or the
                optimizer needs more than it is given.
        """
        step = scope.current()
        params = mirrored(step, self.params)
        _check_gradient(step, grads, params)
        as_stored = lambda tree: jax.tree.map(lambda g, p: g.astype(p.dtype), tree, params)
        grads = constrain_update(step, as_stored(grads))
        if "grad" in extra:
            extra["grad"] = constrain_update(step, as_stored(extra["grad"]))
        params = constrain_update(step, params)
        with jax.named_scope(scope.OPTIMIZER):
            updates, opt_state = _updated(self.optimizer, grads, self.opt_state, params, extra)
        new_params = optax.apply_updates(params, updates)
        ema = self.ema
        if self.ema_decay is not None:
            decay = self.ema_decay
            ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), ema, new_params)
        return self.replace(
            step=self.step + 1,
            params=new_params,
            opt_state=opt_state,
            ema=ema,
            model_state=self.model_state if model_state is None else model_state,
        )


FIELDS = tuple(f.name for f in dataclasses.fields(TrainState) if not f.metadata.get("static"))
"""The fields of a train state that hold arrays, in flattening order."""


def create(
    params: Any, model_state: Any, optimizer: Any, seed: int, ema_decay: float | None, reducer: tuple[Any, ...] = ()
) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        model_state=model_state,
        # In bfloat16 each step's part of the average would be rounded away, and it would never move.
        ema=None
        if ema_decay is None
        else jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32)), params),
        rng=keys.root_data(seed),
        optimizer=optimizer,
        ema_decay=ema_decay,
        reducer=reducer,
    )


def _updated(optimizer: Any, grads: Any, opt_state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
    """Returns (updates, state) of the optimizer.

    Raises:
        ConfigError: it needs a named argument that it is not given, the loss for example.
    """
    try:
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        return updates, opt_state
    except TypeError as error:
        missing = re.search(r"(\w+)\(\) missing \d+ required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        names = re.findall(r"'(\w+)'", missing[2])
        known = {"value": "loss", "grad": "grads", "value_fn": "the loss as a function of the parameters"}
        given = f"is given {', '.join(sorted(extra))}" if extra else "is given the gradient alone"
        raise ConfigError(
            f"apply_gradients: the optimizer needs {', '.join(names)} (optax's {missing[1]}) and {given}. Some optimizers take "
            "more than a gradient. Write state.apply_gradients(grads, "
            f"{', '.join(f'{name}={known.get(name, chr(46) * 3)}' for name in names)}) in the train_step; the default step of a "
            "loss_fn gives value, grad and value_fn."
        ) from error


def check_not_donated(state: Any, what: str) -> None:
    """Refuses a state whose arrays an earlier step has taken. On two or more CPU devices jaxlib 0.10.2 would end the process by SIGSEGV.

    Costs some 20 us for 100 leaves (2026-11-22).

    Raises:
        ConfigError: a leaf is deleted.
    """
    is_deleted = lambda x: hasattr(x, "is_deleted") and x.is_deleted()  # not so for what is no array of JAX
    if any(map(is_deleted, jax.tree.leaves(state))):
        path = next(path for path, x in named_leaves(state) if is_deleted(x))
        raise ConfigError(
            f"{what}: the state was given to an earlier step, which took its memory ('{path}' is deleted). A step donates its state: "
            "only the one that it returns can be used. Write `state, metrics = program.step(state, batch)`, and copy what must stay "
            "(jax.tree.map(jnp.copy, state)) before the step."
        )


def constrain_update(step: scope.Context, tree: Any) -> Any:
    """Returns a tree like the parameters, cut as the optimizer's update is."""
    mesh, placements = step.cuts.mesh, step.cuts.placements
    if step.cuts.form == "manual" or mesh is None or placements is None:
        return tree
    return jax.tree.map(
        lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if len(spec) else x,
        tree,
        placements.update,
    )


def mirrored(step: scope.Context, tree: Any) -> Any:
    """Returns `tree` with each leaf that a per-replica step was handed as its own copy replaced by the mirrored original.

    Inside a per-replica step the parameters are typed varying, so that `jax.grad` gives the replica's own gradient; the
    update needs the mirrored arrays, so that the result is provably mirrored too.
    """
    return jax.tree.map(lambda x: step.mirrored[id(x)][1] if id(x) in step.mirrored else x, tree)


def _check_gradient(step: scope.Context, grads: Any, params: Any) -> None:
    if bool(jax.tree.structure(grads) != jax.tree.structure(params)):  # type: ignore[operator]
        found, asked = ([path for path, _ in named_leaves(tree)] for tree in (grads, params))
        missing, extra = [p for p in asked if p not in found], [p for p in found if p not in asked]
        words = [f"lacks {', '.join(missing[:4])}"] * bool(missing) + [f"has {', '.join(extra[:4])} more"] * bool(extra)
        raise ConfigError(
            f"apply_gradients: the gradient {' and '.join(words) or 'is another kind of tree than the parameters'}. "
            f"It must be a tree like the parameters ({', '.join(asked[:6])}). Differentiate with respect to state.params."
        )
    for (path, grad), (_, leaf) in zip(named_leaves(grads), named_leaves(params), strict=True):
        if jnp.shape(grad) != jnp.shape(leaf):
            raise ConfigError(
                f"apply_gradients: gradient {path} is {describe(grad)}, the parameter is {describe(leaf)}."
            )
        if step.inside and (axes := scope.differing_axes(step, grad)):
            raise ConfigError(
                f"apply_gradients: gradient '{path}' differs between the replicas of axes {list(axes)}: the "
                "reduction is missing. Replicas would drift apart. Use sk.value_and_grad, or sk.pmean(grads) first."
            )

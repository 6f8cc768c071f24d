"""`Task`: the user's functions and data, without parallelism. Loads a task from `file.py:name`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import optax

from spmdkit import compat
from spmdkit.data.evaluation_sets import EvaluationSets
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins, user_code
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import summary
from spmdkit.step.model_state.agreement import KINDS
from spmdkit.step.user_state import StateView


@runtime_checkable
class HookLike(Protocol):
    """The part of `sk.Hook` that a step uses. `sk.Hook` is defined in `spmdkit.run.hooks`."""

    name: str
    order: int
    in_step: Callable[[Any, Any, Any], tuple[Any, Any]] | None
    optimizer: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Task:
    """The functions and data of a training task. All functions are pure.

    Attributes:
        init: `init(key) -> params`, or `-> sk.Variables(params, state)` for a model with mutable state.
        loss_fn: `loss_fn(params, batch, key) -> sk.mean(...)` or `(sk.mean(...), {name: sk.mean(...)})`; with model
            state `loss_fn(params, state, batch, key) -> (sk.mean(...), metrics, new_state)`. The batch has the examples
            of one replica.
        optimizer: an optax transformation, or a function that returns one for a learning rate (a number or schedule);
            the function receives the config's `learning_rate`.
        train_data: a mapping (or any pytree) of arrays with equal first dim, a random-access source, a grain
            MapDataset, or a stream (`@sk.stream`). None: the batch is int32[rows], the number of each example in the
            run, for a loss that makes its own data, by `sk.example_keys()`.
        eval_data: the same types; all examples are evaluated, for any number of them. A mapping of values that each
            have the structure of `train_data` is several sets: `{"clean": a, "hard": b}` gives `clean/loss`.
        eval_fn: `eval_fn(params, batch) -> {name: sk.mean(...)}`, with model state `eval_fn(params, state, batch)`;
            default: `loss_fn` with `key=None`.
        predict_fn: `predict_fn(params, batch) -> arrays`, with model state `predict_fn(params, state, batch)`: any
            pytree of arrays with the rows of the batch as first dim, for `spmdkit predict`.
        eval_params: `eval_params(state) -> params`, the parameters that are evaluated and exported, for an optimizer
            that trains others. Known for `optax.contrib.schedule_free` and `optax.lookahead`.
        train_step: `train_step(state, batch) -> (state, metrics)`, replaces the default step that calls `loss_fn`.
        view: view of `train_step`: `global` (global arrays) or `replica` (in `shard_map`, with explicit reductions).
        axis_name: the name of the replicas in a per-replica `train_step` with `lax.pmean(x, axis_name)`, as in
            `jax.pmap(axis_name=)`. The step runs on every mesh; `lax` collectives over this name are its reductions.
        sharding: `explicit` traces the functions in JAX's explicit sharding mode (`jax.reshard`, `out_sharding=`), on
            global arrays with the shardings of the layout as their types; `auto` detects this mode by an error of JAX.
        state: the parts of the train state of your own type that `init` returns and `train_step` and
            `eval_fn(state, batch)` receive. Known for flax's `TrainState`.
        rules: layout rules of the model, as in `layout.rules` of a config.
        state_reduction: reduction of the model state over replicas: pattern of a leaf's full path -> `mean`, `sum` (of
            the increments of all replicas), `max`, or `identical` (checked). By default derived as `identical` or
            `mean`; other leaves need an entry. See `spmdkit.step.model_state.agreement`.
        frozen: patterns of full paths of parameters that stay as `init` made them, also integers. They are not
            differentiated, reduced or checked, and have no optimizer state. Parameters with a gradient that the
            optimizer does not read (`optax.set_to_zero` in `optax.partition`) are detected for a `loss_fn`.
        overwritten: patterns of full paths of parameters that their gradient overwrites, as in flax's FP8 layers: the
            new value is the maximum over replicas and microbatches, without the optimizer.
        row_mixing: `allow` accepts a loss that mixes the rows of a replica (batch norm per replica) without a warning;
            None: the config's `row_mixing`.
        hooks: `sk.Hook`s, in addition to logging, evaluation and saving; see `spmdkit/run/hooks/base.py`.
        unit: the name of one example in messages.
        tokens: `tokens(batch) -> int`, the number of tokens of a global batch, from its shapes, for `tokens_per_s` in
            the log: `lambda batch: batch["tokens"].size`.
    """

    init: Callable[..., Any]
    loss_fn: Callable[..., Any] | None = None
    optimizer: optax.GradientTransformation | Callable[..., optax.GradientTransformation] | None = None
    train_data: Any = None
    eval_data: Any = None
    eval_fn: Callable[..., Any] | None = None
    predict_fn: Callable[..., Any] | None = None
    eval_params: Callable[..., Any] | None = None
    train_step: Callable[..., Any] | None = None
    view: Literal["global", "replica"] = "global"
    axis_name: str | None = None
    sharding: Literal["auto", "explicit"] = "auto"
    state: StateView | None = None
    rules: Sequence[tuple[str, Sequence[Any]]] = ()
    state_reduction: Mapping[str, str] = field(default_factory=dict)
    frozen: Sequence[str] = ()
    overwritten: Sequence[str] = ()
    row_mixing: Literal["allow"] | None = None
    hooks: Sequence[Any] = ()
    unit: str = "examples"
    tokens: Callable[..., int] | None = None

    def __post_init__(self) -> None:
        for name in ("init", "loss_fn", "eval_fn", "predict_fn", "eval_params", "train_step", "tokens"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                what = f"Task.{name} is {type(value).__name__}"
                raise ConfigError(f"{what}. It must be a function. Pass the function itself.")
        if self.loss_fn is None and self.train_step is None:
            raise ConfigError("Task has neither loss_fn nor train_step. A task needs one of them. Pass loss_fn.")
        for name in ("frozen", "overwritten"):
            check_patterns(f"Task.{name}", getattr(self, name))
        if self.row_mixing not in (None, "allow"):
            raise ConfigError(f"Task.row_mixing is {self.row_mixing!r}. Valid: 'allow', None.")
        if self.view not in ("global", "replica"):
            raise ConfigError(f"Task.view is {self.view!r}. Valid: 'global', 'replica'.")
        if self.view == "replica" and self.train_step is None:
            raise ConfigError(
                "Task.view is 'replica', but there is no train_step. It applies to train_step only. Pass a train_step, "
                "or remove view."
            )
        if compat.is_pmapped(self.train_step):
            raise ConfigError(
                "Task.train_step is a jax.pmap of a function, and the program maps the replicas of its mesh. Remove "
                "jax.pmap, and pass the function with view='replica' and the axis_name of the pmap."
            )
        if self.sharding not in ("auto", "explicit"):
            raise ConfigError(f"Task.sharding is {self.sharding!r}. Valid: 'auto', 'explicit'.")
        if self.axis_name is not None and self.view != "replica":
            raise ConfigError(
                f"Task.axis_name is {self.axis_name!r}, and view is 'global'. It names the replicas of a per-replica "
                "train_step. Pass view='replica', or remove axis_name."
            )
        for name, args in (("init", ("key",)), ("eval_params", ("state",)), ("train_step", ("state", "batch"))):
            check_arity(name, getattr(self, name), args)
        for rule in self.rules:
            pair = isinstance(rule, tuple | list) and len(rule) == 2
            if not pair or not isinstance(rule[0], str) or not isinstance(rule[1], tuple | list):
                raise ConfigError(
                    f"Task.rules holds {rule!r}. A rule is a pair (path pattern, a name or None for each dim). "
                    "Write for example ('blocks/.*/kernel', ('embed', 'mlp'))."
                )
        for hook in self.hooks:
            if not isinstance(hook, HookLike):
                raise ConfigError(
                    f"Task.hooks holds {type(hook).__name__}. A hook is an sk.Hook. Write hooks=[sk.Hook('mine', ...)]."
                )
        for pattern, kind in self.state_reduction.items():
            if kind not in KINDS:
                raise ConfigError(
                    f"Task.state_reduction has {kind!r} for '{pattern}'. Valid: "
                    f"{', '.join(KINDS)}.{nearest(str(kind), KINDS)} Write for example {{'seen': 'sum'}}."
                )

    def __repr__(self) -> str:
        name: Callable[[Any], str] = lambda fn: getattr(fn, "__qualname__", type(fn).__name__)
        functions = ("init", "loss_fn", "eval_fn", "predict_fn", "train_step")
        given = [f"{key}={name(getattr(self, key))}" for key in functions if getattr(self, key) is not None]
        return (
            f"Task({', '.join(given)}, optimizer={name(self.optimizer)})\n"
            f"  train_data: {_shown(self.train_data)}\n  eval_data: {_shown(self.eval_data)}"
        )

    def named_data(self) -> dict[str, Any]:
        """Returns the data by name: `train_data`, and `eval_data` or each of several sets."""
        sets = self.eval_data if isinstance(self.eval_data, EvaluationSets) else None
        evaluated = {"eval_data": self.eval_data} if sets is None else {set_name(name): x for name, x in sets.items()}
        return {name: x for name, x in {"train_data": self.train_data, **evaluated}.items() if x is not None}

    def with_data(self, data: Mapping[str, Any]) -> Task:
        """Returns the task with other data for some names of `named_data`."""
        train, evaluated = data.get("train_data", self.train_data), data.get("eval_data", self.eval_data)
        if isinstance(self.eval_data, EvaluationSets):
            evaluated = EvaluationSets({name: data.get(set_name(name), x) for name, x in self.eval_data.items()})
        return replace(self, train_data=train, eval_data=evaluated)

    def count_tokens(self, examples: Any) -> int:
        """Returns the number of tokens of a global batch. Raises ConfigError if `tokens` does not return a number."""
        assert self.tokens is not None
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), examples)
        call: Callable[[], Any] = lambda: self.tokens(shapes)  # type: ignore[misc]
        num = user_code.call_user(call, "Task.tokens", is_model=False)
        if isinstance(num, bool) or not isinstance(num, int):
            raise ConfigError(
                f"Task.tokens returned {type(num).__name__}. It returns the number of tokens of a global batch, from "
                "the shapes of its arrays. Write for example lambda batch: batch['tokens'].size."
            )
        return num

    @property
    def is_manual(self) -> bool:
        """Whether `train_step` runs inside `shard_map`, over the names of the mesh axes."""
        return self.view == "replica" and self.axis_name is None

    def check_functions(self, stateful: bool) -> None:
        """Raises ConfigError if `loss_fn` or `eval_fn` has the wrong number of arguments for this model."""
        state = ("state",) if stateful else ()
        check_arity("loss_fn", self.loss_fn, ("params", *state, "batch", "key"))
        for name in ("eval_fn", "predict_fn"):
            check_arity(name, getattr(self, name), ("params", *state, "batch"))


def _shown(data: Any) -> str:
    """Returns one line about data, without reading it."""
    if isinstance(data, Mapping | tuple) or hasattr(data, "dtype"):
        return summary(data)
    num = f" of {len(data)} examples" if hasattr(data, "__len__") else ""
    return "none" if data is None else f"{type(data).__name__}{num}"


def set_name(name: str) -> str:
    """Returns the name in messages of one of several evaluation sets."""
    return f"eval_data['{name}']"


def check_patterns(name: str, patterns: Any) -> None:
    """Raises ConfigError unless `patterns` is a sequence of regular expressions."""
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{name} is {patterns!r}. It is a list of patterns of full paths. Write ['encoder/.*'].")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{name} holds {pattern!r}, no regular expression ({error}). Fix it.") from None


def check_arity(name: str, fn: Callable[..., Any] | None, args: tuple[str, ...]) -> None:
    """Raises ConfigError if `fn` cannot be called with the positional arguments `args`."""
    if fn is None:
        return
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError:
        raise ConfigError(
            f"{name} is defined as {name}{signature}, and is called as {name}({', '.join(args)}). "
            f"It takes {len(args)} positional argument{'s' * (len(args) != 1)}. Write def {name}({', '.join(args)})."
        ) from None


def load_hooks(requested: Sequence[str | Mapping[str, Any]], folder: Path) -> list[HookLike]:
    """Returns the hooks of a config, each `module:name` or `{module:name: options}`: a hook, or a function that returns
    one. Raises ConfigError for anything else."""
    return [
        user_code.named(entry, "hook", folder, HookLike)  # type: ignore[type-abstract]
        if plugins.is_reference(entry)
        else plugins.make("hooks", entry)
        for entry in requested
    ]


def load_task(target: str, name: str, folder: Path, args: Mapping[str, Any]) -> Task:
    """Returns the `Task` of `target:name`: a `Task`, or a function with `@sk.task` that returns one from `args`.

    Raises:
        ConfigError: the file (relative to `folder`), module or name does not exist; it is not registered; the import
            raised an exception; the function does not accept its arguments.
    """
    text = f"{target}:{name}"
    target_object = user_code.find(text, "task", folder, Task)
    if not isinstance(target_object, Task):
        return user_code.call_declared(target_object, text, "task", args, Task, "task_args")
    if args:
        raise ConfigError(
            f"task_args {sorted(args)} have no effect: {text} is a Task, not a function that returns one. "
            f"Write `def {name}({', '.join(sorted(args))}): return Task(...)` under @sk.task, or remove task_args."
        )
    return target_object

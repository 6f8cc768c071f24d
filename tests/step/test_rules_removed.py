"""Each rule of the row analysis is needed: without it, a program of test_dataflow.py is classified differently.

A rule is a condition of an `if` (replaced by False), a term of an `and` or `or` (left out), or a primitive in a table.
"""

import ast
import contextlib
import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.program import row_table
from spmdkit.step import trace_context
from spmdkit.step.checks.return_values import checked_loss
from spmdkit.step.dataflow import analysis, arithmetic, constants, cotangent, flow, keys, structure, walk
from spmdkit.step.model_state import agreement
from tests.step import test_example_keys as keys_table
from tests.step import test_row_analysis as table
from tests.step.flow_programs import FEATURES, FLOWS, ROWS, text_of
from tests.step.row_programs import CLASSES, DATA, MIXED, errors, init, logits
from tests.step.test_dataflow import (
    ALONG,
    OTHER_NAMES,
    ROWWISE,
    TOTALS,
    flow_in,
    flow_of,
)

NOT_NEEDED = ["_constant: isinstance(value, jax.core.Tracer)"]
"""A value of an outer trace: only inside of a per-replica step."""

SPEED, ROBUST = "saves time", "for an error that no program here causes"
PIPELINE, OWN_STEP = "tests/ops/pipeline", "tests/step/test_own_step.py"
UNTESTED = {
    keys: {
        "_results: of_layer": PIPELINE,
        "draw_of: 'the loss'": ROBUST,
    },
    constants: {"_equal: first is second": SPEED, "_first_use: len(inner.invars) == len(eqn.invars)": OWN_STEP},
    cotangent: {},
    analysis: {
        "_usages: again is not None": ROBUST,
        "_usages: bool(loss_usages)": SPEED,
        "_usages: check": SPEED,
        "analyze: found": SPEED,
        "analyze: multiple <= LARGEST": SPEED,
        "analyze: not any((usage.mixed for usage in usages))": SPEED,
        "analyze: usages is not None and (not any((usage.mixed for usage in usages)))": SPEED,
    },
    row_table: {},
    agreement: {},
}
"""Module -> condition that no program here needs -> what it is for."""

TRACES = {}
"""(loss, rows) -> its trace."""


@pytest.fixture(scope="module")
def programs():
    """Traces of the programs, with the texts of their flows."""
    square = (FEATURES, FEATURES)
    fns = [(fn, [square]) for fn in (*ROWWISE.values(), *(fn for fn, _ in TOTALS.values()))]
    fns += [(lambda x, fn=fn, axis=axis: fn(x, axis), [square]) for fn in ALONG.values() for axis in (0, 1)]
    fns += [(fn, [(FEATURES,)] * 2) for _, fn in FLOWS.values()]
    with jax.numpy_dtype_promotion("standard"):
        traces = [(flow_of(fn, *shapes)[1], {}) for fn, shapes in fns]
        mean, numbers = (
            flow_of(fn, (FEATURES,))[1] for fn in (lambda x: x.mean(0), lambda x: x * np.arange(ROWS)[:, None])
        )
    traces += [(mean, {"replicas": 1}), (mean, {"unique": False}), (numbers, {"unique": False})]
    return [(traced, settings, text_of(flow_in(traced, **settings))) for traced, settings in traces]


def arguments(loss, state=None, batch=DATA, params=init):
    """Returns the arguments of `analyze` for a loss."""
    context = trace_context.Context(trace_context.ShardingSpec("mapped", sizes=analysis.ANALYZED_REPLICAS))
    shapes = lambda num: jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype), batch)
    key = jax.eval_shape(jax.random.key, 0)

    def of_one_replica(state, shared, of_rows, loss_key):
        (params, key), (rows, positions) = shared, of_rows
        examples = trace_context.Examples(len(positions), None, positions, key)
        with trace_context.tracing(context), trace_context.with_examples(examples):
            return checked_loss(loss(params, *([] if state is None else [state]), rows, loss_key), state is not None)

    inputs = analysis.Inputs(
        jax.eval_shape(lambda: state),
        (jax.eval_shape(params, key), key),
        lambda num: ((shapes(num), jax.ShapeDtypeStruct((num,), "int32")), key),
        4,
    )
    return of_one_replica, inputs, analysis.ANALYZED_REPLICAS, REPLICA_AXES, ("data",)


@jax.custom_vjp
def clipped(x):
    return x


@jax.custom_vjp
def replaced(x):
    return x


replaced.defvjp(lambda x: (x, None), lambda _, g: (jnp.ones_like(g),))
clipped.defvjp(lambda x: (x, None), lambda _, g: (g.clip(-1, 1),))


def drawn_while_traced(h):
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
    return h * jax.random.normal(key, h.shape[1:])


def analyzed_losses():
    """Yields the losses of the tests of the row analysis, with the other arguments of `arguments`."""
    squares = lambda p, b: sk.mean(errors(p, b))
    yield from ((case.loss, {}) for case in MIXED.values())
    metrics = lambda h, b: {name: metric(h, b) for name, (metric, _) in table.METRICS.items()}
    yield lambda p, b, k: (squares(p, b), metrics(jax.lax.stop_gradient(logits(p, b)), b)), {}
    leaves = [{name: x} for name, x in (table.STATE | table.REFUSED).items()]
    for state in (table.STATE, *leaves):
        changed = lambda s, p, b, state=state: {n: state[n][1](s[n], p, b).astype(s[n].dtype) for n in s}
        loss = lambda p, s, b, k, changed=changed: (squares(p, b), {}, changed(s, p, b))
        yield loss, {"state": {name: x[0] for name, x in state.items()}}
    for draw, _ in table.KEYS.values():
        yield lambda p, b, k, draw=draw: squares(p, b) + 0 * sk.mean(draw(b, k)), {}
    weights = lambda key: {"w": jnp.ones((4, 6)), "s": jnp.ones(6)}
    for loss in (keys_table.RIGHT | keys_table.WRONG).values():
        yield loss, {"batch": keys_table.ROWS, "params": weights}
    of_replica = lambda s: s + sk.replica_index().astype(s.dtype)
    more = [
        (jnp.zeros(3), lambda s, p, b: 0.9 * s + 0.1 * sk.replica_index()),
        (jnp.int32(0), lambda s, p, b: of_replica(s)),
        (jnp.float32(0), lambda s, p, b: 0.9 * s + 0.1 * table.callback(logits(p, b)).mean()),
        (jnp.int32(0), lambda s, p, b: s + b["y"].reshape(4, CLASSES).shape[0]),
        (jnp.int32(0), lambda s, p, b: s),
        (jnp.zeros(CLASSES), lambda s, p, b: s + len(b["y"]) * b["y"].sum(0)),
    ]
    for start, update in more:
        yield lambda p, s, b, k, update=update: (squares(p, b), {}, update(s, p, b)), {"state": start}
    yield lambda p, b, k: sk.mean(jnp.stack([part.mean(0) for part in jnp.array_split(errors(p, b), 4)])), {}
    for change in (
        *table.TRACED_ONCE.values(),
        drawn_while_traced,
        clipped,
        replaced,
        lambda h: h.astype(jnp.float16),
        jax.nn.relu,
    ):
        yield lambda p, b, k, change=change: sk.mean(change(logits(p, b))), {}


@pytest.fixture(scope="module")
def observations():
    """Module -> functions of no argument that run its rules on the losses."""
    calls, usages, runs = {"key_uses": [], "check_constants": [], "needs_scale": []}, [], []
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        for name, made in calls.items():
            function = getattr(analysis, name)
            record = lambda *args, made=made, function=function: (made.append(args), function(*args))[1]
            patch.setattr(analysis, name, record)
        for loss, others in analyzed_losses():
            runs.append(arguments(loss, **others))
            with contextlib.suppress(ConfigError):
                usages.append(analysis.analyze(*runs[-1]))
    uses = lambda args: (lambda found: (found.text, found.problem, found.draw_of(args[1]), found.draw_of(())))(
        keys.key_uses(*args)
    )
    of_state_run = next(run for run in runs if jax.tree.leaves(run[1].state))
    of_state = [usage for found in usages for usage in found if usage.what == "model state"]
    settings = [("warn", 1, 1), ("warn", 2, 2), ("allow", 2, 2), ("error", 1, 1)]
    warned = lambda found: [row_table.row_warnings(found, "loss_fn", *each, ()) for each in settings[:3]]
    return {
        keys: [lambda args=args: uses(args) for args in calls["key_uses"]],
        constants: [lambda args=args: constants.check_constants(*args) for args in calls["check_constants"]],
        cotangent: [lambda args=args: cotangent.needs_scale(*args) for args in calls["needs_scale"]],
        analysis: [
            *(lambda args=args: [facts(usage) for usage in analysis.analyze(*args)] for args in runs),
            *(lambda args=args: failed_analysis(args) for args in (runs[0], of_state_run)),
            lambda: [facts(usage) for usage in analysis.analyze(of_evaluation, *runs[0][1:])],
        ],
        row_table: [
            *(
                lambda found=found, each=each: row_table.row_table(found, {"queue": "mean"}, *each)
                for found in usages
                for each in ((1, False), (2, True))
            ),
            *(lambda found=found: warned(found) for found in usages),
            *(lambda found=found: row_table.row_warnings(found, "loss_fn", *settings[3], ()) for found in usages),
            lambda: row_table.table_lines([]),
            *(
                lambda usage=usage, each=each: (
                    [row_table.row_table([usage], declared, 1, False) for declared in ({}, {"a": "sum"})],
                    row_table.row_warnings([usage], "loss_fn", *each, ()),
                )
                for usage in made_usages()
                for each in (*settings[:3], ("warn", 1, 2))
            ),
        ],
        agreement: [*(lambda usage=usage: agreement.reduction_of(usage) for usage in of_state), *state_observations()],
    }


def failed_analysis(args):
    """Returns the usages of a loss for which the walk raises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "flows_of", lambda *args: 1 / 0)
        return [facts(usage) for usage in analysis.analyze(*args)]


def of_evaluation(state, shared, of_rows, key):
    return None, {"error": sk.mean(errors(shared[0], of_rows[0]))}, None


def made_usages():
    """Returns usages that differ in what the table and the warnings read."""
    loss, state = analysis.Usage("loss", "", "as a mean"), analysis.Usage("model state", "a", "as a mean", read=True)
    fixed = tuple("abcd")
    return [
        *(dataclasses.replace(loss, fixed_gradients=fixed[:num]) for num in (3, 4)),
        dataclasses.replace(loss, unknown=("call", "f.py:1")),
        dataclasses.replace(loss, rows="unknown", unknown=("call", "f.py:1")),
        dataclasses.replace(loss, rows="unknown"),
        *(
            dataclasses.replace(loss, what=what, name="m", rows=rows, whole=whole)
            for what in ("metric", "evaluation metric")
            for rows in ("as a mean", "mixed across rows")
            for whole in (None, "f.py:1")
        ),
        *(
            dataclasses.replace(state, per_replica=rows, counted=counted, unchanged=unchanged, inexact=True)
            for rows, counted, unchanged in itertools.product([False, True], repeat=3)
        ),
    ]


def state_observations():
    """Yields functions that derive, check and reduce the model state of a leaf of each dtype."""
    number = jnp.array([0.3, 1e4, 33.3, 2.7])
    leaves = [number.astype(x) for x in ("float32", "bfloat16", "complex64", "int4", "bool")]
    leaves.append(jax.random.split(jax.random.key(0), 4))
    for x, kind in itertools.product(leaves, agreement.KINDS):
        yield lambda x=x, kind=kind: agreement.declared_reductions({"a": kind}, {"a": x[0]})
        for usage in made_usages()[-8:] if x is not leaves[1] else ():
            usages = [dataclasses.replace(usage, factor=factor) for factor in (None, 0.5, 1)]
            for each, declared in itertools.product(usages, ({}, {"a": kind})):
                yield lambda x=x, each=each, declared=declared: agreement.state_reductions(
                    declared, [("a", x[0])], [each]
                )
        if kind == "identical" or (x.dtype != bool and jnp.issubdtype(x.dtype, jnp.number) and x.dtype != "complex64"):
            yield lambda x=x, kind=kind: reduced(x, kind)
    yield lambda: agreement.state_reductions({}, [("a", leaves[0][0])], [])
    yield lambda: agreement.declared_reductions({"b": "sum"}, {})
    yield lambda: agreement.declared_reductions({"b": "sum"}, {"a": leaves[0]})
    yield lambda: reduced(leaves[0], "unchanged")


def reduced(x, kind):
    """Returns what is sent of four replicas, and their state: of all, by groups, and of all groups."""
    kinds, old = {"a": kind}, {"a": x[1]}
    added, largest = agreement.values_to_reduce(kinds, old, {"a": x}, jnp.arange(4) == 0)
    sums, largest = {k: v.sum(0) for k, v in added.items()}, {k: v.max(0) for k, v in largest.items()}
    groups = [agreement.reduce_by_group(kinds, {"a": x[::-1][:n]}, {"a": x}, n)["a"] for n in (1, 2, 4)]
    whole = [agreement.merge_groups(declared, {"a": x})["a"] for declared in (kinds, {})] if kind != "unchanged" else []
    found = [agreement.reduced_state(kinds, old, {"a": x[0]}, sums, largest, 4)["a"], *groups, *whole]
    sent = [x.dtype for x in (*added.values(), *largest.values())]
    return sent, [
        (x.dtype, jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in found
    ]


def facts(usage):
    return {**vars(usage), "flow": text_of(usage.flow)}


def result(observe):
    cotangent.has_small_range.cache_clear()
    try:
        return str(observe())
    except Exception as error:  # noqa: BLE001 - a removed rule fails in any way
        return str(error)


def traced_once(trace):
    """Returns `_traced` with one trace for each loss and number of rows."""

    def traced(loss, inputs, bound, num):
        if (loss, num) not in TRACES:
            TRACES[loss, num] = trace(loss, inputs, bound, num)
        return TRACES[loss, num]

    return traced


def is_caught(programs):
    """Returns whether a program is classified differently. It is moved to the front: it catches similar rules too."""
    for i, (traced, settings, expected) in enumerate(programs):
        try:
            found = text_of(flow_in(traced, **settings))
        except Exception:  # noqa: BLE001 - the analysis reports it as unknown
            found = "failed"
        if found != expected:
            programs.insert(0, programs.pop(i))
            return True
    return False


def functions(module):
    """Yields (syntax tree, function) of the functions and methods of a module."""
    for node in ast.parse(inspect.getsource(module)).body:
        owner = getattr(module, node.name) if isinstance(node, ast.ClassDef) else module
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(part, ast.FunctionDef) and part.name != "_at_call":  # it changes the line in a message
                function = vars(owner)[part.name]
                part.decorator_list = []
                function = getattr(function, "fget", function)
                yield part, getattr(function, "__wrapped__", function)


def names(tree):
    return {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(tree)}


def conditions(tree):
    """Yields (text, node, name of the field, value without the condition)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp) and "same_as" not in ast.unparse(node.test):  # that ends a loop
            yield ast.unparse(node.test), node, "test", ast.Constant(False)
        if isinstance(node, ast.BoolOp) and not {"eqn", "source"} & names(node):  # the line in a message
            neutral = ast.Constant(isinstance(node.op, ast.And))
            for i, term in enumerate(node.values):
                yield ast.unparse(term), node, "values", [*node.values[:i], neutral, *node.values[i + 1 :]]


def code_without(tree, function, node, field, value):
    """Returns the code of a function in which a field of a node has another value."""
    before = getattr(node, field)
    setattr(node, field, value)
    body = ast.fix_missing_locations(ast.Module([tree], []))
    found = {}
    exec(compile(body, function.__code__.co_filename, "exec"), function.__globals__ | {}, found)
    setattr(node, field, before)
    return found[tree.name].__code__


@pytest.mark.forms(2)
@pytest.mark.parametrize(
    "module", [flow, arithmetic, structure, walk], ids=lambda module: module.__name__.split(".")[-1]
)
def test_every_condition_is_needed(module, programs):
    unneeded = []
    for tree, function in functions(module):
        code = function.__code__
        for text, node, field, value in conditions(tree):
            function.__code__ = code_without(tree, function, node, field, value)
            try:
                if not is_caught(programs):
                    unneeded.append(f"{function.__name__}: {text}")
            finally:
                function.__code__ = code
    assert set(unneeded) <= set(NOT_NEEDED)
    assert not is_caught(programs)


@pytest.mark.forms(1)
@pytest.mark.parametrize("module", UNTESTED, ids=lambda module: module.__name__.split(".")[-1])
def test_every_condition_about_a_loss_is_needed(module, observations, monkeypatch):
    monkeypatch.setattr(analysis, "_traced", traced_once(analysis._traced))
    with jax.numpy_dtype_promotion("standard"):
        expected = [(observe, result(observe)) for observe in observations[module]]
        unneeded = set()
        for tree, function in functions(module):
            if tree.name == "_traced":
                continue
            code = function.__code__
            for text, node, field, value in conditions(tree):
                if f"{tree.name}: {text}" in UNTESTED[module]:
                    continue
                function.__code__ = code_without(tree, function, node, field, value)
                try:
                    caught = next(
                        (i for i, (observe, before) in enumerate(expected) if result(observe) != before), None
                    )
                finally:
                    function.__code__ = code
                if caught is None:
                    unneeded.add(f"{tree.name}: {text}")
                else:
                    expected.insert(0, expected.pop(caught))
    assert not unneeded


def test_every_primitive_is_needed(programs, monkeypatch):
    """Those of the tables of elementwise operations are traced in test_dataflow.py."""
    unneeded = set()
    for primitive in structure.RULES:
        monkeypatch.setattr(structure, "RULES", {k: rule for k, rule in structure.RULES.items() if k != primitive})
        if not is_caught(programs):
            unneeded.add(primitive)
        monkeypatch.undo()
    assert unneeded <= OTHER_NAMES

"""Each rule of the row analysis is needed: without it, a program of test_dataflow.py is classified differently.

A rule is a condition of an `if` (replaced by False), a term of an `and` or `or` (left out), or a primitive in a table.
"""

import ast
import contextlib
import inspect

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
from tests.step.row_programs import DATA, MIXED, errors, init, logits
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

UNTESTED = {
    keys: [
        "_draw: ()",
        "_draw: key.call",
        "_loop: x.path",
        "_results: all((value.path is None for value in given))",
        "_results: given[0].same",
        "_results: len(inner[0].invars) == len(given)",
        "_results: len(inner[0].outvars) == num",
        "_results: of_layer",
        "problem: first is not None",
        "problem: second is not None",
        "repeats: other.call is None",
        "repeats: others <= mine",
        "repeats: self.call is None",
    ],
    constants: [
        "_equal: first is second",
        (
            "_equal: first is second or isinstance(first, jax.core.Tracer) or isinstance(second, jax.core.Tracer) "
            "or is_key(first)"
        ),
        "_equal: is_key(first)",
        "_equal: isinstance(first, _PLAIN)",
        "_equal: isinstance(first, jax.core.Tracer)",
        "_equal: isinstance(second, jax.core.Tracer)",
    ],
    cotangent: ["without_cotangent: None", "without_cotangent: list(bound.items())"],
    analysis: [
        "_metric_rows: any((f.mixed for f in parts))",
        "_metric_rows: count.degree",
        "_metric_rows: count.enters",
        "_metric_rows: count.how in ('none', 'total')",
        "_metric_rows: f.how == 'unknown'",
        "_metric_rows: f.how in ('none', 'total')",
        "_metric_rows: f.tag == 'zero'",
        "_metric_rows: isinstance(metric, CustomMetric)",
        "_metric_rows: not (total.enters or count.enters or total.degree or count.degree)",
        "_metric_rows: total.degree",
        "_of_state: old == 'affine'",
        "_of_state: other is not None",
        "_parts: is_metric(metric)",
        "_rows: flow.degree",
        "_rows: flow.degree in (0, 1)",
        "_rows: flow.how == 'unknown'",
        "_rows: flow.how == 'unknown' or flow.unknown is not None",
        "_rows: flow.unknown is not None",
        "_rows: not flow.mixed",
        "_usages: 1",
        "_usages: again is not None",
        "_usages: bool(loss_usages)",
        "_usages: check",
        "_usages: shapes[0] is None",
        "_with_lines: eqn is None and any((flow.how == 'unknown' for flow in flows))",
        "analyze: found",
        "analyze: multiple <= LARGEST",
        "analyze: not any((usage.mixed for usage in usages))",
        "analyze: usages is not None and (not any((usage.mixed for usage in usages)))",
    ],
    row_table: [
        "_fixed_gradients: len(paths) > 3",
        "_read_between: not u.unchanged",
        "_read_between: u.counted",
        "_read_between: u.per_replica",
        "_read_between: u.per_replica or u.counted",
        "_row: usage.unchanged",
        "_row: usage.what == 'evaluation metric'",
        "_why: ''",
        "row_warnings: 1 in (microbatches, replicas)",
        "row_warnings: function == what",
        "row_warnings: mixing == 'allow'",
        "row_warnings: mixing == 'allow' or 1 in (microbatches, replicas)",
        "row_warnings: usage.rows == 'unknown'",
        "row_warnings: usage.unknown is not None",
        "row_warnings: usage.what == 'evaluation metric'",
    ],
    agreement: [
        "reduction_of: flow.degree == 1",
        "reduction_of: flow.how in ('none', 'total')",
        "reduction_of: flow.how in ('none', 'unknown')",
        "reduction_of: not flow.mixed",
        "reduction_of: usage.inexact",
        "reduction_of: usage.unchanged",
    ],
}
"""Module -> conditions that none of the losses needs: they save time, serve the type checker, or concern programs of
other tests (evaluations, metrics of users, pipelines, unknown operations)."""

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
    for change in (*table.TRACED_ONCE.values(), clipped, replaced, lambda h: h.astype(jnp.float16), jax.nn.relu):
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
    uses = lambda args: (lambda found: (found.text, found.problem))(keys.key_uses(*args))
    of_state = [usage for found in usages for usage in found if usage.what == "model state"]
    settings = [("warn", 1, 1), ("warn", 2, 2), ("allow", 2, 2), ("error", 1, 1)]
    warned = lambda found: [row_table.row_warnings(found, "loss_fn", *each, ()) for each in settings[:3]]
    return {
        keys: [lambda args=args: uses(args) for args in calls["key_uses"]],
        constants: [lambda args=args: constants.check_constants(*args) for args in calls["check_constants"]],
        cotangent: [lambda args=args: cotangent.needs_scale(*args) for args in calls["needs_scale"]],
        analysis: [lambda args=args: [facts(usage) for usage in analysis.analyze(*args)] for args in runs],
        row_table: [
            *(
                lambda found=found, each=each: row_table.row_table(found, {"queue": "mean"}, *each)
                for found in usages
                for each in ((1, False), (2, True))
            ),
            *(lambda found=found: warned(found) for found in usages),
            *(lambda found=found: row_table.row_warnings(found, "loss_fn", *settings[3], ()) for found in usages),
            lambda: row_table.table_lines([]),
        ],
        agreement: [lambda usage=usage: agreement.reduction_of(usage) for usage in of_state],
    }


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


@pytest.mark.parametrize("module", UNTESTED, ids=lambda module: module.__name__.split(".")[-1])
def test_every_condition_about_a_loss_is_needed(module, observations, monkeypatch):
    monkeypatch.setattr(analysis, "_traced", traced_once(analysis._traced))
    with jax.numpy_dtype_promotion("standard"):
        expected = [(observe, result(observe)) for observe in observations[module]]
        unneeded = set()
        for tree, function in functions(module):
            if tree.name == "_traced" or (module is agreement and tree.name != "reduction_of"):
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

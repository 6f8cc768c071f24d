"""Each rule of the row analysis is needed: without it, a program of test_dataflow.py is classified differently.

A rule is a condition of an `if` (replaced by False), a term of an `and` or `or` (left out), or a primitive in a table.
"""

import ast
import inspect

import jax
import numpy as np
import pytest

from spmdkit.step.dataflow import arithmetic, flow, structure, walk
from tests.step.flow_programs import FEATURES, FLOWS, ROWS, text_of
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
                yield part, getattr(function, "fget", function)


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


def test_every_primitive_is_needed(programs, monkeypatch):
    """Those of the tables of elementwise operations are traced in test_dataflow.py."""
    unneeded = set()
    for primitive in structure.RULES:
        monkeypatch.setattr(structure, "RULES", {k: rule for k, rule in structure.RULES.items() if k != primitive})
        if not is_caught(programs):
            unneeded.add(primitive)
        monkeypatch.undo()
    assert unneeded <= OTHER_NAMES

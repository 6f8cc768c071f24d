"""What every op has to bring, found by its file: a docstring with its wire and its sources, tests, and that it works
anywhere.

A new file or folder in spmdkit/ops is on this list at once. A new public op fails here until it has an example below.
"""

import ast
import collections
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.step import trace_context
from tests.support.core_runs import assert_close
from tests.support.ops_mesh import step

ROOT = Path(__file__).parents[2]
MODULES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for path in sorted((ROOT / "spmdkit" / "ops").rglob("*.py"))
    if path != ROOT / "spmdkit" / "ops" / "__init__.py"
}
TESTS = {path.name: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)}
OPS = {name: home for name, home in sk._HOME.items() if home.startswith("ops.")}
"""Public name -> module."""

SENDS_WHAT_IT_WRAPS = {"manual", "remat"}
"""They call a function of the user's: what is sent is that function's."""


def docstring_of(home):
    path = "spmdkit/" + home.replace(".", "/")
    return ast.get_docstring(MODULES[path + ".py" if path + ".py" in MODULES else path + "/__init__.py"])


@pytest.mark.parametrize("path", MODULES)
def test_a_file_says_what_it_is(path):
    assert len(ast.get_docstring(MODULES[path]) or "") >= 60


@pytest.mark.parametrize("home", sorted(set(OPS.values())))
def test_an_op_states_its_wire_and_its_sources(home):
    paragraphs = re.findall(r"^(Wire|Source)\b[^\n]*", docstring_of(home), re.MULTILINE)
    assert set(paragraphs) == {"Wire", "Source"}, f"{home}: its docstring has {sorted(set(paragraphs))}"


def users(name, suffix=".py"):
    """Returns the tests, and the models that they share, in which `sk.name` stands."""
    used = re.compile(rf"\bsk\.{name}\b")
    return [file for file, text in TESTS.items() if file.endswith(suffix) and used.search(text)]


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_is_tested(name):
    assert users(name), f"no test uses sk.{name}"


@pytest.mark.parametrize("home", sorted({home for name, home in OPS.items() if name not in SENDS_WHAT_IT_WRAPS}))
def test_documented_bytes_match_the_compiled_program(home):
    """In a module of tests whose name ends with `wire`, where XLA's expensive passes are on."""
    stem = home.removeprefix("ops.")
    by_name = [file for file in TESTS if file == f"test_{stem}_wire.py"]
    assert by_name or [f for name in OPS if OPS[name] == home for f in users(name, "_wire.py")], (
        f"no wire test of {home}"
    )


def test_page_lists_all_unchecked_shard_maps():
    """An island that needs it has a row in docs/why/code.md, with the reason and what proves the rest. In ops there is
    none."""

    def turns_off(node):
        is_keyword = isinstance(node, ast.keyword) and node.arg in ("check_vma", "check_rep")
        return is_keyword or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._check_vma"))

    found = collections.Counter(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "spmdkit").rglob("*.py"))
        if re.search("check_vma|check_rep", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if turns_off(node)
    )
    rows = re.findall(
        r"^\| `(spmdkit/[\w/]+\.py)` \| (\d+) \| (.{20,}) \|$", (ROOT / "docs/why/code.md").read_text(), re.M
    )
    assert {path: int(number) for path, number, _ in rows} == found
    assert not [path for path in found if path.startswith("spmdkit/ops/")]


# ---- in the global view, inside sk.manual, on one device


class Example(NamedTuple):
    """A call of an op: `fn(*args)`, and the names of the dims of arguments and result where it is called on shards."""

    fn: Any
    args: tuple[Any, ...]
    in_dims: tuple[Any, ...]
    out_dims: tuple[Any, ...]


B, T, D, F, V, E = 8, 8, 8, 16, 12, 4
ROWS, TOKENS = ("batch", "norm_sequence", None), ("batch", "sequence")
MESH = {"fsdp": 2, "expert": 2, "tensor": 2}


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32) / 2


def ids(below):
    return np.random.default_rng(below).integers(0, below, (B, T)).astype(np.int32)


PAIR = (("embed", "mlp"), ("mlp", "embed"))
EXPERTS = {"up": ("expert", *PAIR[0]), "down": ("expert", *PAIR[1])}

HEADS = ("batch", "sequence", "heads", None)

EXAMPLES = {
    "attention": Example(
        lambda q, k, v: sk.attention(q, k, v),
        tuple(draw(B, T, 4, D, seed=i) for i in range(3)),
        (HEADS, HEADS, HEADS),
        HEADS,
    ),
    "column_row_parallel": Example(
        lambda x, up, down: sk.column_row_parallel(x, [up], jnp.square, down),
        (draw(B, T, D), draw(D, F), draw(F, D)),
        (ROWS, *PAIR),
        ROWS,
    ),
    "cross_entropy": Example(
        lambda hidden, head, targets: sk.cross_entropy(hidden, head, targets),
        (draw(B, T, D), draw(D, V), ids(V)),
        (ROWS, ("embed", "vocab"), TOKENS),
        TOKENS,
    ),
    "embed": Example(
        lambda tokens, table: sk.embed(tokens, table),
        (ids(V), draw(V, D)),
        (TOKENS, ("vocab", "embed")),
        ROWS,
    ),
    "manual": Example(
        lambda x: sk.manual(jnp.tanh, [ROWS], ROWS)(x),
        (draw(B, T, D),),
        (ROWS,),
        ROWS,
    ),
    "moe": Example(
        lambda x, router, experts: sk.moe(x, router, experts, top_k=2)[0],
        (draw(B, T, D), draw(D, E), {"up": draw(E, D, F), "down": draw(E, F, D)}),
        (ROWS, ("embed", None), EXPERTS),
        ROWS,
    ),
    "remat": Example(
        lambda x: sk.remat(jnp.tanh)(x),
        (draw(B, T, D),),
        (ROWS,),
        ROWS,
    ),
}

WITHOUT_EXAMPLE = {
    **dict.fromkeys(
        ("context_order", "context_positions", "context_restore"),
        "changes the order where a mesh has a context axis, and nothing elsewhere. tests/ops/test_attention.py",
    ),
    "float8_histories": "creates parameters. tests/ops/test_float8.py",
    "pipeline": (
        "its functions see rows of microbatches and end with sk.mean: no op of arrays. tests/ops/test_pipeline.py"
    ),
}


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_is_the_same_in_every_view(name):
    if name in WITHOUT_EXAMPLE:
        return
    assert name in EXAMPLES, f"sk.{name} is new: give it an example, or say in WITHOUT_EXAMPLE why there is none"
    check_same(EXAMPLES[name])


def check_same(example):
    """Fails unless value and gradients are those of one device in the global view of a mesh, and inside a manual
    part."""
    inside = sk.manual(example.fn, example.in_dims, example.out_dims)
    expected = value_and_grad(example.fn, example.args, None)
    for fn in (example.fn, inside):
        assert_close(value_and_grad(fn, example.args, step(**MESH)), expected)


@jax.custom_vjp
def doubled(x):
    """The gradient is added up over `tensor`, where it is the same already."""
    return x


doubled.defvjp(lambda x: (x, None), lambda _, g: (g * trace_context.current().sharding.size("tensor"),))

BROKEN = {
    "takes the mean of its own rows for that of all": lambda x: sk.manual(lambda x: x - x.mean(0), [ROWS], ROWS)(x),
    "adds a gradient up once too often": lambda x: sk.manual(doubled, [ROWS], ROWS)(x),
}


@pytest.mark.parametrize("fn", BROKEN.values(), ids=BROKEN)
def test_a_broken_op_fails_the_contract(fn):
    with pytest.raises(AssertionError, match="relative errors"):
        check_same(Example(fn, (draw(B, T, D),), (ROWS,), ROWS))


def value_and_grad(fn, args, record):
    """Returns the value of `fn` and the gradient of a weighted sum of it for each float argument, on a mesh or
    alone."""

    def weighted(*args):
        out = fn(*args)
        return (out * (1 + jnp.arange(out.size).reshape(out.shape) / out.size)).sum(), out

    floats = tuple(i for i, x in enumerate(args) if jax.tree.leaves(x)[0].dtype == np.float32)
    run = jax.jit(jax.value_and_grad(weighted, argnums=floats, has_aux=True))
    if record is None:
        (_, value), grads = run(*args)
    else:
        with trace_context.tracing(record):
            (_, value), grads = run(*jax.device_put(args, NamedSharding(record.sharding.mesh, PartitionSpec())))
    return jax.device_get((value, grads))

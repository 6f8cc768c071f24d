"""What pairs, lookup and cross-entropy send, read from the compiled program, is what their docstrings say."""

import functools

import jax
import jax.numpy as jnp
import pytest

import spmdkit as sk
from tests.support.forms import slow_except
from tests.support.ops_mesh import GATHERED_TWICE, wire

B, T, D, F, V = 8, 16, 32, 64, 48
ROWS = ("batch", "norm_sequence", None)
TOKENS = ((B, T), ("batch", "sequence"), "int32")
MESHES = [{"tensor": 4, "fsdp": 2}, {"tensor": 2, "fsdp": 2, "context": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}]
mesh = pytest.mark.parametrize("asked", slow_except(MESHES[1:2], MESHES), ids=str)


def sizes(asked):
    """Returns N_t, N_f, N_c, the name of c, the tokens of a device and the bytes of their vectors."""
    num_t, num_f = asked["tensor"], asked["fsdp"]
    other = next((a for a in asked if a in ("context", "expert")), None)
    num_c = asked.get(other, 1)
    tokens = B * T // (num_f * num_c)
    return num_t, num_f, num_c, other, tokens, 4 * D * tokens


def sent(**parts):
    return {tuple(name.split("__")): round(num) for name, num in parts.items() if num}


def added_up(num_c, num_f, other, weight):
    return {f"all_reduce__{other}": 2 * (num_c - 1) / num_c * weight / num_f}


@mesh
def test_pair_sends_rows_and_weights_as_documented(asked):
    pair = lambda x, up, down: sk.column_row_parallel(x, [up], jnp.square, down)
    args = [((B, T, D), ROWS), ((D, F), ("embed", "mlp")), ((F, D), ("mlp", "embed"))]
    num_t, num_f, num_c, other, _, rows = sizes(asked)
    weights = 4 * 2 * D * F / num_t
    t, f = (num_t - 1) / num_t, (num_f - 1) / num_f
    gathered = sent(all_gather__tensor=t * rows, reduce_scatter__tensor=t * rows, all_gather__fsdp=f * weights)
    assert wire(pair, ROWS, *args, **asked) == gathered
    assert wire(pair, ROWS, *args, backward=True, **asked) == sent(
        all_gather__tensor=t * (2 + GATHERED_TWICE) * rows,
        reduce_scatter__tensor=t * rows,
        all_gather__fsdp=f
        * weights
        * (1.5 if GATHERED_TWICE else 1),  # of the forward pass only `up` has to be computed
        reduce_scatter__fsdp=f * weights,
        **added_up(num_c, num_f, other, weights),
    )


@mesh
def test_unsharded_rows_use_one_all_reduce(asked):
    rows_dims = ("batch", "sequence", None)
    pair = lambda x, up, down: sk.column_row_parallel(x, [up], jnp.square, down, dims=rows_dims)
    args = [((B, T, D), rows_dims), ((D, F), ("embed", "mlp")), ((F, D), ("mlp", "embed"))]
    num_t, _, _, _, _, rows = sizes(asked)
    for backward in (False, True):
        found = wire(pair, rows_dims, *args, backward=backward, **asked)
        assert {name: num for name, num in found.items() if "tensor" in name} == sent(
            all_reduce__tensor=2 * (num_t - 1) / num_t * rows
        )


@mesh
@pytest.mark.parametrize("by", ["table", "tokens"])
def test_a_lookup_moves_the_table_or_the_tokens(by, asked):
    embed = lambda tokens, table: sk.embed(tokens, table, by=by)
    num_t, num_f, num_c, other, tokens, rows = sizes(asked)
    t, f, table = (num_t - 1) / num_t, (num_f - 1) / num_f, 4 * D * V / num_t
    summed = added_up(num_c, num_f, other, table)
    ids = {"all_gather__fsdp": 4 * (num_f - 1) * tokens}
    forward, backward = {"reduce_scatter__tensor": t * rows}, {"all_gather__tensor": t * rows}
    if by == "table":
        forward, backward = forward | {"all_gather__fsdp": f * table}, backward | {"reduce_scatter__fsdp": f * table}
    else:
        vectors = {"all_to_all__fsdp": f * rows / num_t}
        forward, backward = forward | vectors | ids, backward | vectors | ids
    args = [TOKENS, ((V, D), ("vocab", "embed"))]
    assert wire(embed, ROWS, *args, **asked) == sent(**forward)
    assert wire(embed, ROWS, *args, backward=True, **asked) == sent(**backward, **summed)


@mesh
def test_loss_sends_three_numbers_per_token(asked):
    loss = functools.partial(sk.cross_entropy, chunk=4)
    args = [((B, T, D), ROWS), ((D, V), ("embed", "vocab")), TOKENS]
    num_t, num_f, num_c, other, tokens, rows = sizes(asked)
    t, f, head = (num_t - 1) / num_t, (num_f - 1) / num_f, 4 * D * V / num_t
    forward = {
        "all_gather__tensor": t * rows,
        "all_reduce__tensor": t * 24 * tokens,
        "all_gather__fsdp": f * head,
    }
    assert wire(loss, TOKENS[1], *args, **asked) == sent(**forward)
    # The gathers of the two passes are one: nothing lies between them here.
    pulled = {"reduce_scatter__tensor": t * rows, "reduce_scatter__fsdp": f * head}
    assert wire(loss, TOKENS[1], *args, backward=True, **asked) == sent(
        **forward, **pulled, **added_up(num_c, num_f, other, head)
    )


def test_logits_of_more_than_a_chunk_are_nowhere():
    tokens, vocab, chunk = 512, 4096, 16
    hidden, head = jax.ShapeDtypeStruct((1, tokens, 8), jnp.float32), jax.ShapeDtypeStruct((8, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def temporaries(chunk):
        loss = lambda hidden, head, targets: sk.cross_entropy(hidden, head, targets, chunk=chunk).sum()
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(tokens) >= 4 * tokens * vocab
    assert temporaries(chunk) < 6 * 4 * chunk * vocab

"""The vocabulary's two ends alone: chunks, padding, masks, z-loss, both ways of looking up; errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops.vocab import padded_vocab
from tests.support.core_runs import assert_close, program_of
from tests.support.forms import slow_except
from tests.support.ops_mesh import value_and_grad

B, T, D, V = 8, 8, 16, 24
MESH = {"fsdp": 2, "context": 2, "tensor": 2}


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    hidden = random.normal(size=(B, T, D)).astype(np.float32)
    head = random.normal(size=(D, V)).astype(np.float32)
    return hidden, head, random.integers(0, V, (B, T)).astype(np.int32)


FORMS = [({}, 32), (MESH, 3), *((asked, chunk) for asked in ({}, MESH) for chunk in (None, 1, 4))]


@pytest.mark.parametrize(("asked", "chunk"), slow_except(FORMS[:2], FORMS), ids=str)
def test_no_number_of_chunks_changes_the_loss(asked, chunk, arrays):
    """On one device the number of columns is prime: no number of equal groups divides it."""
    hidden, head, targets = arrays
    if not asked:
        head, targets = head[:, :23], targets % 23
    where = targets % 3 > 0

    def plain(hidden, head):
        logits = hidden @ head
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.where(where, losses + 0.01 * jax.nn.logsumexp(logits, -1) ** 2, 0)

    ours = lambda hidden, head: sk.cross_entropy(hidden, head, targets, where=where, z_loss=0.01, chunk=chunk)
    assert_close(value_and_grad(ours, hidden, head, **asked), value_and_grad(plain, hidden, head))


def test_a_padded_vocabulary_is_the_one_that_exists(arrays):
    hidden, head, targets = arrays
    num = 9  # the last five of eight devices hold padding alone
    targets = targets % num
    plain = lambda h, w: optax.softmax_cross_entropy_with_integer_labels(h @ w[:, :num], targets)
    ours = lambda h, w: sk.cross_entropy(h, w, targets, vocab_size=num)
    found = value_and_grad(ours, hidden, head, tensor=8)
    assert_close(found, value_and_grad(plain, hidden, head))
    assert not np.any(found[1][1][:, num:])


def test_invalid_target_is_nan_unless_excluded(arrays):
    hidden, head, targets = arrays
    targets = targets.copy()
    targets[0, 0], targets[1, 1] = -1, V
    losses = jax.jit(sk.cross_entropy)(hidden, head, targets)
    assert np.argwhere(np.isnan(losses)).tolist() == [[0, 0], [1, 1]]
    (_, losses), grads = value_and_grad(
        lambda h, w: sk.cross_entropy(h, w, targets, where=(targets >= 0) & (targets < V)), hidden, head, **MESH
    )
    assert losses[0, 0] == 0 and all(np.isfinite(x).all() for x in (losses, *grads))


@pytest.mark.forms(2)
@pytest.mark.parametrize("chunk", [3, 20, 32], ids=["part of an example", "two examples", "four examples"])
def test_chunks_mix_no_rows(chunk):
    init = lambda key: {"head": jnp.zeros((D, V))}
    loss_fn = lambda params, batch, key: sk.mean(
        sk.cross_entropy(batch["x"], params["head"], batch["y"], chunk=chunk).mean(-1)
    )
    data = {"x": np.zeros((16, T, D), np.float32), "y": np.zeros((16, T), np.int32)}
    program = program_of(sk.Task(init, loss_fn, optax.sgd(0.1), train_data=data), mesh={"data": 8}, batch_size=16)
    assert [usage.rows for usage in program.row_usages] == ["as a mean"]
    assert not any("mixes rows" in note for note in program.notes)


@pytest.mark.parametrize("by", ["table", "tokens", "auto"])
@pytest.mark.parametrize("last", ["norm_sequence", "sequence"])
@pytest.mark.parametrize("asked", [MESH, {"fsdp": 4, "expert": 2}], ids=str)
def test_both_ways_to_look_up_are_indexing(by, last, asked, arrays):
    table, tokens = arrays[1].T, arrays[2]
    ours = lambda table: sk.embed(tokens, table, dims=("batch", last, None), by=by)
    assert_close(value_and_grad(ours, table, **asked), value_and_grad(lambda table: table[tokens], table))


def test_gradients_keep_dtype_and_loss_is_float32(arrays):
    hidden, head = (jnp.asarray(x, jnp.bfloat16) for x in arrays[:2])
    (_, losses), grads = value_and_grad(lambda h, w: sk.cross_entropy(h, w, arrays[2], chunk=3), hidden, head, **MESH)
    exact = value_and_grad(
        lambda h, w: optax.softmax_cross_entropy_with_integer_labels(h @ w, arrays[2]),
        *(x.astype(jnp.float32) for x in (hidden, head)),
    )
    assert losses.dtype == jnp.float32 and {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}
    assert_close((losses, grads), (exact[0][1], exact[1]), tolerance=1e-2)


def test_what_cannot_work_is_refused_with_its_repair(arrays):
    hidden, head, targets = arrays
    with pytest.raises(ConfigError, match=r"padded_vocab\(20, 8\) = 24 columns long and give vocab_size=20"):
        value_and_grad(lambda h, w: sk.cross_entropy(h, w[:, :20], targets), hidden, head, tensor=8)
    with pytest.raises(ConfigError, match="vocab_size is 25, and the head has 24 columns"):
        sk.cross_entropy(hidden, head, targets, vocab_size=25)
    with pytest.raises(ConfigError, match="chunk is 0"):
        sk.cross_entropy(hidden, head, targets, chunk=0)
    with pytest.raises(ConfigError, match="Use by='table'"):
        value_and_grad(lambda w: sk.embed(targets, w, by="tokens", dims=(None, "norm_sequence", None)), head.T, fsdp=8)
    assert [padded_vocab(50257), padded_vocab(8, 8), padded_vocab(9, 8)] == [50304, 8, 16]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.bool_])
def test_non_integer_tokens_are_rejected(dtype, arrays):
    hidden, head, targets = arrays
    with pytest.raises(ConfigError, match=r"sk.embed: tokens_BT is .*\[8,8\].*integers.*astype\(jnp.int32\)"):
        sk.embed(targets.astype(dtype), head.T)
    with pytest.raises(ConfigError, match=r"sk.cross_entropy: targets_BT is .*\[8,8\].*integers.*astype\(jnp.int32\)"):
        sk.cross_entropy(hidden, head, targets.astype(dtype))


def test_integers_of_any_width_are_tokens_and_targets(arrays):
    hidden, head, targets = arrays
    as_asked = targets.astype(np.uint8)
    np.testing.assert_array_equal(sk.embed(as_asked, head.T), head.T[targets])
    np.testing.assert_array_equal(*(sk.cross_entropy(hidden, head, ids) for ids in (as_asked, targets)))

"""Functions of arrays `(x, y)` [rows, features], some of an old state [features], and how the rows enter their results.

The text is `how` and the degree (for values of single rows only if it is not 0), then the marks of the flow. `mixed`:
a statistic of some rows changes the value of another row. `anywhere`: of a row, at an unknown position.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas

ROWS, FEATURES = 101, 4
REPLICAS = 11
KEY = jax.random.key(0)


def integer(x):
    return x.astype(jnp.int32)


def number():
    return jnp.float32(ROWS) * jnp.cos(jnp.float32(1))


def variance(x):
    return (x**2).mean(0) - x.mean(0) ** 2


def callback(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def text_of(flow):
    degree = "?" if flow.degree is None else flow.degree
    words = [flow.how, *([degree] if not flow.is_row or degree else [])]
    words += [mark for mark in ("mixed", "added", "unknown", "whole") if getattr(flow, mark) is not None]
    return " ".join(map(str, [*words, *(["anywhere"] if flow.is_row and not flow.stride else [])]))


FLOWS = {
    "table of twice the number at rows": ("row", lambda x, y: jnp.cos(jnp.ones((2 * ROWS, 3)))[integer(x[:, 0])]),
    "constant over rows with a mean": ("row mixed", lambda x, y: 1 / (x + x.mean(0))),
    "half of rows over two dims": ("row mixed", lambda x, y: x.reshape(4, ROWS)[:2]),
    "columns of rows, tiled": ("row", lambda x, y: jnp.tile(x.T, (1, 2)).sum(0)),
    "own rows of all": (
        "total 1",
        lambda x, y: lax.dynamic_slice_in_dim(
            lax.all_gather(x, "data", tiled=True), lax.axis_index("data") * ROWS, ROWS
        ).sum(0),
    ),
    "product of a constant": ("none 0", lambda x, y: jnp.cos(jnp.ones(FEATURES)).prod()),
    "sorted constant": ("none 0", lambda x, y: jnp.sort(jnp.cos(jnp.ones(FEATURES)))),
    "eigenvalues of a constant": ("none 0", lambda x, y: jnp.linalg.eigvalsh(jnp.eye(FEATURES) * jnp.cos(1.0))),
    "table written at a constant": ("none 0", lambda x, y: jnp.cos(jnp.ones(5)).at[0].add(jnp.cos(1.0))),
    "mean of reversed rows": ("total 0 mixed", lambda x, y: lax.rev(x, (0,)).mean(0)),
    "rows over two dims, tiled": ("total 1", lambda x, y: jnp.tile(x.reshape(4, ROWS), (1, 2)).sum(1)),
    # sums
    "rows of another layout": ("row mixed", lambda x, y: x[:, :1] + x[:, 0]),
    "mean added to rows": ("row added", lambda x, y: x + x.mean(0)),
    "root of a mean added": ("row mixed", lambda x, y: x + jnp.sqrt(x.mean(0))),
    "sum added to rows": ("row mixed", lambda x, y: x + x.sum(0)),
    "largest added": ("row mixed", lambda x, y: x + x.max(0)),
    "mean of mixed rows added": ("row mixed", lambda x, y: x + jnp.tanh(x - x.mean(0)).mean(0)),
    "mean and sum": ("other ? mixed", lambda x, y: x.mean() + x.sum()),
    "mean and largest": ("other 0 mixed", lambda x, y: x.mean() + x.max()),
    "variance": ("moment 0 mixed", lambda x, y: (x**2).mean(0) - x.mean(0) ** 2),
    "mean and variance": ("moment 0 mixed", lambda x, y: x.mean() + (x.mean() * y.mean())),
    "two means": ("total 0", lambda x, y: x.mean(0) + y.mean(0)),
    "sum of two largest": ("other 0 mixed", lambda x, y: x.max(0) + y.max(0)),
    "negative largest": ("other 0 mixed", lambda x, y: -x.max(0)),
    "largest minus 1": ("max 0", lambda x, y: x.max(0) - 1),
    "number and constant": (
        "none ?",
        lambda x, y: jnp.float32(x.shape[0]) * jnp.cos(jnp.float32(1)) + jnp.cos(jnp.float32(2)),
    ),
    "zeros": ("none 0", lambda x, y: jnp.zeros(3) + jnp.zeros(3) + 0 * x[0, :3]),
    # products
    "rows times rows": ("row", lambda x, y: x * y),
    "rows times a mean": ("row mixed", lambda x, y: x * x.mean(0)),
    "rows times rows with a mean": ("row mixed", lambda x, y: (x + x.mean(0)) * y),
    "rows with a mean times a constant": ("row added", lambda x, y: (x + x.mean(0)) * 2),
    "mean times mean": ("moment 0 mixed", lambda x, y: x.mean() * y.mean()),
    "mean times largest": ("other 0 mixed", lambda x, y: x.mean() * x.max()),
    "largest times a constant": ("other 0", lambda x, y: x.max() * 2),
    "mean times zero": ("none 0", lambda x, y: x.mean() * 0),
    "mean over a number and constant": ("other ? mixed", lambda x, y: x.mean() * jnp.cos(jnp.float32(x.shape[0]))),
    "sum over the number": ("total 0", lambda x, y: x.sum(0) / x.shape[0]),
    # quotients
    "rows over a mean": ("row mixed", lambda x, y: x / x.mean(0)),
    "rows over rows": ("row", lambda x, y: x / y),
    "rows over rows with a mean": ("row mixed", lambda x, y: y / (x + x.mean(0))),
    "mean over a mean": ("other 0 mixed", lambda x, y: x.mean() / y.mean()),
    "constant over a mean": ("other 0 mixed", lambda x, y: 1 / x.mean()),
    "zero over a mean": ("none 0", lambda x, y: 0 / x.mean()),
    # powers
    "mean squared": ("moment 0 mixed", lambda x, y: x.mean() ** 2),
    "mean cubed": ("moment 0 mixed", lambda x, y: x.mean() ** 3),
    "inverse of a mean": ("other 0 mixed", lambda x, y: x.mean() ** -1),
    "number squared": ("none 2", lambda x, y: lax.integer_pow(jnp.float32(x.shape[0]) * jnp.cos(jnp.float32(1)), 2)),
    "squared rows": ("row", lambda x, y: x**2),
    "squared rows with a mean": ("row mixed", lambda x, y: (x + x.mean(0)) ** 2),
    "largest squared": ("other 0 mixed", lambda x, y: x.max() ** 2),
    # other functions
    "function of a mean": ("other 0 mixed", lambda x, y: jnp.tanh(x.mean(0))),
    "function of rows with a mean": ("row mixed", lambda x, y: jnp.tanh(x + x.mean(0))),
    "function of rows times their number": ("row mixed", lambda x, y: jnp.tanh(x * x.shape[0])),
    "root of the number": ("none ?", lambda x, y: jnp.sqrt(jnp.float32(x.shape[0]) * jnp.cos(jnp.float32(1)))),
    "rows below their mean": ("row mixed", lambda x, y: (x < x.mean(0)) * 1.0),
    "mean clipped at zero": ("other 0 mixed", lambda x, y: jnp.maximum(x.mean(), 0)),
    "variance clipped at zero": ("moment 0 mixed", lambda x, y: jnp.maximum((x**2).mean() - x.mean() ** 2, 0)),
    "larger of two largest": ("max 0", lambda x, y: jnp.maximum(x.max(), y.max())),
    "smaller of two largest": ("other 0 mixed", lambda x, y: jnp.minimum(x.max(), y.max())),
    # choices
    "chosen by a row": ("row", lambda x, y: jnp.where(x > 0, y, x * 2)),
    "chosen by a mean": ("row mixed", lambda x, y: jnp.where(x.mean() > 0, x, y)),
    "mean chosen by rows": ("row mixed", lambda x, y: jnp.where(x > 0, x.mean(0), x)),
    "mean chosen by a mean": ("other 0 mixed", lambda x, y: jnp.where(x.mean() > 0, y.mean(), 0.0)),
    "chosen by rows with a mean": ("row mixed", lambda x, y: jnp.where(x + x.mean(0) > 0, y, x)),
    "constant chosen by rows": ("row", lambda x, y: jnp.where(x > 0, 1.0, 2.0)),
    # reductions
    "sum of a mean": ("total 0", lambda x, y: x.mean(0).sum()),
    "sum of the largest": ("other 0", lambda x, y: x.max(0).sum()),
    "sum with a mean": ("total 1", lambda x, y: (x + x.mean(0)).sum(0)),
    "largest of rows with a mean": ("max 0 mixed", lambda x, y: (x + x.mean(0)).max(0)),
    "largest of one row with a mean": ("row mixed", lambda x, y: (x + x.mean(0)).max(1)),
    "largest of the largest": ("max 0", lambda x, y: x.max(0).max()),
    "smallest of the largest": ("other 0 mixed", lambda x, y: x.max(0).min()),
    "largest of a mean": ("other 0 mixed", lambda x, y: x.mean(0).max()),
    "product over rows": ("other 0", lambda x, y: x.prod(0)),
    "product of a mean": ("other 0 mixed", lambda x, y: x.mean(0).prod()),
    "position of the largest row": ("other 0", lambda x, y: x.argmax(0)),
    "cumulative sum of a mean": ("total 0", lambda x, y: jnp.cumsum(x.mean(0))),
    "sorted mean": ("other 0 mixed", lambda x, y: jnp.sort(x.mean(0))),
    "cumulative sum of rows with a mean": ("row added", lambda x, y: jnp.cumsum(x + x.mean(0), axis=1)),
    "sorted rows with a mean": ("row mixed", lambda x, y: jnp.sort(x + x.mean(0), axis=1)),
    "two largest of each row": ("row", lambda x, y: lax.top_k(x, 2)[1]),
    "largest of windows of a mean": (
        "other 0 mixed",
        lambda x, y: lax.reduce_window(x.mean(0), -jnp.inf, lax.max, (2,), (1,), "SAME"),
    ),
    "sums of windows with a mean": (
        "row added",
        lambda x, y: lax.reduce_window(x + x.mean(0), 0.0, lax.add, (1, 2), (1, 1), "SAME"),
    ),
    "largest of windows with a mean": (
        "row mixed",
        lambda x, y: lax.reduce_window(x + x.mean(0), -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
    ),
    "windows of a constant": (
        "none 0",
        lambda x, y: lax.reduce_window(jnp.cos(jnp.arange(4.0)), 0.0, lax.add, (2,), (1,), "SAME"),
    ),
    # shapes
    "rows over two dims, transposed": ("total 1", lambda x, y: x.reshape(4, ROWS).T.sum(1)),
    "rows over two dims": ("row", lambda x, y: x.reshape(4, ROWS) * 2),
    "rows over two dims, summed": ("total 1", lambda x, y: x.reshape(4, ROWS).sum(1)),
    "every second": ("row mixed", lambda x, y: jnp.concatenate([x, y])[::2]),
    "second half": ("row", lambda x, y: jnp.concatenate([x, y])[ROWS:]),
    "shifted half": ("row mixed", lambda x, y: jnp.concatenate([x, y])[1 : ROWS + 1]),
    "half of columns": ("row", lambda x, y: jnp.concatenate([x, y], 1)[:, FEATURES:]),
    "half, half of columns": ("row", lambda x, y: jnp.concatenate([x, y])[:ROWS, :2]),
    "half, half of columns, summed": ("row", lambda x, y: jnp.concatenate([x, y])[:ROWS, :2].sum(1)),
    "slice of the batch, then rows": ("row mixed", lambda x, y: x[:7] * 2),
    "with a mean in another column": (
        "row added",
        lambda x, y: jnp.concatenate([x, jnp.broadcast_to(x.mean(0), x.shape)], 1),
    ),
    "with an empty part": ("row", lambda x, y: jnp.concatenate([x, jnp.zeros((0, FEATURES))])),
    "mean and constant": ("total 0", lambda x, y: jnp.concatenate([x.mean(0), jnp.cos(jnp.arange(2.0))])),
    "rows and a mean": ("other 0", lambda x, y: jnp.concatenate([x, x.mean(0, keepdims=True)])),
    "rows and others": ("other 0", lambda x, y: jnp.concatenate([x, jnp.cos(jnp.ones((3, FEATURES)))])),
    "rows with a mean and columns": ("row added", lambda x, y: jnp.concatenate([x + x.mean(0), y], 1)),
    "padded rows": ("row anywhere", lambda x, y: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0)))),
    "padded rows, summed": ("total 1", lambda x, y: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0))).sum(0)),
    "padded columns, summed": ("row", lambda x, y: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0))).sum(1)),
    "padded mean": ("total 0", lambda x, y: lax.pad(x.mean(0), 0.0, ((1, 0, 0),))),
    "stacked": ("row", lambda x, y: jnp.stack([x, y], 1).sum((1, 2))),
    "stacked before": ("row", lambda x, y: jnp.stack([x, y]).sum((0, 2))),
    "broadcast mean": ("row added", lambda x, y: jnp.broadcast_to(x.mean(0), x.shape)),
    "broadcast largest": ("row mixed", lambda x, y: jnp.broadcast_to(x.max(0), x.shape)),
    "broadcast constant": ("row", lambda x, y: jnp.broadcast_to(jnp.cos(jnp.arange(4.0)), x.shape)),
    "number of rows": ("total 1", lambda x, y: jnp.ones(x.shape[0]).sum()),
    "numbered": ("row mixed", lambda x, y: x[:, 0] * jnp.arange(x.shape[0])),
    "split columns": ("row", lambda x, y: jnp.split(x, 2, axis=1)[1]),
    "split rows": ("row", lambda x, y: jnp.split(jnp.concatenate([x, y]), 2)[1]),
    "first rows split off": ("row mixed", lambda x, y: jnp.split(x, [7])[0]),
    "unstacked": ("row", lambda x, y: jnp.unstack(x, axis=1)[0]),
    "unstacked rows": ("row mixed", lambda x, y: jnp.unstack(x)[0]),
    "tiled": ("row", lambda x, y: jnp.tile(x, (1, 3))),
    "tiled rows": ("row", lambda x, y: jnp.tile(x, (3, 1))),
    "repeated": ("row", lambda x, y: jnp.repeat(x, 2, 0).sum(1)),
    # products of arrays
    "gram matrix of rows": ("row mixed", lambda x, y: x @ y.T),
    "sum of products": ("total 1", lambda x, y: x.T @ y),
    "sum of products with a mean": ("other 0 mixed", lambda x, y: (x + x.mean(0)).T @ y),
    "weight for each position": ("total 1 mixed", lambda x, y: jnp.cos(jnp.arange(float(ROWS))) @ x),
    "rows times a matrix of a mean": ("row mixed", lambda x, y: x @ jnp.outer(x.mean(0), x.mean(0))),
    "mean times a matrix": ("total 0", lambda x, y: x.mean(0) @ jnp.ones((FEATURES, 2))),
    "rows with a mean times a matrix": ("row added", lambda x, y: (x + x.mean(0)) @ jnp.cos(jnp.ones((FEATURES, 2)))),
    "rows with a mean times rows": ("row mixed", lambda x, y: jnp.einsum("ni,ni->n", x + x.mean(0), y)),
    "rows times the number": ("row 1", lambda x, y: (x * x.shape[0]) @ jnp.cos(jnp.ones((FEATURES, 2)))),
    "pairs of rows against sums": ("row mixed", lambda x, y: (x @ y.T) @ y),
    "rows times zeros": ("none 0", lambda x, y: x @ jnp.zeros((FEATURES, 2))),
    "mean in a convolution": ("total 0", lambda x, y: jnp.convolve(x.mean(0), jnp.cos(jnp.ones(2)))),
    "rows in a kernel": ("row mixed", lambda x, y: jnp.convolve(jnp.cos(jnp.ones(300)), x[:, 0])),
    # indexing
    "mean at a row's index": ("row mixed anywhere", lambda x, y: x.mean(0)[integer(x[:, 0])]),
    "mean at a constant index": ("total 0", lambda x, y: jnp.take(x.mean(0), jnp.array([1, 0]))),
    "rows at the index of the largest": ("row mixed", lambda x, y: x[x[:, 0].argmax()]),
    "columns at the index of the largest": ("row mixed anywhere", lambda x, y: jnp.take(x, x.mean(0).argmax(), axis=1)),
    "table at rows": ("row", lambda x, y: jnp.cos(jnp.ones((9, 3)))[integer(x[:, 0])]),
    "table at rows with a mean": (
        "row mixed",
        lambda x, y: jnp.cos(jnp.ones((9, 3)))[integer(x[:, 0] + x[:, 0].mean())],
    ),
    "rows at rows": ("row mixed anywhere", lambda x, y: x[integer(y[:, 0])]),
    "one row": ("row mixed", lambda x, y: x[3]),
    "columns of each row": ("row", lambda x, y: jnp.take_along_axis(x, integer(y), axis=1)),
    "columns of each row with a mean": (
        "row mixed",
        lambda x, y: jnp.take_along_axis(x, integer(y + y.mean(0)), axis=1),
    ),
    "rows with a mean by their index": (
        "row mixed",
        lambda x, y: jnp.tanh(x + x.mean(0))[jnp.arange(ROWS), integer(y[:, 0])],
    ),
    "rows times the number by their index": (
        "row mixed",
        lambda x, y: jnp.tanh((x * x.shape[0])[jnp.arange(ROWS), integer(y[:, 0])]),
    ),
    "numbers by their index": ("row mixed", lambda x, y: jnp.cos(jnp.arange(float(ROWS)))[jnp.arange(ROWS)]),
    "histogram of a mean": ("other 0 mixed", lambda x, y: jnp.zeros(5).at[integer(x.mean(0))].add(1.0)),
    "histogram with means": ("other 0 mixed", lambda x, y: jnp.zeros(5).at[integer(x[:, 0])].add(x.mean())),
    "histogram of sums": ("total 2", lambda x, y: jnp.zeros(5).at[integer(x[:, 0])].add(x.shape[0] * y[:, 0])),
    "last of each class": ("other 0", lambda x, y: jnp.zeros(5).at[integer(x[:, 0])].set(y[:, 0])),
    "mean added at a constant index": ("total 0", lambda x, y: jnp.cos(jnp.ones(5)).at[0].add(x.mean())),
    "rows written at rows": ("row mixed", lambda x, y: x.at[integer(y[:, 0])].set(1.0)),
    "column written": ("row", lambda x, y: x.at[:, 0].set(y[:, 0])),
    "column added": ("row added", lambda x, y: (x + x.mean(0)).at[:, 0].add(y[:, 0])),
    "column of rows with a mean written": ("row mixed", lambda x, y: (x + x.mean(0)).at[:, 0].set(y[:, 0])),
    "mean written by their index": (
        "row mixed",
        lambda x, y: x.at[jnp.arange(ROWS), 0].set(jnp.tanh(x + x.mean(0))[:, 0]),
    ),
    "part at a mean": (
        "other 0 mixed",
        lambda x, y: lax.dynamic_slice(jnp.cos(jnp.arange(9.0)), (integer(x.mean()),), (3,)),
    ),
    "columns at a mean": ("row mixed", lambda x, y: lax.dynamic_slice(x, (0, integer(x.mean())), (ROWS, 2))),
    "first rows": ("row mixed", lambda x, y: lax.dynamic_slice(x, (3, 0), (7, FEATURES))),
    "part of a mean": ("total 0", lambda x, y: lax.dynamic_slice(x.mean(0), (integer(jnp.cos(1.0)),), (2,))),
    "written at a mean": (
        "other 0 mixed",
        lambda x, y: lax.dynamic_update_slice(jnp.cos(jnp.arange(9.0)), jnp.ones(2), (integer(x.mean()),)),
    ),
    "mean written": ("total 0", lambda x, y: lax.dynamic_update_slice(jnp.cos(jnp.arange(9.0)), x.mean(0), (3,))),
    "rows written to a queue": (
        "other 0",
        lambda x, y: lax.dynamic_update_slice(jnp.cos(jnp.ones((300, FEATURES))), x, (3, 0)),
    ),
    "columns written": ("row", lambda x, y: lax.dynamic_update_slice(x, y[:, :2], (0, 1))),
    # linear algebra
    "eigenvalues of a covariance": ("other 0 mixed", lambda x, y: jnp.linalg.eigvalsh(x.T @ x)),
    "singular values of all rows": ("row mixed", lambda x, y: jnp.linalg.svd(x, compute_uv=False)),
    "solved for rows": ("row", lambda x, y: jnp.linalg.solve(jnp.eye(FEATURES) * 3, x.T).T),
    "solved with a covariance": ("other 0 mixed", lambda x, y: jnp.linalg.solve(x.T @ x, jnp.ones(FEATURES))),
    "rows solved with a covariance": ("row mixed", lambda x, y: jax.scipy.linalg.solve_triangular(x.T @ x, x.T).T),
    "solved between rows": ("row mixed", lambda x, y: jax.scipy.linalg.solve_triangular(jnp.tri(ROWS), x, lower=True)),
    "spectrum of rows with a mean": ("row mixed", lambda x, y: jnp.abs(jnp.fft.rfft(x + x.mean(0)))),
    # loops
    "mean in a loop": ("total 0", lambda x, y: lax.fori_loop(0, 3, lambda _, t: t + x.mean(0), jnp.zeros(FEATURES))),
    "function of a mean in a loop": (
        "other 0 mixed",
        lambda x, y: lax.fori_loop(0, 3, lambda _, t: jnp.tanh(t + x.mean(0)), jnp.zeros(FEATURES)),
    ),
    "rows in a loop": (
        "row",
        lambda x, y: lax.fori_loop(0, 3, lambda _, t: jnp.tanh(t + x), jnp.zeros((ROWS, FEATURES))),
    ),
    "rows with a mean in a loop": (
        "row mixed",
        lambda x, y: lax.fori_loop(0, 3, lambda _, t: jnp.tanh(t - t.mean(0)), x),
    ),
    "mean added in a loop": ("row added", lambda x, y: lax.fori_loop(0, 3, lambda _, t: t + t.mean(0), x)),
    "rows carried to the next row": (
        "row mixed",
        lambda x, y: lax.scan(lambda c, r: (r, c + r), jnp.zeros(FEATURES), x)[1],
    ),
    "each row of a scan": ("row", lambda x, y: lax.map(lambda r: r @ r, x)),
    "scan with the number": ("row mixed", lambda x, y: lax.scan(lambda c, i: (c, y[i] * 2), 0.0, jnp.arange(ROWS))[1]),
    "sum of totals in a scan": (
        "total ?",
        lambda x, y: lax.scan(lambda t, r: (t + (r * x.shape[0]).sum(), None), 0.0, x)[0],
    ),
    "product in a scan": ("other 0 mixed", lambda x, y: lax.scan(lambda t, r: (t * r.sum(), None), 1.0, x)[0]),
    "scan of chunks": (
        "row",
        lambda x, y: lax.map(lambda c: c.sum(1), jnp.concatenate([x, y]).reshape(2, ROWS, FEATURES)),
    ),
    "scan over columns": ("row added", lambda x, y: lax.map(lambda c: c - c.mean(), x.T)),
    "largest in a scan": (
        "other 0 mixed",
        lambda x, y: lax.scan(lambda t, r: (jnp.maximum(t, r.max()), None), -jnp.inf, x)[0],
    ),
    "loop until a mean": (
        "row mixed",
        lambda x, y: lax.while_loop(lambda t: jnp.abs(t).mean() > 1, lambda t: t / 2, x),
    ),
    "loop until a row": (
        "row",
        lambda x, y: lax.map(lambda r: lax.while_loop(lambda t: jnp.abs(t).max() > 1, lambda t: t / 2, r), x),
    ),
    "loop with a number": (
        "row",
        lambda x, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1],
    ),
    "branch of a mean": ("row mixed", lambda x, y: lax.cond(x.mean() > 0, jnp.sin, jnp.cos, x)),
    "branch of a number": ("row", lambda x, y: lax.cond(jnp.cos(1.0) > 0, jnp.sin, jnp.cos, x)),
    "branches with a mean": (
        "row added",
        lambda x, y: lax.cond(jnp.cos(1.0) > 0, lambda x: x + x.mean(0), lambda x: x, x),
    ),
    "constant branch of a mean": ("other 0 mixed", lambda x, y: lax.cond(x.mean() > 0, lambda: 1.0, lambda: 2.0)),
    # collectives
    "mean of all": ("none 0 whole", lambda x, y: lax.pmean(x.mean(0), "data")),
    "mean of all, of a function": ("none 0 mixed whole", lambda x, y: lax.pmean(jnp.tanh(x.mean(0)), "data")),
    "largest of all": ("none 0 whole", lambda x, y: lax.pmax(x.max(0), "data")),
    "largest of sums": ("none 0 mixed whole", lambda x, y: lax.pmax(x.sum(0), "data")),
    "smallest of all": ("none 0 whole", lambda x, y: lax.pmin(x.min(0), "data")),
    "sum of the largest of all": ("none 0 mixed whole", lambda x, y: lax.psum(x.max(0), "data")),
    "sum of rows of all": ("none 0 mixed whole", lambda x, y: lax.psum(x, "data")),
    "rows of all": ("none 0 whole", lambda x, y: lax.all_gather(x, "data")),
    "variances of all": ("none 0 mixed whole", lambda x, y: lax.all_gather(x.var(0), "data")),
    "rows of the next": ("none 0 mixed whole", lambda x, y: lax.ppermute(x, "data", [(0, 1)])),
    "mean of all of rows with a mean": (
        "none 0 mixed whole",
        lambda x, y: lax.pmean((x - x.mean(0)).mean(0) + jnp.tanh(x - x.mean(0)).mean(0), "data"),
    ),
    # constants
    "sum times the reciprocal": ("total 0", lambda x, y: x.sum(0) * (1 / ROWS)),
    "complex": ("total 2", lambda x, y: jnp.real(x.sum(0) * (1j + 0) * ROWS)),
    "sum over twice the number": ("total 0", lambda x, y: x.sum(0) / (2 * ROWS)),
    "number of all": ("total 1", lambda x, y: x.sum(0) / (float(REPLICAS * ROWS))),
    # unknown
    "callback of rows": ("row unknown anywhere", lambda x, y: callback(x)),
    "callback of a mean": ("unknown 0 unknown", lambda x, y: callback(x.mean(0))),
    "callback of a constant": ("none 0", lambda x, y: callback(jnp.cos(jnp.ones(FEATURES))) + 0.0),
    "positions of numpy": ("row mixed", lambda x, y: x * np.linspace(0, 1, ROWS, dtype=np.float32)[:, None]),
    "constant of numpy for each row": ("row", lambda x, y: x * np.ones((ROWS, FEATURES), np.float32)),
    "class weights of numpy": ("row", lambda x, y: x * np.arange(FEATURES, dtype=np.float32)),
    "rows by their index of numpy": ("row", lambda x, y: x[np.arange(ROWS), integer(y[:, 0])]),
    "labels of numpy": (
        "row mixed whole anywhere",
        lambda x, y: (y @ lax.all_gather(x, "data", tiled=True).T)[jnp.arange(ROWS), np.arange(ROWS)],
    ),
    "discounted sum": ("other 0 mixed", lambda x, y: lax.scan(lambda t, r: (0.9 * t + r.sum(), None), 0.0, x)[0]),
    "last row of a scan": ("other 0 mixed", lambda x, y: lax.scan(lambda t, r: (r, None), jnp.zeros(FEATURES), x)[0]),
    "sum of the rows before": (
        "total 1 mixed",
        lambda x, y: lax.scan(lambda t, r: (t + r, t), jnp.zeros(FEATURES), x)[1],
    ),
    "mean in each iteration": (
        "total 0 mixed",
        lambda x, y: lax.scan(lambda t, r: (t + r, x.mean(0)), jnp.zeros(FEATURES), x)[1],
    ),
    "two sums": (
        "total 1",
        lambda x, y: sum(lax.scan(lambda t, r: ((t[0] + r.sum(), t[1] + r.max()), None), (0.0, 0.0), x)[0]),
    ),
    "discounted chunks": (
        "total 1",
        lambda x, y: lax.scan(
            lambda t, r: (0.9 * t + r.sum(), None), 0.0, jnp.concatenate([x, y]).reshape(2, ROWS, FEATURES)
        )[0],
    ),
    "sum of chunks": (
        "total 1",
        lambda x, y: lax.scan(
            lambda t, r: (t + r.sum(), None), 0.0, jnp.concatenate([x, y]).reshape(2, ROWS, FEATURES)
        )[0],
    ),
    "sum in a loop in a map": (
        "row",
        lambda x, y: lax.map(lambda r: lax.fori_loop(0, 3, lambda _, t: t + r.sum(), 0.0), x),
    ),
    "recurrence in a map": (
        "row",
        lambda x, y: lax.map(lambda r: lax.scan(lambda h, v: (jnp.tanh(h + v), h), 0.0, r)[1], x),
    ),
    "scan of a vmap": (
        "row",
        lambda x, y: jax.vmap(lambda r: lax.scan(lambda h, v: (jnp.tanh(h + v), h), 0.0, r)[1])(x),
    ),
    "class sums of centered rows": (
        "other 0 mixed",
        lambda x, y: jax.ops.segment_sum(x - x.mean(0), integer(y[:, 0]), num_segments=5),
    ),
    "integer of a mean": ("other 0 mixed", lambda x, y: integer(x.mean(0))),
    "integer of a sum": ("total 1", lambda x, y: integer(x.sum(0))),
    "integer of rows with a mean": ("row mixed", lambda x, y: integer(x + x.mean(0))),
    "integer of rows": ("row", lambda x, y: integer(x)),
    "largest minus largest": ("other 0 mixed", lambda x, y: x.max() - y.max()),
    "1 minus largest": ("other 0 mixed", lambda x, y: 1 - x.max()),
    "missing rows replaced by the mean": ("row mixed", lambda x, y: jnp.where(y > 0, x, x.mean(0))),
    "tiled, summed": ("row", lambda x, y: jnp.tile(x, (1, 3)).sum(1)),
    "tiled rows, summed": ("row", lambda x, y: jnp.tile(x, (3, 1)).sum(1)),
    "tiled mean": ("total 0", lambda x, y: jnp.tile(x.mean(0), 2)),
    "running sum of a mean": ("total 0", lambda x, y: lax.scan(lambda t, v: (t + v, t), 0.0, x.mean(0))[1]),
    "carry of the whole batch": ("row mixed", lambda x, y: lax.scan(lambda h, v: (h + v.sum(), None), x, y)[0]),
    "diagonal with all": (
        "row mixed whole anywhere",
        lambda x, y: (y @ lax.all_gather(x, "data", tiled=True).T)[jnp.arange(ROWS), jnp.arange(ROWS)],
    ),
    "labels of all": (
        "row whole",
        lambda x, y: (y @ lax.all_gather(x, "data", tiled=True).T)[
            jnp.arange(ROWS), lax.axis_index("data") * ROWS + jnp.arange(ROWS)
        ],
    ),
    "diagonal by take": (
        "row mixed whole",
        lambda x, y: jnp.take_along_axis(y @ lax.all_gather(x, "data", tiled=True).T, jnp.arange(ROWS)[:, None], 1),
    ),
    "diagonal by take of numpy": (
        "row mixed whole",
        lambda x, y: jnp.take_along_axis(y @ lax.all_gather(x, "data", tiled=True).T, np.arange(ROWS)[:, None], 1),
    ),
    "eye": (
        "row mixed whole",
        lambda x, y: (jnp.eye(ROWS, REPLICAS * ROWS) * (y @ lax.all_gather(x, "data", tiled=True).T)).sum(1),
    ),
    "eye of numpy": (
        "row mixed whole",
        lambda x, y: (
            np.eye(ROWS, REPLICAS * ROWS, dtype=np.float32) * (y @ lax.all_gather(x, "data", tiled=True).T)
        ).sum(1),
    ),
    "diag": ("row mixed whole anywhere", lambda x, y: jnp.diagonal(y @ lax.all_gather(x, "data", tiled=True).T)),
    "trace": ("total 1 mixed whole", lambda x, y: jnp.trace(y @ lax.all_gather(x, "data", tiled=True).T)),
    "written by index of numpy": ("row", lambda x, y: x.at[np.arange(ROWS), 0].set(1.0)),
    # one program for each term of a rule
    "largest plus 1": ("max 0", lambda x, y: x.max(0) + 1),
    "largest of both": ("max 0", lambda x, y: jnp.concatenate([x.max(0), y.max(0)])),
    "variance and largest": ("other 0 mixed", lambda x, y: variance(x) + x.max(0)),
    "mean where rows are negative": ("row mixed", lambda x, y: jnp.where(x < 0, x.mean(0), x)),
    "first rows masked": ("row mixed", lambda x, y: jnp.where(jnp.arange(ROWS) < 5, x[:, 0], 0)),
    "first rows masked by numpy": ("row mixed", lambda x, y: jnp.where(np.arange(ROWS) < 5, x[:, 0], 0)),
    "chosen by any row": ("row mixed", lambda x, y: jnp.where((x > 0).any(), x, y)),
    "mean chosen in a map": ("row mixed", lambda x, y: lax.map(lambda r: jnp.where(r[0] > 0, x.mean(), 0.0), x)),
    "largest label as a byte": ("max 0", lambda x, y: integer(x).max(0).astype(jnp.int8)),
    "callback and rows": ("row unknown", lambda x, y: callback(x) + x),
    "sum of rows and rows times their number": ("row mixed", lambda x, y: x * x.shape[0] + y),
    "labels at a fixed block": (
        "row mixed whole anywhere",
        lambda x, y: (y @ lax.all_gather(x, "data", tiled=True).T)[
            jnp.arange(ROWS), (integer(jnp.cos(1.0)) + 1) * ROWS + jnp.arange(ROWS)
        ],
    ),
    "positions in all": ("row", lambda x, y: lax.axis_index("data") * ROWS + jnp.arange(ROWS)),
    "sum over the root of the number": ("other ? mixed", lambda x, y: x.sum(0) / jnp.sqrt(x.shape[0] * jnp.cos(1.0))),
    "square of a sum of totals": (
        "moment ? mixed",
        lambda x, y: lax.scan(lambda t, r: (t + (r * x.shape[0]).sum(), None), 0.0, x)[0] ** 2,
    ),
    "variance squared": ("moment 0 mixed", lambda x, y: variance(x) ** 2),
    "variance times a mean": ("moment 0 mixed", lambda x, y: variance(x) * y.mean(0)),
    "smallest times a constant": ("other 0", lambda x, y: x.min(0) * 2),
    "negative smallest": ("other 0 mixed", lambda x, y: -x.min(0)),
    "smaller of two smallest": ("min 0", lambda x, y: jnp.minimum(x.min(0), y.min(0))),
    "variance or mean": ("other 0 mixed", lambda x, y: jnp.maximum(variance(x), y.mean(0))),
    "sum of the smallest": ("other 0", lambda x, y: x.min(0).sum()),
    "largest of a callback": ("unknown 0 unknown", lambda x, y: callback(x.mean(0)).max()),
    "rows by their index as floats": ("row", lambda x, y: x[integer(jnp.arange(float(ROWS))), integer(y[:, 0])]),
    "rows over two dims, joined": (
        "other 0",
        lambda x, y: jnp.concatenate([x.reshape(4, ROWS), y.reshape(4, ROWS)], axis=1),
    ),
    "tiled over two dims": ("row anywhere", lambda x, y: jnp.tile(x.reshape(4, ROWS), (1, 2))),
    "tiled behind two dims": ("row", lambda x, y: jnp.tile(x.reshape(4, ROWS, 1), (1, 1, 3))),
    "mean in a kernel": ("total 0", lambda x, y: jnp.convolve(jnp.cos(jnp.ones(9)), x.mean(0))),
    "mean of positions over replicas": (
        "none 0 mixed whole",
        lambda x, y: lax.pmean(x, "data")[..., None] * jnp.ones(2),
    ),
    "number for each row": ("row 1", lambda x, y: jnp.broadcast_to(ROWS * jnp.cos(1.0), (ROWS,))),
    "root of the number for each row": (
        "row mixed",
        lambda x, y: jnp.broadcast_to(jnp.sqrt(ROWS * jnp.cos(1.0)), (ROWS,)),
    ),
    "sum of totals for each row": (
        "row mixed",
        lambda x, y: jnp.full(ROWS, lax.scan(lambda t, r: (t + (r * x.shape[0]).sum(), None), 0.0, x)[0]),
    ),
    "padded rows, shifted": ("row mixed anywhere", lambda x, y: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0)))[1:]),
    "pairs across rows": ("total 1", lambda x, y: jnp.stack([x[:, :3], y[:, :3]]).reshape(-1, 2).sum(1)),
    "half, every second column": ("row", lambda x, y: jnp.concatenate([x, y])[:ROWS, ::2]),
    "rows times a mean vector": ("row mixed", lambda x, y: x @ x.mean(0)),
    "rows times the root of the number": (
        "row mixed",
        lambda x, y: x @ (jnp.cos(jnp.ones((FEATURES, 2))) * jnp.sqrt(ROWS * jnp.cos(1.0))),
    ),
    "weights times rows": (
        "row",
        lambda x, y: lax.dot_general(
            jnp.cos(jnp.ones((2, FEATURES))), jnp.tile(x[..., None], 3), (((1,), (1,)), ((), ()))
        ).sum(2),
    ),
    "columns of all rows": ("row mixed", lambda x, y: jnp.take(x, integer(y[:, 0]), axis=1)),
    "columns of a table at rows": (
        "row",
        lambda x, y: jnp.take(jnp.cos(jnp.ones((3, 9))), integer(x[:, 0]), axis=1).sum(0),
    ),
    "mean at the index of a mean": ("other 0 mixed", lambda x, y: x.mean(0)[x.mean(0).argmax()]),
    "diagonal with all, transposed": (
        "row mixed whole anywhere",
        lambda x, y: (lax.all_gather(x, "data", tiled=True) @ y.T)[jnp.arange(ROWS), jnp.arange(ROWS)],
    ),
    "rows of others": (
        "row mixed whole anywhere",
        lambda x, y: (y @ lax.all_gather(x, "data", tiled=True).T)[integer(x[:, 0]), jnp.arange(ROWS)],
    ),
    "one hot by their index": (
        "row",
        lambda x, y: jnp.zeros((ROWS, FEATURES)).at[jnp.arange(ROWS), integer(x[:, 0])].set(1.0),
    ),
    "added at their index": ("other 0 mixed", lambda x, y: jnp.cos(jnp.ones(300)).at[jnp.arange(ROWS)].add(x[:, 0])),
    "mean added to the first row": ("row mixed", lambda x, y: x.at[0].add(x.mean(0))),
    "columns of each row with a sum": (
        "row mixed",
        lambda x, y: jnp.take_along_axis(x, integer(y) + integer(y).sum(0), axis=1),
    ),
    "columns by index with a sum": (
        "row mixed anywhere",
        lambda x, y: x[jnp.arange(ROWS), integer(y[:, 0]) + integer(y[:, 0]).sum()],
    ),
    "padded rows added to a class": (
        "total 1",
        lambda x, y: jnp.zeros(5).at[jnp.zeros(ROWS + 3, int)].add(lax.pad(x[:, 0], 0.0, ((1, 2, 0),))),
    ),
    "classes of padded rows": (
        "total 1",
        lambda x, y: jnp.zeros(5).at[integer(lax.pad(x[:, 0], 0.0, ((1, 2, 0),)))].add(1.0),
    ),
    "table written with rows of all": (
        "none 0 whole",
        lambda x, y: (
            jnp.cos(jnp.ones((9, FEATURES))).at[jnp.array([3, 1])].set(lax.all_gather(x, "data", tiled=True)[:2])
        ),
    ),
    "queue written with rows of all": (
        "none 0 whole",
        lambda x, y: lax.dynamic_update_slice(
            jnp.cos(jnp.ones((2000, FEATURES))), lax.all_gather(x, "data", tiled=True), (integer(jnp.cos(1.0)), 0)
        ),
    ),
    "first rows of all": (
        "none 0 whole",
        lambda x, y: lax.dynamic_slice_in_dim(lax.all_gather(x, "data", tiled=True), integer(jnp.cos(1.0)), 3),
    ),
    "part at a mixed number": (
        "none 0 mixed whole",
        lambda x, y: lax.dynamic_slice(
            jnp.cos(jnp.arange(9.0)), (integer(lax.pmean(jnp.tanh(x.mean()), "data")),), (3,)
        ),
    ),
    "written at a mixed number": (
        "none 0 mixed whole",
        lambda x, y: lax.dynamic_update_slice(
            jnp.cos(jnp.arange(9.0)), jnp.ones(2), (integer(lax.pmean(jnp.tanh(x.mean()), "data")),)
        ),
    ),
    "own block of scores": (
        "row mixed whole",
        lambda x, y: lax.dynamic_slice_in_dim(
            y @ lax.all_gather(x, "data", tiled=True).T, lax.axis_index("data") * ROWS, ROWS, axis=1
        ),
    ),
    "own part of a table": (
        "none 0",
        lambda x, y: lax.dynamic_slice_in_dim(jnp.cos(jnp.ones(2000)), lax.axis_index("data") * ROWS, ROWS),
    ),
    "part of each row in a map": (
        "row",
        lambda x, y: lax.map(lambda r: lax.dynamic_slice(r, (integer(r[0]),), (2,)), x),
    ),
    "column written with a mean": ("row added", lambda x, y: lax.dynamic_update_slice(x + x.mean(0), y[:, :2], (0, 1))),
    "reversed columns with a mean": ("row added", lambda x, y: lax.rev(x + x.mean(0), (1,))),
    "cumulative sum of the largest": ("other 0", lambda x, y: jnp.cumsum(x.max(0))),
    "sums of windows of the largest": (
        "other 0",
        lambda x, y: lax.reduce_window(x.max(0), 0.0, lax.add, (2,), (1,), "SAME"),
    ),
    "sum by a function": ("other 0", lambda x, y: lax.reduce(x, jnp.float32(0), lambda a, b: a + b * 2, (0,))),
    "windows of a function": (
        "row mixed",
        lambda x, y: lax.reduce_window(x, 0.0, lambda a, b: a + b * 2, (2, 1), (1, 1), "SAME"),
    ),
    "solved between rows by numpy": (
        "row mixed",
        lambda x, y: jax.scipy.linalg.solve_triangular(np.tri(ROWS, dtype=np.float32), x, lower=True),
    ),
    "mean solved": (
        "total 0",
        lambda x, y: jax.scipy.linalg.solve_triangular(np.tri(FEATURES, dtype=np.float32), x.mean(0), lower=True),
    ),
    "solved by iteration over all rows": (
        "row mixed",
        lambda x, y: jax.scipy.sparse.linalg.cg(lambda v: 2 * v + jnp.roll(v, 1, 0), x, maxiter=3)[0],
    ),
    "random numbers of each row": (
        "row",
        lambda x, y: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (2,)))(
            integer(x[:, 0])
        ),
    ),
    "random numbers of split keys": (
        "row",
        lambda x, y: jax.vmap(lambda i: jax.random.normal(jax.random.split(jax.random.key(i))[0], (2,)))(
            integer(x[:, 0])
        ),
    ),
    "data of keys": ("row", lambda x, y: jax.random.key_data(jax.vmap(jax.random.key)(integer(x[:, 0])))),
    "keys of data": (
        "row",
        lambda x, y: jax.vmap(lambda d: jax.random.normal(jax.random.wrap_key_data(d)))(
            integer(x[:, :2]).astype(jnp.uint32)
        ),
    ),
    "gamma of a key": ("row", lambda x, y: jax.random.gamma(jax.random.key(0), jnp.abs(x))),
    "numbers of a key of the module": ("row", lambda x, y: x + jax.random.normal(KEY, (FEATURES,))),
    "printed": ("row", lambda x, y: (jax.debug.print("{}", x.sum()), x * 2)[1]),
    "positions of numpy in a jitted function": (
        "row mixed",
        lambda x, y: jax.jit(lambda x: x * np.linspace(0, 1, ROWS, dtype=np.float32)[:, None])(x),
    ),
    "large constant": ("total 1", lambda x, y: x.sum(0) * 12345.678),
    "sum of a recurrence in a map": (
        "row",
        lambda x, y: lax.map(lambda r: lax.scan(lambda h, v: (jnp.tanh(h + v), h), 0.0, r)[1].sum(), x),
    ),
    "root of the number times rows": ("row mixed", lambda x, y: jnp.sqrt(ROWS * jnp.cos(1.0)) * x),
    "function of rows with a mean by their index": (
        "row mixed",
        lambda x, y: jnp.tanh((x + x.mean(0))[jnp.arange(ROWS), integer(y[:, 0])]),
    ),
    "labels of all on two axes": (
        "row whole",
        lambda x, y: (y @ lax.all_gather(x, "data", tiled=True).T)[
            jnp.arange(ROWS),
            (lax.axis_index("replica") * REPLICAS + lax.axis_index("data")) * ROWS + jnp.arange(ROWS),
        ],
    ),
    "mean over one axis of two": ("total 0 mixed", lambda x, y: lax.pmean(x.mean(0), "replica")),
    "zeros plus rows times their number": ("row 1", lambda x, y: jnp.zeros((ROWS, FEATURES)) + x * ROWS),
    "mixed rows written by their index": (
        "row mixed",
        lambda x, y: jnp.tanh(x - x.mean(0)).at[jnp.arange(ROWS), 0].set(1.0),
    ),
    "rows as a kernel": (
        "row mixed",
        lambda x, y: lax.conv_general_dilated(
            jnp.cos(jnp.ones((1, 300, 1))), x[:, :1, None], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        ),
    ),
    "two rows of all": (
        "none 0 whole",
        lambda x, y: jnp.take(lax.all_gather(x, "data", tiled=True), jnp.array([1, 0]), axis=0),
    ),
    "sum times a constant": ("total 1", lambda x, y: x.sum(0) * 0.3),
    "kernel of Pallas": (
        "row unknown anywhere",
        lambda x, y: pallas.pallas_call(lambda a, b: None, jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
    ),
    "middle rows split off": ("row mixed", lambda x, y: jnp.split(jnp.concatenate([x, y]), [50, 151])[1]),
    "number of replicas": ("none 0", lambda x, y: lax.psum(jnp.cos(1.0), "data")),
    "products of all": ("none 0 mixed whole", lambda x, y: lax.all_gather(x.prod(0), "data")),
    "mean in a map": ("total 0", lambda x, y: lax.map(lambda r: x.mean(0), x)),
    "pairs of rows in a map": (
        "row",
        lambda x, y: lax.map(lambda c: c.sum(1), jnp.concatenate([x, y]).reshape(ROWS, 2, FEATURES)),
    ),
    "pairs of rows in a map, summed": (
        "total 1",
        lambda x, y: lax.map(lambda c: c.sum(1), jnp.concatenate([x, y]).reshape(ROWS, 2, FEATURES)).sum(0),
    ),
    "repeated rows in a map": (
        "row",
        lambda x, y: lax.map(jnp.tanh, jnp.repeat(x, 2, 0)) * jnp.repeat(y, 2, 0),
    ),
    "two views in a map": ("row", lambda x, y: lax.map(jnp.tanh, jnp.concatenate([x, y]))[:ROWS] * y),
    "repeated rows with two views in a map": (
        "row mixed",
        lambda x, y: lax.map(lambda rows: rows[0] * rows[1], (jnp.concatenate([x, y]), jnp.repeat(x, 2, 0))),
    ),
    "all pairs in two maps": ("row mixed", lambda x, y: lax.map(lambda r: lax.map(lambda q: r @ q, y), x)),
    "function of the number in a map": ("row mixed", lambda x, y: lax.map(jnp.cos, jnp.arange(float(ROWS)))),
    "doubled in a scan": (
        "none 0",
        lambda x, y: lax.scan(lambda c, r: ((c[0] * 2, c[1] + r.sum()), None), (1.0, 0.0), x)[0][0],
    ),
    "mean decayed in a scan": (
        "other 0 mixed",
        lambda x, y: lax.scan(lambda t, r: (0.9 * t + x.mean(0), r), jnp.zeros(FEATURES), x)[0],
    ),
    # of an old state
    "sum added to a decayed state": ("total 1", lambda x, y, s: 0.9 * s + x.sum(0)),
    "sum divided by a state plus the number": ("other ? mixed", lambda x, y, s: x.sum(0) / (s + ROWS)),
    "sum times a state plus the number": ("other ? mixed", lambda x, y, s: x.sum(0) * (s + ROWS)),
    "mean divided by the square of a state plus the number": (
        "other ? mixed",
        lambda x, y, s: x.sum(0) * ROWS / (s + ROWS) ** 2,
    ),
    "mean divided by a state plus 1": ("total 0", lambda x, y, s: x.mean(0) / (s + 1)),
    # numbers of rows over replicas
    "sum divided by the number of all": ("total 1 whole", lambda x, y: x.sum(0) / lax.psum(number(), "data")),
    "sum divided by the number, not of all": ("total 0", lambda x, y: x.sum(0) / lax.psum(number(), "replica")),
    "sum divided by the largest number": ("total 0", lambda x, y: x.sum(0) / lax.pmax(number(), "data")),
    "rows times the number, of all": ("none 0 mixed whole", lambda x, y: lax.psum(x * number(), "data")),
    "constant of all": ("none 0", lambda x, y: lax.psum(jnp.cos(jnp.float32(1)), "data")),
    "mean added to a state times the number": ("other ? mixed", lambda x, y, s: s * ROWS + x.mean(0)),
}
"""name -> (how rows enter, function)."""

"""The rule of each primitive: applied along a dim of features it stays row by row, along the rows it mixes them."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from spmdkit.foundation import jaxprs
from spmdkit.step.dataflow.arithmetic import COPIES, LINEAR, NONLINEAR
from spmdkit.step.dataflow.flow import Flow
from spmdkit.step.dataflow.structure import RULES
from spmdkit.step.dataflow.walk import flows_of
from tests.step.flow_programs import FEATURES, FLOWS, REPLICAS, ROWS, integer, text_of


def flow_of(fn, *shapes):
    """Returns (flow, trace) of `fn` of arrays with the rows as their first dim, and of an old state."""
    arrays = [jax.ShapeDtypeStruct((ROWS, *shape), "float32") for shape in shapes]
    if inspect.signature(fn).parameters.keys() == {"x", "y", "s"}:
        arrays.append(jax.ShapeDtypeStruct((FEATURES,), "float32"))
    traced = jax.make_jaxpr(fn, axis_env=[("replica", 1), ("data", REPLICAS)])(*arrays)
    return flow_in(traced), traced


def flow_in(traced, replicas=REPLICAS, unique=True):
    """Returns the flow of the result of a trace."""
    given = [
        Flow("row", 0, ROWS, math.prod(aval.shape[1:])) if aval.shape[0] == ROWS else Flow(tag="old")
        for aval in traced.in_avals
    ]
    [flow] = flows_of(traced, given, ROWS, replicas, unique, ["replica", "data"], ["data"])
    return flow


def window(reducer, init):
    def along(x, axis):
        dims = tuple(2 if d == axis else 1 for d in range(x.ndim))
        return lax.reduce_window(x, init, reducer, dims, (1,) * x.ndim, "SAME")

    return along


def convolved(x, axis):
    x = jnp.moveaxis(x, axis, 1)[..., None]
    kernel = jnp.ones((3, 1, 1, 1))
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


ALONG = {
    "reduce_sum": lambda x, axis: x.sum(axis, keepdims=True) * jnp.ones_like(x),
    "reduce_max": lambda x, axis: x - x.max(axis, keepdims=True),
    "reduce_min": lambda x, axis: x - x.min(axis, keepdims=True),
    "reduce_prod": lambda x, axis: x - x.prod(axis, keepdims=True),
    "reduce_and": lambda x, axis: x * (x > 0).all(axis, keepdims=True).astype(x.dtype),
    "reduce_or": lambda x, axis: x * (x > 0).any(axis, keepdims=True).astype(x.dtype),
    "reduce_xor": lambda x, axis: x * jnp.expand_dims(lax.reduce_xor(x > 0, (axis,)), axis).astype(x.dtype),
    "argmax": lambda x, axis: x + x.argmax(axis, keepdims=True).astype(x.dtype),
    "argmin": lambda x, axis: x + x.argmin(axis, keepdims=True).astype(x.dtype),
    "sort": lambda x, axis: lax.sort(x, dimension=axis),
    "cumsum": lambda x, axis: lax.cumsum(x, axis),
    "cumprod": lambda x, axis: lax.cumprod(x, axis),
    "cummax": lambda x, axis: lax.cummax(x, axis),
    "cummin": lambda x, axis: lax.cummin(x, axis),
    "cumlogsumexp": lambda x, axis: lax.cumlogsumexp(x, axis),
    "rev": lambda x, axis: lax.rev(x, (axis,)),
    "slice": lambda x, axis: lax.slice_in_dim(x, 1, 3, axis=axis),
    "dynamic_slice": lambda x, axis: lax.dynamic_slice_in_dim(x, 1, 3, axis=axis),
    "dynamic_update_slice": lambda x, axis: lax.dynamic_update_slice_in_dim(
        x, lax.slice_in_dim(x, 1, 3, axis=axis), 0, axis=axis
    ),
    "concatenate": lambda x, axis: jnp.roll(x, 1, axis),
    "dot_general": lambda x, axis: jnp.moveaxis(jnp.cos(x), axis, -1) @ jnp.arange(1.0, 1.0 + x.shape[axis])[:, None],
    "conv_general_dilated": convolved,
    "reduce_window_sum": window(lax.add, 0.0),
    "reduce_window_max": window(lax.max, -jnp.inf),
    "reduce_window_min": window(lax.min, jnp.inf),
    "gather": lambda x, axis: jnp.take(x, jnp.array([1, 0]), axis=axis),
    "scatter": lambda x, axis: (
        jnp.moveaxis(jnp.moveaxis(x, axis, -1).at[..., 0].set(1.0), -1, axis) if axis else x.at[0].set(x[1])
    ),
    "scatter-add": lambda x, axis: jnp.moveaxis(x, axis, 0).at[0].add(jnp.moveaxis(x, axis, 0)[1]),
    "scatter-sub": lambda x, axis: jnp.moveaxis(x, axis, 0).at[0].subtract(jnp.moveaxis(x, axis, 0)[1]),
    "reduce_window": window(lambda a, b: a + 2 * b, 0.0),
    "reduce": lambda x, axis: x - jnp.expand_dims(lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (axis,)), axis),
    "scatter-mul": lambda x, axis: jnp.moveaxis(x, axis, 0).at[0].multiply(jnp.moveaxis(x, axis, 0)[1]),
    "scatter-min": lambda x, axis: jnp.moveaxis(x, axis, 0).at[0].min(jnp.moveaxis(x, axis, 0)[1]),
    "scatter-max": lambda x, axis: jnp.moveaxis(x, axis, 0).at[0].max(jnp.moveaxis(x, axis, 0)[1]),
    "fft": lambda x, axis: jnp.abs(jnp.fft.fft(jnp.moveaxis(x, axis, -1))),
    "psum": lambda x, axis: jax.vmap(lambda r: r - lax.psum(r, "i"), axis_name="i", in_axes=axis, out_axes=axis)(x),
    "scan": lambda x, axis: lax.scan(lambda c, v: (jnp.tanh(c + v), c), x.take(0, axis), jnp.moveaxis(x, axis, 0))[1],
}
"""name -> `fn(x, axis)` of x [rows, 4, 4]."""


@pytest.mark.parametrize("name", ALONG)
def test_features_stay_in_their_row_and_rows_mix(name):
    shape = (FEATURES, FEATURES)
    flow, _ = flow_of(lambda x: ALONG[name](x, 1), shape)
    assert flow.is_row and flow.mixed is None and flow.unknown is None and flow.stride
    flow, _ = flow_of(lambda x: jnp.tanh(ALONG[name](x, 0)), shape)
    assert flow.mixed is not None and flow.unknown is None


def square(x):
    return x @ x.mT + 5 * jnp.eye(FEATURES)


ROWWISE = {
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "approx_top_k": lambda x: lax.approx_max_k(x, 2)[0],
    "stack": lambda x: jnp.stack([x, -x], axis=0).sum(0),
    "pad": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 1))),
    "expand_dims": lambda x: jnp.expand_dims(x, 0)[0],
    "transpose": lambda x: x.transpose(2, 0, 1).transpose(1, 2, 0),
    "split rows of tokens": lambda x: x.reshape(-1, FEATURES).reshape(x.shape),
    "merged with a view": lambda x: jnp.concatenate([x, x + 1])[: len(x)],
    "cholesky": lambda x: jnp.linalg.cholesky(square(x)),
    "eigh": lambda x: jnp.linalg.eigh(square(x))[0],
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "qr": lambda x: jnp.linalg.qr(x)[0],
    "lu": lambda x: jax.scipy.linalg.lu_factor(square(x))[0],
    "eig": lambda x: jnp.abs(jnp.linalg.eig(x)[0]),
    "schur": lambda x: lax.linalg.schur(x)[0],
    "hessenberg": lambda x: lax.linalg.hessenberg(x)[0],
    "tridiagonal": lambda x: lax.linalg.tridiagonal(square(x))[0],
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x[..., 0], x[..., 1], x[..., 2], x[..., :1]),
    "householder_product": lambda x: lax.linalg.householder_product(x, x[..., 0]),
    "lu_pivots_to_permutation": lambda x: lax.linalg.lu_pivots_to_permutation(integer(x[..., 0]), FEATURES),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(jnp.eye(FEATURES), x.reshape(-1, FEATURES)),
    "solve": lambda x: jnp.linalg.solve(square(x), x),
    "mean under vmap": lambda x: jax.vmap(lambda r: r - lax.pmean(r, "i"), axis_name="i", in_axes=1, out_axes=1)(x),
    "select_n": lambda x: jnp.where(x[:, :1] > 0, x, 0),
    "random": lambda x: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (2,)))(
        x[:, 0, 0].astype(jnp.int32)
    ),
    "cond": lambda x: lax.map(lambda r: lax.cond(r[0, 0] > 0, jnp.sin, jnp.cos, r), x),
    "while": lambda x: jax.vmap(lambda r: lax.while_loop(lambda v: v.max() > 1, lambda v: v / 2, r))(x),
    "custom_jvp": lambda x: jax.nn.relu(x),
    "one hot": lambda x: jax.nn.one_hot(x[:, 0].astype(jnp.int32), 3),
    "rows picked by their index": lambda x: x[jnp.arange(len(x)), x[:, 0, 0].astype(jnp.int32)],
    "rows written by their index": lambda x: x.at[jnp.arange(len(x)), 0].set(1.0),
    "own columns": lambda x: jnp.take_along_axis(x, x.argmax(1, keepdims=True), axis=1),
    "segments of a row": lambda x: jax.vmap(
        lambda r: jax.ops.segment_sum(r, r[:, 0].astype(jnp.int32), num_segments=3)
    )(x),
    "all pairs in a row": lambda x: jnp.einsum("nij,nkj->nik", x, x),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_functions_of_a_row_do_not_mix(name):
    flow, _ = flow_of(ROWWISE[name], (FEATURES, FEATURES))
    assert flow.is_row and flow.mixed is None and flow.unknown is None


TOTALS = {
    "sum": (lambda x: x.sum(), 1),
    "mean": (lambda x: x.mean(), 0),
    "sum of squares": (lambda x: jnp.einsum("nij,nik->jk", x, x), 1),
    "histogram": (lambda x: jnp.zeros(5).at[x[:, 0, 0].astype(jnp.int32)].add(1.0), 1),
    "mean by the reciprocal": (lambda x: (x * (1 / x.shape[0])).sum(), 0),
    "sum in a loop": (lambda x: lax.fori_loop(0, 3, lambda _, t: t + x.sum(), jnp.float32(0)), 1),
    "sum over a scan": (lambda x: lax.scan(lambda t, r: (t + r.sum(), None), jnp.float32(0), x)[0], 1),
    "count": (lambda x: (x > 0).sum(), 1),
}


@pytest.mark.parametrize("name", TOTALS)
def test_sums_and_means_over_rows(name):
    fn, degree = TOTALS[name]
    flow, _ = flow_of(fn, (FEATURES, FEATURES))
    assert (flow.how, flow.degree, flow.mixed) == ("total", degree, None)


@pytest.mark.parametrize("name", FLOWS)
def test_how_rows_enter(name):
    expected, fn = FLOWS[name]
    with jax.numpy_dtype_promotion("standard"):
        flow, _ = flow_of(fn, (FEATURES,), (FEATURES,))
    assert text_of(flow) == expected


UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt tan tanh real"
)
BINARY = "add sub max min pow rem atan2 nextafter eq ne lt le gt ge igamma igammac igamma_grad_a zeta polygamma complex"
INTEGER = (
    "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical population_count clz "
    "bitwise_not"
)
ELEMENTWISE = [
    *(
        functools.partial(lambda fn, x: fn(x + 0j if fn is lax.real else x), getattr(lax, name))
        for name in UNARY.split()
    ),
    *(functools.partial(lambda fn, x: fn(x, x), getattr(lax, name)) for name in BINARY.split()),
    *(functools.partial(lambda fn, x: fn(*[integer(x)] * 2), getattr(lax, name)) for name in INTEGER.split()[:6]),
    *(functools.partial(lambda fn, x: fn(integer(x)), getattr(lax, name)) for name in INTEGER.split()[6:]),
    lambda x: lax.imag(lax.conj(x + 0j)),
    lambda x: lax.clamp(x, x, x),
    lambda x: lax.betainc(x, x, x),
    lambda x: lax.bitcast_convert_type(x, jnp.int32),
    lambda x: lax.reduce_precision(x, 5, 5),
    lambda x: lax.optimization_barrier(jax.device_put(jnp.copy(x))),
    lambda x: checkpoint_name(x, "name"),
    lambda x: jax.grad(lambda x: (jnp.sin(x) * jnp.cos(x)).sum())(x),
]
OTHER_ELEMENTWISE = {
    *(
        "pvary",
        "pcast",
        "pbroadcast",
        "sharding_constraint",
        "reshard",
        "stop_gradient",
    ),  # of a mesh, and of other versions of JAX
    *("log2", "one_minus_square"),  # of jax 0.12
    *("to_edtype", "from_edtype", "random_clone", "eq_to", "le_to", "lt_to"),  # of keys, and in comparators of a sort
}


def test_elementwise_functions_of_a_row_do_not_mix():
    traced = set()
    for fn in ELEMENTWISE:
        with jax.numpy_dtype_promotion("standard"):
            flow, jaxpr = flow_of(fn, (FEATURES,))
        names = {eqn.primitive.name for eqn in jaxprs.equations(jaxpr)}
        assert flow.is_row and flow.mixed is None and flow.unknown is None and flow.stride, names
        traced |= names
    assert (COPIES | LINEAR | NONLINEAR) - traced == OTHER_ELEMENTWISE


OTHER_NAMES = {"expand_dims", "geqrf", "rng_bit_generator", "rng_uniform", "threefry2x32"}
"""Primitives that no test traces: other names of tested ones, and rules that they share with tested ones."""


def test_every_primitive_with_a_rule_is_traced_by_a_test():
    traced = set()
    for fn in (
        *ROWWISE.values(),
        lambda x: jnp.tile(x, (1, 2, 1)),
        *(functools.partial(along, axis=1) for along in ALONG.values()),
        *(
            functools.partial(lambda fn, x: fn(x[:, 0], x[:, 1]), fn)
            for name, (_, fn) in FLOWS.items()
            if "key" in name
        ),
    ):
        traced |= {
            eqn.primitive.name.replace("-", "_") for eqn in jaxprs.equations(flow_of(fn, (FEATURES, FEATURES))[1])
        }
    assert set(RULES) - traced - OTHER_NAMES == set()

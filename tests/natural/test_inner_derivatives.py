"""A derivative inside the loss with respect to a constant: PINNs, adversarial examples, unrolled optimisation,
contexts.

Where arrays are typed, JAX adds the cotangent of whatever is the same on all replicas over them. So each of these
losses was wrong on a mesh of replicas, without a word: u_t 4.70 instead of 2.11.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.mesh.mesh import REPLICA_AXES
from tests.support.environment import QUICK_XLA
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import (
    BATCH,
    MESHES,
    STEPS,
    assert_same_run,
    by_hand,
    keep_gradient,
    num_psums,
    program_of,
    train,
)

WIDTH = 6
DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, WIDTH)).astype(np.float32)


def pinn(w, row):
    """u_t at t = 0 of u = tanh(row (1 + t) w)."""
    return jax.grad(lambda t: jnp.tanh(row * (1 + t) @ w))(0.0) ** 2


def hessian(w, row):
    return jax.hessian(lambda d: jnp.tanh((row + d) @ w).sum())(jnp.zeros(WIDTH)).sum() ** 2


def fgsm(w, row):
    d = jax.grad(lambda d: jnp.tanh((row + d) @ w) ** 2)(jnp.zeros(WIDTH))
    return jnp.tanh((row + 0.1 * jnp.sign(d)) @ w) ** 2


def pgd(w, row):
    ascend = lambda d, _: (d + 0.1 * jax.grad(lambda d: jnp.tanh((row + d) @ w) ** 2)(d), None)
    return jnp.tanh((row + lax.scan(ascend, jnp.zeros(WIDTH), length=3)[0]) @ w) ** 2


def virtual_adversarial(w, row):
    """One power iteration from a fixed direction: Miyato et al., "Virtual Adversarial Training" (2018), algorithm 1."""
    p = jax.nn.sigmoid(row @ w)
    distance = lambda d: (p - jax.nn.sigmoid((row + d) @ w)) ** 2
    d = jax.grad(distance)(jnp.full(WIDTH, 0.1))
    return distance(0.5 * d / (jnp.linalg.norm(d) + 1e-3))


def sparse_code(w, row):
    """ISTA unrolled from a code of zeros."""

    def step(code, _):
        code = code - 0.1 * jax.grad(lambda c: ((row - c * w) ** 2).sum())(code)
        return jnp.sign(code) * jnp.maximum(jnp.abs(code) - 0.01, 0), None

    code = lax.scan(step, jnp.zeros(WIDTH), length=3)[0]
    return ((row - code * w) ** 2).sum()


def maml(w, row):
    """A model that is adapted by one inner step on the example, from a context of zeros (CAVIA)."""
    inner = lambda context: (jnp.tanh((row + context) @ w) - row[0]) ** 2
    return inner(-0.5 * jax.grad(inner)(jnp.zeros(WIDTH)))


def transposed(w, row):
    multiply = lambda x: x * w
    return (jax.linear_transpose(multiply, jnp.zeros(WIDTH))(row)[0] ** 2).sum()


def pulled_back(w, row):
    """jax.vjp at a constant, which the typed manual form refused."""
    _, pull = jax.vjp(lambda d: jnp.tanh((row + d) * w), jnp.zeros(WIDTH))
    return (pull(row)[0] ** 2).sum()


def flow(w, row):
    """The log density of a continuous flow by one Euler step: trace of the Jacobian at the row, from a time of zero."""
    field = lambda z, t: jnp.tanh(z * w * (1 + t))
    trace = lambda z, t: jnp.trace(jax.jacfwd(field)(z, t)) + jax.jvp(lambda t: field(z, t).sum(), (t,), (1.0,))[1]
    return (trace(row, 0.0) + (row**2).sum()) ** 2


CASES = [pinn, hessian, fgsm, pgd, virtual_adversarial, sparse_code, maml, transposed, pulled_back, flow]


def init(key):
    """Parameters of its own for each case, so that each has its own leaf of the gradient."""
    keys = jax.random.split(key, len(CASES))
    return {case.__name__: jax.random.normal(k, (WIDTH,)) for case, k in zip(CASES, keys, strict=True)}


def losses_of(params, rows):
    return {case.__name__: jax.vmap(functools.partial(case, params[case.__name__]))(rows) for case in CASES}


def loss_fn(params, batch, key):
    losses = losses_of(params, batch)
    return sk.mean(sum(losses.values())), {name: sk.mean(x) for name, x in losses.items()}


@functools.cache
def reference():
    def loss(params, rows):
        means = {name: x.mean() for name, x in losses_of(params, rows).items()}
        return sum(means.values()), means

    return by_hand(loss, jax.jit(init)(jax.random.key(0)), DATA, optax.sgd(0.05))


def task(mesh):
    rules = [(".*", ["mlp"])] if "tensor" in mesh else []
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.05)), train_data=DATA, rules=rules)


FORMS = [*((mesh, 1) for mesh in MESHES), ("data 8", 2)]


@pytest.mark.parametrize(("mesh", "microbatches"), slow_except([("data 8", 1)], FORMS))
def test_derivatives_at_constants_equal_one_device(mesh, microbatches):
    """By the emitter that users get: with the one of the suite a Hessian on eight devices is 2.3e-5 from that of
    one."""
    options = {"xla_cpu_use_fusion_emitters": True} if QUICK_XLA else {}  # jax 0.12 has no other emitter
    program, run = train(task(mesh), mesh, microbatches=microbatches, compiler_options=options)
    assert_same_run(run, reference())
    if (mesh, microbatches) == ("data 8", 1):
        assert program.form == "manual"
        sums = 1 + len(CASES) + len(CASES)
        assert num_psums(program) == sums, "the loss, each metric and each leaf of the gradient once, and nothing else"


def replica_task(case):
    """Returns a task with a per-replica step that takes the derivative of a case."""

    def train_step(state, batch):
        def loss(w):
            return jax.vmap(functools.partial(case, w))(batch).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(sk.pmean(grads)), {"loss": sk.pmean(value)}

    init = lambda key: normal(0, WIDTH)
    return sk.Task(
        init, train_step=train_step, view="replica", optimizer=keep_gradient(optax.sgd(0.05)), train_data=DATA
    )


@pytest.mark.parametrize(
    ("case", "mesh"),
    [*((case, "data 8") for case in (pgd, sparse_code)), (fgsm, "replica 2 x data 4")],
)
def test_per_replica_derivative_is_rejected_with_line(case, mesh):
    with pytest.raises(
        ConfigError, match=r"derivative with respect to.*test_inner_derivatives\.py:\d+.*`x \* 0` instead"
    ):
        program_of(replica_task(case), mesh)


@pytest.mark.parametrize("case", [pinn, transposed])
def test_reduction_check_names_the_repeated_sum(case):
    with pytest.raises(ConfigError, match=r"derivative with respect to a value that is the same along.*`x \* 0`"):
        program_of(replica_task(case), "data 8")


@pytest.mark.parametrize("mesh", slow_except(["replica 2 x data 4"], ["one device", "data 8", "replica 2 x data 4"]))
def test_suggested_repair_equals_one_device(mesh):
    def own_zeros(w, row):
        d = jax.grad(lambda d: jnp.tanh((row + d) @ w) ** 2)(row * 0)
        return jnp.tanh((row + 0.1 * jnp.sign(d)) @ w) ** 2

    loss = lambda w, rows: (jax.vmap(functools.partial(own_zeros, w))(rows).mean(), {})
    right = by_hand(loss, normal(0, WIDTH), DATA, optax.sgd(0.05))
    _, run = train(replica_task(own_zeros), mesh)
    assert_same_run(run, right)


@pytest.mark.parametrize("mesh", slow_except(["replica 2 x data 4"], ["one device", "data 8", "replica 2 x data 4"]))
def test_dividing_by_global_statistics_is_accepted(mesh):
    """A synchronised batch norm: the transpose of its sum adds up where the examples meet it, and was taken for a sum
    by the types."""

    def normalised(w, rows, mean):
        y = rows * w
        centre, square = mean(y.mean(0)), mean((y**2).mean(0))
        return jnp.tanh((y - centre) * lax.rsqrt(square - centre**2 + 1e-3) + rows).mean()

    def train_step(state, batch):
        loss = lambda w: normalised(w, batch, lambda x: lax.pmean(x, REPLICA_AXES))
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(sk.pmean(grads)), {"loss": sk.pmean(value)}

    init = lambda key: normal(0, WIDTH)
    task = sk.Task(
        init, train_step=train_step, view="replica", optimizer=keep_gradient(optax.sgd(0.05)), train_data=DATA
    )
    loss = lambda w, rows: (normalised(w, rows, lambda x: x), {})
    right = by_hand(loss, jax.jit(init)(jax.random.key(0)), DATA, optax.sgd(0.05))
    _, run = train(task, mesh)
    assert_same_run(run, right)

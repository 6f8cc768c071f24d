"""The walker of jaxprs: every equation once, in order, with what is around it."""

import jax
import jax.numpy as jnp

from spmdkit.foundation import jaxprs


def turn(carry, x):
    return jax.lax.cond(x > 0, jnp.sin, jnp.cos, carry), x


@jax.jit
def inner_jit(x):
    return jax.lax.scan(turn, x, jnp.arange(3.0))[0] + 1


def program(x):
    with jax.named_scope("first"):
        x = jnp.exp(x)
    return inner_jit(x)


TRACED = jax.make_jaxpr(program)(1.0)


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def test_every_equation_comes_once_and_outer_ones_first():
    found = names(jaxprs.equations(TRACED))
    order = ["exp", "scan", "cond", "cos", "sin"]
    assert [name for name in found if name in order] == order and names(jaxprs.equations(TRACED.jaxpr)) == found
    assert len(found) == sum(len(body.eqns) for body in jaxprs.bodies(TRACED))
    assert next(jaxprs.bodies(TRACED)) is TRACED.jaxpr


def test_a_walk_stays_out_of_excluded_equations():
    is_scan = lambda eqn: eqn.primitive.name == "scan"
    found = names(jaxprs.equations(TRACED, into=lambda eqn: not is_scan(eqn)))
    assert "scan" in found and "cond" not in found
    assert len(list(jaxprs.bodies(TRACED, into=lambda eqn: not is_scan(eqn)))) == 2


def test_what_is_around_an_equation_is_handed_down():
    def enter(eqn, around):
        return around, (*around, eqn.primitive.name)

    around = {eqn.primitive.name: above for eqn, above in jaxprs.equations_within(TRACED, (), enter)}
    assert around["exp"] == () and around["cond"][-1] == "scan" and around["sin"][-2:] == ("scan", "cond")

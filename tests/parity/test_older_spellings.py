"""Functions that Equinox has deprecated, and programs still use."""

import jax
import jax.numpy as jnp
import pytest

from tests.parity.helpers import ramp, same_under_both_imports

# Both libraries say so; the texts are each their own.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")


def scaled(tree, y):
    return {"a": tree["x"] * y, "b": tree["x"] + 1, "name": tree["name"], "i": jnp.arange(2)}


@same_under_both_imports
def test_defvjp(eqx):
    """Both rules at once; an unused result has a gradient of zeros, as an array."""
    log = []

    def fwd(tree, y):
        return scaled(tree, y), y

    def bwd(y, g, tree, _):
        log.append((isinstance(g["b"], jax.Array), g["name"], g["i"]))
        return {"x": 10 * g["a"] * y + g["b"], "name": None}

    fn = eqx.filter_custom_vjp(scaled)
    fn.defvjp(fwd, bwd)
    tree = {"x": ramp(3), "name": "s"}
    return fn(tree, 3.0)["a"], eqx.filter_grad(lambda t: fn(t, 3.0)["a"].sum())(tree), log


@same_under_both_imports
def test_defvjp_by_keyword(eqx):
    """The rules by name, and a function with an argument by keyword."""

    @eqx.filter_custom_vjp
    def fn(x, *, power):
        return x**power

    fn.defvjp(
        fn_fwd=lambda x, *, power: (x**power, None), fn_bwd=lambda _, g, x, *, power: power * g
    )
    return jax.jit(jax.grad(lambda x: fn(x, power=2).sum()))(ramp(3))


@same_under_both_imports
def test_defjvp(eqx):
    """An argument without derivative has a tangent of zeros, as an array; a number has None."""
    log = []

    @eqx.filter_custom_jvp
    def fn(x, y, n):
        return x * y * n

    def rule(primals, tangents):
        (x, y, n), (dx, dy, dn) = primals, tangents
        log.append((isinstance(dx, jax.Array), isinstance(dy, jax.Array), dn))
        return fn(x, y, n), 10 * dx * y + dy

    fn.defjvp(fn_jvp=rule)
    x, y = ramp(3), ramp(3) + 2
    return jax.jvp(lambda x: fn(x, y, 3), (x,), (x,)), jax.grad(lambda x: fn(x, y, 3).sum())(x), log


@same_under_both_imports
def test_rules_by_keyword(eqx):
    """`def_jvp`, `def_fwd` and `def_bwd` accept their argument by keyword, too."""
    jvp = eqx.filter_custom_jvp(jnp.sin)
    jvp.def_jvp(fn_jvp=lambda primals, tangents: (primals[0], 3 * tangents[0]))
    vjp = eqx.filter_custom_vjp(jnp.sin)
    vjp.def_fwd(fn_fwd=lambda perturbed, x: (jnp.sin(x), None))
    vjp.def_bwd(fn_bwd=lambda residuals, g, perturbed, x: 4 * g)
    x = ramp(3)
    return jax.grad(lambda x: jvp(x).sum())(x), jax.grad(lambda x: vjp(x).sum())(x)


@same_under_both_imports
def test_is_traced(eqx):
    """An item says whether its message is known yet."""
    results = type(eqx.Enumeration)("Results", (eqx.Enumeration,), {"good": "well", "bad": "no"})
    return results.bad.is_traced(), eqx.filter_jit(lambda item: item.is_traced())(results.bad)


@same_under_both_imports
def test_functions_by_keyword(eqx):
    """`fun=` and `fn=`, with arguments by keyword."""
    x = ramp(3)
    converted = eqx.filter_closure_convert(fn=lambda *, y: y + x, y=x)
    return eqx.filter_eval_shape(fun=lambda *, y: (y + 1, "a"), y=x), converted(y=x)


@same_under_both_imports
def test_a_check_that_is_known_to_fail(eqx):
    """Its error has a separate name in Equinox, which programs may catch."""
    try:
        eqx.error_if(ramp(2), True, "never")
    except eqx.EquinoxTracetimeError as error:
        return str(error)

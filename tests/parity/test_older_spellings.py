"""Functions that Equinox has deprecated, and programs still use."""

import jax
import jax.numpy as jnp
import pytest

from tests.parity.helpers import ramp, same_under_both_imports

# Both libraries say so; the texts are each their own.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")


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

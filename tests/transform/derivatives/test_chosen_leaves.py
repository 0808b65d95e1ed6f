"""Trees of derivatives are not models."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ShapeError


def f(model, batch, rate=1.0):
    """The function that is differentiated."""


class Bounded(pm.Module):
    """A computed field: it reads as the exponential of the parameter."""

    w: jax.Array = pm.field(constraint=pm.constraints.positive)


def same(model):
    """Linear in the arrays of its leaves, and a model."""
    return jax.tree.map(lambda x: 2 * x, model)


def total(model):
    """A loss."""
    return jnp.sum(model.w)


def of_custom_jvp(model):
    """The tangent that a rule is given."""
    seen = []
    custom = pm.filter_custom_jvp(same)

    @custom.def_jvp
    def rule(primals, tangents):
        seen.append(tangents[0])
        return same(*primals), same(*tangents)

    pm.filter_jvp(custom, (model,), (model,))
    return seen[0]


def of_custom_vjp(model, which):
    """The arguments of the rules of a backward pass."""
    seen = {}
    custom = pm.filter_custom_vjp(same)

    @custom.def_fwd
    def forward(perturbed, model):
        seen["perturbed"] = perturbed
        return same(model), None

    @custom.def_bwd
    def backward(residuals, grad, perturbed, model):
        seen["grad"] = grad
        return grad

    pm.filter_grad(lambda model: total(custom(model)))(model)
    return seen[which]


DERIVATIVES = {
    "filter_grad": lambda m: pm.filter_grad(total)(m),
    "filter_value_and_grad": lambda m: pm.filter_value_and_grad(total)(m)[1],
    "filter_jacfwd": lambda m: pm.filter_jacfwd(total)(m),
    "filter_jacrev": lambda m: pm.filter_jacrev(total)(m),
    "filter_jacfwd, of a model": lambda m: pm.filter_jacfwd(lambda x: same(m))(jnp.ones(2)),
    "filter_jacrev, of a model": lambda m: pm.filter_jacrev(same)(m),
    "filter_hessian": lambda m: pm.filter_hessian(total)(m),
    "filter_jvp": lambda m: pm.filter_jvp(same, (m,), (m,))[1],
    "filter_vjp": lambda m: pm.filter_vjp(same, m)[1](m)[0],
    "filter_linearize": lambda m: pm.filter_linearize(same, m)[1](m),
    "filter_custom_jvp": of_custom_jvp,
    "filter_custom_vjp": ft.partial(of_custom_vjp, which="grad"),
    "filter_custom_vjp, flags": ft.partial(of_custom_vjp, which="perturbed"),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_what_would_be_computed_of_derivatives_is_refused(derivative):
    """The exponential of a gradient has no meaning."""
    tree = derivative(Bounded(jnp.asarray([1.0, 2.0])))

    with pytest.raises(ShapeError, match=r"Bounded\.w"):
        tree.w


def test_every_derivative_is_here():
    """A new one must come through `as_derivatives`, too."""
    folder = "pytreemod.transform.derivatives."
    public = {name: getattr(pm, name) for name in dir(pm) if name.startswith("filter_")}
    found = {name for name, f in public.items() if f.__module__.startswith(folder)}

    # A checkpoint returns the result of the function.
    assert {name.split(",")[0] for name in DERIVATIVES} == found - {"filter_checkpoint"}

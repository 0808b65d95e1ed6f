"""Which arguments of a call are differentiated, and which of their leaves."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ShapeError
from pytreemod.transform.derivatives.chosen_leaves import (
    as_argnums,
    choose,
    chosen_places,
    trainable_mask,
)
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp

X, Y = ramp(2), ramp(3)
TREE = {"n": 3, "x": X, "y": Y, "z": jnp.arange(2)}


class Scaled(pm.Module):
    """A parameter, a buffer and an array of integers."""

    weight: jax.Array
    mean: jax.Array = pm.field(role="buffer")
    count: jax.Array = pm.field(default_factory=lambda: jnp.arange(2))


def f(model, batch, rate=1.0):
    """The function that is differentiated."""


def chosen_of(args, wrt=None, argnums=None, kwargs=None):
    """The leaves that `filter_grad` of `f` selects."""
    return choose("filter_grad", f, args, kwargs or {}, wrt, argnums)


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (None, [True, False, False]),
        (True, [True, True, False]),
        (False, [False, False, False]),
        (pm.is_array, [True, True, False]),
        (pm.select.path("mean"), [False, True, False]),
        (pm.select.path("count"), [False, False, False]),
    ],
)
def test_inexact_arrays_that_are_picked(wrt, expected):
    """By default all leaves but buffers; only floating arrays in any case."""
    assert trainable_mask(Scaled(X, Y), wrt, "wrt") == expected


def test_a_selector_that_finds_nothing_here_is_a_mistake_or_not():
    """In one of several arguments it may find nothing."""
    nowhere = pm.select.path("bias")

    assert trainable_mask(Scaled(X, Y), nowhere, "wrt", strict=False) == [False] * 3


def test_what_is_chosen_goes_out_and_comes_back():
    """The selected values, the arguments with other values, a tree of derivatives."""
    chosen = chosen_of((TREE, "batch"))

    assert_same(chosen.values, [X, Y])
    given, collected = chosen.collect(
        lambda *args, **kwargs: (args, kwargs), [2 * X, 3 * Y], {"n": 1}
    )
    assert_same(given, (({**TREE, "x": 2 * X, "y": 3 * Y}, "batch"), {"n": 1}))
    assert not collected
    assert chosen.place(["dx", "dy"]) == {"n": None, "x": "dx", "y": "dy", "z": None}


def test_several_arguments_give_several_trees():
    """In the order in which they were asked for; one int gives one tree."""
    args = ({"x": X}, Y, 1.0)

    assert chosen_of(args, argnums=(1, 0)).place(["dy", "dx"]) == ("dy", {"x": "dx"})
    assert chosen_of(args, argnums=(1,)).place(["dy"]) == ("dy",)
    assert chosen_of(args, argnums=-2).place(["dy"]) == "dy"


@pytest.mark.parametrize("wrt", [(False, True), [False, True], {"model": False}])
def test_one_spec_for_each_argument(wrt):
    """In a sequence, or by name; other arguments have the default."""
    assert_same(chosen_of((X, Y), wrt, (0, 1)).values, [Y])


def test_where_the_chosen_leaves_are():
    """By the names of the arguments."""
    places = chosen_places(f, chosen_of((TREE, Y), argnums=(0, 1)))
    assert [place for place, _ in places] == ["model['x']", "model['y']", "batch"]
    np.testing.assert_array_equal(places[0][1], X)


def test_a_state_that_was_used_up_inside_is_used_up_outside():
    """The rebuilt argument has the identity of the caller's."""

    class Counter(pm.Module):
        count: pm.StateIndex

        def __init__(self):
            self.count = pm.StateIndex(jnp.zeros(()))

    model, state = pm.make_with_state(Counter)()
    chosen = chosen_of((state,))
    chosen.collect(lambda inside: inside.get(model.count), chosen.values, {})
    chosen.pass_on_use("filter_grad")
    assert state.get(model.count) == 0
    chosen.collect(lambda inside: inside.set(model.count, jnp.ones(())), chosen.values, {})
    chosen.pass_on_use("filter_grad")

    with pytest.raises(pm.PytreemodError, match="filter_grad"):
        state.get(model.count)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), (0, 0), (-1, -1), ([0, 1], (0, 1)), ((1,), (1,))]
)
def test_argnums(given, expected):
    """None, an int, or several."""
    assert as_argnums("filter_grad", given) == expected


# ---- trees of derivatives are not models


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


def of_custom_jvp_as_it_was_written(model):
    """With zeros for None."""
    seen = []
    custom = pm.filter_custom_jvp(same)
    with pytest.warns(DeprecationWarning, match="the newer spelling"):
        custom.defjvp(lambda p, t: (seen.append(t[0]), (same(*p), same(*t)))[1])
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
    "filter_linear_transpose": lambda m: pm.filter_linear_transpose(same, m)(m)[0],
    "filter_custom_jvp": of_custom_jvp,
    "filter_custom_jvp, as it was": of_custom_jvp_as_it_was_written,
    "filter_custom_vjp": ft.partial(of_custom_vjp, which="grad"),
    "filter_custom_vjp, flags": ft.partial(of_custom_vjp, which="perturbed"),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_what_would_be_computed_of_derivatives_is_refused(derivative):
    """The exponential of a gradient has no meaning."""
    tree = derivative(Bounded(jnp.asarray([1.0, 2.0])))

    with pytest.raises(ShapeError, match=r"Bounded\.w: expected a value computed from a model's"):
        tree.w


def test_every_derivative_is_here():
    """A new one must come through `as_derivatives`, too."""
    folder = "pytreemod.transform.derivatives."
    public = {name: getattr(pm, name) for name in dir(pm) if name.startswith("filter_")}
    found = {name for name, f in public.items() if f.__module__.startswith(folder)}

    # A checkpoint returns the result of the function.
    assert {name.split(",")[0] for name in DERIVATIVES} == found - {"filter_checkpoint"}


test_refusals = refusals(globals())

"""The leaves that derivatives are taken by, and the trees of derivatives, which are not models."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ShapeError, SpecError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import Affine, Buffered, affine, ramp

LAYERS = [jax.tree.map(lambda x: x / 9, affine(2, 2, np.float32(i))) for i in (0.5, -1.5)]
HEAD = Buffered(ramp(2), ramp(2), ramp(2))
MODEL = {"layers": LAYERS, "head": HEAD, "name": "a", "n": 2.0, "i": jnp.arange(2)}
X = ramp(2, start=np.float32(0.3))


def loss(model, x):
    """A scalar that depends on every array, on one of them in two ways."""
    for layer in [*model["layers"], model["layers"][0]]:
        x = jnp.tanh(layer(x))
    head = model["head"]
    return jnp.sum((x * head.weight + head.mean * head.low_rank) ** 2) * model["n"]


def named(tree):
    """The paths of floating arrays, with dots."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    keystr = jax.tree_util.keystr
    return {keystr(p, simple=True, separator=".") for p, x in leaves if pm.is_inexact_array(x)}


PREFIX = {"layers": [True, False], "head": False, "name": True, "n": True, "i": True}
SELECTORS = {
    "role": (pm.select.role("lora"), lambda p: p == "head.low_rank"),
    "path": (pm.select.path("layers.*.weight"), lambda p: p[0] == "l" and "weight" in p),
    "string": ("layers.0.bias", lambda p: p == "layers.0.bias"),
    "type": (pm.select.type(Affine), lambda p: p[0] == "l"),
    "class": (Buffered, lambda p: p[0] == "h"),
    "access": (pm.select.at(lambda m: m["layers"][1].bias), lambda p: p == "layers.1.bias"),
    "and": (pm.select.path("layers.1") & pm.is_array, lambda p: p.startswith("layers.1")),
    "not": (~pm.select.path("layers"), lambda p: p[0] == "h"),
    "everything": (..., lambda p: True),
    "predicate": (lambda x: getattr(x, "ndim", 0) == 2, lambda p: "layers" in p and "weight" in p),
    "prefix": (PREFIX, lambda p: "layers.0" in p),
    "inside": ({**PREFIX, "layers": ["bias", False]}, lambda p: p == "layers.0.bias"),
    "default": (None, lambda p: p != "head.mean"),
}


@pytest.mark.parametrize(("wrt", "picked"), SELECTORS.values(), ids=SELECTORS)
@pytest.mark.sampled
def test_the_gradient_has_the_chosen_leaves_and_none_elsewhere(wrt, picked):
    """It equals jax.grad of the chosen arrays alone; trainable is the matching split."""
    found = pm.filter_jit(pm.filter_grad(loss, wrt=wrt))(MODEL, X)
    kept, rest = pm.trainable(MODEL, wrt)

    assert named(found) == {path for path in named(MODEL) if picked(path)}
    assert jax.tree.structure(found) == jax.tree.structure(kept)
    expected = jax.jit(jax.grad(lambda kept: loss(pm.combine(kept, rest), X)))(kept)
    assert_close(found, expected)
    assert pm.tree_equal(pm.combine(kept, rest), MODEL)


OF_TWO = {
    "tuple": (("weight", "bias"), [True, False, False, True]),
    "list": ([pm.select.path("bias"), True], [False, True, True, True]),
    "one by name": ({"m2": "bias"}, [True, True, False, True]),
    "by name": ({"m1": "bias", "m2": False}, [False, True, False, False]),
    "selector": (pm.select.path("weight"), [True, False, True, False]),
    "string": ("weight", [True, False, True, False]),
    "prefix": (Affine(True, False), [True, False, True, False]),
    "predicate": (lambda x: x.ndim == 1, [False, True, False, True]),
}


@pytest.mark.parametrize(("wrt", "picked"), OF_TWO.values(), ids=OF_TWO)
def test_each_argument_has_its_own_leaves(wrt, picked):
    """One spec for all arguments, one for each, or by name, where the rest has the default."""
    f = lambda m1, m2: jnp.sum(m2(m1(X)))  # noqa: E731
    g1, g2 = pm.filter_grad(f, argnums=(0, 1), wrt=wrt)(affine(2, 2), affine(2, 2))
    assert [g is not None for g in (g1.weight, g1.bias, g2.weight, g2.bias)] == picked


def test_a_path_need_only_be_in_one_of_the_arguments():
    """It is misspelt if no argument has it, not if one has not."""
    f = lambda a, b: jnp.sum(a["x"]) * jnp.sum(b["y"])  # noqa: E731
    grads = pm.filter_grad(f, argnums=(0, 1), wrt=pm.select.path("y"))({"x": X}, {"y": X})
    assert_close(grads, ({"x": None}, {"y": jnp.full(2, jnp.sum(X))}))


@pytest.mark.parametrize("wrt", [("weight",), {"m1": True, "z": 1}, {"weight": True}])
def test_specs_for_other_arguments_are_refused(wrt):
    """One for each differentiated argument, by position or by name."""
    with pytest.raises(SpecError, match="wrt"):
        pm.filter_grad(lambda m1, m2: 0.0, argnums=(0, 1), wrt=wrt)(affine(), affine())


SAME = [None, pm.select.role("lora"), {"m": pm.select.role("buffer")}]


@pytest.mark.parametrize("wrt", SAME, ids=["default", "role", "by name"])
@pytest.mark.sampled
def test_jacobians_and_linear_maps_choose_as_gradients_do(wrt):
    """Buffers are left out, unless `wrt` says otherwise; it may differ by argument."""
    f = lambda m, n: jnp.sum(m.weight * m.mean * m.low_rank * n.weight * n.low_rank)  # noqa: E731
    options = {"argnums": (0, 1), "wrt": wrt}
    gradient = pm.filter_grad(f, **options)(HEAD, HEAD)

    assert_close(pm.filter_jacfwd(f, **options)(HEAD, HEAD), gradient)
    assert_close(pm.filter_jacrev(f, **options)(HEAD, HEAD), gradient)
    count = len(jax.tree.leaves(gradient))
    assert len(jax.tree.leaves(pm.filter_hessian(f, **options)(HEAD, HEAD))) == count**2
    assert_close(pm.filter_vjp(f, HEAD, HEAD, wrt=wrt)[1](1.0), gradient)
    slope = pm.filter_linearize(f, HEAD, HEAD, wrt=wrt)[1](*gradient)
    assert_close(slope, sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


# ---- derivatives are not models


class Bounded(pm.Module):
    """A computed field: it reads as the exponential of the parameter."""

    w: jax.Array = pm.field(constraint=pm.constraints.positive)


def same(model):
    """Linear in the arrays of its leaves, and a model."""
    return jax.tree.map(lambda x: 2 * x, model)


def total(model):
    """A loss."""
    return jnp.sum(model.w)


def of_custom_rules(model, index):
    """What rules are given: a tangent, flags, a cotangent."""
    seen = []
    jvp, vjp = pm.filter_custom_jvp(same), pm.filter_custom_vjp(same)
    jvp.def_jvp(lambda p, t: (seen.append(t[0]), (same(*p), same(*t)))[1])
    vjp.def_fwd(lambda perturbed, model: (seen.append(perturbed), (same(model), None))[1])
    vjp.def_bwd(lambda residuals, grad, perturbed, model: (seen.append(grad), grad)[1])
    pm.filter_jvp(jvp, (model,), (model,))
    pm.filter_grad(lambda model: total(vjp(model)))(model)
    return seen[index]


DERIVATIVES = {
    "filter_grad": pm.filter_grad(total),
    "filter_value_and_grad": lambda m: pm.filter_value_and_grad(total)(m)[1],
    "filter_jacfwd": pm.filter_jacfwd(total),
    "filter_jacrev": pm.filter_jacrev(total),
    "filter_jacfwd, of a model": lambda m: pm.filter_jacfwd(lambda x: same(m))(jnp.ones(2)),
    "filter_jacrev, of a model": pm.filter_jacrev(same),
    "filter_hessian": pm.filter_hessian(total),
    "filter_jvp": lambda m: pm.filter_jvp(same, (m,), (m,))[1],
    "filter_vjp": lambda m: pm.filter_vjp(same, m)[1](m)[0],
    "filter_linearize": lambda m: pm.filter_linearize(same, m)[1](m),
    "filter_custom_jvp": ft.partial(of_custom_rules, index=0),
    "filter_custom_vjp, flags": ft.partial(of_custom_rules, index=1),
    "filter_custom_vjp": ft.partial(of_custom_rules, index=2),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.sampled
def test_what_would_be_computed_of_derivatives_is_refused(derivative):
    """The exponential of a gradient has no meaning."""
    tree = derivative(Bounded(jnp.asarray([1.0, 2.0])))
    with pytest.raises(ShapeError, match=r"Bounded\.w"):
        tree.w

"""filter_jvp, filter_vjp and filter_linearize: derivatives along directions, of any trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_jvp, check_vjp

import pytreemod as pm
from pytreemod.errors import DerivativeError
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.trees import Affine, Buffered, Holder, Static, affine, ramp


class Net(pm.Module):
    """Arrays of all kinds, configuration and plain leaves, with a nonlinear call."""

    layers: list
    steps: jax.Array
    host: np.ndarray
    act: object = jnp.tanh
    rate: float = 0.5

    def __call__(self, x):
        for layer in self.layers:
            x = self.act(layer.weight @ x + layer.bias)
        return {"y": self.rate * x + jnp.sum(self.host), "steps": self.steps, "name": "net"}

    def loss(self, x):
        return jnp.sum(self(x)["y"] ** 2)


def net():
    return Net(
        [affine(2, 3, np.float32(0.1)), affine(2, 2, np.float32(-0.3))],
        jnp.asarray(3),
        np.ones(2, np.float32),
    )


def directions(tree):
    """A tangent for each floating array: different numbers, None elsewhere."""
    leaves, treedef = jax.tree.flatten(tree)
    made = [
        ramp(*x.shape, start=np.float32(i + 0.5)).astype(x.dtype)
        if pm.is_inexact_array(x)
        else None
        for i, x in enumerate(leaves)
    ]
    return treedef.unflatten(made)


X = ramp(3, start=np.float32(0.2))


def call(model, x):
    return model(x)


# ---- filter_jvp


def test_jvp_is_the_jvp_of_the_arrays_alone():
    """filter_jvp(f, p, t) == jax.jvp(f on the partition), with None for everything else."""
    model, tangent = net(), directions(net())
    arrays, rest = pm.partition(model, pm.is_inexact_array)
    expected = jax.jvp(
        lambda arrays, x: pm.combine(arrays, rest)(x)["y"], (arrays, X), (tangent, X)
    )
    out, out_tangent = pm.filter_jvp(call, (model, X), (tangent, X))

    assert_close(out["y"], expected[0])
    assert_close(out_tangent, {"y": expected[1], "steps": None, "name": None})
    assert (out["steps"].item(), out["name"]) == (3, "net")


def test_jvp_is_what_finite_differences_say():
    """The tangent agrees with difference quotients."""

    def f(weight, x):
        return pm.tree_at(lambda m: m.layers[0].weight, net(), weight)(x)["y"]

    def f_jvp(primals, tangents):
        return pm.filter_jvp(f, primals, tangents)

    check_jvp(f, f_jvp, (net().layers[0].weight, X), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "given",
    [
        (Affine(ramp(2, 3), ramp(2)), None),
        (Affine(None, ramp(2)), ramp(3)),
        (None, ramp(3)),
        (None, None),
    ],
    ids=["an argument", "a leaf", "a Module", "everything"],
)
def test_none_is_zero_for_all_that_is_below(given):
    """None at a leaf, at a node or for an argument equals zeros there."""

    def f(model, x):
        return model.weight @ x * model.bias

    primals = (affine(), ramp(3))
    full = jax.tree.map(
        lambda x, t: jnp.zeros_like(x) if t is None else t,
        primals,
        (given[0] or Affine(None, None), given[1]),
    )
    expected = pm.filter_jvp(f, primals, full)[1]
    found = pm.filter_jvp(f, primals, given)[1]

    if any(leaf is not None for leaf in jax.tree.leaves(given)):
        assert_close(found, expected)
    else:
        assert found is None
    assert_close(pm.filter_linearize(f, *primals)[1](*given), expected)


def test_what_is_constant_inside_is_not_constant_outside():
    """A result that depends on an outer variable only has None inside and a gradient outside."""

    def f(y):
        out, tangent = pm.filter_jvp(lambda x: (x * y, 3.0 * y), (y,), (jnp.ones(2),))
        assert tangent[1] is None
        return jnp.sum(out[1]) + jnp.sum(tangent[0])

    assert_close(jax.grad(f)(jnp.ones(2)), jnp.full(2, 4.0))
    assert_close(pm.filter_jvp(f, (jnp.ones(2),), (jnp.ones(2),))[1], jnp.asarray(8.0))
    assert_close(jax.jit(jax.grad(f))(jnp.ones(2)), jnp.full(2, 4.0))


# ---- filter_vjp


def test_vjp_is_the_vjp_of_the_arrays_alone():
    """filter_vjp(f, *p) == jax.vjp(f on the partition), with None for everything else."""
    model = net()
    arrays, rest = pm.partition(model, pm.is_inexact_array)
    y, pull = jax.vjp(lambda arrays, x: pm.combine(arrays, rest)(x)["y"], arrays, X)
    out, vjp_fn = pm.filter_vjp(call, model, X)

    assert_close(out["y"], y)
    assert (out["steps"].item(), out["name"]) == (3, "net")
    assert_close(vjp_fn({"y": y, "steps": None, "name": None}), pull(y))


def test_vjp_is_what_finite_differences_say():
    """The cotangents agree with difference quotients."""

    def f(weight, x):
        return pm.tree_at(lambda m: m.layers[0].weight, net(), weight)(x)["y"]

    def f_vjp(*primals):
        return pm.filter_vjp(f, *primals)

    check_vjp(f, f_vjp, (net().layers[0].weight, X), rtol=1e-2, atol=1e-2)


def test_vjp_of_a_scalar_is_the_gradient():
    """filter_vjp(f, x)[1](1.0) == (filter_grad(f)(x),), buffers left out."""
    model = Buffered(ramp(2), ramp(2), ramp(2))

    def loss(m):
        return jnp.sum(m.weight * m.mean * m.low_rank)

    value, vjp_fn = pm.filter_vjp(loss, model)

    assert_close(vjp_fn(1.0), (pm.filter_grad(loss)(model),))
    assert vjp_fn(1.0)[0].mean is None
    assert_close(value, loss(model))


@pytest.mark.parametrize(
    ("wrt", "weight", "mean", "x"),
    [
        (pm.is_array, True, True, True),
        (pm.select.role("buffer"), False, True, False),
        ("mean", False, True, False),
        ((pm.select.path("weight"), False), True, False, False),
        ({"m": pm.select.path("mean")}, False, True, True),
        ({"x": False}, True, False, False),
        ((None, None), True, False, True),
    ],
    ids=["predicate", "role", "path", "tuple", "dict", "dict without the first", "default"],
)
def test_wrt_picks_leaves_of_each_argument(wrt, weight, mean, x):
    """One selector for every argument, one for each, or by name."""
    model = Buffered(ramp(2), ramp(2), None)
    grads = pm.filter_vjp(lambda m, x: m.weight * m.mean * x, model, ramp(2), wrt=wrt)[1](ramp(2))
    found = [g is not None for g in (grads[0].weight, grads[0].mean, grads[1])]

    assert found == [weight, mean, x]


def test_none_is_a_zero_cotangent():
    """None for a floating array, or for everything below a node, counts as zeros."""
    _, vjp_fn = pm.filter_vjp(lambda x: {"a": x, "b": (2 * x, 3 * x)}, ramp(2))
    ones = jnp.ones(2)

    assert_close(vjp_fn({"a": ones, "b": None}), (ones,))
    assert_close(vjp_fn({"a": None, "b": (None, ones)}), (3 * ones,))
    assert_close(vjp_fn(None), (jnp.zeros(2),))


# ---- the maps that are returned


@pytest.fixture(params=["filter_vjp", "filter_linearize"])
def linear(request):
    """A linear map from ramp(2), and its result for ones."""
    make = getattr(pm, request.param)
    _, made = make(lambda x: jnp.sin(x) * jnp.arange(1.0, 3.0), ramp(2))
    return made, make


def test_the_map_is_a_pytree(linear):
    """Its arrays are leaves, and it goes through jit, vmap, scan and into fields."""
    made, _ = linear
    ones = jnp.ones(2)
    expected = made(ones)

    assert jax.tree.leaves(made)
    assert_close(pm.filter_jit(lambda f, t: f(t))(made, ones), expected)
    assert_close(jax.jit(lambda f, t: f(t))(made, ones), expected)
    assert_close(Holder(made).content(ones), expected)
    assert_close(jax.tree.map(lambda x: x, made)(ones), expected)
    assert jax.vmap(made)(jnp.ones((3, 2))) is not None
    stacked = jax.vmap(made)(jnp.stack([ones, 2 * ones]))
    assert_close(jax.tree.map(lambda y: y[1], stacked), jax.tree.map(lambda y: 2 * y, expected))


# ---- filter_linearize


def test_linearize_is_the_jvp():
    """filter_linearize(f, *p)[1](*t) == filter_jvp(f, p, t)[1]."""
    tangents = (pm.tree_at(lambda t: t.layers[0], directions(net()), None), X)
    out, f_jvp = pm.filter_linearize(call, net(), X)
    expected = pm.filter_jvp(call, (net(), X), tangents)

    assert_close(f_jvp(*tangents), expected[1])
    assert_close(out["y"], expected[0]["y"])


def test_linearize_and_vjp_are_transposes():
    """<c, J t> == <J' c, t> for all tangents t and cotangents c."""
    tangents = (directions(net()), X)
    _, f_jvp = pm.filter_linearize(call, net(), X)
    _, vjp_fn = pm.filter_vjp(call, net(), X)
    forward = f_jvp(*tangents)["y"]
    back = vjp_fn({"y": forward, "steps": None, "name": None})
    products = jax.tree.map(jnp.vdot, back, tangents)

    assert_close(sum(jax.tree.leaves(products)), jnp.vdot(forward, forward), rtol=1e-4)


def test_linearize_runs_the_function_once():
    """Every further tangent costs the linear part alone."""
    calls = []

    def f(x):
        calls.append(x)
        return jnp.sin(x)

    _, f_jvp = pm.filter_linearize(f, ramp(2))
    assert_close(f_jvp(jnp.ones(2)), jnp.cos(ramp(2)))
    assert_close(f_jvp(2 * jnp.ones(2)), 2 * jnp.cos(ramp(2)))
    assert len(calls) == 1


# ---- all three


def test_no_operation_is_added():
    """The programs have the operations of JAX's transforms on the arrays alone."""
    model = affine()
    arrays = (model.weight, model.bias, X)

    def by_hand(weight, bias, x):
        return jnp.tanh(weight @ x + bias)

    def of_a_tree(model, x, name):
        return {"y": jnp.tanh(model.weight @ x + model.bias), "n": jnp.arange(2), "name": name}

    def jvp(weight, bias, x):
        return pm.filter_jvp(
            of_a_tree, (Affine(weight, bias), x, "n"), (Affine(weight, bias), x, None)
        )

    def vjp(weight, bias, x):
        out, vjp_fn = pm.filter_vjp(of_a_tree, Affine(weight, bias), x, "n")
        return vjp_fn({"y": out["y"], "n": None, "name": None})[:2]

    def linearize(weight, bias, x):
        _, f_jvp = pm.filter_linearize(of_a_tree, Affine(weight, bias), x, "n")
        return f_jvp(Affine(weight, bias), x, None)["y"]

    def jax_vjp(*arrays):
        out, vjp_fn = jax.vjp(by_hand, *arrays)
        return vjp_fn(out)

    iota = equations(lambda: jnp.arange(2))
    assert equations(lambda *a: jvp(*a)[1]["y"], *arrays) == iota + equations(
        lambda *a: jax.jvp(by_hand, a, a), *arrays
    )
    assert equations(vjp, *arrays) == iota + equations(jax_vjp, *arrays)
    assert equations(linearize, *arrays) == iota + equations(
        lambda *a: jax.linearize(by_hand, *a)[1](*a), *arrays
    )


# ---- directions that do not fit


def f_of_two(model, x):
    """An array, a number and an argument."""
    return model["w"] * x


PRIMALS = ({"w": jnp.ones(3), "n": 2}, jnp.ones(3))
MISFITS = {
    "shape": (({"w": jnp.ones(2), "n": None}, None), r"\['w'\]"),
    "dtype": (({"w": jnp.ones(3, jnp.float16), "n": None}, None), r"\['w'\]"),
    "of a constant": (({"w": None, "n": 1}, None), r"\['n'\]"),
    "structure": (({"w": None}, None), r"\['n'\]"),
    "a node for an array": ((None, (jnp.ones(3),)), "x"),
}


@pytest.mark.parametrize(("tangents", "where"), MISFITS.values(), ids=MISFITS)
def test_tangents_that_do_not_fit_are_refused_by_path(tangents, where):
    """They would be broadcast, or passed over."""
    calls = (
        lambda: pm.filter_jvp(f_of_two, PRIMALS, tangents),
        lambda: pm.filter_linearize(f_of_two, *PRIMALS)[1](*tangents),
    )
    for call in calls:
        with pytest.raises(DerivativeError, match=where):
            call()


@pytest.mark.parametrize("cotangent", [(jnp.ones(2), None), (jnp.ones(3), 1), (jnp.ones(3),)])
def test_cotangents_that_do_not_fit_are_refused(cotangent):
    """In shape, at a constant, in structure."""
    back = pm.filter_vjp(lambda x: (x, jnp.arange(2)), jnp.ones(3))[1]

    with pytest.raises(DerivativeError, match="vjp_fn"):
        back(cotangent)


def test_a_tangent_of_what_is_not_linearized_is_refused():
    """A buffer has a tangent only if `wrt` says so."""
    model = Buffered(ramp(2), ramp(2), None)
    push = pm.filter_linearize(lambda m: m.weight * m.mean, model)[1]

    with pytest.raises(DerivativeError, match="mean"):
        push(Buffered(None, ramp(2), None))


def test_configuration_plays_no_part_in_tangents():
    """Two Modules that differ in configuration have the same leaves."""
    primal, tangent = Static(ramp(2), 1), Static(ramp(2), 2)

    assert_close(pm.filter_jvp(lambda m: 3 * m.weight, (primal,), (tangent,))[1], 3 * ramp(2))

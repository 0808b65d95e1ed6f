"""filter_jvp, filter_vjp and filter_linearize: derivatives along directions, of any trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, StructureError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, Buffered, Holder, Static, affine, ramp

X = ramp(3, start=np.float32(0.2))


def test_they_are_those_of_jax_also_as_decorators():
    """`filter_jvp(f)` is called with the rest of the arguments; strings have None."""
    plain = lambda model, x: jnp.tanh(model(x))  # noqa: E731
    fn = lambda model, x: {"y": plain(model, x), "name": "net"}  # noqa: E731
    args, directions = (affine(), X), (affine(start=2.0), 3 * X)
    y, slope = jax.jvp(plain, args, directions)
    pulled = jax.vjp(plain, *args)[1](y)

    for jvp in (pm.filter_jvp(fn), lambda *args: pm.filter_jvp(fn, *args)):
        out, tangent = jvp(args, directions)
        assert out["name"] == "net"
        assert_close((out["y"], tangent), (y, {"y": slope, "name": None}))
    for vjp in (pm.filter_vjp(fn), lambda *args: pm.filter_vjp(fn, *args)):
        assert_close(vjp(*args)[1]({"y": y, "name": None}), pulled)
    for linearize in (pm.filter_linearize(fn), lambda *args: pm.filter_linearize(fn, *args)):
        assert_close(linearize(*args)[1](*directions), {"y": slope, "name": None})


class Scaled(Affine):
    @pm.filter_jvp
    def by_weight(self, x):
        return self.weight @ x


def test_a_method_has_tangents_of_its_arguments_alone():
    scaled = Scaled(ramp(2, 3), ramp(2))
    assert_close(scaled.by_weight((X,), (2 * X,)), (scaled.weight @ X, 2 * scaled.weight @ X))


ZEROS = {
    "an argument": (Affine(ramp(2, 3), ramp(2)), None),
    "a leaf": (Affine(None, ramp(2)), ramp(3)),
    "a Module": (None, ramp(3)),
    "everything": (None, None),
}


@pytest.mark.parametrize("given", ZEROS.values(), ids=ZEROS)
def test_none_is_a_zero_tangent_for_all_that_is_below(given):
    """None at a leaf, at a node or for an argument equals zeros there."""
    f = lambda model, x: model.weight @ x * model.bias  # noqa: E731
    primals, parts = (affine(), ramp(3)), (given[0] or Affine(None, None), given[1])
    zeros = lambda x, t: jnp.zeros_like(x) if t is None else t  # noqa: E731
    expected = jax.jvp(f, primals, jax.tree.map(zeros, primals, parts))[1]

    assert_close(pm.filter_jvp(f, primals, given)[1], expected)
    assert_close(pm.filter_linearize(f, *primals)[1](*given), expected)


def test_none_is_a_zero_cotangent():
    """None for a floating array, or for all below a node; JAX's own zeros of integers."""
    _, vjp_fn = pm.filter_vjp(lambda x: {"a": x, "b": (2 * x, 3 * x)}, ramp(2))
    ones = jnp.ones(2)

    assert_close(vjp_fn({"a": ones, "b": None}), (ones,))
    assert_close(vjp_fn({"a": None, "b": (None, ones)}), (3 * ones,))
    assert_close(vjp_fn(None), (jnp.zeros(2),))
    f = lambda d: d["x"] * d["i"].astype(jnp.float32)  # noqa: E731
    d, zero = {"x": ones, "i": jnp.arange(2)}, np.zeros(2, jax.dtypes.float0)
    assert_close(pm.filter_jvp(f, (d,), ({"x": ones, "i": zero},))[1], jnp.arange(2.0))


def test_keywords_aux_and_no_arguments():
    """Keywords are constant; aux may be any tree; a function of nothing has a map of nothing."""
    f = lambda x, *, k: (x * k, {"name": "aux", "k": k})  # noqa: E731
    x, k = ramp(2), 3 * ramp(2)
    y, back, aux = pm.filter_vjp(f, has_aux=True)(x, k=k)
    assert_close((y, back(x), aux["k"]), (x * k, (x * k,), k))
    _, push, aux = pm.filter_linearize(has_aux=True)(f)(x, k=k)
    assert_same((push(x), aux["name"]), (x * k, "aux"))
    out, tangent = pm.filter_jvp(lambda x, *, k: x * k, (x,), (x,), k=k)
    assert_close((out, tangent), (x * k, x * k))

    assert_same(pm.filter_jvp(lambda: (x, "a"), (), ()), ((x, "a"), (0 * x, None)))
    assert pm.filter_vjp(lambda: x)[1](x) == ()
    assert pm.filter_vjp(lambda d: x, {})[1](None) == ({},)


def test_a_state_goes_through():
    """As aux, or in the result, where its arrays have tangents."""
    count = pm.StateIndex(jnp.asarray(2.0))

    def f(x, state):
        return x * state.get(count), state.set(count, state.get(count) + x)

    x = jnp.asarray(3.0)
    _, back, state = pm.filter_vjp(f, x, pm.State(count), has_aux=True)
    assert (float(state.get(count)), float(back(1.0)[0])) == (5.0, 2.0)
    (y, state), tangents = pm.filter_jvp(f, (x, pm.State(count)), (1.0, None))
    assert (float(y), float(state.get(count))) == (6.0, 5.0)
    assert [float(t) for t in jax.tree.leaves(tangents)] == [2.0, 1.0]


def test_a_number_has_the_tangent_that_it_is_given():
    """As a weak array has; without one it stays a number."""
    f = lambda d: {"y": d["x"] * d["k"], "k": d["k"]}  # noqa: E731
    found = pm.filter_jvp(f, ({"x": 3.0, "k": 2.0},), ({"x": 1.0, "k": None},))
    assert_same(found[0], {"y": jnp.asarray(6.0), "k": 2.0})
    assert_same(found[1], {"y": jnp.asarray(2.0), "k": None})
    assert found[1]["y"].weak_type
    half = pm.filter_jvp(jnp.sin, (jnp.ones((), jnp.bfloat16),), (1.0,))[1]
    assert half.dtype == jnp.bfloat16


def test_what_is_constant_inside_is_not_constant_outside():
    """A result that depends on an outer variable only has zeros inside, a gradient outside."""

    def f(y):
        out, tangent = pm.filter_jvp(lambda x: (x * y, 3.0 * y), (y,), (jnp.ones(2),))
        return jnp.sum(out[1]) + jnp.sum(tangent[0]) + jnp.sum(tangent[1])

    ones = jnp.ones(2)
    assert_close(jax.grad(f)(ones), jnp.full(2, 4.0))
    assert_close(pm.filter_jvp(f, (ones,), (ones,))[1], jnp.asarray(8.0))
    assert_close(jax.jit(jax.grad(f))(ones), jnp.full(2, 4.0))


@pytest.mark.parametrize("name", ["filter_vjp", "filter_linearize"])
def test_the_map_is_a_pytree(name):
    """Its arrays are leaves; it goes through jit both ways, vmap and into fields."""
    make = lambda x: getattr(pm, name)(lambda x: jnp.sin(x) * ramp(3), x)[1]  # noqa: E731
    made, expected = make(X), make(X)(X)
    for transform in (jax.jit, pm.filter_jit):
        assert_close(transform(lambda f, t: f(t))(made, X), expected)
        assert_close(transform(make)(X)(X), expected)
    assert_close(jax.tree.map(lambda x: x, Holder(made)).content(X), expected)
    stacked = pm.filter_vmap(lambda f, t: f(t), in_axes=(None, 0))(made, jnp.stack([X, X]))
    assert_close(jax.tree.map(lambda y: y[1], stacked), expected)


def test_linearize_runs_the_function_once():
    """Every further tangent costs the linear part alone."""
    calls = []
    f_jvp = pm.filter_linearize(lambda x: (calls.append(x), jnp.sin(x))[1], X)[1]
    assert_close((f_jvp(X), f_jvp(2 * X)), (X * jnp.cos(X), 2 * X * jnp.cos(X)))
    assert len(calls) == 1


# ---- directions that do not fit

PRIMALS = ({"w": jnp.ones(3), "n": 2, "i": jnp.arange(2)}, jnp.ones(3))
MISFITS = {
    "shape": (({"w": jnp.ones(2), "n": None, "i": None}, None), r"\['w'\]: f32\[2\], for f32\[3\]"),
    "dtype": (({"w": jnp.ones(3, jnp.float16), "n": None, "i": None}, None), r"\['w'\]: f16\[3\]"),
    "of a constant": (({"w": None, "n": 1, "i": None}, None), r"\['n'\]: 1"),
    "of integers": (({"w": None, "n": None, "i": jnp.ones(2)}, None), r"\['i'\]: f32\[2\]"),
    "structure": (({"w": None, "n": None}, None), r"\['i'\]"),
    "a node for an array": ((None, (jnp.ones(3),)), r"tangents\[1\]"),
    "no array": (({"w": "a", "n": None, "i": None}, None), r"\['w'\]: 'a'"),
}


@pytest.mark.parametrize(("tangents", "where"), MISFITS.values(), ids=MISFITS)
def test_tangents_that_do_not_fit_are_refused_by_path(tangents, where):
    """They would be broadcast, or passed over."""
    f = lambda model, x: model["w"] * x  # noqa: E731
    with pytest.raises(StructureError, match=where):
        pm.filter_jvp(f, PRIMALS, tangents)
    with pytest.raises(StructureError, match=where):
        pm.filter_linearize(f, *PRIMALS)[1](*tangents)


@pytest.mark.parametrize(
    ("cotangent", "where"),
    [
        ((jnp.ones(2), None), r"\[0\]: f32\[2\], for f32\[3\]"),
        ((jnp.ones(3), 1), r"\[1\]: 1"),
        ((jnp.ones(3),), r"\[1\]"),
    ],
    ids=["shape", "constant", "structure"],
)
def test_cotangents_that_do_not_fit_are_refused_by_path(cotangent, where):
    """And the message says of which map."""
    back = pm.filter_vjp(lambda x: (x, jnp.arange(2)), jnp.ones(3))[1]
    with pytest.raises(StructureError, match=rf"(?s)filter_vjp.*cotangent{where}"):
        back(cotangent)


def test_a_tangent_of_what_is_not_linearized_is_refused():
    """A buffer has a tangent only if `wrt` says so; each primal has one tangent."""
    model = Buffered(ramp(2), ramp(2), None)
    push = pm.filter_linearize(lambda m: m.weight * m.mean, model)[1]

    with pytest.raises(StructureError, match=r"tangents\[0\]\.mean"):
        push(Buffered(None, ramp(2), None))
    with pytest.raises(ArgumentError, match="2 primals have 1 tangents"):
        pm.filter_jvp(jnp.multiply, (X, X), (X,))


def test_configuration_plays_no_part_in_tangents():
    """Two Modules that differ in configuration have the same leaves."""
    primal, tangent = Static(ramp(2), 1), Static(ramp(2), 2)
    assert_close(pm.filter_jvp(lambda m: 3 * m.weight, (primal,), (tangent,))[1], 3 * ramp(2))

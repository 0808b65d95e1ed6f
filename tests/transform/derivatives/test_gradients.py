"""filter_grad, filter_value_and_grad, trainable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import (
    Buffered,
    Holder,
    affine,
    double,
    ramp,
)


def loss(model, x, *, power=2):
    """A scalar of a model and an input."""
    return jnp.sum(model(x) ** power)


def test_shape_of_what_comes_back():
    """The gradient; the value and the gradient; each with aux where asked."""
    model, x = affine(), ramp(3)
    with_aux = lambda m, x: (loss(m, x), {"y": m(x), "name": "aux", "n": 3})  # noqa: E731
    gradient = pm.filter_grad(loss)(model, x)

    value, again = pm.filter_value_and_grad(loss)(model, x)
    assert_close((value, again), (loss(model, x), gradient))
    again, aux = pm.filter_grad(with_aux, has_aux=True)(model, x)
    assert_close(again, gradient)
    assert (aux["name"], aux["n"]) == ("aux", 3)
    assert_close(aux["y"], model(x))
    listed = pm.filter_grad(lambda m, x: [loss(m, x), "aux"], has_aux=True)(model, x)
    assert_close(listed[0], gradient)
    assert listed[1] == "aux"
    (value, aux), again = pm.filter_value_and_grad(with_aux, has_aux=True)(model, x)
    assert_close((value, again), (loss(model, x), gradient))
    assert aux["name"] == "aux"


def test_other_arguments_are_passed_on():
    """By position and by keyword, arrays or not."""
    found = pm.filter_grad(loss)(affine(), x=ramp(3), power=1)

    assert_close(found.bias, jnp.ones(2))


@pytest.mark.parametrize(
    ("argnums", "shapes"),
    [
        (0, [(2,)]),
        (1, [(3,)]),
        (2, [(4,)]),
        (-1, [(4,)]),
        ((0, 2), [(2,), (4,)]),
        ([2, 0], [(4,), (2,)]),
        ((1,), [(3,)]),
    ],
)
def test_argnums(argnums, shapes):
    """One argument gives a tree, several a tuple of trees in the order asked for."""
    fn = lambda a, b, c: jnp.sum(a["x"]) * jnp.sum(b["x"]) * jnp.sum(c["x"])  # noqa: E731
    args = [{"x": ramp(n), "n": n} for n in (2, 3, 4)]
    found = pm.filter_grad(fn, argnums=argnums)(*args)
    expected = jax.grad(lambda xs: fn(*({"x": x} for x in xs)))([ramp(2), ramp(3), ramp(4)])

    trees = found if isinstance(argnums, (tuple, list)) else (found,)
    assert isinstance(found, tuple) == isinstance(argnums, (tuple, list))
    assert [tree["x"].shape for tree in trees] == shapes
    indices = argnums if isinstance(argnums, (tuple, list)) else [argnums]
    for index, tree in zip(indices, trees, strict=True):
        assert_close(tree["x"], expected[index])
        assert tree["n"] is None


def test_a_buffer_stays_a_buffer_where_it_is():
    """Buffers of inner Modules are left alone, also inside fields with other roles."""
    model = Holder([Buffered(ramp(1), ramp(1), Buffered(ramp(1), ramp(1), ramp(1)))])
    gradient = pm.filter_grad(lambda m: sum(jnp.sum(x) for x in jax.tree.leaves(m)))(model)

    outer, inner = gradient.content[0], gradient.content[0].low_rank
    assert [x is None for x in (outer.weight, outer.mean)] == [False, True]
    assert [x is None for x in (inner.weight, inner.mean, inner.low_rank)] == [False, True, False]


def test_numbers_and_numpy():
    """Python numbers are not differentiated; NumPy arrays are, and give JAX arrays."""
    gradient = pm.filter_grad(lambda m: m[0] * jnp.sum(m[1]) * m[2])(
        [2.0, np.ones(2, np.float32), 3]
    )

    assert gradient[0] is None
    assert gradient[2] is None
    assert isinstance(gradient[1], jax.Array)
    np.testing.assert_array_equal(gradient[1], [6.0, 6.0])


def test_trainable_is_for_the_optimizer():
    """Weight decay and the gradient have the same leaves."""
    model = {"net": Buffered(ramp(2), ramp(2), ramp(2)), "act": double, "frozen": affine()}
    wrt = pm.select.path("net") & ~pm.select.role("buffer")
    optimizer = optax.sgd(1.0)
    optimizer = optax.chain(optax.add_decayed_weights(0.5), optimizer)
    first, rest = pm.trainable(model, wrt)
    state = optimizer.init(first)
    gradient = pm.filter_grad(lambda m: 0.0 * jnp.sum(m["net"].weight), wrt=wrt)(model)

    assert jax.tree.structure(gradient) == jax.tree.structure(first)
    updates, _ = optimizer.update(gradient, state, first)
    moved = pm.apply_updates(model, updates)
    assert_close(moved["net"].weight, 0.5 * ramp(2))
    assert_same((moved["net"].mean, moved["frozen"], moved["act"]), (ramp(2), affine(), double))
    assert_same(pm.combine(first, rest), model)


def used_up_through(transformed):
    """Whether a State inside a differentiated argument is used up for the caller."""
    index = pm.StateIndex(jnp.asarray(1.0))
    state = pm.State(index)

    def loss(pair):
        x, state = pair
        n = state.get(index)
        return x * n, state.set(index, n + 1.0)

    transformed(loss)((jnp.asarray(2.0), state))
    with pytest.raises(pm.errors.StateError, match=r"old state|newest State"):
        state.get(index)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: pm.filter_grad(f, has_aux=True),
        lambda f: pm.filter_value_and_grad(f, has_aux=True),
        lambda f: pm.filter_jacrev(f, has_aux=True),
        lambda f: lambda pair: pm.filter_vjp(f, pair, has_aux=True),
    ],
    ids=["grad", "value_and_grad", "jacrev", "vjp"],
)
def test_a_state_among_what_is_differentiated_is_used_up(transformed):
    """A State in that argument is used up like any other."""
    used_up_through(transformed)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (lambda m: m.weight, r"f32\[2,3\]"),
        (lambda m: jax.lax.complex(m.bias, m.bias).sum(), "c64"),
        (lambda m: (jnp.sum(m.bias), 1), "tuple"),
        (lambda m: None, "None"),
    ],
    ids=["shape", "complex", "pair", "nothing"],
)
def test_a_loss_is_a_floating_scalar(loss, shown):
    """A sum over the axes that the user forgot would be another loss."""
    with pytest.raises((ArgumentError, ShapeError), match=shown):
        pm.filter_grad(loss)(affine())


@pytest.mark.parametrize("result", [lambda x: x, lambda x: (x,), lambda x: (x, 1, 2)])
def test_has_aux_takes_a_pair(result):
    """The first of three values is not taken for the loss."""
    with pytest.raises(ArgumentError, match="aux"):
        pm.filter_grad(lambda m: result(jnp.sum(m.bias)), has_aux=True)(affine())


def test_a_pattern_that_matches_nothing_is_refused():
    """A misspelt path is an error, not an empty gradient."""
    for wrt in ("wieght", ~pm.select.path("wieght"), pm.select.path("bias.x")):
        for call in (
            lambda wrt=wrt: pm.filter_grad(lambda m: 0.0, wrt=wrt)(affine()),
            lambda wrt=wrt: pm.trainable(affine(), wrt),
        ):
            with pytest.raises(SpecError, match=r"wieght|bias\.x"):
                call()


@pytest.mark.parametrize("wrt", [("weight",), {"m1": True, "z": 1}, {"weight": True}])
def test_specs_for_other_arguments_are_refused(wrt):
    """One for each differentiated argument, by position or by name."""
    with pytest.raises(SpecError, match="wrt"):
        pm.filter_grad(lambda m1, m2: 0.0, argnums=(0, 1), wrt=wrt)(affine(), affine())

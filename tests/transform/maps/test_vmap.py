"""filter_vmap and if_array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import (
    Affine,
    Static,
    affine,
    ramp,
)


def stacked_affine(n=3):
    """Members with different weights, stacked."""
    return jax.tree.map(lambda x: jnp.stack([x + i for i in range(n)]), affine())


def call(model, x):
    """The model's output."""
    return model(x)


XS = ramp(3, 3)
SUM_COLUMNS = np.asarray(XS).sum(axis=0)
SUM_ROWS = np.asarray(XS).sum(axis=1)


@pytest.mark.parametrize(
    ("in_axes", "expected"),
    [
        (0, SUM_ROWS),
        (1, SUM_COLUMNS),
        (-1, SUM_COLUMNS),
        ((1,), SUM_COLUMNS),
        ([1], SUM_COLUMNS),
        ({"x": 1}, SUM_COLUMNS),
        ({}, SUM_ROWS),
        (pm.if_array(1), SUM_COLUMNS),
        (lambda leaf: leaf.ndim - 1, SUM_COLUMNS),
        (pm.by({...: 1}), SUM_COLUMNS),
        ((pm.by({pm.is_array: 1}),), SUM_COLUMNS),
        ({"x": pm.by({...: 1})}, SUM_COLUMNS),
    ],
)
def test_axes_of_one_array(in_axes, expected):
    """Ints, functions, rules; bare, in a tuple, or by name."""
    np.testing.assert_array_equal(
        pm.filter_vmap(lambda x: jnp.sum(x), in_axes=in_axes)(XS), expected
    )


TREE = {"a": [ramp(3, 2), ramp(2, 3)], "b": ramp(3), "n": 2.0}


def tree_function(tree):
    """Uses everything in the tree."""
    return jnp.sum(tree["a"][0]) + jnp.sum(tree["a"][1]) + jnp.sum(tree["b"]) * tree["n"]


@pytest.mark.parametrize(
    "in_axes",
    [
        {"a": [0, 1], "b": 0, "n": None},
        ({"a": [0, 1], "b": pm.if_array(0), "n": pm.if_array(0)},),
        pm.by({"a.1": 1, pm.is_array: 0, ...: None}),
        {"a": pm.by({"0": 0, "1": 1}), "b": 0, "n": None},
        {"tree": {"a": [0, 1], "b": 0, "n": None}},
        {"tree": pm.by({"a.1": 1, ...: pm.if_array(0)})},
    ],
)
def test_axes_of_a_tree(in_axes):
    """A prefix tree, a rule, or a rule inside a prefix tree, for one argument that is a tree."""
    found = pm.filter_vmap(tree_function, in_axes=in_axes)(TREE)
    members = [
        {"a": [TREE["a"][0][i], TREE["a"][1][:, i]], "b": TREE["b"][i], "n": 2.0} for i in range(3)
    ]

    assert_close(found, jnp.stack([tree_function(member) for member in members]))


@pytest.mark.parametrize(
    "in_axes",
    [
        (0, None),
        {"x": None},
        {"model": 0, "x": None},
        (Affine(0, 0), None),
        (pm.by({"weight": 0, "bias": 0}), None),
        pm.by({Affine: 0, ...: None}),
        pm.by({"weight": 0, "bias": 0, ...: None}),
    ],
)
def test_axes_of_several_arguments(in_axes):
    """By position, by name, by one rule for all; a Module of axes is a prefix."""
    models, x = stacked_affine(), ramp(3)
    expected = jnp.stack([jax.tree.map(lambda w, i=i: w[i], models)(x) for i in range(3)])

    assert_close(pm.filter_vmap(call, in_axes=in_axes)(models, x), expected)
    assert_close(pm.filter_vmap(call, in_axes=in_axes)(models, x=x), expected)


def test_keyword_arguments_are_mapped():
    """By default over axis 0, or as in_axes says by name."""
    fn = lambda x, *, y, how: x * y if how == "times" else x  # noqa: E731

    assert_close(pm.filter_vmap(fn)(ramp(3), y=ramp(3), how="times"), ramp(3) ** 2)
    found = pm.filter_vmap(fn, in_axes={"y": None})(ramp(3), how="times", y=jnp.asarray(2.0))
    assert_close(found, 2 * ramp(3))
    assert_close(pm.filter_vmap(fn, in_axes=(0,))(ramp(3), y=ramp(3), how="no"), ramp(3))


@pytest.mark.parametrize(
    ("out_axes", "shape"),
    [
        (0, (4, 2, 3)),
        (1, (2, 4, 3)),
        (2, (2, 3, 4)),
        (-1, (2, 3, 4)),
        (pm.if_array(1), (2, 4, 3)),
        (lambda leaf: leaf.ndim, (2, 3, 4)),
    ],
)
def test_out_axes_of_one_array(out_axes, shape):
    """Ints and functions of the member's result."""
    found = pm.filter_vmap(lambda x: x * jnp.ones((2, 3)), out_axes=out_axes)(ramp(4))

    assert found.shape == shape
    assert_close(jnp.sum(found), 6 * jnp.sum(ramp(4)))


@pytest.mark.parametrize(
    "out_axes",
    [
        {"model": Affine(1, 0), "text": None, "same": None},
        pm.by({"model.weight": 1, "same": None, ...: pm.if_array(0)}),
        {"model": pm.by({"weight": 1, ...: 0}), "text": None, "same": None},
    ],
)
def test_out_axes_of_a_tree(out_axes):
    """Prefix trees, Modules of axes and rules; strings and functions are returned unchanged."""

    def fn(x):
        return {"model": jax.tree.map(lambda w: w * x, affine()), "text": "abc", "same": ramp(2)}

    found = pm.filter_vmap(fn, out_axes=out_axes)(ramp(4))
    assert found["model"].weight.shape == (2, 4, 3)
    assert found["model"].bias.shape == (4, 2)
    assert found["text"] == "abc"
    assert_same(found["same"], ramp(2))


def test_over_a_class():
    """filter_vmap(Class) builds the stacked Module, its configuration once."""
    made = pm.filter_vmap(Static, in_axes=(0, None))(ramp(3, 2), ("a", 1))
    assert_same(made, Static(ramp(3, 2), ("a", 1)))


def test_collectives_and_axis_size():
    """axis_name serves collectives; axis_size stands in where nothing is mapped."""
    centered = pm.filter_vmap(lambda x: x - jax.lax.pmean(x, "batch"), axis_name="batch")(ramp(3))
    assert_close(centered, ramp(3) - 2)

    assert_close(pm.filter_vmap(lambda: ramp(2), axis_size=3)(), jnp.stack([ramp(2)] * 3))
    found = pm.filter_vmap(lambda x: x, in_axes=None, axis_size=2, out_axes=1)(ramp(3))
    assert found.shape == (3, 2)


def test_if_array():
    """An axis for arrays, None for other leaves; equal ones are equal."""
    assert [pm.if_array(1)(x) for x in (ramp(2), np.ones(2), 1.0, "a", None)] == [
        1,
        1,
        None,
        None,
        None,
    ]
    assert pm.if_array(1) == pm.if_array(1) != pm.if_array(0)
    assert repr(pm.if_array(1)) == "if_array(axis=1)"


# ---- mistakes


@pytest.mark.parametrize("around", [lambda f: f, pm.filter_jit, pm.filter_vmap])
def test_the_result_that_is_mapped_is_named(around):
    """And none that is the same for all members, also where a `vmap` around maps that."""

    def run(y):
        def fn(x, y):
            keys = jax.random.split(jax.random.key(0))
            return {"a": y * 2, "b": x + y[..., None], "c": 1, "d": keys, "e": {"f": x}, "g": y}

        return pm.filter_vmap(fn, in_axes=(0, None), out_axes=None)(ramp(3), y)

    with pytest.raises(SpecError, match=r"result\['b'\][\s\S]*result\['e'\]\['f'\]"):
        around(run)(ramp(2, 2))


def test_errors_inside_are_the_users():
    """A ValueError in the function is not taken for ours."""

    def fn(x):
        raise ValueError("mine, about out_axes")

    with pytest.raises(ValueError, match=r"^mine, about out_axes") as caught:
        pm.filter_vmap(fn, out_axes=None)(ramp(3))
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("axis", [0, lambda _: 0])
@pytest.mark.parametrize("number", [1.5, True], ids=repr)
def test_a_number_with_an_axis_is_repeated_for_each_member(axis, number):
    """Where `out_axes` gives a number an axis it is stacked, as `jax.vmap` does: weak type, too."""

    def fn(x):
        return (x, {"number": number})

    found = pm.filter_vmap(fn, out_axes=axis)(ramp(3))
    expected = jax.vmap(fn)(ramp(3))

    assert_same(found, expected)
    assert found[1]["number"].weak_type == expected[1]["number"].weak_type
    # A leaf that cannot have an axis is unchanged.
    beside = pm.filter_vmap(lambda x: (fn(x), "text"), out_axes=axis)(ramp(3))
    assert_same(beside, (expected, "text"))


@pytest.mark.parametrize(
    "in_axes",
    [(0,), (0, 0, 0), ({"a": 0}, 0), (True, 0), (1.0, 0), (pm.by({"w": 0, ...: None}), 0)],
    ids=["too few", "too many", "structure", "bool", "float", "path"],
)
def test_axes_that_do_not_fit_are_refused(in_axes):
    """An argument would be mapped over another axis, or shared."""
    with pytest.raises(SpecError, match=r"in_axes|'w'"):
        pm.filter_vmap(lambda x, y: x, in_axes=in_axes)(ramp(3), ramp(3))

"""filter_vmap, and the axes that say what it maps."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, ramp

XS = ramp(3, 3)
FORMS = [1, -1, (1,), {"x": 1}, pm.if_array(1), lambda x: x.ndim - 1, pm.by({...: 1})]


@pytest.mark.parametrize("in_axes", [*FORMS, (pm.by({pm.is_array: 1}),), {"x": pm.by({...: 1})}])
def test_axes_of_one_array(in_axes):
    """Ints, functions, rules; bare, in a tuple, or by name."""
    assert_close(pm.filter_vmap(lambda x: x.sum(), in_axes=in_axes)(XS), XS.sum(0))


TREE = {"a": [ramp(3, 2), ramp(2, 3)], "b": ramp(3), "n": 2.0}


@pytest.mark.parametrize(
    "in_axes",
    [
        {"a": [0, 1], "b": 0, "n": None},
        ({"a": [0, 1], "b": pm.if_array(0), "n": pm.if_array(0)},),
        pm.by({"a.1": 1, pm.is_array: 0, ...: None}),
        {"a": pm.by({"0": 0, "1": 1}), "b": 0, "n": None},
        {"tree": pm.by({"a.1": 1, ...: pm.if_array(0)})},
    ],
)
def test_axes_of_a_tree(in_axes):
    """A prefix tree, a rule, or a rule inside a prefix tree, for one argument that is a tree."""
    fn = lambda tree: tree["a"][0].sum() + tree["a"][1].sum() + tree["b"] * tree["n"]  # noqa: E731
    (rows, columns), b = TREE["a"], TREE["b"]

    assert_close(pm.filter_vmap(fn, in_axes=in_axes)(TREE), rows.sum(1) + columns.sum(0) + 2 * b)


def test_keyword_arguments_are_mapped():
    """By default over axis 0, or as in_axes says by name; numbers stay numbers."""
    fn = lambda x, *, y, how: x * y if how == "times" else x  # noqa: E731
    assert_close(pm.filter_vmap(fn)(ramp(3), y=ramp(3), how="times"), ramp(3) ** 2)
    found = pm.filter_vmap(fn, in_axes={"y": None})(ramp(3), how="times", y=jnp.asarray(2.0))
    assert_close(found, 2 * ramp(3))
    found = pm.filter_vmap(lambda *a, **k: (a, k), in_axes={})(ramp(3), 1, z=ramp(3), n="a")
    assert_same(found, ((ramp(3), 1), {"z": ramp(3), "n": "a"}))


@pytest.mark.parametrize(
    "out_axes",
    [
        {"model": Affine(1, 0), "text": None, "same": None},
        pm.by({"model.weight": 1, "same": None, ...: pm.if_array(0)}),
        {"model": pm.by({"weight": 1, ...: lambda x: x.ndim - 1}), "text": None, "same": None},
    ],
)
def test_out_axes(out_axes):
    """Prefix trees, Modules of axes and rules; strings and functions are returned unchanged."""
    fn = lambda x: {"model": Affine(x * XS, x * XS[0]), "text": "abc", "same": max}  # noqa: E731
    found = pm.filter_vmap(fn, out_axes=out_axes)(ramp(4))
    weight, bias = (jax.vmap(lambda x, y=y: x * y)(ramp(4)) for y in (XS, XS[0]))
    assert_same(found, {"model": Affine(weight.swapaxes(0, 1), bias), "text": "abc", "same": max})


def test_collectives_and_axis_size():
    """axis_name serves collectives; axis_size stands in where nothing is mapped."""
    centered = pm.filter_vmap(lambda x: x - jax.lax.pmean(x, "batch"), axis_name="batch")(ramp(3))
    assert_close(centered, ramp(3) - 2)
    found = pm.filter_vmap(lambda: ("a", ramp(2), {}, None), axis_size=3)()
    assert_same(found, ("a", jnp.stack([ramp(2)] * 3), {}, None))
    found = pm.filter_vmap(lambda x: x, in_axes=None, axis_size=2, out_axes=1)(ramp(3))
    assert found.shape == (3, 2)
    assert pm.filter_vmap(lambda x: 2 * x)(jnp.zeros((0, 2))).shape == (0, 2)


@pytest.mark.parametrize("number", [1.5, 2, True, 2j], ids=repr)
def test_a_number_with_an_axis_is_repeated_for_each_member(number):
    """Where `out_axes` is an int, as in `jax.vmap`, weak type and all; by default it stays one."""
    found = pm.filter_vmap(lambda x: (x, number, "text"), out_axes=0)(ramp(3))
    assert_same(found, (*jax.vmap(lambda x: (x, number))(ramp(3)), "text"))
    assert found[1].weak_type == (type(number) is not bool)
    assert pm.filter_vmap(lambda x: (x, number))(ramp(3))[1] is number


# ---- mistakes

MISTAKES = {
    "sizes": ({}, (ramp(3), {"y": ramp(4)}), r"x: f32\[3\](?s:.*)y\['y'\]: f32\[4\], axis 0"),
    "axis_size": ({"axis_size": 4}, (ramp(3), 1), r"x: f32\[3\](?s:.*)axis_size: 4"),
    "no axis": ({}, (ramp(3), [jnp.asarray(1.0)]), r"y\[0\]: f32\[\], axis 0"),
    "no such axis": ({"in_axes": -2}, (ramp(3), 1), r"x: f32\[3\], axis -2"),
    "nothing mapped": ({}, (1, "a"), "axis_size"),
    "axis of a result": ({"out_axes": 2}, (ramp(3), 1), r"result\[0\]: f32\[\]"),
    "structure of a result": ({"out_axes": {"z": 0}}, (ramp(3), 1), "out_axes"),
    "name": ({"in_axes": {"z": 0}}, (ramp(3), 1), "'z'"),
    "too few": ({"in_axes": (0,)}, (ramp(3), ramp(3)), "in_axes"),
    "too many": ({"in_axes": (0, 0, 0)}, (ramp(3), ramp(3)), "in_axes"),
    "structure": ({"in_axes": ({"a": 0}, 0)}, (ramp(3), ramp(3)), "in_axes"),
    "bool": ({"in_axes": (True, 0)}, (ramp(3), ramp(3)), "in_axes"),
    "float": ({"in_axes": (1.0, 0)}, (ramp(3), ramp(3)), "in_axes"),
    "path": ({"in_axes": (pm.by({"w": 0, ...: None}), 0)}, (ramp(3), ramp(3)), "'w'"),
}


@pytest.mark.parametrize(("options", "args", "match"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_mapped_is_named(options, args, match):
    """By all paths that disagree, with their shapes: another axis would be mapped, or none."""
    with pytest.raises((ShapeError, ArgumentError, SpecError), match=match):
        pm.filter_vmap(lambda x, y: (x, y), **options)(*args)


@pytest.mark.parametrize("around", [lambda f: f, pm.filter_jit, pm.filter_vmap])
def test_a_result_that_differs_by_member_needs_an_axis(around):
    """And the error names the paths without an axis."""
    fn = lambda x, y: {"a": 1, "b": x + y[..., None]}  # noqa: E731
    run = lambda y: pm.filter_vmap(fn, in_axes=(0, None), out_axes=None)(ramp(3), y)  # noqa: E731
    with pytest.raises(SpecError, match=r"result\['b'\]"):
        around(run)(ramp(2, 2))

"""tree_at, and the functions below it."""

import contextlib
import gc
import weakref

import jax
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, FieldWarning
from tests.helpers.comparing import assert_identical
from tests.helpers.trees import (
    Affine,
    AutoConfiguration,
    Buffered,
    Checked,
    Converted,
    Static,
    affine,
    double,
    ramp,
)
from tests.labels import label

weight = lambda m: m.weight  # noqa: E731


@pytest.mark.parametrize("new", [None, (), [1, [2]], {"a": 1}, Affine(1, 2), "text", 3])
def test_the_new_node_may_have_any_structure(new):
    """A leaf may become a subtree, and a subtree a leaf, None included."""
    assert pm.tree_at(lambda t: t[1], [1, (2, 3)], new) == [1, new]
    assert pm.tree_at(lambda t: t[0].bias, [Affine(1, 2)], new)[0].bias is new
    assert pm.tree_at(lambda t: t, affine(), new) is new


def test_configuration_can_be_replaced():
    """Static fields, functions and strings are reached as data is, and stay configuration."""
    layer = Static(ramp(2), 3)
    changed = pm.tree_at(lambda m: m.size, layer, 4)
    assert (changed.size, changed.weight) == (4, layer.weight)
    assert jax.tree.leaves(changed) == [layer.weight]

    changed = pm.tree_at(lambda m: (m.function, m.name), AutoConfiguration(1.0), (max, "other"))
    assert (changed.function, changed.name) == (max, "other")
    assert jax.tree.leaves(changed)[0] == 1.0
    assert max not in jax.tree.leaves(changed)


def test_neither_converters_nor_checks_run():
    assert pm.tree_at(weight, Converted([1.0]), [2.0]).weight == [2.0]
    assert pm.tree_at(lambda m: m.low, Checked(1.0, 2.0), 5.0).low == 5.0


LAYERS = {"first": [Affine(1, 2), Buffered(3.0, 4, Affine(5, 6))], "second": Affine(7, None)}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Affine, [[1, 2], [5, 6], [7]]),
        (Buffered, [[3.0, 4, 5, 6]]),
        (float, [[3.0]]),
        (type(None), [[], []]),
        (str, []),
        (pm.select.role("buffer"), [[4]]),
        (pm.select.path("first.*.weight"), [[1], [3.0]]),
        (pm.select.type(Affine) & (lambda leaf: leaf > 1), [[2], [5], [6], [7]]),
        (pm.select.at(lambda t: t["second"]), [[7]]),
    ],
    ids=label,
)
def test_classes_and_selectors_as_where(where, expected):
    """A class names the outermost nodes of that type, a selector every leaf that it picks."""
    seen = []
    changed = pm.tree_at(where, LAYERS, replace_fn=lambda old: seen.append(old) or "new")

    assert [jax.tree.leaves(old) for old in seen] == expected
    assert jax.tree.leaves(changed).count("new") == len(expected)
    if len(seen) == 1:
        assert_identical(pm.tree_at(where, LAYERS, "new"), changed)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"where": weight}, "either"),
        ({"where": weight, "replace": 1, "replace_fn": double}, "either"),
        ({"where": lambda m: (m.weight, m.bias), "replace": ramp(2)}, "2 nodes"),
        ({"where": lambda m: (m.weight, m.bias), "replace": (1, 2, 3)}, "2 nodes"),
        # One of them would be put everywhere, or in an order that the reader cannot see.
        ({"where": "*", "replace": (1, 2)}, "2 nodes"),
        ({"where": str, "replace": (1, 2)}, "0 nodes"),
        ({"where": pm.select.role("param"), "replace": (1, 2)}, "2 nodes"),
    ],
)
def test_new_nodes_that_do_not_fit_the_named_ones_are_refused(options, text):
    """One of `replace` and `replace_fn`, and as many as there are nodes."""
    with pytest.raises(ArgumentError, match=text):
        pm.tree_at(pytree=affine(), **options)


def test_an_array_in_a_static_field_is_told():
    """As where it is put there by construction."""
    with pytest.warns(FieldWarning, match=r"Static\.size"):
        pm.tree_at(lambda m: m.size, Static(ramp(2), 3), ramp(2))


class Held:
    """A leaf that says when it is gone."""


def garbage_of(use):
    """How much there is to collect when a tree was used and has lost its last name."""
    tree = [Affine(Held(), 1), Affine(2.0, None), Static(3, 4)]
    held = weakref.ref(tree[0].weight)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(pm.PytreemodError, AttributeError):
            use(tree)
        del tree
        assert held() is None
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "use",
    [
        lambda m: pm.tree_at(lambda m: m[0].weight, m, 1),
        lambda m: pm.tree_at(lambda m: m[2].size, m, 1),
        lambda m: pm.tree_at("*.weight", m, replace_fn=str),
        lambda m: pm.filter(m, pm.select.at(lambda m: m[0].weight)),
        lambda m: pm.tree_at(lambda m: m[1].weight + 1, m, 1),
        lambda m: pm.tree_at(lambda m: m[0].wieght, m, 1),
    ],
)
def test_the_old_tree_is_gone_with_its_last_name(use):
    """Nothing goes round in circles: an array on a device would wait for the garbage collector."""
    # The minimum of three: a class caches its data at its first use.
    assert min(garbage_of(use) for _ in range(3)) == 0

"""A note on a leaf belongs to the innermost Module above it."""

import jax.numpy as jnp

import pytreemod as pm
from pytreemod.module.flattening import note_of
from pytreemod.module.leaf_notes import depth_of_holder, with_leaf_notes
from pytreemod.tree.nodes import locations


class Inner(pm.Module):
    """Holds arrays in a container."""

    arrays: list[jnp.ndarray]


class Outer(pm.Module):
    """Holds a Module."""

    inner: Inner


def _model() -> Outer:
    return Outer(Inner([jnp.ones(1), jnp.ones(2)]))


def test_the_innermost_module_says_it():
    model = with_leaf_notes(_model(), "<said>", [(loc, "x") for loc in locations(_model())])

    assert note_of(model, "<said>") == ()
    assert note_of(model.inner, "<said>") == ((("arrays", "0"), "x"), (("arrays", "1"), "x"))


def test_what_is_said_of_one_leaf_leaves_the_others():
    first, second = locations(_model())
    both = with_leaf_notes(
        with_leaf_notes(_model(), "<said>", [(second, "b")]), "<said>", [(first, "a")]
    )
    at_once = with_leaf_notes(_model(), "<said>", [(first, "a"), (second, "b")])

    assert both == at_once
    assert with_leaf_notes(both, "<said>", [(first, None), (second, None)]) == _model()


def test_what_no_module_holds():
    (loc,) = locations({"x": jnp.ones(1)})

    assert depth_of_holder(loc) == -1

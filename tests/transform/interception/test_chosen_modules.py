"""The Modules in arguments that a selector chooses; `capture` shows the result."""

import jax
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from pytreemod.transform.interception.chosen_modules import choose_modules, choose_values, rebuilt
from pytreemod.tree.paths import path_text
from pytreemod.tree.selecting import as_selector
from tests.goldens import refusals
from tests.helpers.trees import Affine, affine

MODEL = {"a": [affine(2, 2), affine(2, 2)], "b": affine(1, 2)}


def chosen(spec, *trees):
    """The names in each argument, in order."""
    found = choose_modules("f", as_selector(spec), trees, callable)
    return [list(names.values()) for names in found]


def test_paths_start_at_each_argument():
    """And are those of the Modules, however the argument is wrapped."""
    assert chosen(Affine, MODEL, affine(2, 2)) == [["['a'][0]", "['a'][1]", "['b']"], ["<root>"]]
    assert chosen("a.*", MODEL) == [["['a'][0]", "['a'][1]"]]
    jitted = pm.filter_jit(affine(2, 2).__call__)
    (names,) = choose_modules("f", as_selector(...), [jitted], callable)
    ((path, name),) = names.items()
    assert name == "<root>"
    assert len(path) == 2


class ScaledAffine(Affine):
    """Of the same arrays as its base."""


class Box(pm.Module):
    """A model around a layer."""

    inner: Affine


def test_moments_of_another_model_have_no_names():
    """Two models of one class and one shape may have parts of different classes."""
    model, other = Box(affine(2, 2)), Box(ScaledAffine(*jax.tree.leaves(affine(2, 2))))

    assert chosen(Affine, model, optax.TraceState(model)) == [["inner"], ["inner"]]
    assert chosen(Affine, model, optax.TraceState(other)) == [["inner"], []]


class Holding(pm.Module):
    """A model whose State has a Module for a value."""

    index: pm.StateIndex
    layer: Affine

    def __init__(self):
        self.index = pm.StateIndex(affine(2, 2))
        self.layer = affine(2, 2)

    def __call__(self, x, state):
        return self.layer(x), state


def test_values_in_a_state_are_not_chosen():
    """They are not part of a model, and must remain of the class in their token."""
    model, state = pm.make_with_state(Holding)()
    assert chosen(Affine, model, state) == [["layer"], []]
    assert rebuilt(state, lambda node, path: None) is state


def test_a_tree_is_rebuilt_from_below():
    """An unchanged part remains the same object; parts see their paths."""
    seen = []

    def change(node, path):
        seen.append(len(path))
        return "changed" if path and node is MODEL["b"] else node

    made = rebuilt(MODEL, change)
    assert made["b"] == "changed"
    assert made["a"] is MODEL["a"]
    assert seen == [2, 2, 1, 1, 0]
    assert jax.tree.structure(MODEL["a"]) == jax.tree.structure(made["a"])


def test_values_for_modules_themselves():
    """The first selector that picks one decides; none may be missing."""
    rule = pm.by({"a.0": "first", Affine: "rest"})

    values = choose_values("f", rule, MODEL, callable)
    names = {path_text(path): value for path, value in values.items()}
    assert names == {"['a'][0]": "first", "['a'][1]": "rest", "['b']": "rest"}
    # By the whole path, whatever is wrapped around.
    (path,) = choose_values("f", pm.by({Affine: 1}), pm.filter_jit(affine(2, 2)), callable)
    assert len(path) == 1
    with pytest.raises(
        SpecError, match=r"f\(select.path\('c'\)\): expected a selector of at least"
    ):
        choose_values("f", pm.by({"c": 1, ...: 2}), MODEL, callable)
    with pytest.raises(
        SpecError, match=r"f\(select.type\(Box\)\): expected a selector of at least"
    ):
        choose_values("f", pm.by({Box: 1, ...: 2}), MODEL, callable)
    with pytest.raises(SpecError, match=r"path\('b'\), whose .*\n  at b: by select\.type"):
        choose_values("f", pm.by({Affine: 1, "b": 2}), MODEL, callable)


test_refusals = refusals(globals())

"""What may stand in a selector's place, and what may not."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FrozenError, SpecError
from pytreemod.tree.nodes import Place
from tests.helpers.trees import Affine


@pytest.mark.parametrize(
    ("spec", "got"),
    [
        (3, "3"),
        (None, "None"),
        (jnp.ones(2), r"f32\[2\]"),
    ],
)
def test_anything_else_is_no_selector(spec, got):
    """A number or an array combined with a selector is refused, with an example."""
    with pytest.raises(
        SpecError,
        match=rf"selector: expected a selector, a class, a path, a bool or a predicate, got "
        rf"{got}\.\n"
        r"  write, for instance\n      select.path",
    ):
        pm.select.role("a") & spec


@pytest.mark.parametrize("answer", [1, 0, None, "yes", np.ones(2, bool), []])
def test_a_predicate_must_answer_with_a_bool(answer):
    """Truthy is not True: an answer that is no bool is refused."""
    with pytest.raises(SpecError, match=r"expected True or False for each leaf, got"):
        pm.filter([1, 2], lambda leaf: answer)
    with pytest.raises(SpecError, match=r"expected True or False for each leaf, got"):
        pm.filter([1, 2], pm.select.type(int) & (lambda leaf: answer))


@pytest.mark.parametrize("answer", [np.True_, np.asarray(True), jnp.asarray(True)])
def test_an_array_of_one_bool_is_a_bool(answer):
    """Comparing an array's size or value gives such an answer."""
    assert pm.filter([1, 2], lambda leaf: answer) == [1, 2]


def test_a_traced_answer_is_refused():
    """What is picked must be known when a function is traced."""
    with pytest.raises(SpecError, match=r"True or False for each leaf, got a traced array"):
        jax.jit(lambda x: pm.filter([x], lambda leaf: leaf > 0))(jnp.asarray(1.0))


def test_mask_follows_is_leaf():
    """mask(tree, is_leaf) has one bool for each leaf of jax.tree.leaves(tree, is_leaf)."""
    tree = [Affine(1, 2), None, 3]
    selector = pm.select.type(Affine)

    assert selector.mask(tree) == [True, True, False]
    assert selector.mask(tree, lambda x: isinstance(x, Affine)) == [True, False]
    assert selector.mask(tree, lambda x: x is None) == [True, True, False, False]


@pytest.mark.parametrize(
    "selector", [pm.select.path("inner"), pm.select.at(lambda tree: tree["inner"])]
)
def test_a_node_is_picked_by_its_own_name(selector):
    """Of nodes in the place of leaves, those below the one that was named are not meant."""
    tree = {"inner": {"x": [1]}}
    keys = [(jax.tree_util.DictKey("inner"),), (jax.tree_util.DictKey("inner"),) * 2]
    spots = [Place(path, None, (), "param", is_node=True) for path in keys]

    assert selector.pick(spots, tree, None) == [True, False]
    assert selector.mask(tree) == [True]


SELECTORS = {
    "path": lambda: pm.select.path("a/*"),
    "type": lambda: pm.select.type(float),
    "role": lambda: pm.select.role("buffer"),
    "at": lambda: pm.select.at(len),
    "and": lambda: pm.select.path("a") & pm.select.type(int),
    "or": lambda: pm.select.path("a") | pm.select.type(int),
    "not": lambda: ~pm.select.path("a"),
    "predicate": lambda: pm.select.path("a") & callable,
}


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_are_values(name):
    """Two that were made alike are equal; copies are; others are not; none can be changed."""
    one, two = SELECTORS[name](), SELECTORS[name]()

    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert all(one != make() for other, make in SELECTORS.items() if other != name)
    assert one != name
    for attribute in (*type(one).__slots__, "other"):
        with pytest.raises(FrozenError, match=r"expected no assignment, for a selector is a value"):
            setattr(one, attribute, None)
    assert one == two

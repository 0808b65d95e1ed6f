"""Values that are accepted as selectors, and values that are not."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from tests.helpers.counting_calls import is_linear
from tests.helpers.trees import Affine, Buffered, Holder, affine, ramp


def test_a_selector_sees_the_leaves_that_is_leaf_makes():
    """A node that it stops at is one leaf; None, too."""
    tree = [Affine(1, 2), None, 3]
    selector = pm.select.type(Affine)

    for is_leaf in (None, lambda x: isinstance(x, Affine)):
        assert pm.filter(tree, selector, is_leaf=is_leaf) == [Affine(1, 2), None, None]
    assert selector.mask(tree, lambda x: x is None) == [True, True, False, False]


SELECTORS = {
    "path": lambda: pm.select.path("a/*"),
    "type": lambda: pm.select.type(float),
    "role": lambda: pm.select.role("buffer"),
    "at": lambda: pm.select.at(len),
    "and": lambda: pm.select.path("a") & pm.select.type(int),
    "or": lambda: pm.select.path("a") | pm.select.type(int),
    "not": lambda: ~pm.select.path("a"),
    "predicate": lambda: pm.select.path("a") & callable,
    "by": lambda: pm.by({"a": 1, ...: 2}),
    "by others": lambda: pm.by({...: 2}),
}


def test_selectors_are_values():
    """Selectors of equal arguments are equal; copies are; others are not."""
    for name, make in SELECTORS.items():
        one, two = make(), make()
        assert one == two
        assert hash(one) == hash(two)
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
        assert all(one != other() for kind, other in SELECTORS.items() if kind != name)
        assert one != name


@pytest.mark.parametrize(
    "use",
    [
        bool,
        lambda rule: not rule,
        lambda rule: pm.filter_vmap(lambda x: x, in_axes=rule)(Holder(ramp(2))),
        lambda rule: pm.filter_vmap(lambda x: x, in_axes=pm.by({...: rule}))(ramp(2)),
        lambda rule: pm.filter_jit(lambda x: x, in_shardings=pm.by({...: rule}))(ramp(2)),
        lambda rule: pm.filter([1], pm.by({...: rule})),
        lambda rule: pm.filter_jit(rule),
        lambda rule: pm.filter_vmap(rule),
        lambda rule: pm.filter_map(rule, ramp(2)),
        lambda rule: pm.tree_at(lambda t: rule, [1], 2),
    ],
)
def test_a_rule_is_neither_a_truth_value_nor_a_function_of_leaves(use):
    """Where a bool or a function is allowed, a rule must not be taken for "everywhere"."""
    for make in SELECTORS.values():
        with pytest.raises(pm.PytreemodError, match=r"\w"):
            use(make())


WEIGHTS = {
    "path": pm.select.path("**.weight"),
    "not": ~pm.select.path("**.bias"),
    "at": pm.select.at(lambda layers: [layer.weight for layer in layers]),
    "type and predicate": pm.select.type(Affine) & (lambda leaf: leaf.ndim == 2),
    "by": pm.by({"**.bias": False, ...: True}),
}
"""Rules that mean the weights of a list of layers."""


@pytest.mark.parametrize("rule", WEIGHTS.values(), ids=WEIGHTS)
def test_a_rule_is_a_mask_of_optax(rule):
    """It means the same leaves there as here, and never all of them."""
    model = [affine(), affine()]
    weights, zero = [True, False, True, False], optax.masked(optax.set_to_zero(), rule)
    for optimizer, gradient, expected in [
        (optax.adamw(1.0, weight_decay=0.5, mask=rule), jnp.zeros_like, weights),
        (optax.add_decayed_weights(0.5, mask=rule), jnp.zeros_like, weights),
        (optax.chain(optax.sgd(1.0), zero), jnp.ones_like, [not weight for weight in weights]),
    ]:
        grads = jax.tree.map(gradient, model)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = optimizer.update(grads, optimizer.init(model), model)
        assert [bool(jnp.any(leaf)) for leaf in jax.tree.leaves(updates)] == expected


def test_a_by_gives_the_labels_of_optax():
    """multi_transform asks it of parameters and of gradients."""
    model = [affine(), Buffered(ramp(2), ramp(2), ramp(2)), None]
    labels = pm.by({"0": "slow", pm.select.role("buffer"): "still", ...: "fast"})
    optimizer = optax.multi_transform(
        {"slow": optax.sgd(0.5), "fast": optax.sgd(2.0), "still": optax.set_to_zero()}, labels
    )
    ones = jax.tree.map(jnp.ones_like, model)
    updates, _ = optimizer.update(ones, optimizer.init(model), model)
    assert [float(leaf.ravel()[0]) for leaf in jax.tree.leaves(updates)] == [-0.5, -0.5, -2, 0, -2]
    assert jax.tree.leaves(labels([affine(), None])) == ["slow", "slow"]


@pytest.mark.parametrize("rule", WEIGHTS.values(), ids=WEIGHTS)
def test_a_mask_of_gradients(rule):
    """Leaves without a gradient are None there: rules go by the path."""
    model = [affine(), affine()]
    gradients = pm.filter_grad(
        lambda model: sum(jnp.sum(layer(ramp(3))) for layer in model), wrt=pm.select.path("0")
    )(model)
    found = rule(gradients)
    assert found[0] == Affine(True, False)
    assert found[1] == Affine(None, None)


def test_a_path_to_a_node_without_leaves_is_in_the_tree():
    """It selects nothing, but is not an error: the model may have leaves there later."""
    for tree, pattern in [
        ({"a": None, "b": 1}, "a"),
        ({"a": None, "b": 1}, "a.weight"),
        ({"a": [], "b": 1}, "a.0.weight"),
        ({"a": optax.MaskedNode(), "b": 1}, "a.**"),
        ({"a": [None, ()], "b": 1}, "**.1"),
    ]:
        selector = pm.select.path(pattern)
        assert pm.filter(tree, selector)["b"] is None
        assert pm.filter(tree, ~selector)["b"] == 1
        assert selector(tree)["b"] is False
    # With wildcards, past a leaf, or elsewhere, it is misspelt.
    for pattern in ("*.weight", "b.weight", "c"):
        with pytest.raises(SpecError, match=re.escape(pattern)):
            pm.filter({"a": None, "b": 1}, pm.select.path(pattern))


@pytest.mark.parametrize("answer", [1, None, "yes", np.ones(2, bool)])
def test_a_predicate_answers_with_a_bool(answer):
    """Truthy is not True; a traced answer is none, either."""
    for spec in (lambda leaf: answer, pm.select.type(int) & (lambda leaf: answer)):
        with pytest.raises(SpecError, match="leaf"):
            pm.filter([1, 2], spec)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="bool"):
        jax.jit(lambda x: pm.filter([x], lambda leaf: leaf > 0))(jnp.asarray(1.0))


@pytest.mark.parametrize(
    "use",
    [
        lambda model: pm.resolve("weight", model),
        lambda model: pm.select.role("param") & model,
        lambda model: pm.trainable(model, wrt=["weight", "bias"]),
    ],
)
def test_what_is_meant_for_another_argument_is_refused(use):
    """A model as a selector, a list of paths as a prefix."""
    with pytest.raises(SpecError, match="Affine"):
        use(affine())


def test_many_nodes_cost_by_their_number():
    """Each was compared with each leaf."""
    layers = [affine() for _ in range(160)]
    assert is_linear(lambda n: lambda: pm.select.at(lambda x: [a.weight for a in x])(layers[:n]))
    assert is_linear(lambda n: lambda: pm.tree_at("*.weight", layers[:n], replace_fn=id))

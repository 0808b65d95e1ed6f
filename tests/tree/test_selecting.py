"""Values that are accepted as selectors, and values that are not."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import FrozenError, SpecError
from pytreemod.tree.nodes import Location
from tests.goldens import refusals
from tests.helpers.counting_calls import is_linear
from tests.helpers.trees import Affine, Buffered, Holder, affine, every_tree, ramp

LAYER = pm.nn.Linear(2, 2, key=jax.random.key(0))


def test_a_method_or_a_module_without_arrays_is_a_predicate():
    """Only a Module that holds arrays is refused: a function of any other kind may be meant."""

    class OfRank(pm.Module):
        rank: int = pm.field(static=True)

        def __call__(self, leaf):
            return leaf.ndim == self.rank

    for spec in (OfRank(2), OfRank(2).__call__, pm.filter_jit(OfRank(2))):
        picked = pm.select.role("param") & spec
        assert picked.mask(LAYER) == [True, False]


@pytest.mark.parametrize("answer", [np.True_, np.asarray(True), jnp.asarray(True)])
def test_an_array_of_one_bool_is_a_bool(answer):
    """Comparing an array's size or value gives such an answer."""
    assert pm.filter([1, 2], lambda leaf: answer) == [1, 2]


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
    """For nodes as leaves, the children of the named node are not selected."""
    tree = {"inner": {"x": [1]}}
    keys = [(jax.tree_util.DictKey("inner"),), (jax.tree_util.DictKey("inner"),) * 2]
    locs = [Location(path, None, (), "param", is_node=True) for path in keys]

    assert selector.pick(locs, tree, None) == [True, False]
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
    """Selectors of equal arguments are equal; copies are; others are not; all are immutable."""
    one, two = SELECTORS[name](), SELECTORS[name]()

    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert all(one != make() for other, make in SELECTORS.items() if other != name)
    assert one != name
    for attribute in (*type(one).__slots__, "other"):
        with pytest.raises(
            FrozenError, match=r"expected no assignment, because a selector is immutable"
        ):
            setattr(one, attribute, None)
    assert one == two


@every_tree
def test_a_selector_is_called_on_a_tree(make):
    """selector(tree) is a tree of bools, of the same structure, which equals the mask."""
    tree = make()
    for selector in (pm.select.type(jax.Array), pm.select.role("buffer"), ~pm.select.type(list)):
        bools = selector(tree)
        assert jax.tree.structure(bools) == jax.tree.structure(tree)
        assert jax.tree.leaves(bools) == selector.mask(tree)
        assert {*map(type, jax.tree.leaves(bools))} <= {bool}


RULES = {**SELECTORS, "by": lambda: pm.by({"a": 1, ...: 2})}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_no_truth_value(name):
    """Functions that take a bool, a mask or a selector must not take a rule for "everywhere"."""
    rule = RULES[name]()
    for question in (bool, lambda rule: rule and 1, lambda rule: not rule):
        with pytest.raises(
            SpecError,
            match=r"expected a call with a tree, got a conversion to bool\.\n"
            r"  for the value of each leaf, write\n      rule\(tree\)",
        ):
            question(rule)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "use",
    [
        lambda rule: pm.filter_vmap(lambda x: x, in_axes=rule)(Holder(ramp(2))),
        lambda rule: pm.filter_vmap(lambda x: x, in_axes=pm.by({...: rule}))(ramp(2)),
        lambda rule: pm.filter_vmap(lambda x: x, out_axes=pm.by({...: rule}))(ramp(2)),
        lambda rule: pm.filter_jit(lambda x: x, in_shardings=pm.by({...: rule}))(ramp(2)),
        lambda rule: pm.filter([1], pm.by({...: rule})),
        lambda rule: pm.filter_jit(rule),
        lambda rule: pm.filter_vmap(rule),
        lambda rule: pm.filter_checkpoint(lambda x: x, policy=rule),
        lambda rule: pm.filter_map(rule, ramp(2)),
        lambda rule: pm.tree_at(lambda t: rule, [1], 2),
    ],
)
def test_a_rule_is_no_function_of_leaves(name, use):
    """Where a function is allowed, a misplaced rule is refused, and not called."""
    with pytest.raises(pm.PytreemodError, match=r"expected"):
        use(RULES[name]())


WEIGHTS = {
    "path": pm.select.path("**.weight"),
    "not": ~pm.select.path("**.bias"),
    "at": pm.select.at(lambda layers: [layer.weight for layer in layers]),
    "type and predicate": pm.select.type(Affine) & (lambda leaf: leaf.ndim == 2),
    "by": pm.by({"**.bias": False, ...: True}),
}
"""Rules that mean the weights of a list of layers."""


def changed(optimizer, model, gradients=None):
    """Which leaves of a model an optimizer changes, from gradients that are all zero."""
    if gradients is None:
        gradients = jax.tree.map(jnp.zeros_like, model)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(gradients, optimizer.init(model), model)
    return [bool(jnp.any(leaf)) for leaf in jax.tree.leaves(updates)]


@pytest.mark.parametrize("rule", WEIGHTS.values(), ids=WEIGHTS)
def test_a_rule_is_a_mask_of_optax(rule):
    """It means the same leaves there as here, and never all of them."""
    model = [affine(), affine()]
    weights = [True, False, True, False]
    ones = jax.tree.map(jnp.ones_like, model)

    assert changed(optax.adamw(1.0, weight_decay=0.5, mask=rule), model) == weights
    assert changed(optax.add_decayed_weights(0.5, mask=rule), model) == weights
    zero = optax.masked(optax.set_to_zero(), rule)
    assert changed(zero, model, ones) == [not weight for weight in weights]
    frozen = optax.chain(optax.sgd(1.0), zero)
    assert changed(frozen, model, ones) == [not weight for weight in weights]


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


def test_a_mask_inside_a_mask():
    """Other leaves are empty nodes there: a path that leads to one of them is not an error."""
    model = [affine(), affine()]
    ones = jax.tree.map(jnp.ones_like, model)
    first, weights = pm.select.path("0"), pm.select.path("**.weight")
    decay = optax.add_decayed_weights(0.5, mask=pm.select.path("1.weight"))

    assert changed(
        optax.masked(optax.masked(optax.set_to_zero(), weights), first), model, ones
    ) == [
        False,
        True,
        True,
        True,
    ]
    assert not any(changed(optax.masked(decay, first), model))
    assert not any(changed(optax.masked(decay, [True, False]), model))
    assert changed(optax.masked(decay, ~first), model) == [False, False, True, False]


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


@pytest.mark.parametrize(
    ("tree", "pattern"),
    [
        ({"a": None, "b": 1}, "a"),
        ({"a": None, "b": 1}, "a.weight"),
        ({"a": [], "b": 1}, "a.0.weight"),
        ({"a": optax.MaskedNode(), "b": 1}, "a.**"),
        ({"a": [None, ()], "b": 1}, "a.*"),
        ({"a": [None, ()], "b": 1}, "**.1"),
    ],
)
def test_a_path_to_a_node_without_leaves_is_in_the_tree(tree, pattern):
    """It selects nothing, but is not an error: the model may have leaves there later."""
    selector = pm.select.path(pattern)

    assert pm.filter(tree, selector)["b"] is None
    assert pm.filter(tree, ~selector)["b"] == 1
    assert selector(tree)["b"] is False


@pytest.mark.parametrize(
    "rule",
    [
        pm.select.path("a"),
        pm.select.role("buffer"),
        pm.select.at(lambda t: t["a"]),
        pm.select.role("buffer") & pm.select.path("a"),
        pm.select.role("buffer") | ~pm.select.path("a"),
    ],
)
def test_a_rule_of_places_is_structural(rule):
    """It says the same of all trees of one structure, so that it is asked once for each."""
    assert rule.is_structural()
    assert (rule & True).is_structural()


@pytest.mark.parametrize("rule", [pm.select.path("a"), pm.select.role("buffer")])
def test_a_rule_with_a_predicate_in_it_is_not_structural(rule):
    """The answer of a predicate for an array may differ in the next call, on either side."""
    assert not (rule & pm.is_array).is_structural()
    assert not (pm.is_array & rule).is_structural()
    assert not (rule | pm.is_array).is_structural()
    assert not (pm.is_array | rule).is_structural()
    assert not (~(rule | pm.is_array)).is_structural()


class _Roles(pm.Module):
    lora: object = pm.field(role="lora_a")
    mean: object = pm.buffer()
    weight: object = None


@pytest.mark.parametrize("role", ["lora_a", "buffer", "something else"])
def test_a_role_that_a_tree_lacks_is_no_mistake(role):
    """A rule for many models may name a role that one of them does not have."""
    assert pm.select.role(role)({"a": 1}) == {"a": False}


def test_many_nodes_cost_by_their_number():
    """Nodes by access, and rules by path: each was compared with each leaf."""
    layers = [affine() for _ in range(160)]

    assert is_linear(lambda n: lambda: pm.select.at(lambda x: [a.weight for a in x])(layers[:n]))
    rules = [pm.by({**{f"[{i}].weight": i for i in range(n)}, ...: -1}) for n in range(161)]
    assert is_linear(lambda n: lambda: rules[n](layers[:n]))


test_refusals = refusals(globals())

"""The rule of each leaf, as it is decided and cached."""

import pickle

import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SpecError
from pytreemod.training.plans import make_plan
from tests.goldens import refusals
from tests.helpers.trees import Affine, Buffered, Static, affine, ramp

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)


def model():
    """Trained, left alone, of the user's own role, and no floating array."""
    return {"a": Buffered(ramp(1), ramp(2), ramp(3)), "b": affine(), "n": jnp.arange(2), "p": 0.5}


def test_leaves_are_numbered_by_their_rules():
    """The first that selects one, for all trained leaves; others have none."""
    plan = make_plan(pm.by({"b.bias": ADAM, Affine: None, ...: SGD}), model())

    assert plan.labels == (2, -1, 2, 1, 0, -1, -1)
    assert plan.is_used == (True, False, True)
    assert plan.is_trained == (True, False, True, False, True, False, False)


def test_what_is_not_trained_needs_no_rule():
    """A buffer, integers, a number of Python's."""
    plan = make_plan(pm.by({"a": SGD, "b": None}), model())

    assert plan.labels == (0, -1, 0, 1, 1, -1, -1)


def test_plans_of_equal_models_are_equal():
    """And have the same hash, as configuration must."""
    rules = pm.by({"a": SGD, ...: None})
    plan, same = make_plan(rules, model()), make_plan(rules, model())
    other = make_plan(pm.by({"b": SGD, ...: None}), model())

    assert plan == same
    assert hash(plan) == hash(same)
    assert plan != other
    assert plan != "plan"


def test_plans_can_be_pickled():
    """JAX's own structures of trees with Modules cannot."""
    rules = pm.by({Buffered: SGD, pm.select.path("b") & Affine: None})
    plan = make_plan(rules, model())

    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_tells_how_many_leaves_each_rule_has():
    """Where it is printed, and where files are compared."""
    assert repr(make_plan(pm.by({"b.bias": ADAM, ...: SGD}), model())) == "<1, 3 of 7 leaves>"


def test_a_leaf_without_a_rule_is_told_by_path():
    """With the two ways to give it one."""
    with pytest.raises(SpecError, match="none for 2 of 4") as caught:
        make_plan(pm.by({"b": SGD}), model())

    text = str(caught.value)
    assert "at model['a'].weight: f32[1]" in text
    assert "at model['a'].low_rank: f32[3]" in text
    assert "pm.by({..., ...: None})" in text


def test_a_rule_that_an_earlier_one_leaves_nothing_is_refused():
    """Its leaves would have another rule, or none; the error names the path."""
    # But where it makes no difference.
    assert make_plan(pm.by({"b.**": None, "b": None, ...: ADAM}), model()).is_used[2]


@pytest.mark.parametrize("selector", ["a.mean", "n", "p"])
def test_rules_for_what_is_not_trained_are_none_the_worse(selector):
    """Buffers, and integers, are leaves like others."""
    rules = pm.by({"b.**": None, selector: SGD, ...: ADAM})

    assert make_plan(rules, model()).is_used == (False, False, True)


def test_predicates_are_asked_of_the_arrays():
    """They may read shapes and dtypes."""
    plan = make_plan(pm.by({lambda x: getattr(x, "ndim", 0) > 1: SGD, ...: None}), model())

    assert plan.labels == (1, -1, 1, 0, 1, -1, -1)


def test_what_configuration_holds_is_no_leaf():
    """A model with other configuration is another structure, and another plan."""
    one, two = Static(ramp(1), 1), Static(ramp(1), 2)

    assert make_plan(SGD, one) != make_plan(SGD, two)
    assert make_plan(SGD, one).labels == (0,)


def test_a_plan_knows_whether_layers_or_members_are_stacked():
    """At any depth, also after a pickle, so that models without them pay nothing at a step."""
    stack = nn.Stack(lambda: nn.LayerNorm(2), 2)
    plans = [make_plan(SGD, tree) for tree in (model(), [nn.LayerNorm(2)], {"a": [stack]})]

    assert [plan.has_layers for plan in plans] == [False, False, True]
    assert pickle.loads(pickle.dumps(plans[2])).has_layers


test_refusals = refusals(globals())

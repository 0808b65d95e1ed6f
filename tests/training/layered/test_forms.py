"""The ways to call a transformation: each gives what it promises, whatever the others do."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pytreemod import nn
from pytreemod.training.layered.forms import ChainedRule, ListedRule
from tests.helpers.comparing import assert_same


def layers():
    return nn.Stack(lambda key: nn.Linear(3, 2, key=key), 4, key=jax.random.key(0))


def test_a_chain_gives_what_optax_gives():
    """Each link in its own way, with its own state."""
    model = layers()
    links = [optax.clip_by_global_norm(0.1), optax.trace(0.9)]
    form, rule = ChainedRule(links), optax.chain(*links)

    updates, state = form.update(model, form.init(model), model)
    expected, after = rule.update(model, rule.init(model), model)
    assert_same(updates, expected)
    assert_same(state, after)


def test_a_list_of_layers_is_what_the_rule_sees():
    """And its state has the form of the model."""
    seen = []

    def update(updates, state, params=None):
        seen.append([x.shape for x in jax.tree.leaves(updates)])
        return jax.tree.map(lambda x: x / jnp.max(jnp.abs(x)), updates), updates

    model = layers()
    form = ListedRule(optax.GradientTransformation(lambda params: params, update))
    updates, state = form.update(model, form.init(model), model)

    assert seen == [[(2, 3), (2,)] * 4]
    assert_same(state, model)
    assert jnp.max(jnp.abs(updates.layer.weight), axis=(1, 2)) == pytest.approx(1.0)

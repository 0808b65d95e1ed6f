"""The ways to call a transformation: each keeps its promise, independent of the others."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pytreemod import nn
from pytreemod.training.layered.forms import ChainedRule, ListedRule, RulePart
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import ramp


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


def test_a_part_is_mapped_with_its_parameters_and_further_arguments():
    """Each layer sees its own row of all of them."""

    def update(updates, state, params, like):
        made = jax.tree.map(lambda u, p, x: u + jnp.sum(p) * jnp.max(x), updates, params, like)
        return made, state + 1

    rule = optax.GradientTransformationExtraArgs(lambda params: jnp.max(params["w"]), update)
    part = RulePart((0,), 1, (1,), (), jax.tree.structure(0.0), rule, "all")
    rows = {"w": ramp(3, 2)}

    (made,), (state,) = part.update(rows, part.init(rows), rows, {"like": {"w": 2 * rows["w"]}})
    w = rows["w"]
    assert_close(made, w + jnp.sum(w, 1, keepdims=True) * jnp.max(2 * w, 1, keepdims=True))
    assert_close(state, jnp.max(w, 1) + 1)

"""Law: a function of each array is applied to each layer, and each member, as if alone.

For every way to hold several as one, in one another and in any container.
"""

import functools as ft
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_close

KEY = jax.random.key(0)
AXES = {"weight": 2, "bias": 1, "base": 2, "a": 2, "b": 2, "g": 2, "trees": 2}
"""How many axes an array has in one layer, by the last of these steps in its path."""
WEIGHTS = pm.select.path("**.weight")


pytestmark = pytest.mark.usefixtures("usual_promotion")


def linear(key):
    return nn.Linear(2, 2, key=key)


def stack(make, depth=2):
    return lambda key: nn.Stack(make, depth, key=key)


def ensemble(make, n=2):
    return lambda key: nn.Ensemble(make, n, key=key)


FORMS = {
    "Stack": stack(linear),
    "Ensemble": ensemble(linear),
    "Stacks in a Stack": stack(stack(linear)),
    "Ensemble of Stacks": ensemble(stack(linear)),
    "Ensembles in a Stack": stack(ensemble(linear)),
}


def lists(node):
    """The same, with a list of layers, or members, instead of a Stack or Ensemble."""
    if isinstance(node, (nn.Stack, nn.Ensemble)):
        return [lists(layer) for layer in node.unstack()]
    return node


def check_axes(tree):
    """Each leaf has as many axes more than in one layer."""
    checked = 0
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(pm.layer_axes(tree)), jax.tree.leaves(tree), strict=True
    )
    for (path, axes), leaf in pairs:
        steps = [getattr(step, "name", None) for step in path]
        known = [AXES[step] for step in steps if step in AXES]
        if known:
            checked += 1
            assert jnp.ndim(leaf) - known[-1] == axes, (path, jnp.shape(leaf))
    assert checked


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled
def test_the_axes_are_those_that_one_layer_lacks(form, tmp_path):
    """In the model, in trees of its structure, and in results made from it."""
    make = FORMS[form]
    model = make(KEY)
    adapted = pm.lora(model, WEIGHTS, 1, key=KEY)
    mapped = pm.map_parameters(jnp.exp, model, WEIGHTS)
    opt = pm.Optimizer(optax.adam(0.1))
    pm.save(tmp_path / "file", model)
    for tree in (
        model,
        {"nets": [model]},
        pm.filter_eval_shape(make, KEY),
        pm.filter_grad(lambda m: sum(map(jnp.sum, jax.tree.leaves(m))))(model),
        opt.init(model),
        opt.init(adapted),
        pm.tree_at(WEIGHTS, model, replace_fn=jnp.negative),
        adapted,
        mapped,
        pm.resolve(mapped),
        pm.filter(model, WEIGHTS),
        pm.filter_jit(lambda m: m)(model),
        pickle.loads(pickle.dumps(model)),
        pm.load(tmp_path / "file", make(jax.random.key(1))),
    ):
        check_axes(tree)


def of_length_one(w):
    return w / jnp.linalg.norm(w)


def adapted(model):
    model = pm.lora(model, WEIGHTS, 1, key=KEY, alpha=2.0)
    factors = pm.select.role("lora")
    model = pm.tree_at(factors, model, replace_fn=jnp.ones_like)
    lars = pm.per_layer(optax.lars(0.1))
    opt = pm.Optimizer(pm.by({factors: lars, ...: None})).init(model)
    return pm.resolve(opt.update(model, grads=model)[0])


def trained(model):
    model = pm.map_parameters(of_length_one, model, WEIGHTS)
    opt = pm.Optimizer(pm.per_layer(optax.lars(0.1))).init(model)
    return opt.update(model, grads=jax.tree.map(jnp.sin, model))[0]


CHANGES = {
    "mapped": lambda m: pm.resolve(pm.map_parameters(of_length_one, m, WEIGHTS)),
    "mapped with an inverse": ft.partial(
        pm.map_parameters, jnp.transpose, selector=WEIGHTS, inverse=jnp.transpose
    ),
    "mapped and trained": trained,
    "quantized": lambda m: pm.resolve(pm.quantize(m, pm.by({WEIGHTS: "int8", ...: None}))),
    "adapted and trained": adapted,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled
def test_each_layer_is_changed_as_if_alone(form, change):
    """Also by functions that read all of an array."""
    model, do = FORMS[form](KEY), CHANGES[change]
    # Shared leaves are then a parameter of each member.
    alone = jax.tree.map(jnp.copy, lists(model))

    assert_close(lists(do(model)), do(alone), rtol=1e-5, atol=1e-6)

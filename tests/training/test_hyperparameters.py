"""Hyperparameters that are changed between two steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.trees import Affine, affine, ramp


@pytest.fixture(autouse=True)
def _standard_promotion():
    """optax injects values with a float dtype, and an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def injected(rate=1.0, **kwargs):
    """Gradient descent whose learning rate is in the state."""
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, **kwargs)


def model():
    """Two layers, and a norm."""
    return {"a": affine(1, 1), "b": affine(1, 1), "norm": nn.LayerNorm(1)}


def three_groups():
    """Two of which have a learning rate in the state."""
    return pm.by({"a": injected(), nn.LayerNorm: optax.sgd(1.0), ...: injected()})


def ones(tree):
    """A gradient."""
    return jax.tree.map(jnp.ones_like, tree)


def rates(opt):
    """The learning rates."""
    return [float(s.hyperparams["learning_rate"]) for s in opt.states if hasattr(s, "hyperparams")]


def test_all_groups_are_meant_if_none_is_named():
    """Those that have it; the others have none that could be changed."""
    tree = model()
    opt = pm.Optimizer(three_groups()).init(tree).with_hyperparams(learning_rate=0.5)

    new, _ = opt.update(tree, ones(tree))

    assert rates(opt) == [0.5, 0.5]
    assert np.allclose(new["b"].bias, tree["b"].bias - 0.5)
    assert np.allclose(new["norm"].bias, tree["norm"].bias - 1)


@pytest.mark.parametrize(
    "selector", ["a", pm.select.at(lambda m: m["a"]), pm.select.path("a") & Affine]
)
def test_groups_are_named_by_selectors_of_their_leaves(selector):
    """By path, by access, and combined."""
    opt = pm.Optimizer(three_groups()).init(model())

    assert rates(opt.with_hyperparams(selector, learning_rate=0.25)) == [0.25, 1.0]


def test_what_acts_on_all_is_meant_with_all():
    """A hyperparameter of `before` belongs to no group."""
    scale = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=1.0)
    opt = pm.Optimizer(three_groups(), before=scale).init(model())

    new = opt.with_hyperparams(max_norm=0.5, learning_rate=2.0)

    assert float(new.before_state.hyperparams["max_norm"]) == 0.5
    assert rates(new) == [2.0, 2.0]


def test_it_is_found_wherever_it_is_kept():
    """In a chain, and inside of gradient accumulation."""
    rule = optax.MultiSteps(optax.chain(optax.clip(1.0), injected()), every_k_schedule=2)
    opt = pm.Optimizer(rule).init(model()).with_hyperparams(learning_rate=0.5)

    assert float(optax.tree.get(opt, "learning_rate")) == 0.5


@pytest.mark.parametrize("value", [0.5, np.float64(0.5), 1])
def test_nothing_is_compiled_anew(value):
    """The new value has shape, dtype and weak type of the old, whatever it was given as."""
    traces = []

    @pm.filter_jit
    def step(tree, opt):
        traces.append(1)
        return opt.update(tree, ones(tree))

    tree = affine(1, 1)
    tree, opt = step(tree, pm.Optimizer(injected()).init(tree))
    new, opt = step(tree, opt.with_hyperparams(learning_rate=value))

    assert len(traces) == 1
    assert np.allclose(new.bias, tree.bias - float(value))


def test_each_member_of_a_stack_may_have_its_own():
    """An array like the old one; a scalar is for all of them."""
    trees = pm.stack([affine(1, 1), affine(1, 1)])
    opts = pm.filter_vmap(pm.Optimizer(injected()).init)(trees)

    own = opts.with_hyperparams(learning_rate=ramp(2))

    assert own.states[0].hyperparams["learning_rate"].tolist() == [1.0, 2.0]
    same = opts.with_hyperparams(learning_rate=3.0)
    assert same.states[0].hyperparams["learning_rate"].tolist() == [3.0, 3.0]


REFUSED = {
    "what is not in the state": (
        lambda: pm.Optimizer(optax.adam(1e-3)).init(model()).with_hyperparams(learning_rate=0.1),
        ArgumentError,
        "learning_rate",
    ),
    "what a schedule sets in each step": (
        lambda: (
            pm.Optimizer(injected(optax.linear_schedule(1.0, 0.0, 10)))
            .init(model())
            .with_hyperparams(learning_rate=0.1)
        ),
        ArgumentError,
        "schedule",
    ),
    "a part of a group": (
        lambda: pm.Optimizer(three_groups()).init(model()).with_hyperparams("a.weight", momentum=1),
        SpecError,
        "bias",
    ),
    "a fraction for an integer": (
        lambda: (
            pm.Optimizer(optax.inject_hyperparams(lambda n: optax.scale(n * 1.0))(n=2))
            .init(model())
            .with_hyperparams(n=0.5)
        ),
        ArgumentError,
        r"0\.5",
    ),
    "too many numbers": (
        lambda: pm.Optimizer(injected()).init(model()).with_hyperparams(learning_rate=ramp(3)),
        ShapeError,
        r"f32\[3\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_have_no_effect_or_another_is_refused(call, error, match):
    """By the name of the hyperparameter, or the path."""
    with pytest.raises(error, match=match):
        call()

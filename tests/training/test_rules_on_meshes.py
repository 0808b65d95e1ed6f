"""The optimizer on a mesh of explicit axes: equal to one device."""

import jax
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_close
from tests.helpers.meshes import EXPLICIT, all_lie, on

KEY = jax.random.key(0)


pytestmark = pytest.mark.usefixtures("usual_promotion")


def at(x, *entries):
    return pm.filter_shard(x, on(*entries, mesh=EXPLICIT))


def linear(key):
    return nn.Linear(4, 4, key=key)


MODEL = {
    "first": linear(KEY),
    "stack": nn.Stack(linear, 4, key=KEY),
    "nets": nn.Ensemble(linear, 4, key=KEY),
}
WAYS = {"column": (None, "model", None), "row": (None, None, "model"), "layers": ("data",)}


def laid(model, way):
    """A model whose weights, of matrices and stacks of them, are split in a way; biases whole."""

    def lay(leaf):
        entries = WAYS[way][3 - leaf.ndim :] if leaf.ndim > 1 else ()
        return at(leaf, *entries) if leaf.shape[-2:] == (4, 4) else at(leaf)

    return jax.tree.map(lay, model)


def gradients(model):
    return jax.tree.map(lambda x: 0.5 * x + 1, model)


MUON = optax.contrib.muon(1e-2)
RULES = {
    "adamw": optax.chain(pm.per_member(optax.clip_by_global_norm(1.0)), optax.adamw(1e-2)),
    "adafactor": pm.per_layer(optax.adafactor(1e-2, min_dim_size_to_factor=2)),
    "muon": pm.per_layer(MUON),
    "by selector": pm.by({"stack": pm.per_layer(MUON), "nets": None, ...: optax.sgd(0.1)}),
}


def step(opt, model, grads):
    return opt.update(model, grads=grads)


@pytest.fixture(scope="module", params=RULES)
def rule(request):
    """A rule, with a step of it on one device."""
    rule = RULES[request.param]
    opt = pm.Optimizer(rule).init(MODEL)
    return rule, pm.filter_jit(step)(opt, MODEL, gradients(MODEL))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_one_device(rule, way):
    """The model and the state; shardings are unchanged, and the next step is no new program."""
    rule, expected = rule
    model = laid(MODEL, way)
    opt = pm.Optimizer(rule).init(model)
    counted = pm.debug.assert_max_traces(step, max_traces=None)
    stepped = pm.filter_jit(counted)
    new = stepped(opt, model, gradients(model))

    assert_close([*map(jax.tree.leaves, new)], [*map(jax.tree.leaves, expected)], atol=1e-5)
    assert all_lie(new) == all_lie((model, opt))
    stepped(new[1], new[0], gradients(new[0]))
    assert pm.debug.get_num_traces(counted) == 1


@pytest.mark.slow
def test_outside_of_jit():
    """A step that is traced once more runs eagerly, too."""
    model = laid({"first": MODEL["first"]}, "column")
    opt = pm.Optimizer(RULES["muon"]).init(model)
    new, after = opt.update(model, grads=gradients(model))

    plain = pm.Optimizer(RULES["muon"]).init({"first": MODEL["first"]})
    expected, _ = plain.update(
        {"first": MODEL["first"]}, grads=gradients({"first": MODEL["first"]})
    )
    assert_close(new, expected, atol=1e-5)
    assert all_lie(after) == all_lie(opt)

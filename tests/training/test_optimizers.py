"""The optimizer of a model: it does the same as optax, with selectors."""

import functools as ft

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_identical, assert_same
from tests.helpers.equations import equations
from tests.helpers.laws import array_trees, law
from tests.helpers.trees import Affine, Boxed, affine, ramp

pytestmark = pytest.mark.usefixtures("usual_promotion")


def gradients(model, step=0):
    params, _ = pm.trainable(model)
    return jax.tree.map(lambda x: (x + 1 + step) / 2, params)


def size_in_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if pm.is_array(leaf))


class Net(pm.Module):
    """A backbone of two layers, a norm, a head, a buffer, and other leaves."""

    backbone: list[Affine]
    norm: nn.LayerNorm
    head: Affine
    mean: jax.Array = pm.buffer()
    count: jax.Array
    name: str = "net"

    def __init__(self):
        self.backbone = [affine(2, 2), affine(2, 2, start=np.float32(2))]
        self.norm = nn.LayerNorm(2)
        self.head = affine(1, 2)
        self.mean = ramp(2)
        self.count = jnp.asarray(3)

    def __call__(self, x):
        for layer in self.backbone:
            x = jnp.tanh(layer(x - self.mean))
        return self.head(self.norm(x))


def loss(model):
    return jnp.sum(model(ramp(2)) ** 2)


def three_rules():
    return pm.by(
        {nn.LayerNorm: optax.adam(1e-2), "backbone.**": None, ...: optax.sgd(1e-2, momentum=0.9)}
    )


# Each array is at one path only.
models = array_trees.map(
    lambda tree: Boxed([jax.tree.map(lambda x: x.copy(), tree), ramp(2), {"a": affine()}])
)

TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw, schedule": optax.adamw(optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
}
transformations = st.sampled_from(list(TRANSFORMATIONS.values()))


@settings(law, max_examples=4)
@given(models, transformations)
def test_one_rule_is_plain_optax(model, transformation):
    """Over several steps, to the bit; and so is its state."""
    other, state = model, transformation.init(pm.trainable(model)[0])
    opt = pm.Optimizer(transformation).init(model)

    for step in range(3):
        updates, state = transformation.update(
            gradients(other, step), state, pm.trainable(other)[0]
        )
        other = pm.apply_updates(other, updates)
        model, opt = opt.update(model, grads=gradients(model, step))

    assert_same(model, other)
    assert_same(opt.states, (state,))


# ---- which leaves


def test_each_leaf_has_the_first_rule_that_picks_it():
    model = Net()
    rules = {"head.bias": 1.0, Affine: 0.1, "**.bias": 7.0, ...: 0.0}
    opt = pm.Optimizer(pm.by({key: optax.sgd(rate) for key, rate in rules.items()})).init(model)

    new, _ = opt.update(model, grads=jax.tree.map(jnp.ones_like, pm.trainable(model)[0]))

    moved = jax.tree.map(lambda a, b: np.round(np.max(a - b), 3), model, new)
    assert np.allclose([moved.head.bias, moved.head.weight], [1.0, 0.1])
    assert np.allclose([moved.backbone[0].bias, moved.norm.bias], [0.1, 7.0])
    assert np.allclose([moved.backbone[0].weight, moved.norm.weight], [0.1, 0.0])


def test_what_is_left_alone_costs_no_state():
    """Not a byte: neither a None rule, nor a buffer, nor a non-floating leaf."""
    model = Net()
    opt = pm.Optimizer(pm.by({"head": optax.adam(1e-2), ...: None})).init(model)

    count = 4
    assert size_in_bytes(opt) == 2 * size_in_bytes(model.head) + count
    whole = pm.Optimizer(optax.adam(1e-2)).init(model)
    assert size_in_bytes(whole) == 2 * size_in_bytes(pm.trainable(model)[0]) + count
    assert size_in_bytes(pm.Optimizer(optax.sgd(1e-2)).init(model)) == 0


def test_what_is_left_alone_stays_whatever_its_gradient():
    """By a rule, by its class, or by a role that it was given."""
    model = pm.with_role(Net(), "norm.bias", "buffer")
    everything = jax.tree.map(lambda x: jnp.ones_like(x, dtype=float), model)
    opt = pm.Optimizer(pm.by({"head": None, ...: optax.sgd(1.0)})).init(model)

    new, _ = opt.update(model, grads=everything)

    assert_identical(new.head, model.head)
    assert new.mean is model.mean
    assert new.norm.bias is model.norm.bias
    assert np.allclose(new.norm.weight, model.norm.weight - 1)


def test_before_acts_on_all_groups_together():
    """It sees neither frozen leaves, nor gradients from before they were removed."""
    model = Net()
    grads = jax.tree.map(jnp.ones_like, pm.trainable(model)[0])
    rules = pm.by({"backbone": None, "norm": optax.sgd(1.0), ...: optax.sgd(2.0)})
    opt = pm.Optimizer(rules, before=optax.clip_by_global_norm(1.0)).init(model)

    new, _ = opt.update(model, grads=grads)

    norm = np.sqrt(2 + 2 + 2 + 1)  # of the LayerNorm and of the head, in ones
    assert np.allclose(model.norm.weight - new.norm.weight, 1 / norm)
    assert np.allclose(model.head.bias - new.head.bias, 2 / norm)


def test_a_compiled_step_is_compiled_once_and_may_be_donated():
    """Also from the first step to the second, whose model and state the first has made."""
    expected, new = Net(), Net()
    other, opt = (pm.Optimizer(three_rules()).init(model) for model in (expected, new))

    @pm.filter_jit(donate=("model", "opt"), max_traces=1)
    def step(model, opt):
        return opt.update(model, grads=pm.filter_grad(loss)(model))

    for _ in range(3):
        expected, other = other.update(expected, grads=pm.filter_grad(loss)(expected))
        new, opt = step(new, opt)

    assert all(map(np.allclose, jax.tree.leaves(new), jax.tree.leaves(expected)))
    assert all(map(np.allclose, jax.tree.leaves(opt), jax.tree.leaves(other)))


SGD, MOMENTUM = optax.sgd(1.0), optax.sgd(1.0, momentum=0.9)


def test_files_have_the_state_by_path(tmp_path):
    """And give it back to an optimizer that was made anew, in another process too."""
    path = tmp_path / "run.safetensors"
    model = Net()
    opt = pm.Optimizer(three_rules()).init(model)
    model, opt = opt.update(model, grads=gradients(model))
    pm.save(path, (model, opt))

    fresh = pm.Optimizer(three_rules()).init(model)
    loaded, again = pm.load(path, (model, fresh))

    assert_same(jax.tree.leaves((loaded, again)), jax.tree.leaves((model, opt)))
    assert "states.0.0.mu.norm.weight" in dict(pm.named_leaves(opt))
    with pytest.raises(pm.FileError, match=r"states\.0"):
        pm.load(path, (model, pm.Optimizer(optax.sgd(0.1)).init(model)))


def test_a_step_traces_to_the_program_that_is_written_by_hand():
    """Selectors, labels and parts are gone: each group is optax's update of a list."""
    model = Net()
    opt = pm.Optimizer(three_rules()).init(model)
    adam, sgd = optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9)

    def by_hand(params, grads, states):
        (norm, head), (norm_grads, head_grads) = params, grads
        of_norm, kept = adam.update(norm_grads, states[0], norm)
        of_head, others = sgd.update(head_grads, states[1], head)
        return optax.apply_updates((norm, head), (of_norm, of_head)), (kept, others)

    params = jax.tree.leaves(model.norm), jax.tree.leaves(model.head)
    states = adam.init(params[0]), sgd.init(params[1])

    ours = equations(lambda model, opt: opt.update(model, grads=pm.trainable(model)[0]), model, opt)

    assert ours == equations(by_hand, params, params, states)


def test_extra_arguments_go_to_those_that_take_them():
    """By signature: optax's own take any, others the named ones."""
    seen = {}

    def takes_value(updates, state, params=None, *, value):
        seen["value"] = value
        return updates, state

    def takes_any(updates, state, params=None, **extra):
        seen["any"] = extra
        return updates, state

    model = affine()
    rule = ft.partial(optax.GradientTransformation, optax.init_empty_state)
    rules = pm.by({"bias": rule(takes_value), ...: optax.identity()})
    opt = pm.Optimizer(rules, before=rule(takes_any)).init(model)

    opt.update(model, grads=gradients(model), value=5, loss=6)
    assert seen == {"value": 5, "any": {"value": 5, "loss": 6}}


def test_a_state_is_no_parameter():
    """Whatever holds it: weight decay moved the running statistics of one in a dict."""
    norm, state = pm.make_with_state(nn.BatchNorm)(2)
    run = {"model": norm, "state": state, "more": [(state.restored(),)]}
    grads = pm.filter_grad(lambda run: run["model"].weight.sum())(run)
    opt = pm.Optimizer(optax.adamw(0.1, weight_decay=0.5)).init(run)
    new, _ = opt.update(run, grads=grads)

    names = ["model.weight", "model.bias"]
    assert [*pm.named_leaves(grads)] == [*pm.named_leaves(pm.trainable(run)[0])] == names
    for part in ("state", "more"):
        assert_same(new[part], run[part])
        for change in (
            lambda tree: pm.with_precision(tree, pm.by({nn.BatchNorm: "float16", ...: None})),
            lambda tree: pm.quantize({"w": ramp(2, 2), **tree}, "int8"),
            lambda tree: pm.lora({"w": ramp(2, 2), **tree}, ..., key=jax.random.key(0)),
        ):
            assert_same(change(run)[part], run[part])


def test_an_optimizer_may_be_made_inside_of_a_capture():
    """Its state is for all calls, and not for the wrapped model of that one."""
    net = nn.Linear(2, 2, key=jax.random.key(0))
    opt, _ = pm.capture(lambda m, x: (pm.Optimizer(MOMENTUM).init(m), m(x))[0], ...)(net, ramp(2))
    assert_same(opt, pm.Optimizer(MOMENTUM).init(net))


def test_gradients_are_named():
    """In optax's order, the gradients were trained, and nothing could tell."""
    model = affine()
    opt = pm.Optimizer(SGD).init(model)
    with pytest.raises(TypeError, match="positional"):
        opt.update(gradients(model), model)


def test_rules_are_replaced_and_moments_stay():
    model = affine()
    opt = pm.Optimizer(optax.adam(0.1)).init(model)
    model, opt = opt.update(model, grads=model)
    new = opt.replace(rules=optax.adam(0.0))
    assert_same(new.states, opt.states)
    assert_same(new.update(model, grads=model)[0], model)

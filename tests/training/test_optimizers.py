"""The optimizer of a model: it does the same as optax, with selectors."""

from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError, StructureError
from tests.helpers.comparing import assert_identical, assert_same
from tests.helpers.equations import equations
from tests.helpers.laws import array_trees, law
from tests.helpers.trees import Affine, Boxed, affine, ramp


@pytest.fixture(autouse=True)
def _standard_promotion():
    """The optimizers of optax divide floats by their count of steps."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def gradients(model, step=0):
    """Some gradient, another at each step."""
    params, _ = pm.trainable(model)
    return jax.tree.map(lambda x: (x + 1 + step) / 2, params)


def size_in_bytes(tree):
    """Of the arrays in a tree."""
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
    """A scalar that depends on all parameters."""
    return jnp.sum(model(ramp(2)) ** 2)


def three_rules():
    """By class, by path and by default."""
    return pm.by(
        {nn.LayerNorm: optax.adam(1e-2), "backbone.**": None, ...: optax.sgd(1e-2, momentum=0.9)}
    )


# ---- laws

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
    """As in `by`, at any position."""
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


# ---- transformations of all leaves


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


# ---- where it goes


def run(model, opt, steps=3):
    """Steps one by one, each compiled."""
    traces = []

    @pm.filter_jit(donate=("model", "opt"))
    def step(model, opt):
        traces.append(1)
        return opt.update(model, grads=pm.filter_grad(loss)(model))

    for _ in range(steps):
        model, opt = step(model, opt)
    assert len(traces) == 1
    return model, opt


def test_a_compiled_step_is_compiled_once_and_may_be_donated():
    """Also from the first step to the second, whose model and state the first has made."""
    model = Net()
    expected, other = model, pm.Optimizer(three_rules()).init(model)
    for _ in range(3):
        expected, other = other.update(expected, grads=pm.filter_grad(loss)(expected))

    new, opt = run(jax.tree.map(jnp.copy, model), other.init(model))

    assert all(map(np.allclose, jax.tree.leaves(new), jax.tree.leaves(expected)))
    assert all(map(np.allclose, jax.tree.leaves(opt), jax.tree.leaves(other)))


class Doubling(NamedTuple):
    """A transformation that can be pickled: its functions are at the top level of a file."""

    init: Any
    update: Any


def _init(params):
    return jnp.zeros(())


def _update(updates, state, params=None):
    return jax.tree.map(lambda g: -2 * g, updates), state + 1


DOUBLING = Doubling(_init, _update)
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


def test_a_model_in_another_mode_is_another_model():
    """Its structure differs."""
    model = [affine(), nn.Dropout(0.5)]
    opt = pm.Optimizer(optax.adam(1e-2)).init(model)
    quiet = pm.inference_mode(model)

    with pytest.raises(ValueError, match="Dropout"):
        opt.update(quiet, grads=gradients(quiet))


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


# ---- accepted transformations


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
    rules = pm.by({"bias": Doubling(_init, takes_value), ...: DOUBLING})
    opt = pm.Optimizer(rules, before=Doubling(_init, takes_any)).init(model)

    opt.update(model, grads=gradients(model), value=5, loss=6)
    assert seen == {"value": 5, "any": {"value": 5, "loss": 6}}


# ---- refusals


class Tied(pm.Module):
    """Two layers of one shape."""

    first: nn.Linear
    second: nn.Linear

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def untied_pair():
    """Two layers with a matrix each."""
    keys = jax.random.split(jax.random.key(0))
    return Tied(nn.Linear(3, 3, key=keys[0]), nn.Linear(3, 3, key=keys[1]))


def tied_pair():
    """The second's matrix is the first's."""
    return pm.tie(untied_pair(), "second.weight", to="first.weight")


AFFINE = affine(3, 2)


def updated(model, grads, rules=SGD, **options):
    """One step of an optimizer that is made for the model."""
    return pm.Optimizer(rules, **options).init(model).update(model, grads=grads)


def sums(updates, state, params=None):
    return jax.tree.map(jnp.sum, updates), state


REFUSED = {
    "an array that no rule has": (
        lambda: pm.Optimizer(pm.by({"weight": SGD})).init(AFFINE),
        SpecError,
        r"bias: f32\[3\]",
    ),
    "nothing to train": (
        lambda: pm.Optimizer(pm.by({...: None})).init(AFFINE),
        ArgumentError,
        "no floating array",
    ),
    "before init": (
        lambda: pm.Optimizer(SGD).update(AFFINE, grads=AFFINE),
        StructureError,
        "with 0 leaves",
    ),
    "no gradient for a part": (
        lambda: updated(AFFINE, AFFINE.replace(bias=None)),
        StructureError,
        r"grads\.bias",
    ),
    "gradients of another model": (
        lambda: updated([AFFINE], [{"weight": ramp(2)}]),
        ValueError,
        "Affine",
    ),
    "a gradient that would be broadcast": (
        lambda: updated(AFFINE, AFFINE.replace(weight=jnp.ones((3, 1)))),
        StructureError,
        r"grads\.weight: f32\[3,1\]",
    ),
    "a state that would be broadcast": (
        lambda: pm.Optimizer(MOMENTUM).init(affine(1, 3)).update(affine(2, 3), grads=affine(2, 3)),
        ShapeError,
        "another shape",
    ),
    "gradients that `before` sums": (
        lambda: updated(AFFINE, AFFINE, before=Doubling(_init, sums)),
        StructureError,
        r"model\.weight",
    ),
    "an imaginary part": (
        lambda: updated({"w": ramp(2)}, {"w": ramp(2) * 1j}),
        StructureError,
        r"model\['w'\]",
    ),
    "a model with a tie": (
        lambda: pm.Optimizer(SGD).init(untied_pair()).update(tied_pair(), grads=tied_pair()),
        StructureError,
        "with 4 leaves, and the model has 3",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_train_something_else_is_refused(call, error, match):
    """Or nothing; the path says what."""
    with jax.numpy_rank_promotion("allow"), pytest.raises(error, match=match):
        call()


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


def test_a_learning_rate_is_changed_by_tree_at():
    """As an array, without another program."""
    rule = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    model, traces = {"w": jnp.ones(2)}, []

    @pm.filter_jit
    def step(model, opt):
        traces.append(1)
        return opt.update(model, grads=model)[0]

    opt = pm.Optimizer(rule).init(model)
    rate = lambda o: o.states[0].hyperparams["learning_rate"]  # noqa: E731
    assert step(model, opt)["w"].tolist() == [0.5, 0.5]
    opt = pm.tree_at(rate, opt, replace_fn=lambda old: jnp.full_like(old, 0.25))
    assert step(model, opt)["w"].tolist() == [0.75, 0.75]
    assert len(traces) == 1


def test_rules_are_replaced_and_moments_stay():
    """By a rule as it would be given."""
    model = affine()
    opt = pm.Optimizer(optax.adam(0.1)).init(model)
    model, opt = opt.update(model, grads=model)
    new = opt.replace(rules=optax.adam(0.0))
    assert_same(new.states, opt.states)
    assert_same(new.update(model, grads=model)[0], model)


def test_an_argument_that_no_rule_takes_is_refused():
    """It would be dropped in silence."""
    opt = pm.Optimizer(pm.by({...: DOUBLING})).init(affine())
    with pytest.raises(ArgumentError, match="'valeu'"):
        opt.update(affine(), grads=affine(), valeu=1)


def test_a_parameter_at_two_paths_is_a_warning():
    """Training makes two of it."""
    with pytest.warns(pm.SharedParameterWarning, match=r"\[0\]\.weight and model\[1\]\.weight"):
        pm.Optimizer(SGD).init([AFFINE, AFFINE])

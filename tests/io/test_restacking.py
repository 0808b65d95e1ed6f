"""Stacked layers and layers in a list: loaded into one another, each at its path."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp


class Block(nn.StatefulLayer):
    """A layer with everything that a stack must take along: arrays, statistics, configuration."""

    linear: nn.Linear
    norm: nn.BatchNorm
    act: object

    def __init__(self, *, key, act=jax.nn.relu):
        self.linear = nn.Linear(3, 3, key=key)
        self.norm = nn.BatchNorm(3)
        self.act = act

    def __call__(self, x, state):
        y, state = self.norm(self.linear(x), state)
        return self.act(y), state


class Net(pm.Module):
    """A network with stacked blocks."""

    blocks: nn.Stack
    head: nn.Linear

    def __init__(self, key):
        self.blocks = nn.Stack(Block, 3, key=key)
        self.head = nn.Linear(3, 2, key=key)


class ListNet(pm.Module):
    """The same with a list."""

    blocks: list[Block]
    head: nn.Linear

    def __init__(self, key):
        self.blocks = [Block(key=k) for k in jax.random.split(key, 3)]
        self.head = nn.Linear(3, 2, key=key)


class SequentialNet(pm.Module):
    """The same with a Sequential."""

    blocks: nn.Sequential
    head: nn.Linear

    def __init__(self, key):
        self.blocks = nn.Sequential([Block(key=k) for k in jax.random.split(key, 3)])
        self.head = nn.Linear(3, 2, key=key)


def made(cls, seed):
    """A network with statistics that differ from those of a new one."""
    model, state = pm.make_with_state(cls)(jax.random.key(seed))
    x = ramp(4, 3, start=ramp(1)[0])
    if cls is ListNet:
        for block in model.blocks:
            x, state = block(x, state)
    else:
        x, state = model.blocks(x, state)
    return {"model": model, "state": state}


def outputs(tree):
    """The output of a network with its statistics."""
    model, state = pm.inference_mode(tree["model"]), tree["state"]
    x = ramp(2, 3)
    if isinstance(model, ListNet):
        for block in model.blocks:
            x, state = block(x, state)
    else:
        x, state = model.blocks(x, state)
    return model.head(x)


@pytest.mark.parametrize(
    ("cls", "other"), [(Net, ListNet), (ListNet, Net), (Net, SequentialNet), (SequentialNet, Net)]
)
def test_layers_as_one_and_in_a_list_are_loaded_into_one_another(cls, other, tmp_path):
    """With their statistics; the network computes the same as the saved one."""
    tree, like = made(cls, 0), made(other, 1)
    pm.save(tmp_path / "net", tree)
    # Their own classes are two; of the layers' nothing may differ.
    loaded, report = pm.load(tmp_path / "net", like, strict=False)

    assert all("model: like" in line for line in report.configuration)
    assert not report.missing
    assert not report.unexpected
    expected = outputs(made(cls, 0))
    assert jnp.allclose(outputs(loaded), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inner", [False, True])
def test_a_stack_and_a_sequential_are_one_in_a_strict_load(inner, tmp_path):
    """Both ways, alone and inside a dict."""

    def layers(seed):
        return [nn.Linear(3, 3, key=k) for k in jax.random.split(jax.random.key(seed), 2)]

    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=jax.random.key(2))
    one, two = (stack, nn.Sequential(layers(1)))
    if inner:
        one, two = {"a": one, "b": layers(2)}, {"a": two, "b": layers(3)}
    pm.save(tmp_path / "one", one)
    pm.save(tmp_path / "two", pm.load(tmp_path / "one", two))

    assert_same(pm.load(tmp_path / "two", one), one)


def test_layers_that_differ_cannot_be_one(tmp_path):
    """They differ in their configuration, in their shapes, or in their number."""
    like = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=jax.random.key(2))
    key = jax.random.key(0)
    odd = nn.Linear(3, 3, use_bias=False, key=key)
    pm.save(tmp_path / "odd", [nn.Linear(3, 3, key=key), odd])
    with pytest.raises(FileError, match="differ"):
        pm.load(tmp_path / "odd", like)
    drops = [nn.Dropout(0.5), nn.Dropout(0.1)]
    pm.save(tmp_path / "drops", drops)
    with pytest.raises(FileError, match="differ"):
        pm.load(tmp_path / "drops", nn.Stack(lambda: nn.Dropout(0.5), 2))
    pm.save(tmp_path / "more", [nn.Linear(3, 3, key=key)] * 3)
    with pytest.raises(FileError, match="<root>: Stack of 2"):
        pm.load(tmp_path / "more", like)


# ---- in one another

FORMS = list(itertools.product(("stack", "list"), repeat=2))
"""The containers of the outer layers, and of the inner ones."""


def layers_of(form, make, key):
    if form == "stack":
        return nn.Stack(make, 2, key=key)
    return nn.Sequential([make(key=k) for k in jax.random.split(key)])


def nested(forms, seed):
    """Twice two blocks, in which no two numbers are the same."""
    outer, inner = forms

    def net(key):
        return layers_of(outer, lambda key: layers_of(inner, Block, key), key)

    model, state = pm.make_with_state(net)(jax.random.key(seed))
    tree = {"model": model, "state": state}
    leaves, start = {}, seed * 1000
    for name, leaf in pm.named_leaves(tree).items():
        leaves[name] = jnp.arange(start, start + leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        start += leaf.size
    return pm.from_named(tree, leaves)


def blocks(tree, forms):
    """The leaves of each block, whatever its container."""
    found = {place: {} for place in itertools.product(range(2), repeat=2)}
    named = pm.named_leaves(tree)
    for place in found:
        steps = ["layer" if f == "stack" else f"layers.{i}" for f, i in zip(forms, place)]
        index = tuple(i for f, i in zip(forms, place) if f == "stack")
        for part in ("model", "state"):
            start = ".".join([part, *steps, ""])
            own = {n: leaf[index] for n, leaf in named.items() if n.startswith(start)}
            found[place] |= {f"{part}.{n[len(start) :]}": leaf for n, leaf in own.items()}
    return found


@pytest.mark.parametrize("saved", FORMS, ids="-".join)
@pytest.mark.parametrize("like", FORMS, ids="-".join)
@pytest.mark.sampled
def test_stacks_in_stacks_keep_each_layer_in_its_place(saved, like, tmp_path):
    """The inner and outer numbers of layers are equal, so a swapped axis would not be an error."""
    tree = nested(saved, 0)
    pm.save(tmp_path / "net", tree)
    loaded, report = pm.load(tmp_path / "net", nested(like, 1), strict=False)

    assert not report.missing
    assert not report.unexpected
    expected = blocks(tree, saved)
    assert len(expected[0, 1]) == 6
    assert_same(blocks(loaded, like), expected)


def test_numbers_of_each_layer_are_of_the_kind_of_likes(tmp_path):
    """A part of an array of NumPy without axes would be a scalar."""

    class Scale(pm.Module):
        by: object

        def __call__(self, x):
            return x * self.by

    def scale(number):
        return Scale(np.asarray(number, np.float32))

    stack = nn.Stack(lambda: Scale(jnp.ones(())), 2)
    pm.save(tmp_path / "one", stack)
    loaded = pm.load(tmp_path / "one", [scale(2.0), scale(3.0)], strict=False)[0]

    assert_same(loaded, [scale(1.0), scale(1.0)])
    loaded[0].by[...] = 5.0
    assert loaded[1].by == 1.0


def test_what_has_as_many_items_as_a_stack_has_layers_stays_a_list(tmp_path):
    """A State may be that of another part: its names are not a reason to stack it."""

    def run(linears):
        norms, state = pm.make_with_state(lambda: nn.Sequential([nn.BatchNorm(2)] * 2))()
        return {"linears": linears, "norms": norms, "state": state}

    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=jax.random.key(2))
    linears = [nn.Linear(3, 3, key=k) for k in jax.random.split(jax.random.key(0))]
    pm.save(tmp_path / "run", run(linears))
    loaded = pm.load(tmp_path / "run", run(stack))

    assert_same(loaded["linears"].layer.weight, jnp.stack([x.weight for x in linears]))


def test_a_state_of_another_part_has_the_axes_of_its_own(tmp_path):
    """A Stack in a Stack, elsewhere, has as many layers as that part: there are no further axes."""

    def run(norms):
        def two(key):
            return nn.Stack(lambda key: nn.Linear(2, 2, key=key), 2, key=key)

        norms, state = pm.make_with_state(norms)()
        state = pm.from_named(
            state, {name: ramp(*leaf.shape) for name, leaf in pm.named_leaves(state).items()}
        )
        return {"big": nn.Stack(two, 3, key=jax.random.key(0)), "norms": norms, "state": state}

    as_list = run(lambda: nn.Sequential([nn.BatchNorm(3), nn.BatchNorm(3)]))
    pm.save(tmp_path / "list", {**as_list, "big": [layer.unstack() for layer in layers(as_list)]})
    loaded = pm.load(tmp_path / "list", run(lambda: nn.Stack(lambda: nn.BatchNorm(3), 2)))

    mean = pm.named_leaves(loaded["state"])["layer.state_index.0"]
    assert_same(mean, jnp.stack([ramp(3), ramp(3)]))


def layers(tree):
    """The layers of the large Stack, in a list."""
    return tree["big"].unstack()


def test_layers_of_other_tools_must_be_alike(tmp_path):
    """Without configuration to compare, one would be repeated until it fits."""
    stack = nn.Stack(lambda key: nn.Linear(3, 3, use_bias=False, key=key), 2, key=jax.random.key(2))
    arrays = {"0.weight": np.ones((3, 3), np.float32), "1.weight": np.ones((3, 1), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "plain")
    with pytest.raises(FileError, match="differ"):
        pm.load(tmp_path / "plain", stack)
    arrays["1.weight"] = np.zeros((3, 3), np.float32)
    safetensors.numpy.save_file(arrays, tmp_path / "plain")
    loaded = pm.load(tmp_path / "plain", stack)
    assert_same(loaded.layer.weight, jnp.stack([jnp.ones((3, 3)), jnp.zeros((3, 3))]))


def test_keys_of_layers_go_along(tmp_path):
    """Their numbers have one axis more than they have."""

    class Keyed(pm.Module):
        key: jax.Array

        def __call__(self, x):
            return x

    keys = jax.random.split(jax.random.key(0), 3)
    stack = nn.Stack(lambda key: Keyed(key), 3, key=jax.random.key(1))
    pm.save(tmp_path / "list", [Keyed(key) for key in keys])
    loaded = pm.load(tmp_path / "list", stack, strict=False)[0]
    assert_same(loaded.layer.key, keys)
    pm.save(tmp_path / "stack", loaded)
    items = pm.load(tmp_path / "stack", [Keyed(keys[0])] * 3, strict=False)[0]
    assert_same([item.key for item in items], [*keys])


def members(kind, seed, *, shared):
    """Two members of two layers each, so that no axis is known by its size."""

    def layers(number):
        start = 100 * seed + 10 * number
        linears = [nn.Linear(2, 2, key=jax.random.key(start + i)) for i in range(2)]
        if shared:
            own = [jnp.full(2, 100.0 * seed + i) for i in range(2)]
            linears = [x.replace(bias=b) for x, b in zip(linears, own, strict=True)]
        return nn.Stack.from_layers(linears) if kind == "stack" else nn.Sequential(linears)

    selector = pm.select.path("**.bias") if shared else None
    return {"nets": nn.Ensemble.from_members([layers(0), layers(1)], shared=selector)}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("kind", "other"), [("stack", "list"), ("list", "stack")])
def test_layers_of_members_go_from_one_form_to_the_other(kind, other, shared, tmp_path):
    """The axis of members is before that of layers; shared leaves have none."""
    pm.save(tmp_path / "file", members(kind, 1, shared=shared))
    loaded, report = pm.load(
        tmp_path / "file", members(other, 2, shared=shared), strict=False, missing="error"
    )

    assert_same(loaded, members(other, 1, shared=shared))
    assert not report.unexpected


factored = optax.adafactor(0.1, min_dim_size_to_factor=2)
RUNS = {
    # For elementwise rules, rules of matrices, and rules of all arrays.
    "groups": pm.by(
        {
            nn.BatchNorm: optax.sgd(0.1),
            "head": None,
            pm.matrices: optax.contrib.muon(0.1),
            ...: optax.inject_hyperparams(optax.lamb)(learning_rate=0.1),
        }
    ),
    "chain": optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.5), factored), 2),
}


@pytest.mark.parametrize(
    ("cls", "other"), [(Net, ListNet), (ListNet, Net)], ids=["to list", "to Stack"]
)
@pytest.mark.parametrize("rules", RUNS.values(), ids=RUNS)
@pytest.mark.sampled
def test_a_whole_run_goes_from_one_form_to_the_other(cls, other, rules, tmp_path):
    """Model, State and Optimizer: the next step is the same in both."""

    def start(kind, seed):
        # optax promotes as JAX does by default.
        with jax.numpy_dtype_promotion("standard"):
            run = made(kind, seed)
            return {**run, "opt": pm.Optimizer(rules).init(run["model"])}

    def step(run):
        grads = jax.tree.map(jnp.ones_like, pm.filter(run["model"], pm.is_inexact_array))
        # optax promotes as JAX does by default.
        with jax.numpy_dtype_promotion("standard"):
            model, opt = run["opt"].update(run["model"], grads)
        return {**run, "model": model, "opt": opt}

    run, path = step(start(cls, 0)), tmp_path / "file"
    pm.save(path, run)
    loaded, report = pm.load(path, start(other, 1), strict=False)
    # The classes of the nets are two; the rest is whole.
    assert not [line for line in report.configuration if "Net, the file" not in line]
    assert not [*report.missing, *report.unexpected]

    for _ in range(2):
        run, loaded = step(run), step(loaded)
        np.testing.assert_allclose(outputs(loaded), outputs(run), rtol=1e-5)


# ---- members, and fewer layers


def block(key):
    return nn.Sequential([nn.Linear(3, 3, key=key), nn.LayerNorm(3)])


def in_form(form, n, seed):
    """The same layers in each form."""
    layers = [block(key) for key in jax.random.split(jax.random.key(seed), n)]
    if form == "list":
        return layers
    stacked = pm.stack(layers)
    made = (nn.Stack if form == "Stack" else nn.Ensemble)(block, n, key=jax.random.key(0))
    return made.replace(**{"layer" if form == "Stack" else "member": stacked})


FORMS = ("list", "Stack", "Ensemble")


@pytest.mark.parametrize("given", FORMS)
@pytest.mark.parametrize("wanted", FORMS)
def test_each_form_is_loaded_into_each_other(given, wanted, tmp_path):
    """A list, a Stack and an Ensemble of the same layers."""
    pm.save(tmp_path / "file", {"blocks": in_form(given, 4, 1), "x": ramp(2)})
    like = {"blocks": in_form(wanted, 4, 2), "x": ramp(2) * 0}
    loaded = pm.load(tmp_path / "file", like, restack=True)
    assert_same(loaded, {"blocks": in_form(wanted, 4, 1), "x": ramp(2)})
    # Of fewer, the first ones; and not unless it is asked for.
    fewer = {"blocks": in_form(wanted, 2, 2), "x": ramp(2) * 0}
    loaded = pm.load(tmp_path / "file", fewer, restack=True, only="blocks.**")
    first = [block(key) for key in jax.random.split(jax.random.key(1), 4)[:2]]
    blocks = loaded["blocks"]
    got = (
        blocks
        if wanted == "list"
        else pm.unstack(blocks.layer if wanted == "Stack" else blocks.member)
    )
    assert_same([*got], first)
    assert_same(loaded["x"], ramp(2) * 0)
    with pytest.raises(FileError, match="blocks"):
        pm.load(tmp_path / "file", fewer, restack=True)


@pytest.mark.parametrize(("given", "wanted"), [("list", "Ensemble"), ("Ensemble", "Stack")])
def test_members_are_in_another_form_only_if_asked_for(given, wanted, tmp_path):
    """They are not layers: the output of one would be the input of the next."""
    pm.save(tmp_path / "file", {"blocks": in_form(given, 4, 1)})
    with pytest.raises(FileError, match=f"blocks: {wanted} of 4 in like, {given} of 4"):
        pm.load(tmp_path / "file", {"blocks": in_form(wanted, 4, 2)})

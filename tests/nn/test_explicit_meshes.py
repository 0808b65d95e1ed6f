"""Layers on an explicit mesh of eight devices, by how batch and weights are split."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

import pytreemod as pm
from pytreemod import nn
from tests.helpers.counting_collectives import collectives
from tests.helpers.meshes import EXPLICIT, MESH, lies, on
from tests.nn.catalogue import CATALOGUE, Entry
from tests.nn.numbers_to_compare import assert_close, wave


class Way(NamedTuple):
    """A way to split the weights; the batch is split over `data` in all of them."""

    out: str | None = None  # the mesh axis of the weights' rows: of the features of the result
    into: str | None = None  # the sharding of the summed axis
    features: str | None = None  # that of the features of x
    on_mesh: bool = True  # whether weights and State are on the mesh


WAYS = {
    "on one device": Way(on_mesh=False),
    "whole": Way(),
    "out": Way(out="model"),
    "in": Way(into="model"),
    "in, and x": Way(into="model", features="model"),
    "out, by the batch's axis": Way(out="data"),
    "in, by the batch's axis": Way(into="data"),
}
"""Weights by the sharded axes. In `in, and x`, both operands of the sum are split alike."""


def split(array: jax.Array, axes: dict[int, str | None]) -> jax.Array:
    """The array on the mesh, split on those of the axes that it has, and that divide."""
    spec: list[str | None] = [None] * array.ndim
    for axis, name in axes.items():
        divides = -array.ndim <= axis < array.ndim and name is not None
        if divides and array.shape[axis] % EXPLICIT.shape[name] == 0:
            spec[axis] = name
    return jax.device_put(array, NamedSharding(EXPLICIT, PartitionSpec(*spec)))


def laid_out(entry: Entry, way: Way) -> tuple[Any, Any, Any]:
    layer, state = entry.fill()
    x = split(jnp.asarray(entry.x), {entry.features: way.features, 0: "data"})

    def split_weight(path: Any, leaf: jax.Array) -> jax.Array:
        is_stacked = entry.stacked is not None and keystr(path).startswith(entry.stacked)
        return split(leaf, {entry.out + is_stacked: way.out, entry.into + is_stacked: way.into})

    if way.on_mesh:
        layer = jax.tree_util.tree_map_with_path(split_weight, layer)
        state = jax.tree.map(lambda leaf: split(leaf, {}), state)
    return layer, x, state


def step_of(entry: Entry) -> Callable[..., Any]:
    """A function to compile: the result, the State, and the gradient of layer and input."""

    def loss(layer: Any, x: Any, state: Any) -> Any:
        out, state = entry.apply(layer, state, x)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), (out, state)

    argnums = (0, 1) if jnp.issubdtype(entry.x.dtype, jnp.inexact) else 0
    return jax.jit(jax.value_and_grad(loss, argnums, has_aux=True, allow_int=True))


RESULTS = {
    "Linear": {"out": ("data", "model")},
    "Conv2d": {"out": ("data", "model")},
    "LayerNorm": {"in, and x": ("data", None, "model")},
}
"""How the result lies; in all other ways, like the batch alone."""


@pytest.mark.parametrize("name", RESULTS)
def test_how_results_lie(name):
    """With the leading axes of x and the rows of the weight; what both want, x keeps."""
    entry = next(entry for entry in CATALOGUE if entry.name == name)

    for way, split_as in WAYS.items():
        layer, x, state = laid_out(entry, split_as)
        # The type has it: nothing needs to be compiled.
        found = lies(jax.eval_shape(entry.apply, layer, state, x)[0])
        assert found == RESULTS[name].get(way, ("data",))


def numbers_to_check():
    """Of each class in three ways, two of them slow; of its other forms, in one slow way."""
    met, found = set(), []
    for i, entry in enumerate(CATALOGUE):
        kind = entry.name.split()[0].rstrip("123d")
        # A layer without weights is split in one way.
        names = [*WAYS] if jax.tree.leaves(entry.fill()[0]) else [*WAYS][:1]
        count = 1 if kind in met else min(3, len(names))
        # Not the first three, so that all ways are tried with some layers.
        for j, name in enumerate(names[(i + 2 * k) % len(names)] for k in range(count)):
            marks = [] if j == 0 and kind not in met else [pytest.mark.slow]
            found.append(pytest.param(entry, name, id=f"{entry.name}, {name}", marks=marks))
        met.add(kind)
    return found


@ft.cache
def result_on_one_device(name: str) -> Any:
    """Result, State and gradients of the entry with that name, once for all ways."""
    entry = next(entry for entry in CATALOGUE if entry.name == name)
    layer, state = entry.fill()
    return step_of(entry)(layer, jnp.asarray(entry.x), state)


@pytest.mark.parametrize(("entry", "way"), numbers_to_check())
@pytest.mark.sampled(4)
def test_numbers_are_those_of_one_device(entry, way):
    """Result, State and gradients. A gradient is sharded as its array, and so is the State.

    Without a mesh in context: the types of the arrays have all information.
    """
    layer, x, state = laid_out(entry, WAYS[way])
    found = step_of(entry)(layer, x, state)

    jax.tree.map(assert_close, found, result_on_one_device(entry.name))
    ((_, (_, state_after)), gradients) = found
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    for after, before in zip((state_after, *gradients), (state, layer, x), strict=False):
        jax.tree.map(assert_lies_alike, after, before)


def assert_lies_alike(after, before):
    on_mesh = isinstance(before.sharding, NamedSharding)
    assert not on_mesh or after.sharding.is_equivalent_to(before.sharding, before.ndim)


X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16) / 64 - 1
LINEAR = nn.Linear(16, 32, key=jax.random.key(0))


def put(array, spec):
    """An array on the mesh with a spec; without a mesh if the spec is None."""
    return jnp.asarray(array) if spec is None else jax.device_put(array, on(*spec, mesh=EXPLICIT))


# ---- what is sent


@pytest.mark.usefixtures("optimized")
def test_what_is_sent_is_the_weight():
    """One sum over devices by row, and nothing by column; along the batch's axis one gathering."""
    plain = nn.Linear(16, 32, use_bias=False, key=jax.random.key(0))

    def sent(x_at, weight_at):
        layer = plain.replace(weight=put(plain.weight, weight_at))
        lowered = jax.jit(lambda layer, x: layer(x)).lower(layer, put(X, x_at))
        return collectives(lowered.compile().as_text())

    assert sent(("data",), ("model",)).numbers == {}
    assert sent(("data", "model"), (None, "model")).numbers == {"all-reduce": 1}
    along = sent(("data",), ("data",))
    assert (along.numbers, along.size) == ({"all-gather": 1}, plain.weight.size)


@pytest.mark.parametrize("layer", [LINEAR, nn.LayerNorm(16)], ids=["Linear", "LayerNorm"])
def test_the_gradient_of_a_bias_gathers_no_activations(layer):
    """Each device sums over its part of the batch; devices add arrays of the bias's size."""
    layer, x = jax.device_put(layer, on(mesh=EXPLICIT)), put(X, ("data",))
    gradient = jax.jit(jax.grad(lambda layer, x: (layer(x) ** 2).sum()))
    found = collectives(gradient.lower(layer, x).compile().as_text())

    assert {*found.numbers} == {"all-reduce"}
    assert found.size == sum(leaf.size for leaf in jax.tree.leaves(layer))


# Each device has some of the heads.
BY_HEADS = pm.by(
    {
        "output_proj.**": pm.AxisRules({"in_features": "model"}),
        ...: pm.AxisRules({"out_features": "model"}),
    }
)


def test_attention_sends_no_more_than_by_hand():
    """Where the compiler chooses for both; the gradient of what is projected thrice is one sum."""
    layer = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    x = jnp.cos(jnp.arange(4.0 * 3 * 8)).reshape(4, 3, 8)
    leaves = jax.tree.leaves(layer)

    def by_hand(x, leaves):
        x = jnp.tanh(x)
        q, k, v = (jnp.inner(x, w).reshape(*x.shape[:-1], 2, 4) for w in leaves[:3])
        heads = jax.nn.dot_product_attention(q, k, v)
        return (jnp.inner(heads.reshape(x.shape), leaves[3]) ** 2).sum()

    def ours(x, layer):
        return (layer(jnp.tanh(x)) ** 2).sum()

    def sent(f, x, weights):
        return collectives(jax.jit(jax.grad(f)).lower(x, weights).compile().as_text()).size

    explicit = jax.device_put(layer, pm.shardings(layer, EXPLICIT, BY_HEADS))
    automatic = jax.tree.leaves(jax.device_put(layer, pm.shardings(layer, MESH, BY_HEADS)))
    put_x = jax.device_put(x, on("data", mesh=EXPLICIT))
    found = jax.jit(jax.grad(ours))(put_x, explicit)

    np.testing.assert_allclose(found, jax.grad(by_hand)(x, leaves), atol=1e-5)
    # By hand each of the three projections has a sum over devices in the backward pass.
    assert sent(ours, put_x, explicit) < sent(by_hand, jax.device_put(x, on("data")), automatic)


def test_a_weight_that_was_gathered_is_not_kept_for_the_backward_pass():
    """Each device stores its part; a loop over layers would store all gathered weights."""
    layer = LINEAR.replace(weight=put(LINEAR.weight, ("data",)))
    _, back = jax.vjp(lambda layer, x: layer(x), layer, put(X, ("data",)))

    kept = [leaf for leaf in jax.tree.leaves(back) if leaf.shape == layer.weight.shape]
    assert [lies(leaf) for leaf in kept] == [("data",)]


def test_a_cache_that_is_on_the_mesh_stays_as_it_lies():
    """So a loop can carry it; a cache without a mesh is sharded as the first keys."""
    make = nn.make_with_state(nn.MultiheadAttention)
    layer, state = make(2, 8, is_causal=True, cache_size=6, key=jax.random.key(0))
    state = nn.reset_cache(layer, state, batch=4)
    x, cache = wave(4, 3, 8), state.get(layer.cache)
    whole = state.restored().set(layer.cache, tuple(put(array, ()) for array in cache))
    layer = jax.device_put(layer, on(mesh=EXPLICIT))

    _, first = layer(put(x, ("data",)), state=state)
    _, second = layer(put(x, ("data",)), state=whole)

    assert {lies(array) for array in first.get(layer.cache)[:2]} == {("data",)}
    assert {lies(array) for array in second.get(layer.cache)} == {()}
    for one, other in zip(first.get(layer.cache), second.get(layer.cache), strict=True):
        assert_close(one, other)


def test_what_is_traced_decides_about_the_mesh():
    """In a map over some of its axes, which are manual there, also if the layer is captured."""
    layer, spec = jax.device_put(LINEAR, on(mesh=EXPLICIT)), PartitionSpec("data")
    split = {"in_specs": spec, "out_specs": spec, "axis_names": {"data"}}
    with jax.set_mesh(EXPLICIT):
        found = jax.jit(jax.shard_map(lambda x: layer(x), **split))(put(X, spec))
    assert_close(found, LINEAR(X))


def test_elsewhere_no_operation_is_added():
    """On one device, and on a mesh whose axes are not explicit."""
    for mesh in (None, MESH):

        def here(array, mesh=mesh):
            return jnp.asarray(array) if mesh is None else jax.device_put(array, on("data"))

        layer, x = jax.tree.map(here, LINEAR), here(X)
        found = jax.make_jaxpr(lambda layer, x: layer(x))(layer, x)
        names = [eqn.primitive.name for eqn in found.eqns]
        assert names == ["dot_general", "broadcast_in_dim", "add"]
        assert found.eqns[0].params["out_sharding"] is None


# ---- members of a Stack and of an Ensemble

BATCH = jnp.asarray(wave(8, 4))


def tanh_layer(key):
    return nn.MLP(4, 4, 4, 0, final_activation=jnp.tanh, key=key)


STACK = nn.Stack(tanh_layer, 4, key=jax.random.key(0))
NETS = nn.Ensemble(tanh_layer, 4, key=jax.random.key(0))
MEMBERS = {"Stack": STACK, "recomputing": STACK.replace(remat=True, unroll=2), "Ensemble": NETS}


def by_layers(tree):
    """Split over `data` along the leading axis of the layers, where there is one of four."""
    return jax.tree.map(lambda leaf: put(leaf, ("data",) if leaf.shape[0] == 4 else ()), tree)


@pytest.mark.parametrize("name", MEMBERS)
def test_members_that_are_split_over_the_devices(name):
    """Forward and backward equal one device; gradients are sharded as their arrays."""
    model, x = by_layers(MEMBERS[name]), put(BATCH, ("data",))

    @jax.jit
    def step(model, x):
        return jax.value_and_grad(lambda both: jnp.mean(both[0](both[1]) ** 2))((model, x))

    value, grads = step(model, x)
    expected, others = step(MEMBERS[name], BATCH)

    assert_close(value, expected)
    jax.tree.map(assert_close, grads, others)
    leaves = zip(jax.tree.leaves(grads), jax.tree.leaves((model, x)), strict=True)
    assert all(jax.typeof(grad) == jax.typeof(leaf) for grad, leaf in leaves)


def test_inputs_lead_where_members_are_split_over_the_same_axis():
    """The members are gathered, as other weights are, but never the inputs."""
    own, nets = jnp.stack([BATCH] * 4), by_layers(NETS)

    assert lies(nets(put(BATCH, ("model",)))) == ("data", "model")
    assert lies(nets(put(BATCH, ("data",)))) == (None, "data")
    assert lies(nets(put(own, (None, "data")), in_axes=0)) == (None, "data")
    assert lies(nets(put(own, ("model",)), in_axes=0)) == ("model",)


def test_layers_are_gathered_once(optimized):
    """Before the scan, each array once; and nothing else is sent."""
    lowered = jax.jit(lambda stack, x: stack(x)).lower(by_layers(STACK), put(BATCH, ("data",)))
    found = collectives(lowered.compile().as_text())

    assert dict(found.numbers) == {"all-gather": 2}
    assert found.size == 4 * (4 * 4 + 4)


@pytest.mark.parametrize("kind", [nn.Stack, nn.Ensemble])
@pytest.mark.parametrize("entries", [("data",), (None, "model")])
@pytest.mark.sampled(3)
def test_values_in_state_lie_as_they_did(kind, entries):
    """Written values are sharded as the old ones; streams are split as usual."""

    def make():
        return nn.Sequential([nn.BatchNorm(4), nn.Dropout(0.5, stream=pm.RngStream())])

    model, state = pm.make_with_state(kind)(make, 4)
    running = (model.layer if kind is nn.Stack else model.member)[0].state_index
    state = state.seed(jax.random.key(0))
    expected, after = pm.filter_jit(model)(BATCH, state.restored())
    split_state = state.set(running, tuple(put(x, entries) for x in state.get(running)))
    y, new = pm.filter_jit(model)(put(BATCH, ("data",)), split_state)

    assert_close(y, expected)
    for found, right in zip(new.get(running), after.get(running), strict=True):
        assert_close(found, right)
        assert lies(found) == entries


def test_a_number_may_be_the_input():
    layer = nn.Linear("scalar", 4, key=jax.random.key(0))

    found = jax.device_put(layer, on("model", mesh=EXPLICIT))(2.0)

    assert lies(found) == ("model",)
    assert_close(found, layer(2.0))

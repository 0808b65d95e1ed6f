"""Layers through plain JAX: no filter, no partition, for every layer of the catalogue."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.calling import is_stateful
from tests.nn.catalogue import CATALOGUE
from tests.nn.numbers_to_compare import assert_close


def as_parameters(entries):
    """One entry of each class for every run; its other forms, named after it, in the slow one."""
    met, found = set(), []
    for entry in entries:
        kind = entry.name.split()[0]
        marks = [pytest.mark.slow] if kind in met else []
        met.add(kind)
        found.append(pytest.param(entry, id=entry.name, marks=marks))
    return found


every_layer = pytest.mark.parametrize("entry", as_parameters(CATALOGUE))


STATELESS = [entry for entry in CATALOGUE if not is_stateful(entry.build()[0])]


BATCHED = [entry for entry in CATALOGUE if entry.batches]


def assert_trees_close(found, expected):
    """Same structure, same numbers."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda *leaves: assert_close(*map(as_numbers, leaves)), found, expected)


def as_numbers(leaf):
    """A random key as its bits, any other leaf unchanged."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def has_weights(layer):
    """Whether there is anything to train."""
    return bool(jax.tree.leaves(layer))


@every_layer
def test_leaves_are_arrays_only(entry):
    """No number, flag or function is a leaf: sizes and activations are configuration."""
    layer, state = entry.build()

    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((layer, state)))


@every_layer
@pytest.mark.sampled
def test_jit_of_a_layer_is_the_layer(entry):
    """jax.jit(f)(layer, state) == f(layer, state), and a second layer does not trace again."""
    traces = []

    @jax.jit
    def apply(layer, state):
        traces.append(None)
        return entry.apply(layer, state)

    for seed in (0, 7):
        out, after = apply(*entry.build(seed))
        expected, expected_after = entry.apply(*entry.build(seed))
        assert_close(out, expected)
        assert_trees_close(jax.tree.leaves(after), jax.tree.leaves(expected_after))
    assert len(traces) == 1


@every_layer
@pytest.mark.sampled
def test_gradient_is_a_layer_that_points_downhill(entry):
    """jax.grad gives a tree of the layer's structure; a small step against it lowers the loss."""
    layer, state = entry.build()

    @jax.jit
    def loss(layer):
        out, _ = entry.apply(layer, state)
        return jnp.mean(jnp.sin(out + 0.3))

    grads = jax.grad(loss)(layer)
    stepped = jax.tree.map(lambda leaf, grad: leaf - 1e-2 * grad, layer, grads)

    assert jax.tree.structure(grads) == jax.tree.structure(layer)
    assert all(np.all(np.isfinite(grad)) for grad in jax.tree.leaves(grads))
    if has_weights(layer):
        assert loss(stepped) < loss(layer)


@pytest.mark.slow
@pytest.mark.parametrize("entry", as_parameters(STATELESS))
def test_vmap_over_layers_is_a_stack_of_calls(entry):
    """jax.vmap of constructor and call equals a loop over layers."""
    keys = jax.random.split(jax.random.key(0), 2)

    @jax.jit
    def both(x):
        layers = jax.vmap(entry.make)(keys)
        stacked = jax.vmap(lambda layer: layer(x, key=keys[0]), axis_size=2)(layers)
        return stacked, jnp.stack([entry.make(keys[i])(x, key=keys[0]) for i in range(2)])

    assert_close(*both(jnp.asarray(entry.x)))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mapped", "as a batch"])
@pytest.mark.parametrize("entry", STATELESS, ids=lambda entry: entry.name)
def test_gradients_of_many_examples_are_added_up_in_single_precision(entry, way):
    """In bfloat16, 256 + 1 is 256: the gradients of later examples would be lost in a bias."""
    layer = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), entry.build()[0])
    if not has_weights(layer) or (way == "as a batch" and not entry.batches):
        return
    if "with a Module between" in entry.name:
        return  # Which is the tests' own, and multiplies as anyone would.
    x = jnp.broadcast_to(jnp.asarray(entry.x), (40, 50, *jnp.shape(entry.x)))
    x = x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def gradient(dtype):
        def loss(layer):
            call = ft.partial(layer, key=jax.random.key(0))
            out = (jax.vmap(jax.vmap(call)) if way == "mapped" else call)(given)
            return jnp.sum(out, dtype=jnp.float32)

        given = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return jax.jit(jax.grad(loss))(jax.tree.map(lambda leaf: leaf.astype(dtype), layer))

    def assert_same(found, expected):
        assert found.dtype == jnp.bfloat16
        assert_close(found.astype("f4"), expected, rtol=0.05, atol=0.02 * np.max(np.abs(expected)))

    jax.tree.map(assert_same, gradient(jnp.bfloat16), gradient(jnp.float32))


@every_layer
@pytest.mark.sampled
def test_scan_carries_a_layer(entry):
    """lax.scan with (layer, state) as carry equals a loop in Python."""

    def step(carry, number):
        layer, state = carry
        out, state = entry.apply(layer, state)
        return (jax.tree.map(lambda leaf: leaf * 0.9, layer), state), jnp.sum(out) * number

    numbers = jnp.arange(1.0, 3.0)
    (layer, state), sums = jax.lax.scan(step, entry.build(), numbers)
    carry, expected = entry.build(), []
    for number in numbers:
        carry, value = jax.jit(step)(carry, number)
        expected.append(value)

    assert_close(sums, jnp.stack(expected), rtol=1e-4)
    assert_trees_close(jax.tree.leaves((layer, state)), jax.tree.leaves(carry))


@every_layer
@pytest.mark.sampled
def test_optax_takes_a_layer(entry):
    """optax.adam(1e-3).init(layer) works, and its updates apply to the layer."""
    optax = pytest.importorskip("optax", reason="optimizers come from optax")
    layer, _ = entry.build()
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(layer):
        opt_state = optimizer.init(layer)
        updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, layer), opt_state, layer)
        return optax.apply_updates(layer, updates)

    with jax.numpy_dtype_promotion("standard"):  # optax itself divides floats by its step count
        stepped = step(layer)

    assert_trees_close(stepped, jax.tree.map(lambda leaf: leaf - 1e-3, layer))


def mapped_over(layer, batch):
    """The layer under one jax.vmap for each axis of `batch`."""
    for _ in batch:
        layer = jax.vmap(layer)
    return layer


every_batched_layer = pytest.mark.parametrize("entry", as_parameters(BATCHED))


@every_batched_layer
@pytest.mark.sampled
def test_leading_axes_are_batch_axes(entry):
    """layer(batch) == vmap(layer)(batch), for three leading axes at once."""
    layer, _ = entry.build()
    x = jnp.broadcast_to(jnp.asarray(entry.x), (2, 1, 3, *jnp.shape(entry.x)))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = x + 0.1 * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)

    out, expected = jax.jit(lambda x: (layer(x), mapped_over(layer, "abc")(x)))(x)

    assert_close(out, expected)


@every_batched_layer
def test_a_batch_may_be_empty(entry):
    """No examples give no outputs, of the shape that vmap says."""
    layer, _ = entry.build()
    x = jax.ShapeDtypeStruct((0, 2, *jnp.shape(entry.x)), entry.x.dtype)

    expected = jax.eval_shape(jax.vmap(mapped_over(layer, "b"), axis_size=0), x)

    assert jax.eval_shape(layer, x) == expected

"""The laws of every layer, through plain JAX: no filter, no partition."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.catalogue import CATALOGUE, as_parameters
from tests.nn.numbers_to_compare import assert_close

every_layer = pytest.mark.parametrize("entry", as_parameters(CATALOGUE))


BATCHED = [entry for entry in CATALOGUE if entry.batches]
# Their State has values.
STATEFUL = [entry for entry in CATALOGUE if jax.tree.leaves(jax.eval_shape(entry.build)[1])]
WEIGHTED = [
    entry
    for entry in CATALOGUE
    if entry not in STATEFUL and jax.tree.leaves(jax.eval_shape(entry.build)[0])
]


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
        jax.tree.map(assert_close, jax.tree.leaves(after), jax.tree.leaves(expected_after))
    assert len(traces) == 1


@every_layer
@pytest.mark.sampled
def test_gradient_is_a_layer_that_points_downhill(entry):
    """jax.grad gives a tree of the layer's structure; a small step against it lowers the loss."""
    layer, state = entry.fill()

    @jax.jit
    def loss(layer):
        out, _ = entry.apply(layer, state)
        return jnp.mean(jnp.sin(out + 0.3))

    grads = jax.grad(loss)(layer)
    stepped = jax.tree.map(lambda leaf, grad: leaf - 1e-2 * grad, layer, grads)

    assert jax.tree.structure(grads) == jax.tree.structure(layer)
    assert all(np.all(np.isfinite(grad)) for grad in jax.tree.leaves(grads))
    if jax.tree.leaves(layer):
        assert loss(stepped) < loss(layer)


@pytest.mark.parametrize("entry", as_parameters(STATEFUL))
@pytest.mark.sampled(4)
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
    jax.tree.map(assert_close, jax.tree.leaves((layer, state)), jax.tree.leaves(carry))


@every_layer
def test_leaves_are_arrays_only(entry):
    """No number, flag or function is a leaf: sizes and activations are configuration."""
    layer, state = entry.build()

    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((layer, state)))


def mapped_over(layer, batch):
    """The layer under one jax.vmap for each axis of `batch`."""
    for _ in batch:
        layer = jax.vmap(layer)
    return layer


@pytest.mark.parametrize("entry", as_parameters(BATCHED))
@pytest.mark.sampled(4)
def test_leading_axes_are_batch_axes(entry):
    """layer(batch) == vmap(layer)(batch), for three leading axes at once, and for no examples."""
    layer, _ = entry.build()
    one = jnp.asarray(entry.x)[0]
    x = jnp.broadcast_to(one, (2, 1, 3, *one.shape))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = x + 0.1 * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
    none = jax.ShapeDtypeStruct((0, 2, *one.shape), one.dtype)

    out, expected = jax.jit(lambda x: (layer(x), mapped_over(layer, "abc")(x)))(x)

    assert_close(out, expected)
    shape = jax.eval_shape(jax.vmap(mapped_over(layer, "b"), axis_size=0), none)
    assert jax.eval_shape(layer, none) == shape


def cast(tree, kind, dtype):
    """The tree with arrays of one kind as another."""
    is_kind = lambda leaf: jnp.issubdtype(leaf.dtype, kind)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_kind(leaf) else leaf, tree)


halved = ft.partial(cast, kind=jnp.floating, dtype=jnp.bfloat16)
widened = ft.partial(cast, kind=jnp.bfloat16, dtype=jnp.float32)


def assert_near(found, expected):
    """A bfloat16 and a float32, but for the rounding of the former."""
    assert found.dtype == jnp.bfloat16
    scale = np.max(np.abs(expected), initial=0.0)
    assert_close(found.astype("f4"), expected, rtol=0.05, atol=0.02 * scale)


@pytest.mark.parametrize("entry", as_parameters(WEIGHTED))
@pytest.mark.sampled(4)
def test_half_precision_gives_half_precision(entry):
    """Of weights and input in bfloat16, as near to float32 as its digits allow."""
    layer, x = halved(entry.build()[0]), halved(jnp.asarray(entry.x))
    call = jax.jit(lambda layer, x: layer(x, key=jax.random.key(0)))

    assert_near(call(layer, x), call(widened(layer), widened(x)))


@pytest.mark.slow
@pytest.mark.parametrize("entry", WEIGHTED, ids=lambda entry: entry.name)
def test_gradients_of_many_examples_are_added_up_in_single_precision(entry):
    """In bfloat16, 256 + 1 is 256: the gradients of later examples would be lost in a bias."""
    layer = halved(entry.build()[0])
    one = jnp.asarray(entry.x)[0] if entry.batches else jnp.asarray(entry.x)
    x = halved(jnp.broadcast_to(one, (40, 50, *one.shape)))

    @jax.jit
    def gradient(layer, x):
        def loss(layer):
            call = ft.partial(layer, key=jax.random.key(0))
            called = call if entry.batches else mapped_over(call, "ab")
            return jnp.sum(called(x), dtype=jnp.float32)

        return jax.grad(loss)(layer)

    jax.tree.map(assert_near, gradient(layer, x), gradient(widened(layer), widened(x)))


@pytest.mark.parametrize(
    "entry", as_parameters([*WEIGHTED, *(e for e in CATALOGUE if e.name == "BatchNorm")])
)
@pytest.mark.sampled(4)
def test_double_precision_has_its_digits(entry):
    """The gradient is the difference quotient, which has no digits left in single precision."""

    def moved(leaf, step):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        direction = jnp.cos(jnp.arange(leaf.size, dtype=float)).reshape(leaf.shape)
        # The start is moved, too: some numbers are 0, where some functions have no derivative.
        return leaf.astype(float) + (0.1 + step) * direction

    layer, state = entry.fill()
    with jax.enable_x64(True):

        @jax.jit
        def f(step):
            trees = jax.tree.map(lambda leaf: moved(leaf, step), (layer, jnp.asarray(entry.x)))
            out, _ = entry.apply(trees[0], cast(state, jnp.floating, float), trees[1])
            return jnp.sum(jnp.sin(out))

        quotient = (f(1e-4) - f(-1e-4)) / 2e-4
        np.testing.assert_allclose(jax.grad(f)(0.0), quotient, rtol=1e-5, atol=1e-5)

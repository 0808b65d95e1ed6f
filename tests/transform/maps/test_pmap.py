"""filter_pmap."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.meshes import DEVICES
from tests.helpers.trees import Affine, Static, affine, double, ramp


def stacked(n=4):
    """Members with different weights, stacked."""
    return jax.tree.map(lambda x: jnp.stack([x + i for i in range(n)]), affine())


def call(model, x):
    """The model's output."""
    return model(x)


@pytest.mark.parametrize(
    ("in_axes", "model", "x"),
    [
        ((0, 0), stacked(), ramp(4, 3)),
        ((0, None), stacked(), ramp(3)),
        ((None, 1), affine(), ramp(3, 4)),
        ((None, -1), affine(), ramp(3, 4)),
        ({"model": None}, affine(), ramp(4, 3)),
        ((Affine(0, None), None), Affine(stacked().weight, affine().bias), ramp(3)),
        ((pm.by({"bias": None, ...: 0}), 0), Affine(stacked().weight, affine().bias), ramp(4, 3)),
        ((lambda x: 0 if x.ndim == 3 else None, None), Affine(stacked().weight, ramp(2)), ramp(3)),
    ],
)
@pytest.mark.sampled
def test_pmap_is_vmap(in_axes, model, x):
    """filter_pmap(f)(*args) == filter_vmap(f)(*args)."""
    mapped = pm.filter_pmap(call, in_axes=in_axes)

    assert_close(mapped(model, x), pm.filter_vmap(call, in_axes=in_axes)(model, x))


def test_what_is_no_array():
    """In and out unchanged: strings, functions, configuration."""
    fn = pm.filter_pmap(lambda x, box, how: (x + 1, box, how, (double, "a", 3)))

    x, box, how, rest = fn(ramp(4), Static(ramp(4), size=(1,)), "how")

    assert_close(x, ramp(4) + 1)
    assert_same(box, Static(ramp(4), size=(1,)))
    assert (how, rest) == ("how", (double, "a", 3))


@pytest.mark.parametrize("size", [1, 8])
def test_axis_size(size):
    """Nothing is mapped, and JAX does not warn."""
    fn = pm.filter_pmap(lambda x: x * 2, in_axes=None, axis_size=size)

    assert_close(fn(ramp(2)), jnp.stack([ramp(2) * 2] * size))


def test_chosen_devices():
    """jax.pmap's own options pass."""
    out = pm.filter_pmap(double, devices=DEVICES[4:])(ramp(4))

    assert out.devices() == set(DEVICES[4:])


def test_donation():
    """Donated arrays are gone; where one was of no use, `all` is quiet."""

    def total(x):
        return jnp.sum(x)

    x = pm.filter_pmap(lambda x: x + 0)(ramp(4, 2))
    assert_close(pm.filter_pmap(double, donate="all")(x), 2 * ramp(4, 2))
    assert x.is_deleted()
    assert_close(pm.filter_pmap(total, donate="all")(ramp(4, 2)), jnp.sum(ramp(4, 2), axis=1))


# ---- bad input


def test_made_anew_it_is_traced_once():
    """As in a training loop: by the function, whatever transforms it has; by its options."""
    traces = []

    def loss(weight, x):
        traces.append(x.shape)
        return ((weight * x) ** 2).sum()

    for _ in range(3):
        pm.filter_pmap(pm.filter_grad(loss), in_axes=(None, 0))(jnp.ones(2), ramp(4, 2))
        pm.filter_pmap(loss, in_axes=(None, 0))(jnp.ones(2), ramp(4, 2))
        pm.filter_pmap(affine(), in_axes=0)(ramp(4, 3))
    assert len(traces) == 2

    other = pm.filter_pmap(loss, in_axes=(None, 0), out_axes=None)
    assert other(jnp.ones(2), ramp(4, 2)).shape == ()
    assert len(traces) == 3


def test_what_is_compiled_goes_with_the_function():
    """The cache of a function does not keep it alive."""

    def fn(x):
        return 2 * x

    pm.filter_pmap(fn)(ramp(4, 2))
    reference = weakref.ref(fn)
    del fn
    gc.collect()

    assert reference() is None

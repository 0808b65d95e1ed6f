"""filter_pmap: filter_vmap, compiled, with the members split over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.meshes import DEVICES, lies
from tests.helpers.trees import Affine, affine, double, ramp


def call(model, x):
    """The model's output."""
    return model(x)


STACKED = pm.stack([affine(start=np.float32(i)) for i in range(8)])
MIXED = Affine(STACKED.weight, affine().bias)


@pytest.mark.parametrize(
    ("in_axes", "model", "x"),
    [
        (0, STACKED, ramp(8, 3)),
        ((None, -1), affine(), ramp(3, 16)),
        ({"model": None}, affine(), ramp(3, 3)),
        ((Affine(0, None), None), MIXED, ramp(3)),
        ((pm.by({"bias": None, ...: 0}), 0), MIXED, np.asarray(ramp(8, 3))),
        ((lambda x: 0 if x.ndim == 3 else None, None), MIXED, ramp(3)),
    ],
)
@pytest.mark.parametrize("out_axes", [0, 1])
@pytest.mark.sampled
def test_pmap_is_vmap(in_axes, out_axes, model, x):
    """filter_pmap(f)(*args) == filter_vmap(f)(*args); members that divide evenly are split."""
    axes = {"in_axes": in_axes, "out_axes": out_axes}
    found = pm.filter_pmap(call, **axes)(model, x)

    assert_close(found, pm.filter_vmap(call, **axes)(model, x))
    if out_axes == 0 and found.shape[0] % 8 == 0:
        assert lies(found) == ("devices",)


def test_collectives_keys_and_axis_size():
    """Names of axes, typed keys, members of nothing."""
    mean = pm.filter_pmap(lambda x: jax.lax.pmean(x, "batch"), axis_name="batch")
    assert_close(mean(ramp(8)), jnp.full(8, 4.5))
    keys = jax.random.split(jax.random.key(0), 8)
    assert_close(pm.filter_pmap(jax.random.normal)(keys), jax.vmap(jax.random.normal)(keys))
    fn = pm.filter_pmap(lambda x: x * 2, in_axes=None, axis_size=8)
    assert_close(fn(ramp(2)), jnp.stack([ramp(2) * 2] * 8))


def test_chosen_devices():
    """The members lie on these, and on no others."""
    out = pm.filter_pmap(double, devices=DEVICES[4:])(ramp(8))
    assert out.devices() == {*DEVICES[4:]}
    assert_close(out, 2 * ramp(8))


def test_donation_and_compiling_ahead():
    """Those of filter_jit; where an array was of no use, `all` is quiet."""
    x = pm.filter_pmap(jnp.copy)(ramp(8, 2))
    assert_close(pm.filter_pmap(double, donate="x")(x), 2 * ramp(8, 2))
    assert x.is_deleted()
    assert_close(pm.filter_pmap(jnp.sum, donate="all")(ramp(8, 2)), jnp.sum(ramp(8, 2), axis=1))
    compiled = pm.filter_pmap(double).lower(ramp(8)).compile()
    assert_close(compiled(ramp(8)), 2 * ramp(8))


def test_made_anew_it_is_traced_once():
    """As in a training loop: it is a value, by its function and options."""
    traces = []
    loss = lambda weight, x: (traces.append(1), ((weight * x) ** 2).sum())[1]  # noqa: E731
    for _ in range(3):
        pm.filter_pmap(pm.filter_grad(loss), in_axes=(None, 0))(jnp.ones(2), ramp(8, 2))
        pm.filter_pmap(loss, in_axes=(None, 0))(jnp.ones(2), ramp(8, 2))
    assert len(traces) == 2
    assert pm.filter_pmap(loss) == pm.filter_pmap(loss) != pm.filter_pmap(loss, in_axes=1)


def test_an_error_of_the_function_comes_through():
    """As from a call."""
    with pytest.raises(TypeError, match="reshape"):
        pm.filter_pmap(lambda x: x.reshape(3))(jnp.ones((8, 2)))

"""`load(quantize=)`: each array is quantized as soon as it is read."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.labels import label

KEY = jax.random.key(0)


def mlp():
    """Three matrices."""
    return nn.MLP(3, 2, 4, 2, key=KEY)


def stack():
    """Layers as one."""
    return nn.Stack(ft.partial(nn.Linear, 4, 4), 3, key=KEY)


def saved(folder, tree):
    """A file of the model."""
    path = folder / "model.safetensors"
    pm.save(path, tree)
    return path


@pytest.mark.parametrize("make", [mlp, stack], ids=["mlp", "stack"])
@pytest.mark.parametrize(
    "form", ["int8", pm.by({"**.weight": "int4,group_size=1", ...: None})], ids=label
)
def test_it_is_what_is_loaded_quantised(make, form, tmp_path):
    """Whether `like` has arrays or not."""
    model = make()
    path = saved(tmp_path, model)
    expected = pm.quantize(model, form)

    assert pm.load(path, make(), quantize=form) == expected
    assert pm.load(path, pm.filter_eval_shape(make), quantize=form) == expected
    pm.save(path, expected)
    assert pm.load(path, pm.quantize(pm.filter_eval_shape(make), form)) == expected


def test_with_other_options(tmp_path):
    """Names, forms and dtypes are compared with `like` before anything is quantized."""
    layers = [*stack()]
    path = saved(tmp_path, {"old": layers})
    like = {"new": pm.filter_eval_shape(stack)}
    rename = {"old.**": "new.**"}

    made = pm.load(path, like, rename=rename, quantize=pm.by({"**.weight": "int4", ...: None}))
    assert made == {"new": pm.quantize(stack(), pm.by({"**.weight": "int4", ...: None}))}
    made = pm.load(path, like, rename=rename, cast="bfloat16", quantize="int8")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), stack())
    assert made == {"new": pm.quantize(half, "int8")}
    assert made["new"][0].weight.dtype == jnp.bfloat16

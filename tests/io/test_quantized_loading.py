"""`load(quantize=)`: each array is quantized as soon as it is read."""

import functools as ft
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from tests.goldens import refusals
from tests.labels import label

KEY = jax.random.key(0)
RULE = pm.by({"layers.0.weight": "int4", "**.weight": "int8", ...: None})


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


def test_what_is_kept_is_quantised_as_well(tmp_path):
    """It is one model, whatever the file had."""
    model, other = mlp(), nn.MLP(3, 2, 4, 2, key=jax.random.key(1))
    path = saved(tmp_path, model)

    made = pm.load(path, other, only="layers.0", quantize=RULE)
    assert made == pm.quantize(pm.load(path, other, only="layers.0"), RULE)
    rule = {"strict": False, "missing": "keep", "quantize": RULE}
    made, report = pm.load(saved(tmp_path, model.layers[0]), other, rename={"": "layers.0"}, **rule)
    assert made == pm.tree_at(
        "layers.0", pm.quantize(other, RULE), pm.quantize(model, RULE).layers[0]
    )
    assert report.loaded == ("layers.0.weight", "layers.0.bias")
    abstract = pm.load(
        path, pm.filter_eval_shape(mlp), rename={"": "layers.0"}, only="layers.0", quantize="int8"
    )
    assert abstract.layers[1] == pm.quantize(pm.filter_eval_shape(mlp), "int8").layers[1]


def test_arrays_are_where_like_has_them(tmp_path):
    """On several devices, and numbers with them."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    sharding = NamedSharding(mesh, P("d"))
    w = jax.random.normal(KEY, (4, 6))
    like = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)}

    leaves = pm.named_leaves(pm.load(saved(tmp_path, {"w": w}), like, quantize="int8"))
    assert leaves["w.numbers"].sharding.is_equivalent_to(sharding, 2)
    assert (
        leaves["w.numbers"].tolist()
        == pm.named_leaves(pm.quantize({"w": w}, "int8"))["w.numbers"].tolist()
    )


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_shapes_on_devices_stay_there(form, tmp_path):
    """Rows of each layer, and columns where each number has a byte."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("r", "c"))

    def placed(leaf, *axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    like = pm.filter_eval_shape(stack)
    like = pm.tree_at("layer.weight", like, replace_fn=lambda w: placed(w, None, "r", "c"))
    path = saved(tmp_path, pm.quantize(stack(), form))
    made = pm.load(path, pm.quantize(like, form))

    assert made == pm.quantize(stack(), form)
    leaves = pm.named_leaves(made)
    columns = "c" if form == "int8" else None
    for name, axes in (("numbers", (None, "r", columns)), ("scales", (None, "r", None))):
        wanted = NamedSharding(mesh, P(*axes))
        assert leaves[f"layer.weight.{name}"].sharding.is_equivalent_to(wanted, 3)


def test_the_base_of_an_update_is_quantised(tmp_path):
    """The factors are those of the file, or of `like`."""
    adapted = pm.lora(mlp(), "**.weight", 1, key=KEY)
    path = saved(tmp_path, mlp())
    rule = {"missing": pm.by({pm.select.role("lora"): "keep", ...: "error"}), "quantize": "int8"}

    assert pm.load(path, adapted, **rule) == pm.quantize(adapted, "int8")
    assert pm.load(saved(tmp_path, adapted), adapted, quantize="int8") == pm.quantize(
        adapted, "int8"
    )


PROGRAM = """
import re, sys
import jax
import pytreemod as pm

def peak():
    # Not by getrusage: that begins with the memory of the process that this one was made by.
    status = open("/proc/self/status").read()
    return int(re.search("VmHWM: *(\\d+)", status.replace("\\t", " "))[1]) / 1024

path, small, quantize = sys.argv[1], sys.argv[2], sys.argv[3] or None
for file in (small, path):
    before = peak()
    count = 2 if file is small else 24
    like = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * count
    made = pm.load(file, like, quantize=quantize, verify=False)
    jax.block_until_ready(made)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of memory")
def test_the_whole_model_is_never_in_memory_in_full(tmp_path):
    """Of 96 MB there are 24 MB as integers, or 12, and one matrix of 4 MB at a time."""
    w = np.zeros((1024, 1024), np.float32)
    pm.save(tmp_path / "small", [w] * 2)
    pm.save(tmp_path / "model", [w] * 24)

    def peak(quantize):
        command = [sys.executable, "-c", PROGRAM, tmp_path / "model", tmp_path / "small", quantize]
        env = {**os.environ, "PYTHONPATH": os.getcwd(), "XLA_FLAGS": ""}
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        return float(run.stdout)

    assert peak("int8") < 24 + 8
    assert peak("int4") < 12 + 8
    assert peak("") > 80


test_refusals = refusals(globals())

"""Configuration in a file: text that is compared with that of `like`, and is never executed."""

import enum
import functools as ft
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.labels import label

KEY = jax.random.key(0)


class Configured(pm.Module):
    weight: np.ndarray
    place: object = pm.field(static=True)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def linear(seed=0):
    return nn.Linear(3, 3, key=jax.random.key(seed))


def differences(folder, tree, like, **options):
    """What a strict load tells, a line each."""
    pm.save(folder / "file", tree)
    try:
        loaded = pm.load(folder / "file", like, **options)
    except FileError as error:
        return [x.removeprefix("  at ") for x in str(error).splitlines() if x.startswith("  at ")]
    # Where nothing differs, the configuration is that of `like`.
    assert jax.tree.structure(loaded) == jax.tree.structure(like)
    return []


# ---- values


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (1, True, False),
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        ((1,), "1", False),
        (2**80, 2**80 + 1, False),
        (range(5), range(6), False),
        (jnp.float32, np.dtype("float32"), True),
        (jnp.float32, jnp.float16, False),
        (np.dtype("float32"), np.dtype("float16"), False),
        (np.float32(1.5), np.float32(2.5), False),
        (np.float64(0.1), 0.1, True),
        (Color.RED, Color.RED, True),
        (Color.RED, Color.BLUE, False),
        (jax.nn.relu, jax.nn.gelu, False),
        (jax.nn.relu, jax.jit(jax.nn.relu), True),
        (jnp.add, jnp.multiply, False),
        (nn.Linear, nn.MLP, False),
        (ft.partial(max, 1), ft.partial(max, 2), False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({1, "a"}, {"b", 1}, False),
        (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec("y"), False),
        (nn.Dropout(0.1), nn.Dropout(0.2), False),
        # Without a text that lasts.
        (object(), object(), True),
    ],
    ids=label,
)
@pytest.mark.filterwarnings("ignore:.*static")
def test_a_difference_is_told_where_the_text_can_tell(a, b, is_same, tmp_path):
    weight = np.zeros(1, np.float32)
    found = differences(tmp_path, Configured(weight, a), Configured(weight, b))

    assert [line.split(":")[0] for line in found] == ([] if is_same else ["place"])


PROGRAM = """
import functools as ft
import jax
import pytreemod as pm
sets = frozenset(["a", "b", "c", ("d", 1)])
fn = ft.partial(jax.nn.gelu, approximate=True)
tree = [pm.nn.Lambda(fn), pm.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))]
pm.save(PATH, {"net": tree, "act": jax.nn.relu, "set": sets})
"""


@pytest.mark.slow
def test_the_file_is_the_same_in_every_process(tmp_path):
    """Strings have another hash in each, and functions another address."""
    for seed in "12":
        program = PROGRAM.replace("PATH", repr(str(tmp_path / seed)))
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)

    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


# ---- Modules

RELU, DROP = nn.Lambda(jax.nn.relu), nn.Dropout(0.5)
DIFFERENT = {
    "p": (DROP, nn.Dropout(0.1), ".p: expected 0.1, got 0.5"),
    "class": (
        nn.LayerNorm(3),
        nn.RMSNorm(3, use_bias=True),
        ": expected class RMSNorm, got class LayerNorm",
    ),
    "activation": (
        nn.MLP(3, 3, 4, 1, key=KEY),
        nn.MLP(3, 3, 4, 1, jax.nn.gelu, key=KEY),
        ".activation: expected gelu, got relu",
    ),
    "function": (RELU, nn.Lambda(jax.nn.tanh), ".fn: expected tanh, got relu"),
    "leaf": (jax.nn.relu, jax.nn.gelu, ": expected gelu, got relu"),
    "text": ("a", "b", ": expected 'b', got 'a'"),
    "only the file has it": (DROP, None, ": expected nothing, got class Dropout"),
    "only like has it": (None, DROP, ": expected class Dropout, got nothing"),
    "a layer more": ([linear(), DROP], [linear()], ".1: expected nothing, got class Dropout"),
    "a layer less": ([linear()], [linear(), RELU], ".1: expected class Lambda, got nothing"),
    "layers between": (
        [linear(), RELU, linear()],
        [linear(), DROP, linear()],
        ".1: expected class Dropout, got class Lambda",
    ),
}


@pytest.mark.parametrize(("tree", "like", "line"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_difference_in_configuration_is_told_by_name(tree, like, line, tmp_path):
    """Strict or not; then the result has the configuration of `like`."""
    beside = {"w": np.zeros(1, "f")}
    assert differences(tmp_path, beside | {"x": tree}, beside | {"x": like}) == [f"x{line}"]
    made, report = pm.load(tmp_path / "file", beside | {"x": like}, strict=False)

    assert report.configuration == [f"x{line}"]
    assert jax.tree.structure(made["x"]) == jax.tree.structure(like)


@pytest.mark.parametrize(
    "rename", [{"body": "trunk"}, {"body.**": "trunk.**"}, {"b*y": "trunk"}], ids=str
)
def test_renamed_configuration_moves_along(rename, tmp_path):
    def net(p):
        return nn.Sequential([linear(), nn.Dropout(p)])

    found = differences(tmp_path, {"body": net(0.5)}, {"trunk": net(0.1)}, rename=rename)
    assert found == ["trunk.layers.1.p: expected 0.1, got 0.5"]
    assert differences(tmp_path, {"body": net(0.5)}, {"trunk": net(0.5)}, rename=rename) == []
    # Each layer of a Stack has its own.
    tree = {"blocks": nn.Stack.from_layers([net(0.5), net(0.5)])}
    found = differences(tmp_path, tree, {"h0": net(0.5), "h1": net(0.1)}, rename={"blocks.*": "h*"})
    assert found == ["h1.layers.1.p: expected 0.1, got 0.5"]


# ---- what is no configuration


def attention(size):
    make = pm.make_with_state(nn.MultiheadAttention)
    return make(2, 4, is_causal=True, cache_size=size, key=KEY)[0]


def norm(make):
    """A layer with a token, which is named by its path in what is made."""
    return jax.tree.leaves(pm.make_with_state(make)()[0], is_leaf=lambda x: type(x) is nn.BatchNorm)


def optimizer(name):
    """With one label for each leaf."""
    rules = pm.by({name: optax.sgd(0.1), ...: optax.sgd(0.2)})
    return pm.Optimizer(rules).init({"a": linear(), "b": linear()})


ALIKE = {
    "the size of a cache": lambda: (attention(8), attention(16)),
    "the name of a token": lambda: (norm(lambda: nn.BatchNorm(2)), norm(lambda: [nn.BatchNorm(2)])),
    "the labels of an Optimizer": lambda: (optimizer("a"), optimizer("b")),
    "a list or a tuple": lambda: ([linear(), {"a": linear()}], (linear(), {"a": linear()})),
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE.keys())
def test_what_follows_from_the_rest_is_not_compared(make, tmp_path):
    """Neither written nor compared, so that files fit more trees."""
    one, other = make()
    beside = {"w": np.zeros(1, "f")}
    assert differences(tmp_path, beside | {"x": one}, beside | {"x": other}) == []
    assert differences(tmp_path, beside | {"x": other}, beside | {"x": one}) == []

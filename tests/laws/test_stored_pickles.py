"""Pickles that an earlier version wrote still load: of every way to make a class for an instance.

`stored_pickles.bin` was written at commit eabcd0ef, on Python 3.11 with JAX 0.10: a dict of pickles
by the names below, pickled and compressed with zlib. Add to it when a class of the library gets
another path or other fields.
"""

import pickle
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn

KEY = jax.random.key(0)
STORED = pickle.loads(zlib.decompress(Path(__file__).with_name("stored_pickles.bin").read_bytes()))
MIXED = "params=float32,compute=bfloat16,output=float32"


def mlp(width=3):
    return nn.MLP(2, 2, width, 1, key=KEY)


def tied(**options):
    return pm.tie(mlp(2), "layers[1].weight", to="layers[0].weight", **options)


def linear(key):
    return nn.Linear(2, 2, key=key)


def are_close(a, b):
    # Not to the last bit: the arrays were drawn by programs that were compiled otherwise.
    return bool(pm.tree_equal(a, b, rtol=1e-5, atol=1e-6))


MODELS = {
    "linear": lambda: nn.Linear(2, 3, key=KEY),
    "mlp": mlp,
    "tied": tied,
    "tied_through": lambda: tied(through=jnp.transpose),
    "weight_norm": lambda: nn.WeightNorm(nn.Linear(2, 3, key=KEY)),
    "lora": lambda: pm.lora(mlp(), "layers.*.weight", 1, key=KEY),
    "precision": lambda: pm.with_precision(mlp(), MIXED),
    "tied_precision": lambda: pm.with_precision(tied(), MIXED),
    "role": lambda: pm.with_role(mlp(), "layers.0", "buffer"),
    "unfinished": lambda: nn.Linear(None, 3, key=KEY),
    "conv": lambda: nn.Conv2d(1, 2, 3, key=KEY),
    "attention": lambda: nn.MultiheadAttention(2, 4, key=KEY),
    "batch_norm": lambda: pm.make_with_state(nn.BatchNorm)(3)[0],
    "state": lambda: pm.make_with_state(nn.BatchNorm)(3)[1],
    "stack": lambda: nn.Stack(linear, 2, key=KEY),
    "ensemble": lambda: nn.Ensemble(linear, 2, key=KEY),
    "method": lambda: mlp().layers[0].__call__,
    "optimizer": lambda: pm.Optimizer(pm.by({"layers.0": None, ...: None})),
    "lstm": lambda: nn.LSTMCell(2, 3, key=KEY),
    "dropout": lambda: nn.Dropout(0.5),
    "layer_norm": lambda: nn.LayerNorm((2, 3)),
    "loss_scale": lambda: pm.LossScale(4.0),
    "stream": lambda: pm.make_with_state(lambda: pm.RngStream())()[1].seed(KEY),
}


def test_every_stored_pickle_is_loaded():
    assert sorted(STORED) == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_stored_pickle_is_what_it_was(name):
    loaded, fresh = pickle.loads(STORED[name]), MODELS[name]()
    assert type(loaded).__qualname__ == type(fresh).__qualname__
    assert jax.tree.structure(loaded) == jax.tree.structure(fresh)
    assert are_close(loaded, fresh)
    assert pickle.loads(pickle.dumps(loaded)) == loaded


def test_stored_models_compute():
    x = jnp.ones(2)
    for name in ("mlp", "tied", "lora", "precision", "tied_precision", "stack"):
        assert are_close(pickle.loads(STORED[name])(x), MODELS[name]()(x)), name
    finished = pm.materialize(pickle.loads(STORED["unfinished"]), x)
    assert are_close(finished, pm.materialize(MODELS["unfinished"](), x))

"""Precisions are values, and are written as text."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.training.dtype_policies import as_precision

WRITTEN = {
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    "f32": ("float32", "float32", "float32"),
    jnp.float16: ("float16", "float16", "float16"),
    np.dtype("float32"): ("float32", "float32", "float32"),
    "params=float32,compute=bfloat16,output=float32": ("float32", "bfloat16", "float32"),
    " params = f16 , output = f32 ": ("float16", "float16", "float32"),
    "compute=bf16": ("float32", "bfloat16", "bfloat16"),
    "params=f32,compute=f16": ("float32", "float16", "float16"),
    "output=f32,params=bf16": ("bfloat16", "bfloat16", "float32"),
}


@pytest.mark.parametrize(("spec", "expected"), WRITTEN.items(), ids=map(str, WRITTEN))
def test_a_precision_may_be_written(spec, expected):
    """Missing parts have defaults: params are float32, compute is params, output is compute."""
    made = as_precision("f(spec)", spec)

    assert (made.params, made.compute, made.output) == expected
    assert made == pm.Precision(*expected)
    assert as_precision("f(spec)", made) is made


def test_a_precision_is_a_value():
    """It is compared, hashed, printed and pickled as its dtypes; it has no arrays."""
    made = pm.Precision("float32", jnp.bfloat16)

    assert repr(made) == "Precision(compute='bfloat16', output='bfloat16')"
    assert hash(made) == hash(pm.Precision("f32", "bf16", "bf16"))
    assert pickle.loads(pickle.dumps(made)) == made
    assert made != made.replace(output="float32")
    assert jax.tree.leaves(made) == []


def test_without_64_bits_there_is_no_float64():
    """As everywhere in JAX, and as in the layers' own `dtype`."""
    with pytest.warns(
        UserWarning, match=r"expected a dtype that JAX supports, got float64, which bec"
    ):
        assert pm.Precision("float64") == pm.Precision("float32")


WRONG = {
    "an integer": "int32",
    "complex": jnp.complex64,
    "no dtype": "float31",
    "a number": 16,
    "an unknown word": "params=float32,computer=bfloat16",
    "a word twice": "params=float32,params=float16",
    "no word": "params=float32,bfloat16",
    "nothing after the word": "params=",
    "a dict": {"params": "float32"},
    "an empty text": "",
}


@pytest.mark.parametrize("spec", WRONG.values(), ids=WRONG)
def test_what_is_no_precision_is_refused(spec):
    """The hint is one that can be pasted."""
    with pytest.raises(ArgumentError, match=r"(?s)^f\(spec\): expected a floating dtype.*params="):
        as_precision("f(spec)", spec)


@pytest.mark.parametrize("name", ["params", "compute", "output"])
def test_fields_are_checked_by_name(name):
    """In the constructor, and in `replace`."""
    with pytest.raises(ArgumentError, match=rf"^Precision\({name}\): expected a floating dtype"):
        pm.Precision(**{name: "int8"})
    with pytest.raises(ArgumentError, match=rf"^Precision\({name}\): expected a floating dtype"):
        pm.Precision().replace(**{name: None})

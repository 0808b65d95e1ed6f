"""Every layer that Equinox has, too: made with the same key, it computes the same.

The same key gives the same first weights, so nothing is copied.
"""

import dataclasses

import equinox
import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

import pytreemod as pm
from pytreemod import nn
from tests.nn.both_libraries import LAYERS
from tests.nn.catalogue import as_parameters
from tests.nn.numbers_to_compare import assert_close, wave


def value_and_gradients(layer, is_array, partition, combine, inputs):
    """The leaves of the result, and the gradients of a sum over them, by the paths of leaves."""
    parameters, rest = partition(layer, is_array)
    numbers, others = partition(jax.tree.map(jnp.asarray, inputs), is_array)

    def loss(both):
        parameters, numbers = both
        out = jax.tree.leaves(combine(parameters, rest)(*combine(numbers, others)))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in out), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))((parameters, numbers))
    return out, {keystr(path): leaf for path, leaf in tree_leaves_with_path(gradients)}


def configuration(layer):
    """The flags, sizes and words in the fields that Equinox's class has."""
    fields = dataclasses.fields(getattr(equinox.nn, type(layer).__name__))
    # MLP(scan=) is not here: a Stack does that.
    values = {f.name: getattr(layer, f.name) for f in fields if f.name not in ("scan", "layers")}
    return {
        name: x for name, x in values.items() if isinstance(x, bool | int | float | str | tuple)
    }


CALLED = [name for name, (_, *inputs) in LAYERS.items() if inputs]


@pytest.mark.parametrize("name", as_parameters(CALLED, str))
def test_value_and_gradients_are_equinoxs(name, key):
    """Of the weights, which have the same paths, and of the inputs; and all sizes and flags are."""
    make, *inputs = LAYERS[name]
    layer = make(nn, key)
    out, gradients = value_and_gradients(
        layer, pm.is_inexact_array, pm.partition, pm.combine, inputs
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        equinoxs = make(equinox.nn, key)
        expected, theirs = value_and_gradients(
            equinoxs, equinox.is_inexact_array, equinox.partition, equinox.combine, inputs
        )

    assert configuration(layer) == configuration(equinoxs)
    jax.tree.map(assert_close, out, expected)
    assert gradients.keys() == theirs.keys()
    for path, gradient in gradients.items():
        assert_close(gradient, theirs[path], rtol=1e-4, atol=1e-4)


def test_spectral_norm_is_equinoxs(key):
    """At each step of training, and then in inference."""

    def make(lib):
        layer = lib.Linear(3, 4, key=key)
        return lib.make_with_state(lib.SpectralNorm)(layer, "weight", key=key)

    (ours, state), (theirs, their_state) = make(nn), make(equinox.nn)
    for step in range(3):
        if step == 2:
            ours, theirs = nn.inference_mode(ours), equinox.nn.inference_mode(theirs)
        x = jnp.asarray(wave(3, phase=step))
        out, state = ours(x, state)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            expected, their_state = theirs(x, their_state)
        assert_close(out, expected, rtol=1e-4, atol=1e-4)

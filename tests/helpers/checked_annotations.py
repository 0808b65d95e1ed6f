"""Every layer, run while beartype checks pytreemod's annotations.

tests/typing starts this in a separate process, with jaxtyping's option for pytest, together with
all examples in docstrings. It covers what examples leave out: every layer under transforms.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import pytreemod as pm
from pytreemod import nn
from tests.nn.catalogue import CATALOGUE, Entry

KEY = jax.random.key(0)


def total(out: Any) -> Any:
    """A scalar of an output, for gradients."""
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(pm.filter(out, pm.is_inexact_array)))


def test_annotations_are_checked() -> None:
    """Without the checks, the other test would prove nothing."""
    with pytest.raises(TypeCheckError, match="out_features"):
        nn.Linear(3, "many", key=KEY)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_layers_under_transforms(entry: Entry) -> None:
    """Called, compiled, differentiated, in inference mode, and in an ensemble."""
    layer, state = entry.build()
    out, _ = entry.apply(layer, state)

    @pm.filter_value_and_grad(has_aux=True)
    def loss(given: Any, state: Any) -> Any:
        layer, scale = given
        out, state = entry.apply(layer, state)
        return scale * total(out), state

    layer, state = entry.build()
    (_, state), (gradient, _) = pm.filter_jit(loss)((layer, jnp.ones(())), state)
    layer = pm.apply_updates(layer, gradient)
    pm.filter_jit(entry.apply)(pm.inference_mode(layer), state)

    if entry.caches:  # Theirs are for one sequence.
        return
    keys = jax.random.split(KEY, 2)
    layers, states = pm.filter_vmap(nn.make_with_state(entry.make))(keys)
    states = pm.filter_vmap(lambda state, key: state.seed(key))(states, keys)
    outs, _ = pm.filter_vmap(entry.apply, axis_size=2)(layers, states)

    assert jax.tree.leaves(outs)[0].shape == (2, *jax.tree.leaves(out)[0].shape)

"""One step of the scan of a `Stack`."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod.errors import StructureError
from pytreemod.nn.stack.step import Step

X = jnp.ones(2)


def run(layer, x=X, key=None, extra=None, **same):
    """One step without State: what comes out of the layer."""
    (out, shared), own = Step(same, None, "Stack", None)((x, ()), (layer, (), key, extra or {}, 0))
    assert (shared, own) == ((), ())
    return out


def test_arguments_go_by_name():
    """Those of this layer, those of all, and the key; without a key there is none."""
    seen = {}

    def layer(x, **arguments):
        seen.update(arguments)
        return x

    key = jax.random.key(0)
    assert run(layer, key=key, extra={"mask": 1}, scale=2) is X
    assert seen == {"mask": 1, "scale": 2, "key": key}

    seen.clear()
    run(layer)
    assert seen == {}


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (lambda x: x[:1], r"at x: f32\[2\] -> f32\[1\](.|\n)*nn\.Sequential\("),
        (lambda x: (x, x), r"a change in 1 place\.(.|\n)*at x"),
        (lambda x: x.astype(jnp.bfloat16), r"bf16\[2\](.|\n)*stack\(x\.astype\(jnp\.bfloat16\)\)"),
    ],
    ids=["shape", "structure", "dtype"],
)
def test_a_layer_gives_back_what_it_takes(layer, text):
    """Or the next one could not take it; a dtype may be had by starting from it."""
    with pytest.raises(
        StructureError, match=rf"^Stack: expected each layer to give back(.|\n)*{text}"
    ):
        run(layer)


def test_a_weak_dtype_may_become_another():
    """It gives way to the layer's, as in JAX's own arithmetic; then the next layer has that."""
    out = run(lambda x: x.astype(jnp.bfloat16), x=jnp.asarray(1.0))

    assert out.dtype == jnp.bfloat16

"""`filter_eval_shape`, `filter_make_jaxpr`, `filter_closure_convert` and `filter_checkpoint`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports


def make_layer(eqx):
    """The class of a layer built from a size and a key, with a static field."""

    class Layer(eqx.Module):
        weight: jax.Array
        extra: Any
        size: int = eqx.field(static=True)

        def __init__(self, size, key):
            self.size = size
            self.weight = jax.random.normal(key, (size, 2))
            self.extra = {"scale": 2.0, "name": jnp.zeros(1, jnp.bfloat16), "none": None}

        def __call__(self, x):
            return self.weight @ x * self.extra["scale"]

        def method(self, x, *, power=1):
            return self(x) ** power

    return Layer


@same_under_both_imports
def test_eval_shape_of_a_constructor(eqx):
    """The skeleton of a model: structs instead of arrays; other leaves are unchanged."""
    layer_class = make_layer(eqx)
    skeleton = eqx.filter_eval_shape(layer_class, 3, jax.random.key(0))
    filled = jax.tree.map(
        lambda s: jnp.ones(s.shape, s.dtype) if isinstance(s, jax.ShapeDtypeStruct) else s, skeleton
    )
    return skeleton, filled(ramp(2)), filled.size


@same_under_both_imports
def test_eval_shape_takes_shapes_arrays_and_anything_else(eqx):
    """Arrays and shapes are abstract inside; keywords and static values are passed on."""
    abstract = []

    def apply(tree, n, *, name):
        abstract.append(isinstance(tree["x"], jax.core.Tracer))
        return {name: tree["x"].sum() * tree["host"], "n": n, "text": name}

    struct, host = jax.ShapeDtypeStruct((5,), jnp.float32), np.ones(2, np.float32)
    results = [
        eqx.filter_eval_shape(apply, {"x": x, "host": host}, 3, name="out")
        for x in (struct, ramp(4))
    ]
    return results, abstract


@same_under_both_imports
def test_make_jaxpr(eqx):
    """The program over the arrays, the shapes of the results, and the static results."""

    def apply(tree, n):
        return {"y": jnp.sin(tree["x"]) * n, "text": "a", "n": n}

    jaxpr, shapes, rest = eqx.filter_make_jaxpr(apply)({"x": ramp(2), "name": "b"}, 3.0)
    primitives = [equation.primitive.name for equation in jaxpr.jaxpr.eqns]
    values = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, ramp(2))
    inputs = [str(variable.aval) for variable in jaxpr.jaxpr.invars]
    return primitives, values, inputs, eqx.combine(shapes, rest)


@same_under_both_imports
def test_closure_convert_hoists_the_arrays(eqx):
    """The converted function gives the same values, and its arrays are leaves that can change."""
    weight, traces = ramp(2), []

    def closed(x, tree):
        traces.append(None)
        return jnp.sin(weight * x) + tree["y"], "text"

    converted = eqx.filter_closure_convert(closed, 1.0, {"y": ramp(2), "name": "a"})
    value = converted(1.0, {"y": 3 * ramp(2), "name": "a"})
    arrays = [leaf for leaf in jax.tree.leaves(converted) if eqx.is_array(leaf)]
    loss = lambda f, y: jnp.sum(f(1.0, {"y": y, "name": "a"})[0])  # noqa: E731
    gradient = jax.tree.leaves(eqx.filter_grad(loss)(converted, ramp(2)))
    return value, arrays, gradient, len(traces)


CHECKPOINTS = {
    "plain": {},
    "prevent_cse": {"prevent_cse": False},
    "policy": {"policy": jax.checkpoint_policies.dots_saveable},
}


@pytest.mark.parametrize("options", CHECKPOINTS)
@same_under_both_imports
def test_checkpoint_changes_no_numbers(eqx, options):
    """Values and gradients are those of the function, with static arguments passed on."""

    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x, power):
            return jnp.sum(jnp.sin(self.weight @ x) ** power)

    @eqx.filter_checkpoint(**CHECKPOINTS[options])
    def apply(layer, x, power, *, name="a"):
        return layer(x, power), name

    layer = Layer(ramp(2, 2))
    loss = lambda layer, x: apply(layer, x, 2)[0]  # noqa: E731
    return apply(layer, ramp(2), 3, name="b"), eqx.filter_value_and_grad(loss)(layer, ramp(2))

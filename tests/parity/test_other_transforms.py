"""`filter_eval_shape`, `filter_make_jaxpr`, `filter_closure_convert` and `filter_checkpoint`."""

from typing import Any

import jax
import jax.numpy as jnp

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

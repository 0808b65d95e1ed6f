"""filter_closure_convert: a closure made a tree, jitted once, and differentiated."""

import equinox as eqx
import jax
import jax.numpy as jnp

TRACES = []


@eqx.filter_jit
def euler(field, y, n):
    TRACES.append(n)
    return jax.lax.fori_loop(
        0, n, lambda _, y: jax.tree.map(lambda a, d: a + 0.1 * d, y, field(y)), y
    )


class Drag(eqx.Module):
    coefficient: jax.Array

    def __call__(self, y):
        return {"x": y["v"], "v": -self.coefficient * y["v"]}


def make_field(rate, push):
    def field(y):
        return {"x": y["v"], "v": push - rate * y["v"]}

    return field


def main():
    y0 = {"x": jnp.array(0.0), "v": jnp.array(1.0)}
    shared = eqx.filter_closure_convert(make_field(jnp.array(0.5), jnp.array(0.1)), y0)
    leaves = len([x for x in jax.tree.leaves(shared) if eqx.is_array(x)])

    def loss(rate):
        converted = eqx.filter_closure_convert(make_field(rate, 0.0), y0)
        return euler(converted, y0, 3)["x"]

    values = [euler(eqx.filter_closure_convert(Drag(jnp.array(c)), y0), y0, 3) for c in (0.1, 0.2)]
    try:
        shared({"x": jnp.ones(2), "v": jnp.ones(2)})
    except ValueError:
        refused = True
    struct = shared.out_struct if hasattr(shared, "out_struct") else None
    return (
        leaves,
        euler(shared, y0, 3),
        jax.grad(loss)(jnp.array(0.3)),
        values,
        refused,
        struct,
        loss(0.3),
    )

"""Law of filter_vmap: it equals the stack of the calls on each member."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.laws import law
from tests.helpers.trees import Affine, affine, double, ramp

MEMBERS = 2


def take(tree, axes, i):
    """Member `i`: `axes` is a tree with an int or a dash for each leaf."""

    def one(axis, leaf):
        return leaf if axis == "-" else np.take(np.asarray(leaf), i, axis)

    return jax.tree.map(one, axes, tree)


def stack(members, axes):
    """The members of a result, stacked along the axes; dashes are the same in all of them."""

    def one(axis, *leaves):
        return leaves[0] if axis == "-" else np.stack(leaves, axis)

    return jax.tree.map(one, axes, *members)


def as_spec(axes):
    """The tree of axes as filter_vmap takes it."""
    return jax.tree.map(lambda axis: None if axis == "-" else axis, axes)


def combined(tree, scale):
    """A function of a tree with three arrays and of a number; its result has two."""
    x, y, z = jax.tree.leaves(tree)
    total = jnp.sum(x) + jnp.sum(y) * jnp.sum(jnp.cos(z))
    return {
        "sums": jnp.outer(jnp.sin(x.reshape(-1)[:2] + total), y.reshape(-1)[:2]),
        "x": x * scale,
    }


axis = st.sampled_from([0, 1, 2, -1, -2, -3])


@settings(law, max_examples=12)  # Each example compiles anew.
@given(
    st.sampled_from([list, tuple, lambda xs: Affine(xs[0], [xs[1], xs[2]])]),
    st.tuples(axis, st.one_of(axis, st.just("-")), st.one_of(axis, st.just("-"))),
    st.tuples(axis, axis),
    st.sampled_from([2.0, 3]),
)
def test_vmap_is_the_stack_of_calls(build, axes, out_axes, scale):
    """filter_vmap(f, in_axes=a, out_axes=b) == stack of f on members, for any axes in and out."""
    shapes = [(2, 3), (3, 2), (1, 2)]
    full = [
        ramp(*(s if a == "-" else np.insert(s, a if a >= 0 else len(s) + 1 + a, MEMBERS)))
        for s, a in zip(shapes, axes, strict=True)
    ]
    tree, in_axes = build(full), build(list(axes))
    outs = {"sums": out_axes[0], "x": out_axes[1]}

    mapped = pm.filter_vmap(combined, in_axes=(as_spec(in_axes), None), out_axes=outs)
    found = mapped(tree, scale * jnp.ones(()))
    members = [combined(take(tree, in_axes, i), scale * jnp.ones(())) for i in range(MEMBERS)]
    assert_close(found, stack(members, outs), rtol=1e-4)


def stacked(n=3):
    """Three models in one."""
    return pm.filter_vmap(lambda start: affine(start=start))(jnp.arange(float(n)))


def test_default_axes_map_every_array_and_nothing_else():
    """By default arrays are mapped over axis 0; numbers, strings and functions are shared."""
    models, xs = stacked(), ramp(3, 3)

    found = pm.filter_vmap(lambda m, x, how, fn: fn(m(x)) if how == "double" else m(x))(
        models, xs, "double", double
    )
    expected = jnp.stack([2 * jax.tree.map(lambda w, i=i: w[i], models)(xs[i]) for i in range(3)])
    assert_close(found, expected)

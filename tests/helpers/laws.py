"""Settings of the property tests, and their strategies for trees."""

from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from hypothesis import settings

from tests.helpers.trees import Affine, Boxed, Buffered, Color, Holder, Pair, Static, double

# Derandomized, so that every run on every machine tests the same examples.
law = settings(max_examples=25, derandomize=True, database=None)

NUMPY_ARRAYS = [np.zeros((), np.float32), np.arange(3), np.ones((2, 1), np.float32)]
JAX_ARRAYS = [jnp.zeros(()), jnp.arange(2), jnp.ones((1, 2)), jnp.asarray([True, False])]

arrays = st.sampled_from([*NUMPY_ARRAYS, *JAX_ARRAYS])
"""A few arrays of several shapes and dtypes; few, so that jitted functions rarely compile."""

numbers = st.one_of(st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.5]), st.booleans())

others = st.sampled_from(["", "text", double, Affine, Color.RED, None])
"""Leaves that JAX cannot convert to arrays, and None."""

leaves = st.one_of(arrays, numbers, others)

_words = st.sampled_from(["a", "b", "c"])


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A node of any kind with these children."""
    return st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(_words, children, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
        st.builds(Affine, children, children),
        st.builds(Boxed, children),
        st.builds(Buffered, children, children, children, children),
        st.builds(Static, children, st.sampled_from([0, "a", (1, 2)])),
        st.builds(Holder, children),
    )


trees = st.recursive(leaves, nodes, max_leaves=6)
"""Any tree."""

array_trees = st.recursive(arrays, nodes, max_leaves=5)
"""Trees whose leaves are all arrays."""

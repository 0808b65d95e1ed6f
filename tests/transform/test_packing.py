"""Deep trees, values without a hash and references go through a compiled call and come out."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Affine, Holder, Registered, ramp


def test_deep_results():
    """A result may be nested as deep as JAX takes trees, nearly Python's limit; it can be read."""
    turns = [Holder, lambda x: {"a": x}, lambda x: (x, None), lambda x: Registered(x, "note")]
    tree = x = ramp(1)
    for i in range(900):
        tree = turns[i % len(turns)](tree)

    def call():
        made = pm.filter_jit(lambda t: t)(tree)
        return jax.tree.leaves(made), jax.tree.structure(made) == jax.tree.structure(tree)

    with ThreadPoolExecutor(1) as pool:  # A thread's stack is empty; pytest's own is half full.
        assert pool.submit(call).result() == ([x], True)


def test_results_without_a_hash_are_returned():
    """A leaf that is no array is returned unchanged, each time."""
    thing = {1}
    jitted = pm.filter_jit(lambda x: (x, thing, Holder([thing])))
    for _ in range(3):
        found = jitted(ramp(1))
        assert found[1] is thing
        assert found[2].content[0] is thing


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: Affine(x, 2)], ids=["bare", "Module"])
def test_a_reference_is_an_argument_and_no_result(hold):
    """A `Ref` is passed on to a compiled function, which writes to it; also inside a trace."""
    traced = []

    @pm.filter_jit
    def add(held, x):
        traced.append(None)
        (reference,) = (r for r in jax.tree.leaves(held) if not isinstance(r, int))
        reference[...] = reference[...] + x

    def program(x):
        reference = jax.new_ref(x)
        for _ in range(2):
            add(hold(reference), x)
        return reference[...]

    assert_same(jax.jit(program)(ramp(2)), 3 * ramp(2))
    assert len(traced) == 1
    assert_same(program(ramp(2)), 3 * ramp(2))
    with pytest.raises(ValueError, match="mutable array reference"):
        pm.filter_jit(lambda x: hold(jax.new_ref(x)))(ramp(2))

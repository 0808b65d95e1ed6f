"""The compiled program: the filters add no operation to a training step written by hand."""

import re
from collections import Counter

import jax
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.training import adam, batch, network, step, step_by_hand

MODEL, STATE, BATCH = network(), adam(network()), batch()
# The arguments of the two forms: trees, and lists of arrays.
TREES = MODEL, STATE, *BATCH
LISTS = jax.tree.leaves(MODEL), jax.tree.leaves(STATE), *BATCH


def test_no_equation_is_added():
    """The traced program has the same equations, nested ones included; and the same results."""
    leaves, structure = jax.tree.flatten(TREES)
    nested = pm.filter_jit(lambda *args: pm.filter_jit(step)(*args))
    by_hand = jax.jit(lambda *args: jax.jit(step_by_hand)(*args))

    def on_leaves(*leaves):
        return nested(*jax.tree.unflatten(structure, leaves))

    assert equations(on_leaves, *leaves) == equations(by_hand, *LISTS)
    assert_close(*map(jax.tree.leaves, (nested(*TREES), by_hand(*LISTS))))


@pytest.mark.usefixtures("optimized")
def test_the_compiled_program_is_the_same():
    """XLA's operations, and its estimate of floating-point operations and bytes, are equal."""
    mine = pm.filter_jit(step).lower(*TREES).compile()
    theirs = jax.jit(step_by_hand).lower(*LISTS).compile()
    operations = [
        Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", compiled.as_text()))
        for compiled in (mine, theirs)
    ]

    assert sum(operations[0].values()) > 10
    assert operations[0] == operations[1]
    for key in ("flops", "bytes accessed"):
        assert mine.cost_analysis()[key] == theirs.cost_analysis()[key]

"""The compiled program: the filters add no operation to hand-written code."""

import re
from collections import Counter

import jax
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.training import adam, batch, loss, loss_by_hand, network, step, step_by_hand

MODEL, STATE, BATCH = network(), adam(network()), batch()
FLAT, FLAT_STATE = jax.tree.leaves(MODEL), jax.tree.leaves(STATE)
AXES = {"in_axes": (None, 0, 0)}

# The two forms of each program.
PROGRAMS = {
    "loss": (loss, loss_by_hand),
    "gradient": (pm.filter_grad(loss), jax.grad(loss_by_hand)),
    "value and gradient": (pm.filter_value_and_grad(loss), jax.value_and_grad(loss_by_hand)),
    "vmap": (pm.filter_vmap(loss, **AXES), jax.vmap(loss_by_hand, **AXES)),
    "checkpoint": (
        pm.filter_grad(pm.filter_checkpoint(loss)),
        jax.grad(jax.checkpoint(loss_by_hand)),
    ),
    "train step": (step, step_by_hand),
    "nested jit": (
        lambda *args: pm.filter_jit(step)(*args),
        lambda *args: jax.jit(step_by_hand)(*args),
    ),
}


def arguments(name):
    """The arguments of the two forms: trees, and lists of arrays."""
    is_step = name in ("train step", "nested jit")
    states = ((STATE,), (FLAT_STATE,)) if is_step else ((), ())
    return (MODEL, *states[0], *BATCH), (FLAT, *states[1], *BATCH)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_equation_is_added(name):
    """The traced program has the same equations, nested ones included; and the same results."""
    (ours, by_hand), (trees, lists) = PROGRAMS[name], arguments(name)
    structure = jax.tree.structure(trees)

    def on_leaves(*leaves):
        return pm.filter_jit(ours)(*jax.tree.unflatten(structure, leaves))

    assert equations(on_leaves, *jax.tree.leaves(trees)) == equations(jax.jit(by_hand), *lists)
    assert_close(*map(jax.tree.leaves, (pm.filter_jit(ours)(*trees), jax.jit(by_hand)(*lists))))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ["gradient", "train step"])
def test_the_compiled_program_is_the_same(name):
    """XLA's operations, and its estimate of floating-point operations and bytes, are equal."""
    (ours, by_hand), (trees, lists) = PROGRAMS[name], arguments(name)
    mine = pm.filter_jit(ours).lower(*trees).compile()
    theirs = jax.jit(by_hand).lower(*lists).compile()
    operations = [
        Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", compiled.as_text()))
        for compiled in (mine, theirs)
    ]

    assert sum(operations[0].values()) > 10
    assert operations[0] == operations[1]
    for key in ("flops", "bytes accessed"):
        assert mine.cost_analysis()[key] == theirs.cost_analysis()[key]

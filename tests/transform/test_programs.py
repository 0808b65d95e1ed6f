"""The compiled program: the filters add no operation to hand-written code."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from tests.helpers import training
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.training import adam, batch, loss, loss_by_hand, network, step, step_by_hand

MODEL, STATE, BATCH = network(), adam(network()), batch()
FLAT, FLAT_STATE = jax.tree.leaves(MODEL), jax.tree.leaves(STATE)


def mapped(model, x, y):
    return pm.filter_vmap(loss, in_axes=(None, 0, 0))(model, x, y)


def mapped_by_hand(arrays, x, y):
    return jax.vmap(loss_by_hand, in_axes=(None, 0, 0))(arrays, x, y)


# The two forms of each program, with the arguments before the batch.
PROGRAMS = {
    "loss": (loss, loss_by_hand, (MODEL,), (FLAT,)),
    "gradient": (pm.filter_grad(loss), jax.grad(loss_by_hand), (MODEL,), (FLAT,)),
    "value and gradient": (
        pm.filter_value_and_grad(loss),
        jax.value_and_grad(loss_by_hand),
        (MODEL,),
        (FLAT,),
    ),
    "vmap": (mapped, mapped_by_hand, (MODEL,), (FLAT,)),
    "checkpoint": (
        pm.filter_grad(pm.filter_checkpoint(loss)),
        jax.grad(jax.checkpoint(loss_by_hand)),
        (MODEL,),
        (FLAT,),
    ),
    "train step": (step, step_by_hand, (MODEL, STATE), (FLAT, FLAT_STATE)),
    "nested jit": (
        lambda *args: pm.filter_jit(step)(*args),
        lambda *args: jax.jit(step_by_hand)(*args),
        (MODEL, STATE),
        (FLAT, FLAT_STATE),
    ),
}
EACH = pytest.mark.parametrize(
    ("ours", "by_hand", "trees", "lists"), PROGRAMS.values(), ids=PROGRAMS.keys()
)


def on_leaves(fn, args):
    """A function of trees as a function of their leaves."""
    structure = jax.tree.structure(args)
    return lambda *leaves: fn(*jax.tree.unflatten(structure, leaves))


@EACH
def test_no_equation_is_added(ours, by_hand, trees, lists):
    """The traced program has the same equations, nested ones included."""
    args, flat = (*trees, *BATCH), (*lists, *BATCH)
    counted = equations(on_leaves(pm.filter_jit(ours), args), *jax.tree.leaves(args))

    assert counted == equations(jax.jit(by_hand), *flat)


def operations(compiled):
    """How often each operation stands in a compiled program."""
    return Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", compiled.as_text()))


def compiled_pair(name):
    ours, by_hand, trees, lists = PROGRAMS[name]
    return (
        pm.filter_jit(ours).lower(*trees, *BATCH).compile(),
        jax.jit(by_hand).lower(*lists, *BATCH).compile(),
    )


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ["gradient", "train step"])
def test_the_compiled_program_is_the_same(name):
    """XLA's operations, and its estimate of floating-point operations and bytes, are equal."""
    ours, by_hand = compiled_pair(name)

    assert sum(operations(ours).values()) > 10
    assert operations(ours) == operations(by_hand)
    for key in ("flops", "bytes accessed"):
        assert ours.cost_analysis()[key] == by_hand.cost_analysis()[key]


def test_the_results_are_the_same():
    """The two ways to write a train step agree, so that comparing them means something."""
    ours = pm.filter_jit(step)(MODEL, STATE, *BATCH)
    by_hand = jax.jit(step_by_hand)(FLAT, FLAT_STATE, *BATCH)

    assert_close(jax.tree.leaves(ours), jax.tree.leaves(by_hand))


def test_configuration_is_part_of_the_program():
    """Flags, names and functions of a model are not inputs: branching on them is free."""

    def call(model, x):
        return model(x) if model.name == "network" else None

    by_hand = equations(
        lambda w, b, x: jnp.tanh(training.linear(x, w, b)), FLAT[0], FLAT[1], BATCH[0]
    )
    ours = equations(on_leaves(call, (network(depth=1), BATCH[0])), *FLAT[:2], BATCH[0])

    assert ours == by_hand

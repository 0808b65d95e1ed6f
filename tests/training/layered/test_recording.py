"""The program of a transformation shows which arrays it reads."""

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.training.layered.lists import abstract, without
from pytreemod.training.layered.programs import is_by_number
from pytreemod.training.layered.recording import (
    UndecidedError,
    axes_of_state,
    is_leafwise,
    is_whole,
    record,
    record_same,
    record_two,
)
from pytreemod.tree.members import without_axes

SHAPES = abstract(nn.Stack(lambda key: nn.Linear(3, 2, key=key), 4, key=jax.random.key(0)))
ONE = without(SHAPES, [1, 1])


@pytest.fixture(autouse=True)
def _standard_promotion():
    """As JAX does by default: optax divides floats by counts, and broadcasts across ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    ("rule", "by_number", "whole", "leafwise"),
    [
        (optax.adam(0.1), True, True, True),
        (optax.clip_by_global_norm(1.0), False, True, False),
        (optax.lamb(0.1), False, False, True),
        (optax.contrib.muon(0.1), False, False, True),
        (optax.contrib.prodigy(), False, False, False),
        (optax.noisy_sgd(0.1, key=0), False, False, False),
    ],
    ids=["numbers", "all arrays", "arrays", "matrices", "mixed", "random"],
)
@pytest.mark.sampled
def test_what_a_rule_looks_at(rule, by_number, whole, leafwise):
    """Numbers, whole arrays, one array at a time."""
    assert (record_same(rule, SHAPES, ONE, is_by_number) is not None) is by_number
    assert is_whole(rule, SHAPES, ONE) is whole
    program, _, by_leaf = record_two(rule, SHAPES)
    assert is_leafwise(program) is leafwise
    assert not by_leaf


def test_state_has_axes_where_the_model_has_them():
    """Counts have none."""
    with without_axes("members"):
        program = record(optax.adam(0.1), ONE)
    axes, paths, structure = axes_of_state(program, 1, "members")
    by_path = {jax.tree_util.keystr(path): n for path, n in zip(paths, axes, strict=True)}
    assert len(paths) == structure.num_leaves
    assert by_path.pop("[0].count") == 0
    assert len(by_path) == 4
    assert set(by_path.values()) == {1}


def test_what_cannot_be_recorded_is_undecided():
    """Such as Python's `if` on a number."""

    def update(updates, state, params=None):
        return (updates, state) if jnp.sum(updates.layer.weight) > 0 else (params, state)

    rule = optax.GradientTransformation(optax.init_empty_state, update)
    with pytest.raises(UndecidedError, match=r"^$"):
        record(rule, SHAPES)
    assert record_same(rule, SHAPES, ONE, is_by_number) is None


def test_a_mask_of_the_model_makes_each_leaf_a_list():
    """It fits no other tree."""
    rule = optax.masked(optax.lamb(0.1), jax.tree.map(lambda x: len(x.shape) == 3, SHAPES))
    program, two, by_leaf = record_two(rule, SHAPES)
    assert by_leaf
    assert jax.tree.structure(SHAPES).flatten_up_to(two)
    assert is_leafwise(program)


class Number(pm.Module):
    """A parameter without axes."""

    value: jax.Array

    def __init__(self):
        self.value = jnp.ones(())

    def __call__(self, x):
        return x


def test_the_sum_of_a_layers_number_is_not_that_of_all_layers():
    """Though no equation says so for one layer."""

    def filled(update, params):
        del params
        return jnp.broadcast_to(jnp.sum(update), update.shape)

    numbers = abstract(nn.Stack(Number, 3))
    one = without(numbers, [1])
    assert not is_whole(optax.stateless_with_tree_map(filled), numbers, one)
    assert is_whole(optax.clip_by_global_norm(1.0), numbers, one)


def test_a_rule_that_needs_the_loss_is_recorded_with_one():
    """As optax names it."""
    assert record(optax.contrib.momo(), SHAPES).outs == 2

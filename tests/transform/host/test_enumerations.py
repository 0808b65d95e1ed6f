"""Enumerations: integers to JAX, messages to people."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError


class Result(pm.Enumeration):
    """How a computation ended."""

    success = "All is well."
    failure = "It did not work."


class More(Result):
    """Results that know one more way."""

    late = "Too late."


class Other(pm.Enumeration):
    """Another enumeration, with a name in common."""

    success = "Also well."


with warnings.catch_warnings():
    # Of the two messages for `success`.
    warnings.simplefilter("ignore")

    class Both(Other, More):
        """Both of them."""


FLAGS = jnp.array([True, False])


def chosen(flag):
    return Result.where(flag, Result.success, Result.failure)


def test_items_have_messages():
    """`Class[item]` is the text that was declared."""
    assert Result[Result.success] == "All is well."
    assert Result[Result.failure] == "It did not work."


def test_items_are_integers_to_jax():
    """An item is a tree with one leaf, an int32 scalar: its index in the class."""
    for place, item in enumerate(More):
        [leaf] = jax.tree.leaves(item)
        assert (leaf.shape, leaf.dtype, int(leaf)) == ((), jnp.int32, place)


def test_items_are_instances_of_their_own_class():
    """isinstance asks for the class that can be asked for the message, as `in` does."""
    assert isinstance(Result.success, Result)
    assert not isinstance(More.late, Result)
    assert not isinstance(Result.success, More)
    assert not isinstance(1, Result)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, pm.filter_jit], ids=["eager", "jax", "pm"])
def test_where_chooses(jit):
    """`where` takes the first item where the predicate is True, under any jit."""
    for flag, text in [(True, "All is well."), (False, "It did not work.")]:
        assert Result[jit(chosen)(jnp.array(flag))] == text
    assert Result.where(True, Result.success, Result.failure) is not Result.failure
    assert Result[Result.where(np.array(False), Result.success, Result.failure)] != "All is well."


def test_equality_is_a_boolean_array():
    """`==` and `!=` compare items, traced or not, one or many."""
    assert bool(Result.success == Result.success)
    assert bool(Result.success != Result.failure)
    assert not bool(Result.success == Result.failure)
    many = jax.vmap(chosen)(FLAGS)
    np.testing.assert_array_equal(many == Result.success, FLAGS)
    np.testing.assert_array_equal(many != Result.success, ~FLAGS)
    np.testing.assert_array_equal(jax.jit(lambda r: r == Result.failure)(many), ~FLAGS)


def test_items_go_through_control_flow():
    """A scan carries an item, a cond returns one, a while loop runs until it changes."""

    def step(carry, flag):
        return Result.where(flag, carry, Result.failure), None

    carried = jax.lax.scan(step, Result.success, FLAGS)[0]
    branched = jax.lax.cond(FLAGS[1], lambda: Result.success, lambda: Result.failure)
    looped = jax.lax.while_loop(
        lambda r: r == Result.success, lambda _: Result.failure, Result.success
    )

    assert {Result[item] for item in (carried, branched, looped)} == {"It did not work."}


def test_promote_finds_the_item_of_the_same_name():
    """An item of any base becomes the item of the derived class, traced or not."""
    assert bool(More.promote(Result.failure) == More.failure)
    assert bool(Both.promote(More.late) == Both.late)
    assert bool(Both.promote(Other.success) == Both.success)
    promoted = jax.jit(lambda flag: More.promote(chosen(flag)))(jnp.array(False))
    assert More[promoted] == "It did not work."
    np.testing.assert_array_equal(
        More.promote(jax.vmap(chosen)(FLAGS)) == More.failure, [False, True]
    )


def test_the_message_of_the_derived_class_wins():
    """A name that is declared again has the new message."""

    with pytest.warns(UserWarning, match=r"Polite\.failure") as told:

        class Polite(Result):
            success = "All is well."
            failure = "Sorry."

    assert told[0].filename == __file__
    assert Polite[Polite.promote(Result.failure)] == "Sorry."
    assert Both[Both.success] == "All is well."
    assert len(Polite) == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copied_and_pickled(again):
    """A copy is the same item of the same class."""
    assert bool(again(More.late) == More.late)


def test_error_if_has_the_items_message():
    """item.error_if fails with the message of the item, known or traced."""
    fails = pm.filter_jit(lambda flag, x: chosen(flag).error_if(x, ~flag))

    assert fails(jnp.array(True), jnp.ones(1)) == 1
    with pytest.raises(CheckError, match=r"\AIt did not work\."):
        fails(jnp.array(False), jnp.ones(1))
    with pytest.raises(CheckError, match=r"\AAll is well\."):
        Result.success.error_if(jnp.ones(1), True)


def test_error_if_of_many_names_the_first():
    """Under vmap the message is that of the member that failed."""
    check = pm.filter_jit(jax.vmap(lambda flag, x: chosen(flag).error_if(x, ~flag)))
    with pytest.raises(CheckError, match=r"\AIt did not work\.") as caught:
        check(FLAGS, jnp.ones(2))

    assert "for the batch index 1" in caught.value.__notes__


@pytest.mark.parametrize(
    "call",
    [
        lambda: Result.success == Other.success,
        lambda: Result.success == 0,
        lambda: Result[More.late],
        lambda: Result.promote(More.late),
        lambda: Result.where(True, Result.success, Other.success),
    ],
    ids=["==", "a number", "message", "promote", "where"],
)
def test_items_of_two_classes_are_not_mixed(call):
    """The same number means something else in each."""
    with pytest.raises(ArgumentError, match="Result"):
        call()

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


def test_items_are_integers_to_jax_and_messages_to_people():
    """An item is a tree with one leaf, its index; `Class[item]` is the text that was declared."""
    for place, item in enumerate(More):
        [leaf] = jax.tree.leaves(item)
        assert (leaf.shape, leaf.dtype, int(leaf)) == ((), jnp.int32, place)
    assert [More[item] for item in More] == ["All is well.", "It did not work.", "Too late."]
    assert len(More) == 3
    assert repr(Result) == "<enumeration Result: success, failure>"
    assert pm.tree_pformat([Result.failure]) == f"[{__name__}.Result<It did not work.>]"


def test_items_belong_to_their_own_class():
    """isinstance asks for the class that can be asked for the message, as `in` does."""
    assert isinstance(Result.success, Result)
    for other in (More.late, More.success, 1):
        assert not isinstance(other, Result)
        assert other not in Result
    assert hash(More.late) == hash(More.late) != hash(More.failure)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, pm.filter_jit], ids=["eager", "jax", "pm"])
def test_where_chooses(jit):
    """`where` takes the first item where the predicate is True; `==` and `!=` tell which it is."""
    for flag, text in [(True, "All is well."), (False, "It did not work.")]:
        for known in (flag, np.array(flag), jnp.array(flag)):
            assert Result[chosen(known)] == text
        assert Result[jit(chosen)(jnp.array(flag))] == text
        assert bool(chosen(flag) == Result.success) == flag
    many = jit(jax.vmap(chosen))(FLAGS)
    np.testing.assert_array_equal(many != Result.success, ~FLAGS)
    np.testing.assert_array_equal(jit(lambda r: r == Result.failure)(many), ~FLAGS)


def test_promote_finds_the_item_of_the_same_name():
    """An item of any base becomes the item of the derived class, traced or not."""
    items = {"failure": Result.failure, "late": More.late, "success": Other.success}
    for name, item in items.items():
        assert bool(Both.promote(item) == getattr(Both, name))
    promote = lambda flag: More.promote(chosen(flag))  # noqa: E731
    assert More[jax.jit(promote)(jnp.array(False))] == "It did not work."
    np.testing.assert_array_equal(jax.vmap(promote)(FLAGS) == More.failure, ~FLAGS)


def test_the_message_of_the_derived_class_wins():
    """A name that is declared again has the new message, with a warning."""
    with pytest.warns(UserWarning, match=r"Polite\.failure") as told:

        class Polite(Result):
            success = "All is well."
            failure = "Sorry."

    assert told[0].filename == __file__
    assert Polite[Polite.promote(Result.failure)] == "Sorry."
    assert Both[Both.success] == "All is well."


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copied_and_pickled(again):
    """A copy is the same item of the same class."""
    assert bool(again(More.late) == More.late)


def test_error_if_has_the_items_message():
    """item.error_if fails with the message of the item; of the first that failed under vmap."""
    check = pm.filter_jit(jax.vmap(lambda flag, x: chosen(flag).error_if(x, ~flag)))

    np.testing.assert_array_equal(check(FLAGS | True, jnp.ones(2)), jnp.ones(2))
    with pytest.raises(CheckError, match=r"\AIt did not work\."):
        check(FLAGS, jnp.ones(2))


MISTAKES = {
    "==": lambda: Result.success == Other.success,
    "a number": lambda: Result.success == 0,
    "message": lambda: Result[More.late],
    "promote": lambda: Result.promote(More.late),
    "where": lambda: Result.where(True, Result.success, Other.success),
    "a flag": lambda: Result.where(FLAGS, Result.success, Result.failure),
    "traced": lambda: jax.jit(lambda flag: len(Result[chosen(flag)]))(True),
    "no text": lambda: type("Result2", (pm.Enumeration,), {"late": 3}),
    "a taken name": lambda: type("Result2", (pm.Enumeration,), {"where": "There."}),
}


@pytest.mark.parametrize("call", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused(call):
    """The same number means something else in another class."""
    with pytest.raises(ArgumentError, match="Result"):
        call()

"""Donation: the arrays that a call gives away, and the memory that it saves."""

import gc
import re

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, StateError
from tests.helpers.training import adam, batch, network, step
from tests.helpers.trees import Buffered, affine, ramp


def update(model, opt_state, x):
    return jax.tree.map(lambda w: w + x, model), jax.tree.map(lambda s: s * x, opt_state), x * 2


def arguments():
    """New arguments, because each call may give them away."""
    return Buffered(ramp(5), ramp(6), ramp(7)), [ramp(8), ramp(9)], jnp.full((), 2.0)


DONATED = {
    "none": "- - - - - -",
    "model": "d d d - - -",
    ("opt_state",): "- - - d d -",
    ("opt_state", "model"): "d d d d d -",
    "all": "d d d d d d",
    "warn": "d d d d d d",
    "all-except-first": "- - - d d d",
    "warn-except-first": "- - - d d d",
}


@pytest.mark.parametrize("donate", DONATED, ids=str)
def test_what_is_donated(donate):
    """By names, or by Equinox's strings: exactly these are gone, however they were passed."""
    jitted = pm.filter_jit(update, donate=donate)
    by_keyword = lambda model, opt_state, x: jitted(x=x, opt_state=opt_state, model=model)  # noqa: E731
    for call in (jitted, by_keyword):
        args = arguments()
        call(*args)
        gone = [leaf.is_deleted() for leaf in jax.tree.leaves(args)]
        assert ["d" if x else "-" for x in gone] == DONATED[donate].split()


def test_a_donated_array_used_again_is_refused():
    """By path, whichever function the second call is of."""
    args = arguments()
    first = pm.filter_jit(update, donate=("opt_state", "x"))
    first(*args)
    for other in (first, pm.filter_jit(update)):
        with pytest.raises(StateError, match=r"at opt_state\[0\]: f32\[8\]\n  at opt_state\[1\]"):
            other(*args)


TWICE = {
    "two models": (lambda m: pm.filter_jit(lambda q, p: (q, p), donate="all")(m, m), "at q.weight"),
    "one of two": (
        lambda m: pm.filter_jit(lambda x, y, n: n * (x + y), donate="y")(m.bias, m.bias, 2.0),
        "at x",
    ),
    "own array": (
        lambda m: pm.filter_jit(pm.Partial(lambda m, x: (m, x), m), donate="all")(m.bias),
        "at function.args",
    ),
}


@pytest.mark.parametrize(("call", "where"), TWICE.values(), ids=TWICE)
def test_an_array_that_is_donated_may_be_passed_once(call, where):
    """Both paths are named; JAX would fail, or read what was given away."""
    with pytest.raises(StateError, match=re.escape(where)):
        call(affine())


def test_a_function_of_any_keywords_takes_any_name():
    """The name is that of the keyword."""
    y = ramp(2)
    pm.filter_jit(lambda **kwargs: kwargs["y"] + 1, donate="y")(y=y)

    assert y.is_deleted()


def test_a_donation_that_was_of_no_use_warns_where_asked():
    """JAX's own warning comes through, except for the quiet strings."""
    for donate in ("all", "all-except-first"):
        pm.filter_jit(lambda a, b: jnp.sum(a) + jnp.sum(b), donate=donate)(ramp(3), ramp(4))
    for donate in ("warn", ("b",)):
        with pytest.warns(UserWarning, match="donated buffers were not usable"):
            pm.filter_jit(lambda a, b: jnp.sum(a) + jnp.sum(b), donate=donate)(ramp(3), ramp(4))


def test_a_training_loop_holds_one_model():
    """With donation, live arrays after any number of steps are one model, one state, one loss."""
    x, y = batch(32)
    train = pm.filter_jit(step, donate=("model", "state"))
    model = network(32, 2)
    # Copies, for some arrays of the state are one and the same at first.
    model, state = jax.tree.map(jnp.copy, (model, adam(model)))
    # Held, so that no array of another test is freed meanwhile; donated arrays are not live.
    held = jax.live_arrays()
    before, given = set(map(id, held)), jax.tree.leaves((model, state))
    for _ in range(3):
        model, state, loss = train(model, state, x, y)
    gc.collect()
    new = [array for array in jax.live_arrays() if id(array) not in before]

    assert all(array.is_deleted() for array in given)
    assert {*map(id, new)} == {*map(id, jax.tree.leaves((model, state, loss)))}


def test_a_misspelt_name_is_refused():
    """In a tuple, too, where the other name is right."""
    with pytest.raises(ArgumentError, match="no argument 'opt_stat'"):
        pm.filter_jit(update, donate=("model", "opt_stat"))

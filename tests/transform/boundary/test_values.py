"""Deep trees, values without a hash and references go through a compiled call and come out."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import (
    Affine,
    Holder,
    Registered,
    ramp,
)


@pytest.mark.parametrize("kind", ["Module", "by turns"])
def test_deep_results(kind):
    """A result may be nested as deep as JAX takes trees, nearly Python's limit; it can be read."""
    others = [
        lambda x: {"a": x},
        lambda x: [x],
        lambda x: (x, None),
        lambda x: Registered(x, "note"),
    ]
    turns = [Holder] if kind == "Module" else [Holder, *others]
    tree = x = ramp(1)
    for i in range(900):
        tree = turns[i % len(turns)](tree)

    def call():
        made = pm.filter_jit(lambda t: t)(tree)
        return jax.tree.leaves(made), jax.tree.structure(made) == jax.tree.structure(tree)

    with ThreadPoolExecutor(1) as pool:  # A thread's stack is empty; pytest's own is half full.
        leaves, same = pool.submit(call).result()
    assert (leaves, same) == ([x], True)


class Unhashable:
    """Has no hash, and no part in JAX's trees."""

    __hash__ = None

    def __repr__(self):
        return "Unhashable()"


def test_results_that_cannot_be_hashed_are_returned():
    """A result need not be hashable: a non-array leaf is returned unchanged."""
    thing = Unhashable()
    found = pm.filter_jit(lambda x: (x, thing, Holder([thing, {1}])))(ramp(1))

    assert found[1] is thing
    assert found[2].content[0] is thing


# ---- traced values that are not arrays

ways_to_hold = pytest.mark.parametrize(
    "hold",
    [lambda x: x, lambda x: [x, 2], lambda x: Affine(x, None)],
    ids=["bare", "list", "Module"],
)


@ways_to_hold
@pytest.mark.parametrize(
    "transform",
    [pm.filter_jit, pm.filter_checkpoint, pm.filter_make_jaxpr],
    ids=lambda transform: transform.__name__,
)
def test_a_reference_does_not_leave_its_trace(transform, hold):
    """A `Ref` that a traced function makes cannot be returned: JAX says so, and no tracer is."""
    program = transform(lambda x: hold(jax.new_ref(x)))

    with pytest.raises(ValueError, match="mutable array reference"):
        program(ramp(2))


@ways_to_hold
def test_a_reference_of_a_trace_is_an_argument(hold):
    """A `Ref` that was made in a trace is passed on to a compiled function, which writes to it."""
    traced = []

    @pm.filter_jit
    def add(held, x):
        traced.append(None)
        (reference,) = (r for r in jax.tree.leaves(held) if not isinstance(r, int))
        reference[...] = reference[...] + x

    @jax.jit
    def program(x):
        reference = jax.new_ref(x)
        for _ in range(2):
            add(hold(reference), x)
        return reference[...]

    assert_same(program(ramp(2)), 3 * ramp(2))
    assert len(traced) == 1


def test_a_static_value_without_a_hash_is_refused_by_path():
    """It could change after the program was compiled."""
    step = pm.filter_jit(lambda x=0, *args, **kwargs: x)

    calls = {
        r"x": lambda: step(Unhashable()),
        r"x\['a'\]\[1\]": lambda: step({"a": [1, Unhashable()]}),
        r"x\.content\[0\]": lambda: step(Holder([Unhashable()])),
        r"z": lambda: step(z=Unhashable()),
    }
    for where, call in calls.items():
        with pytest.raises(ArgumentError, match=rf"at {where}"):
            call()

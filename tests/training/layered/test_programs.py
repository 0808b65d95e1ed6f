"""Facts from the program of a transformation."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod.training.layered.programs import (
    DEPENDENCIES,
    OWNERS,
    SHARED,
    Mark,
    Unfit,
    are_alike,
    is_by_number,
    is_by_number_or_whole,
    is_complete,
    is_random,
)


def program(fn, *shapes):
    return jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr


def test_outputs_depend_on_what_goes_into_them():
    """Through compiled functions and branches."""

    def step(x, y, z):
        return jax.jit(jnp.sin)(x), jax.lax.cond(z > 0, lambda: x, lambda: y), z + 1

    found = DEPENDENCIES.follow(
        program(step, (), (), ()), [frozenset("x"), frozenset("y"), frozenset("z")]
    )
    assert found == [{"x"}, {"x", "y", "z"}, {"z"}]


@pytest.mark.parametrize(
    ("fn", "by_number", "whole"),
    [
        (lambda x, n: x * n + 1, True, True),
        (lambda x, n: jnp.where(x > 0, x, jnp.sqrt(jnp.abs(x)) / n), True, True),
        (lambda x, n: x / jnp.sqrt(jnp.sum(x * x)), False, True),
        (lambda x, n: x / jnp.mean(x), False, False),
        (lambda x, n: x / jnp.sum(x, axis=-1, keepdims=True), False, False),
        (lambda x, n: x * x.shape[0], False, False),
        (lambda x, n: x if x.ndim == 2 else x + 1, False, False),
    ],
)
def test_programs_for_one_layer_and_for_several_are_compared(fn, by_number, whole):
    """They may differ in shapes alone."""
    one, several = program(fn, (3, 4), ()), program(fn, (2, 3, 4), ())
    assert are_alike(several, one, is_by_number) is by_number
    assert are_alike(several, one, is_by_number_or_whole) is whole


def test_sums_over_all_layers_are_told_from_those_over_one():
    """Whether they are joined before they are used."""
    first, second = (Mark(frozenset([("w", (i,))])) for i in range(2))

    def by_all(x, y):
        norm = jnp.sqrt(sum([jnp.sum(x * x), jnp.sum(y * y)]))
        return x / norm, y / norm, norm

    def by_each(x, y):
        return x / jnp.sum(x), y / jnp.sum(y)

    shapes = ((3,), (3,))
    assert OWNERS.follow(program(by_all, *shapes), [first, second]) == [first, second, SHARED]
    for wrong in (by_each, lambda x, y: x + y, lambda x, y: jnp.cumsum(x)):
        with pytest.raises(Unfit, match="some layers"):
            OWNERS.follow(program(wrong, *shapes), [first, second])
    both = Mark(first.owners | second.owners, "add")
    assert is_complete(both)
    assert not is_complete(Mark(first.owners, "add"))


def test_what_draws_is_seen():
    """Wherever it does."""

    def draw(x):
        return jax.jit(lambda x: x + jax.random.normal(jax.random.key(0), x.shape))(x)

    assert is_random(program(draw, (3,)))
    assert not is_random(program(jnp.sin, (3,)))

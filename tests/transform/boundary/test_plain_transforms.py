"""Which transform of plain JAX is running."""

import jax
import jax.numpy as jnp
import pytest

from pytreemod.transform.boundary.plain_transforms import plain_transform

X = jnp.ones(3)


def with_jvp(look):
    custom = jax.custom_jvp(look)
    custom.defjvp(lambda primals, tangents: (*primals, *tangents))
    return custom


def with_vjp(look):
    custom = jax.custom_vjp(look)
    custom.defvjp(lambda x: (x, None), lambda residuals, grads: (grads,))
    return custom


INSIDE = {
    "jax.jit": lambda look: jax.jit(look)(X),
    "jax.vmap": lambda look: jax.vmap(look)(X),
    "jax.lax.scan": lambda look: jax.lax.scan(lambda carry, y: (carry, look(y)), 0, X),
    "jax.lax.map": lambda look: jax.lax.map(look, X),
    "jax.lax.while_loop": lambda look: jax.lax.while_loop(lambda x: x[0] > 2, look, X),
    "jax.lax.fori_loop": lambda look: jax.lax.fori_loop(0, 2, lambda i, x: look(x), X),
    "jax.lax.cond": lambda look: jax.lax.cond(True, look, lambda x: x, X),
    "jax.lax.switch": lambda look: jax.lax.switch(0, [look, lambda x: x], X),
    "jax.grad": lambda look: jax.grad(lambda x: look(x).sum())(X),
    "jax.value_and_grad": lambda look: jax.value_and_grad(lambda x: look(x).sum())(X),
    "jax.checkpoint": lambda look: jax.checkpoint(look)(X),
    "jax.jvp": lambda look: jax.jvp(look, (X,), (X,)),
    "jax.vjp": lambda look: jax.vjp(look, X),
    "jax.linearize": lambda look: jax.linearize(look, X),
    "a function with a custom_jvp": lambda look: with_jvp(look)(X),
    "a function with a custom_vjp": lambda look: with_vjp(look)(X),
    "associative_scan": lambda look: jax.lax.associative_scan(lambda a, b: look(a + b), X),
}


def looking(found):
    """A function that appends which transform it is in."""

    def look(x):
        found.append(plain_transform())
        return x + 0

    return look


@pytest.mark.parametrize("name", INSIDE)
def test_a_transform_is_named_as_it_was_written(name):
    """And not one that it is made of."""
    found = []
    INSIDE[name](looking(found))

    assert found[0].name == name
    assert found[0].instead.startswith(("pm.filter_", "check before"))


def test_outside_there_is_none():
    """A call that has ended is not found."""
    found = []
    jax.vmap(lambda x: x)(X)
    looking(found)(X)

    assert found == [None]


def test_the_innermost_is_named():
    """An outer compiled function is not named."""
    found = []
    jax.vmap(jax.jit(lambda x: jax.lax.map(looking(found), x[None])))(X)

    assert found[0].name == "jax.lax.map"

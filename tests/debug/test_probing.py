"""debug.announce_transform, backward_nan, breakpoint_if, store_dce and inspect_dce."""

from unittest import mock

import equinox
import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError
from tests.helpers.trees import ramp

X = ramp(3)


def loss(f):
    return lambda x: jnp.sum(f(x) ** 2)


PROGRAMS = {
    "jit of vmap": lambda f: jax.jit(jax.vmap(f))(X),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f)))(X),
    "half moves": lambda f: jax.jvp(lambda x: f({"a": x, "b": 2 * X})["a"], (X,), (X,)),
    "a tree": lambda f: f({"a": X, "b": 3, "c": "text"})["a"],
    "no arrays": lambda f: f("text"),
}


@pytest.mark.parametrize("intermediates", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_transforms_are_announced_as_in_equinox(program, intermediates):
    """Line for line, and the program computes the same as without."""

    def run(eqx):
        lines = []

        def f(x):
            return eqx.debug.announce_transform(x, "name", intermediates, lines.append)

        return PROGRAMS[program](f), lines

    (ours, lines), (_, expected) = run(pm), run(equinox)
    assert lines == expected
    assert pm.tree_equal(ours, PROGRAMS[program](lambda x: x))


def root(terminate):
    return lambda x: jnp.sum(0 * jnp.sqrt(pm.debug.backward_nan(x, "here", terminate)))


@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit])
def test_a_nan_of_the_backward_pass_is_printed_and_refused(transform, capsys):
    bad = jnp.array([1.0, 0.0])
    gradient = transform(jax.grad(root(terminate=False)))(bad)
    jax.effects_barrier()

    assert jnp.isnan(gradient).tolist() == [False, True]
    assert capsys.readouterr().out == (
        "here:\n   primals=Array([1., 0.], dtype=float32)\n"
        "cotangents=Array([ 0., nan], dtype=float32)\n"
    )
    with pytest.raises(CheckError, match="backward_nan"):
        transform(jax.grad(root(terminate=True)))(bad).block_until_ready()
    assert transform(jax.grad(root(terminate=True)))(X + 1).tolist() == [0, 0, 0]


def test_backward_nan_is_the_identity_of_any_tree():
    tree = {"a": X, "n": jnp.arange(2), "text": "a"}
    gradient = pm.filter_grad(lambda t: jnp.sum(pm.debug.backward_nan(t)["a"] ** 2))(tree)
    assert (gradient["a"] == 2 * X).all()
    assert pm.tree_equal(pm.debug.backward_nan(tree), tree)


@pytest.mark.parametrize(
    ("transform", "x", "count"),
    [
        (lambda f: f, 1.0, 0),
        (jax.jit, 3.0, 1),
        (jax.vmap, [0.0, 3.0, 4.0], 1),
        (lambda f: jax.jit(jax.vmap(f)), [0.0, 1.0], 0),
        (lambda f: jax.jit(jax.grad(f)), 3.0, 1),
    ],
)
def test_a_breakpoint_is_reached_where_a_condition_is_true(transform, x, count):
    """Once for a batch, and never for a batch without."""
    hits = []

    def f(x):
        pm.debug.breakpoint_if(x > 2, num_frames=1)
        return 2 * x

    def stop(**options):
        jax.debug.callback(lambda: hits.append(options))

    with mock.patch("jax.debug.breakpoint", stop):
        transform(f)(jnp.asarray(x))
        jax.effects_barrier()
    assert hits == [{"num_frames": 1}] * count


def test_dead_code_is_found(capsys):
    """By name: what XLA is left with, below transforms, too."""

    @jax.jit
    def f(x):
        a = pm.debug.store_dce({"kept": x**2, "dead": [x + 1], "text": "a"}, name="one")
        return a["kept"], jax.vmap(lambda y: pm.debug.store_dce(y, "two"))(x)

    f(X)
    for name in ("one", "two", "none"):
        pm.debug.inspect_dce(name)
    assert capsys.readouterr().out == (
        "Found 1 call to `store_dce`.\nEntry 0:\n"
        "{'dead': [<DCE'd>], 'kept': f32[3], 'text': 'a'}\n"
        "Found 1 call to `store_dce`.\nEntry 0:\nf32[]\n"
        "Found 0 calls to `store_dce`.\n"
    )

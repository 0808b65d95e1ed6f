"""filter_while_loop and filter_fori_loop."""

import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.cells import cell
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Holder, ramp


def test_while_loop_is_the_loop():
    """filter_while_loop(c, f, x) == while c(x): x = f(x), for a Module with everything in it."""
    model = Holder({"cell": cell(), "n": 0, "s": "text"})

    def cond(m):
        return m.content["n"] < 3

    def body(m):
        inner = m.content["cell"]
        grown = inner.replace(weight=inner.weight * 2)
        return Holder({**m.content, "cell": grown, "n": m.content["n"] + 1})

    found, expected = pm.filter_while_loop(cond, body, model), model
    while cond(expected):
        expected = body(expected)
    assert_same(found.content["cell"], expected.content["cell"])
    assert (int(found.content["n"]), found.content["s"]) == (3, "text")


def test_while_loop_of_methods():
    """Condition and body may be methods of a Module, whose arrays are inputs."""
    model = cell(1.0)

    grow = pm.Partial(lambda m, x: m.weight @ x, model)
    found, expected = pm.filter_while_loop(model.is_small, grow, ramp(2)), ramp(2)
    while model.is_small(expected):
        expected = grow(expected)
    assert_close(found, expected)


@pytest.mark.parametrize("upper", [3, jnp.asarray(3), np.int64(3)])
@pytest.mark.parametrize("jit", [False, True])
def test_fori_loop_is_the_loop(upper, jit):
    """filter_fori_loop(a, b, f, x) == for i in range(a, b): x = f(i, x), bounds traced or not."""

    def run(upper):
        return pm.filter_fori_loop(
            1, upper, lambda i, v: {"x": v["x"] * (i + 1), "m": v["m"]}, {"x": 1, "m": "mode"}
        )

    found = (pm.filter_jit(run) if jit else run)(upper)
    assert (int(found["x"]), found["m"]) == (6, "mode")


def test_fori_loop_with_static_bounds_is_differentiable():
    """As in jax.lax, and so is a loop of methods."""
    loss = lambda m: jnp.sum(pm.filter_fori_loop(0, 3, lambda i, x: m.advance(x), ramp(2)))  # noqa: E731
    by_hand = lambda m: jnp.sum(m.advance(m.advance(m.advance(ramp(2)))))  # noqa: E731

    assert_close(pm.filter_grad(loss)(cell()), pm.filter_grad(by_hand)(cell()))

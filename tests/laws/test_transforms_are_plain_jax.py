"""Law: a program of filtered transforms computes what plain JAX computes on dicts.

Programs are drawn at random. Each is built twice: from Modules, a State and filtered transforms,
and from dicts and JAX's own transforms. Both have the same steps in the same order.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close

# Slow: each program is compiled twice.
PROGRAMS = 300


class Net(pm.Module):
    """A parameter, a bias, an activation, a number of repetitions, and a counter."""

    weight: jax.Array
    bias: jax.Array
    activation: Callable[..., Any]
    times: int = pm.field(static=True)
    count: pm.StateIndex

    def __call__(self, x):
        for _ in range(self.times):
            x = self.activation(self.weight @ x + self.bias)
        return x


@dataclass
class Both:
    """One step in both forms: from (model, state, x) and from (params, count, x), to the same."""

    ours: Callable[..., Any]
    plain: Callable[..., Any]


def start(times):
    """The values that a program starts from, in both forms."""
    weight, bias = jnp.asarray([[0.5, -0.2], [0.1, 0.3]]), jnp.asarray([0.1, -0.4])
    x = jnp.asarray([0.5, -1.0])
    make = pm.make_with_state(Net)
    model, state = make(weight, bias, jnp.tanh, times, pm.StateIndex(jnp.asarray(0.0)))
    return (model, state, x), ({"weight": weight, "bias": bias}, jnp.asarray(0.0), x)


def result(values):
    """The numbers of a result of the first form, as the second has them."""
    model, state, x = values
    return {"weight": model.weight, "bias": model.bias}, state.get(model.count), x


def called(params, x, times):
    """What a `Net` computes, on a dict."""
    for _ in range(times):
        x = jnp.tanh(params["weight"] @ x + params["bias"])
    return x


# ---- steps


def apply(times, _):
    return Both(lambda m, s, x: (m, s, m(x)), lambda p, n, x: (p, n, called(p, x, times)))


def counted(times, _):
    def ours(m, s, x):
        n = s.get(m.count)
        return m, s.set(m.count, n + 1), x + 0.1 * n

    return Both(ours, lambda p, n, x: (p, n + 1, x + 0.1 * n))


def trained(times, _):
    def ours(m, s, x):
        grads = pm.filter_grad(lambda m, x: jnp.sum(m(x) ** 2))(m, x)
        return pm.apply_updates(m, jax.tree.map(lambda g: -0.1 * g, grads)), s, x

    def plain(p, n, x):
        grads = jax.grad(lambda p: jnp.sum(called(p, x, times) ** 2))(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), n, x

    return Both(ours, plain)


def mapped(times, _):
    return Both(
        lambda m, s, x: (m, s, jnp.sum(pm.filter_vmap(m)(jnp.stack([x, -2 * x, x + 1])), 0)),
        lambda p, n, x: (
            p,
            n,
            jnp.sum(jax.vmap(lambda x: called(p, x, times))(jnp.stack([x, -2 * x, x + 1])), 0),
        ),
    )


def along(times, _):
    """The derivative along a direction, by jvp or by the transposed vjp."""

    def ours(m, s, x):
        y, dy = pm.filter_jvp(lambda m, x: m(x), (m, x), (None, jnp.ones(2)))
        _, back = pm.filter_vjp(lambda x, m: m(x), x, m)
        return m, s, y + 0.1 * dy + 0.1 * back(jnp.ones(2))[0]

    def plain(p, n, x):
        y, dy = jax.jvp(lambda x: called(p, x, times), (x,), (jnp.ones(2),))
        _, back = jax.vjp(lambda x: called(p, x, times), x)
        return p, n, y + 0.1 * dy + 0.1 * back(jnp.ones(2))[0]

    return Both(ours, plain)


def sensitivity(times, _):
    return Both(
        lambda m, s, x: (m, s, x + jnp.sum(pm.filter_jacfwd(lambda x, m: m(x))(x, m), 0)),
        lambda p, n, x: (p, n, x + jnp.sum(jax.jacrev(lambda x: called(p, x, times))(x), 0)),
    )


def folded(times, _):
    """A scan over members of a stacked model, whose values are used and not kept."""

    def ours(m, s, x):
        models = pm.stack([m, jax.tree.map(lambda w: 0.5 * w, m)])
        return m, s, pm.filter_scan(lambda x, m: (m(x), None), x, models)[0]

    def plain(p, n, x):
        both = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p)
        return p, n, jax.lax.scan(lambda x, p: (called(p, x, times), None), x, both)[0]

    return Both(ours, plain)


# ---- transforms around a step


def in_jit(step, _):
    return Both(pm.filter_jit(step.ours), jax.jit(step.plain))


def in_checkpoint(step, _):
    return Both(pm.filter_checkpoint(step.ours), jax.checkpoint(step.plain))


def in_scan(step, draw):
    length = draw.randint(1, 3)

    def ours(*values):
        return pm.filter_scan(lambda c, _: (step.ours(*c), None), values, length=length)[0]

    def plain(*values):
        return jax.lax.scan(lambda c, _: (step.plain(*c), None), values, length=length)[0]

    return Both(ours, plain)


def in_fori(step, draw):
    count = draw.randint(0, 2)
    return Both(
        lambda *v: pm.filter_fori_loop(0, count, lambda _, v: step.ours(*v), v),
        lambda *v: jax.lax.fori_loop(0, count, lambda _, v: step.plain(*v), v),
    )


def in_while(step, _):
    def ours(*v):
        def body(c):
            return c[0] + 1, step.ours(*c[1])

        return pm.filter_while_loop(lambda c: c[0] < 2, body, (0, v))[1]

    def plain(*v):
        return jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, step.plain(*c[1])), (0, v)
        )[1]

    return Both(ours, plain)


def in_cond(step, _):
    return Both(
        lambda m, s, x: pm.filter_cond(x[0] > 0, step.ours, lambda *v: v, m, s, x),
        lambda p, n, x: jax.lax.cond(x[0] > 0, step.plain, lambda *v: v, p, n, x),
    )


def in_switch(step, draw):
    index = draw.randint(-1, 2)
    return Both(
        lambda *v: pm.filter_switch(jnp.asarray(index), [step.ours, lambda *v: v], *v),
        lambda *v: jax.lax.switch(jnp.asarray(index), [step.plain, lambda *v: v], *v),
    )


def in_value_and_grad(step, _):
    """The step inside a loss: what it returns comes out as aux, and the gradient moves x."""

    def ours(m, s, x):
        def loss(x, m, s):
            m, s, y = step.ours(m, s, x)
            return jnp.sum(y**2), (m, s, y)

        (_, (m, s, y)), g = pm.filter_value_and_grad(loss, has_aux=True)(x, m, s)
        return m, s, y - 0.1 * g

    def plain(p, n, x):
        def loss(x):
            p2, n2, y = step.plain(p, n, x)
            return jnp.sum(y**2), (p2, n2, y)

        (_, (p2, n2, y)), g = jax.value_and_grad(loss, has_aux=True)(x)
        return p2, n2, y - 0.1 * g

    return Both(ours, plain)


def in_vmap(step, _):
    """The step for three vectors with one model; each member counts, and the first is kept."""

    def ours(m, s, x):
        run = pm.filter_vmap(step.ours, in_axes=(None, None, 0))
        return jax.tree.map(lambda leaf: leaf[0], run(m, s, jnp.stack([x, -x, 2 * x])))

    def plain(p, n, x):
        run = jax.vmap(step.plain, in_axes=(None, None, 0))
        return jax.tree.map(lambda leaf: leaf[0], run(p, n, jnp.stack([x, -x, 2 * x])))

    return Both(ours, plain)


STEPS = [apply, counted, trained, mapped, along, sensitivity, folded]
AROUND = [in_jit, in_checkpoint, in_scan, in_fori, in_cond, in_switch, in_value_and_grad, in_vmap]
# Reverse mode does not pass a loop with a condition.
FORWARD_ALONE = [in_while, in_fori]


def in_order(steps):
    def run(kind):
        def call(*values):
            for step in steps:
                values = getattr(step, kind)(*values)
            return values

        return call

    return Both(run("ours"), run("plain"))


def drawn(draw, times, depth, is_differentiated=False):
    """A program: a few steps, some of them nested in transforms."""
    steps = []
    for _ in range(draw.randint(1, 3)):
        if depth == 0 or draw.random() < 0.4:
            steps.append(draw.choice(STEPS)(times, draw))
            continue
        wraps = [w for w in AROUND if w not in FORWARD_ALONE] if is_differentiated else AROUND
        wrap = draw.choice([*wraps, *([] if is_differentiated else [in_while])])
        inside = is_differentiated or wrap is in_value_and_grad
        steps.append(wrap(drawn(draw, times, depth - 1, inside), draw))
    return in_order(steps)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_program_of_filtered_transforms_is_that_of_plain_jax(part):
    """Values, parameters and State after random programs, thirty in each part."""
    for seed in range(part, PROGRAMS, 10):
        draw = random.Random(seed)
        times = draw.randint(1, 2)
        program = drawn(draw, times, depth=3)
        first, second = start(times)
        expected = jax.jit(program.plain)(*second)
        found = pm.filter_jit(program.ours)(*first)
        assert_close(result(found), expected, rtol=2e-4, atol=2e-5)

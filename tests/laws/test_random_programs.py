"""Law of value semantics: a program means the same eagerly, compiled, run again, and from threads.

Programs are drawn at random: steps on a model, its State and a vector, some of them nested in other
transforms.
"""

import functools as ft
import threading

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from hypothesis import HealthCheck, given, settings

import pytreemod as pm
from tests.helpers.comparing import assert_close


class Part(pm.Module):
    """A parameter, and its configuration."""

    weight: jax.Array
    power: int = pm.field(static=True)


class Model(pm.Module):
    """Parts in a container, a buffer, a function, and tokens."""

    parts: list
    offset: jax.Array = pm.buffer()
    activation: object
    names: dict = pm.field(static=True)
    count: pm.StateIndex
    noise: pm.RngStream

    def __init__(self):
        self.parts = [Part(jnp.eye(2) * 0.5, 1), Part(jnp.ones((2, 2)) / 4, 2)]
        self.offset = jnp.asarray([0.25, -0.5])
        self.activation = jnp.tanh
        self.names = {"b": 1, "a": 2}
        self.count = pm.StateIndex(jnp.asarray(0.0))
        self.noise = pm.RngStream()


def start():
    """The values that every program starts from."""
    model, state = pm.make_with_state(Model)()
    return model, state.seed(jax.random.key(0)), jnp.asarray([0.5, -1.0])


# ---- steps: from (model, state, x) to the same


def apply(model, state, x):
    for part in model.parts:
        x = model.activation(part.weight @ x) ** part.power
    return model, state, x + model.offset


def counted(model, state, x):
    n = state.get(model.count)
    return model, state.set(model.count, n + 1), x + 0.1 * n


def noisy(model, state, x):
    key, state = state.next_key(model.noise)
    return model, state, x + 0.1 * jax.random.normal(key, (2,))


def edited(model, state, x):
    model = pm.tree_at(lambda m: m.parts[0].weight, model, replace_fn=lambda w: w * jnp.cos(x[0]))
    return model, state, x


def split(model, state, x):
    inexact, rest = pm.partition(model, pm.is_inexact_array)
    return pm.combine(jax.tree.map(lambda leaf: leaf * 0.9, inexact), rest), state, x


def trained(model, state, x):
    grads = pm.filter_grad(lambda model: jnp.sum(apply(model, state, x)[2] ** 2))(model)
    return pm.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, x


def mapped(model, state, x):
    run = pm.filter_vmap(lambda x: apply(model, state, x)[2])
    return model, state, jnp.sum(run(jnp.stack([x, -x])), axis=0)


# These change the structure: they stay out of loops and branches.


def grown(model, state, x):
    parts = [*model.parts, Part(-model.parts[-1].weight, len(model.parts))]
    return pm.tree_at(lambda m: m.parts, model, parts), state, x


def reconfigured(model, state, x):
    names = dict(reversed(model.names.items()))
    return model.replace(names=names, activation=jnp.sin), state, x


STEADY = [apply, counted, noisy, edited, split, trained, mapped]
CHANGING = [grown, reconfigured]


# ---- transforms around a sequence of steps


def in_sequence(steps, *values):
    for step in steps:
        values = step(*values)
    return values


def in_jit(run):
    return pm.filter_jit(run)


def in_checkpoint(run):
    return pm.filter_checkpoint(run)


def in_scan(run):
    def call(*values):
        return pm.filter_scan(lambda carry, _: (run(*carry), None), values, length=2)[0]

    return call


def in_cond(run):
    def call(model, state, x):
        return pm.filter_cond(x[0] > 0, run, lambda *values: values, model, state, x)

    return call


def sequences(steps):
    return st.lists(steps, min_size=1, max_size=3).map(lambda s: ft.partial(in_sequence, s))


def nested(steady, wrap):
    return st.builds(lambda w, run: w(run), st.sampled_from(wrap), sequences(steady))


PLAIN = st.sampled_from(STEADY)
WRAPPED = nested(PLAIN | nested(PLAIN, [in_jit, in_checkpoint]), [in_scan, in_cond, in_jit])
PROGRAMS = sequences(PLAIN | WRAPPED | st.sampled_from(CHANGING))


def numbers(values):
    """With plain arrays for random keys, which NumPy does not know."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, values)


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
@given(PROGRAMS)
def test_a_program_means_the_same_in_every_way(run):
    """f(*args) == filter_jit(f)(*args), the second time, and from threads."""
    once = run(*start())
    jitted = pm.filter_jit(run)
    found = [jitted(*start()), jitted(*start()), pm.filter_jit(lambda *v: run(*v))(*start())]

    def call():
        found.append(jitted(*start()))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 6
    for values in found:
        assert_close(numbers(values), numbers(once))
    # The results go in again: pending models, States of the trace before.
    assert_close(numbers(jitted(*jitted(*start()))), numbers(run(*once)))

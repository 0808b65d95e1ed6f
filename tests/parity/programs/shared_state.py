"""Stateful Modules: counters, moving statistics, nested and batched, substates, scans."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self, start=0):
        self.index = eqx.nn.StateIndex(jnp.array(start, jnp.int32))

    def __call__(self, x, state, *, key=None):
        n = state.get(self.index)
        return x + n, state.set(self.index, n + 1)


class Standardise(eqx.nn.StatefulLayer):
    stats: eqx.nn.StateIndex
    decay: float = eqx.field(static=True)

    def __init__(self, size, decay=0.5):
        self.stats = eqx.nn.StateIndex((jnp.zeros(size), jnp.ones(size)))
        self.decay = decay

    def __call__(self, x, state, *, key=None):
        mean, square = state.get(self.stats)
        blend = lambda old, new: self.decay * old + (1 - self.decay) * new
        mean, square = blend(mean, x), blend(square, x**2)
        return (x - mean) / jnp.sqrt(square + 1e-3), state.set(self.stats, (mean, square))


class Net(eqx.Module):
    seq: eqx.nn.Sequential
    counters: dict[str, Counter]

    def __init__(self):
        self.seq = eqx.nn.Sequential([Standardise(2), eqx.nn.Lambda(jnp.tanh), Standardise(2, 0.9)])
        self.counters = {"a": Counter(), "b": Counter(5)}

    def __call__(self, x, state):
        x, state = self.seq(x, state)
        _, state = self.counters["a"](x, state)
        return self.counters["b"](x, state)


@eqx.filter_jit
def run(net, state, xs):
    def body(state, x):
        y, state = net(x, state)
        return state, y

    return jax.lax.scan(body, state, xs)


def main():
    net, state = eqx.nn.make_with_state(Net)()
    state, ys = run(net, state, jnp.arange(6.0).reshape(3, 2))
    sub = state.substate(net.counters)
    _, sub = net.counters["a"](0, sub)
    state = state.update(sub)
    a, b = (state.get(net.counters[k].index) for k in "ab")
    nets, states = eqx.filter_vmap(lambda _: eqx.nn.make_with_state(Net)(), axis_size=2)(None)
    many, _ = eqx.filter_vmap(lambda n, s, x: n(x, s))(nets, states, jnp.ones((2, 2)))
    return ys, a, b, state.get(net.seq[2].stats), many

"""A sampler library: kernels are Generic over their state, composed, and run by one function."""

import dataclasses
from typing import Any, Callable, Generic, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

S = TypeVar("S", bound=eqx.Module)


class LogDensity(Protocol):
    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class ChainState(eqx.Module):
    x: jax.Array
    log_prob: jax.Array


class TunedState(ChainState):
    scale: jax.Array = eqx.field(default_factory=lambda: jnp.array(0.5))


class AbstractKernel(eqx.Module, Generic[S]):
    log_density: eqx.AbstractVar[LogDensity]
    State: eqx.AbstractClassVar[type]

    def init(self, x) -> S:
        return self.State(x, self.log_density(x))


class Metropolis(AbstractKernel[ChainState]):
    log_density: Callable
    scale: float = 1.0
    State = ChainState

    def step(self, state, key):
        propose, accept = jr.split(key)
        x = state.x + self.scale * jr.normal(propose, state.x.shape)
        log_prob = self.log_density(x)
        ok = jnp.log(jr.uniform(accept)) < log_prob - state.log_prob
        return jax.lax.cond(
            ok, lambda: dataclasses.replace(state, x=x, log_prob=log_prob), lambda: state
        )


class Tuned(AbstractKernel[TunedState]):
    inner: Metropolis
    State = TunedState

    @property
    def log_density(self):
        return self.inner.log_density

    def step(self, state, key):
        inner = dataclasses.replace(self.inner, scale=state.scale)
        new = inner.step(ChainState(state.x, state.log_prob), key)
        moved = jnp.any(new.x != state.x)
        return TunedState(new.x, new.log_prob, state.scale * jnp.where(moved, 1.1, 0.9))


@eqx.filter_jit
def run(kernel: AbstractKernel[Any], x, key, n=5):
    return jax.lax.scan(lambda s, k: (kernel.step(s, k), s.x), kernel.init(x), jr.split(key, n))


def main():
    metropolis = Metropolis(lambda x: -0.5 * jnp.sum(x**2))
    chains = eqx.filter_vmap(run, in_axes=(None, 0, 0))
    xs, keys = jnp.arange(4.0).reshape(2, 2), jr.split(jr.key(0), 2)
    return chains(metropolis, xs, keys), chains(Tuned(metropolis), xs, keys), Tuned.State.__name__

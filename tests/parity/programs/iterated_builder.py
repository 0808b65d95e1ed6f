"""A builder style: chained methods that return copies, plans that are compiled ahead."""

import dataclasses
from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp


class Plan(eqx.Module):
    steps: tuple = ()
    dtype: type = eqx.field(static=True, default=jnp.float32)
    options: dict = eqx.field(default_factory=dict)

    def then(self, step, **options) -> Self:
        return dataclasses.replace(
            self, steps=(*self.steps, step), options={**self.options, **options}
        )

    def add(self, amount):
        return self.then(eqx.Partial(jnp.add, jnp.asarray(amount, self.dtype)))

    def __or__(self, other):
        return self.then(other)

    def __rshift__(self, x):
        return self(x)

    def __call__(self, x):
        for step in self.steps:
            x = step(x)
        return x * self.options.get("gain", 1.0)

    def __len__(self):
        return len(self.steps)

    def compile(self, x):
        return eqx.filter_jit(type(self).__call__).lower(self, x).compile()


def main():
    plan = (
        Plan().add(1.0).then(jnp.square, gain=2.0)
        | eqx.nn.Lambda(jnp.sqrt)
        | eqx.nn.Linear(2, 1, key=jax.random.key(0))
    )
    x = jnp.array([1.0, 2.0])
    compiled = plan.compile(x)
    grads = eqx.filter_grad(lambda p: jnp.sum(p(x)))(plan)
    return (
        len(plan),
        plan >> x,
        compiled(plan, x),
        grads.steps[0].args,
        grads.options,
        plan.dtype is jnp.float32,
    )

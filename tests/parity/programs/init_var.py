"""Init-only variables, __post_init__ with defaults, kw_only, inheritance of post-inits."""

import dataclasses
from dataclasses import KW_ONLY, InitVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Dense(eqx.Module):
    n_in: int = eqx.field(static=True)
    n_out: int = eqx.field(static=True)
    key: InitVar[jax.Array]
    _: KW_ONLY
    use_bias: bool = True
    init_scale: InitVar[float] = 1.0
    weight: jax.Array = dataclasses.field(init=False)
    bias: jax.Array | None = dataclasses.field(init=False, default=None)

    def __post_init__(self, key, init_scale):
        self.weight = init_scale * jr.normal(key, (self.n_out, self.n_in))
        if self.use_bias:
            self.bias = jnp.zeros(self.n_out)

    def __call__(self, x):
        y = self.weight @ x
        return y if self.bias is None else y + self.bias


class Scaled(Dense):
    gain: jax.Array = dataclasses.field(default_factory=lambda: jnp.array(2.0))

    def __post_init__(self, key, init_scale):
        super().__post_init__(key, init_scale / 2)
        self.weight = self.weight * self.gain


def main():
    dense, scaled = (
        Dense(2, 3, jr.key(0)),
        Scaled(2, 1, key=jr.key(0), use_bias=False, init_scale=3.0),
    )
    names = [[f.name for f in dataclasses.fields(m)] for m in (dense, scaled)]
    try:
        Dense(2, 3)
    except TypeError as error:
        missing = "key" in str(error)
    try:
        dataclasses.replace(dense, n_in=3)
    except (TypeError, ValueError) as error:
        replaced = type(error).__name__ in ("TypeError", "ValueError")
    other = (
        dataclasses.replace(scaled, key=jr.key(1), init_scale=1.0, gain=jnp.array(1.0))
        if not replaced
        else None
    )
    out = eqx.filter_jit(lambda m, x: m(x))(dense, jnp.ones(2))
    return dense, scaled, names, missing, out, other, len(jax.tree.leaves(dense))

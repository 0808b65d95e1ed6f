"""An exponential moving average of a model, kept beside it, with a debiased reading."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu


class EMA(eqx.Module):
    average: eqx.Module
    decay: float = eqx.field(static=True)
    count: jax.Array

    def __init__(self, model, decay=0.9):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        self.average = eqx.combine(jtu.tree_map(jnp.zeros_like, params), static)
        self.decay = decay
        self.count = jnp.zeros((), jnp.int32)

    def update(self, model):
        def blend(old, new):
            return self.decay * old + (1 - self.decay) * new if eqx.is_inexact_array(new) else old

        where = lambda ema: (ema.average, ema.count)
        return eqx.tree_at(where, self, (jtu.tree_map(blend, self.average, model), self.count + 1))

    @property
    def model(self):
        correction = 1 - self.decay**self.count
        fix = lambda x: x / correction if eqx.is_inexact_array(x) else x
        return eqx.nn.inference_mode(jtu.tree_map(fix, self.average))


def main():
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5), eqx.nn.Identity()]
    )
    ema = EMA(model)
    for scale in (1.0, 2.0):
        new = jtu.tree_map(lambda x, s=scale: x * s if eqx.is_inexact_array(x) else x, model)
        ema = ema.update(new)
    same = eqx.tree_equal(copy.deepcopy(ema), ema)
    out = eqx.filter_jit(lambda ema, x: ema.model(x))(ema, jnp.ones(2))
    return (
        ema.count,
        ema.model[0].weight,
        out,
        bool(same),
        model[1].inference,
        ema.model[1].inference,
    )

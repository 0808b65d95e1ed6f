"""An interpolator: checked when it is made, called, differentiated, indexed and joined."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class HermiteSpline(eqx.Module):
    """Cubic, with finite-difference slopes."""

    ts: Float[Array, " n"] = eqx.field(converter=jnp.asarray)
    ys: Float[Array, "n d"] = eqx.field(converter=jnp.asarray)
    slopes: Float[Array, "n d"] = eqx.field(init=False)

    def __post_init__(self):
        self.slopes = jnp.gradient(jnp.asarray(self.ys), axis=0)

    def __check_init__(self):
        if self.ts.ndim != 1:
            raise ValueError("`ts` must be one-dimensional")
        if self.ts.shape[0] != self.ys.shape[0]:
            raise ValueError("`ts` and `ys` must have the same length")

    @property
    def interval(self):
        return self.ts[0], self.ts[-1]

    def _locate(self, t):
        return jnp.clip(jnp.searchsorted(self.ts, t, side="right") - 1, 0, self.ts.shape[0] - 2)

    def evaluate(self, t):
        i = self._locate(t)
        h = self.ts[i + 1] - self.ts[i]
        s = (t - self.ts[i]) / h
        y0, y1, m0, m1 = self.ys[i], self.ys[i + 1], self.slopes[i], self.slopes[i + 1]
        blend = (1 + 2 * s) * (1 - s) ** 2, s * (1 - s) ** 2, s**2 * (3 - 2 * s), s**2 * (s - 1)
        return blend[0] * y0 + blend[1] * h * m0 + blend[2] * y1 + blend[3] * h * m1

    def derivative(self, t):
        return jax.jvp(self.evaluate, (t,), (jnp.ones_like(t),))[1]

    def __call__(self, t):
        return jnp.vectorize(self.evaluate, signature="()->(d)")(t)

    def __len__(self):
        return self.ts.shape[0]


def main():
    spline = HermiteSpline([0.0, 1.0, 2.0, 3.0], [[0.0, 1.0], [1.0, 0.0], [4.0, 1.0], [9.0, 0.0]])
    t = jnp.array([0.5, 1.5, 2.75])
    try:
        HermiteSpline([0.0, 1.0], [[1.0]])
    except ValueError as error:
        refused = str(error)
    slope = jax.vmap(spline.derivative)(t)
    grads = eqx.filter_grad(lambda s: jnp.sum(s(t)))(spline)
    return spline, spline.interval, len(spline), spline(t), slope, grads, refused

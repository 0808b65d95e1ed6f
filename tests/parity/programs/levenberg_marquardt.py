"""Least squares by Levenberg-Marquardt: a Jacobian with respect to a whole model."""

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp


class Peak(eqx.Module):
    height: jax.Array
    centre: jax.Array
    width: jax.Array
    label: str = eqx.field(static=True, default="peak")

    def __call__(self, x):
        return self.height * jnp.exp(-(((x - self.centre) / self.width) ** 2))


class Spectrum(eqx.Module):
    peaks: list[Peak]
    background: jax.Array

    def __call__(self, x):
        return sum((peak(x) for peak in self.peaks), start=self.background)


@eqx.filter_jit
def step(model, damping, xs, ys):
    def residual(model):
        return jax.vmap(model)(xs) - ys

    flat, unravel = jax.flatten_util.ravel_pytree(eqx.filter(model, eqx.is_inexact_array))
    static = eqx.filter(model, eqx.is_inexact_array, inverse=True)
    jacobian = eqx.filter_jacfwd(residual)(model)
    rows = jax.vmap(lambda j: jax.flatten_util.ravel_pytree(j)[0])(jacobian)
    r = residual(model)
    delta = jnp.linalg.solve(rows.T @ rows + damping * jnp.eye(flat.size), rows.T @ r)
    new = eqx.combine(unravel(flat - delta), static)
    better = jnp.sum(residual(new) ** 2) < jnp.sum(r**2)
    model = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, model)
    return model, jnp.where(better, damping / 3, damping * 2), jnp.sum(r**2)


def main():
    scalar = jnp.float32
    truth = Spectrum(
        [Peak(scalar(1), scalar(0), scalar(1)), Peak(scalar(0.5), scalar(2), scalar(0.5))],
        scalar(0.1),
    )
    xs = jnp.linspace(-2.0, 4.0, 12)
    ys = jax.vmap(truth)(xs)
    model = eqx.tree_at(
        lambda m: (m.peaks[0].height, m.peaks[1].centre), truth, (scalar(0.8), scalar(1.8))
    )
    damping, losses = jnp.array(0.1), []
    for _ in range(3):
        model, damping, loss = step(model, damping, xs, ys)
        losses.append(loss)
    return model, damping, losses

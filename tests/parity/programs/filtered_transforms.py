"""Each filter_ transform once, as people combine them: axes by tree, jacobians, vjp."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Poly(eqx.Module):
    coefficients: jax.Array
    shift: float
    name: str = eqx.field(static=True, default="poly")

    def __call__(self, x, *, scale=1.0):
        powers = x ** jnp.arange(self.coefficients.shape[-1])
        return scale * jnp.sum(self.coefficients * powers) + self.shift


def main():
    poly = Poly(jnp.array([1.0, 2.0, 3.0]), 0.5)
    many = Poly(jnp.arange(6.0).reshape(2, 3), 0.5)
    xs = jnp.array([1.0, 2.0])
    axes = Poly(0, None, "poly")
    mapped = eqx.filter_vmap(lambda p, x: p(x), in_axes=(axes, 0))(many, xs)
    outer = eqx.filter_vmap(
        eqx.filter_vmap(lambda p, x: p(x), in_axes=(None, 0)), in_axes=(axes, None)
    )
    jac = eqx.filter_jacrev(lambda p: jnp.stack([p(x) for x in xs]))(poly)
    fwd = eqx.filter_jacfwd(lambda p: p(xs[0]), has_aux=False)(poly)
    out, vjp_fn = eqx.filter_vjp(lambda p, x: p(x), poly, xs[1])
    hess = eqx.filter_hessian(lambda x, p: p(x))(xs[1], poly)
    both = eqx.filter_value_and_grad(lambda px: px[0](px[1]))((poly, xs[0]))
    shaped = eqx.filter_eval_shape(outer, many, xs)
    printed = eqx.filter_make_jaxpr(lambda p, x: p(x))(poly, xs[0])[1]
    sized = eqx.filter_vmap(lambda: jnp.ones(2), axis_size=3)()
    named = eqx.filter_vmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(xs)
    return (
        mapped,
        outer(many, xs),
        jac,
        fwd,
        out,
        vjp_fn(jnp.array(1.0)),
        hess,
        both,
        shaped,
        printed,
        sized,
        named,
    )

"""Mean-field variational inference: a guide shaped like the model, has_aux, optax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Regression(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    link: str = eqx.field(static=True, default="identity")

    def log_joint(self, xs, ys):
        prediction = xs @ self.weight + self.bias
        prior = -0.5 * (jnp.sum(self.weight**2) + self.bias**2)
        return prior - 0.5 * jnp.sum((prediction - ys) ** 2)


class MeanField(eqx.Module):
    loc: Regression
    log_scale: Regression

    @classmethod
    def around(cls, model):
        params = eqx.filter(model, eqx.is_inexact_array)
        return cls(loc=params, log_scale=jax.tree.map(lambda p: jnp.full_like(p, -1.0), params))

    def sample(self, key):
        leaves, treedef = jax.tree.flatten(self.loc)
        keys = jax.tree.unflatten(treedef, list(jr.split(key, len(leaves))))
        draw = lambda m, s, k: m + jnp.exp(s) * jr.normal(k, m.shape)
        return jax.tree.map(draw, self.loc, self.log_scale, keys)

    def entropy(self):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(self.log_scale))


@eqx.filter_value_and_grad(has_aux=True)
def negative_elbo(guide, xs, ys, key):
    joint = eqx.filter_vmap(lambda key: guide.sample(key).log_joint(xs, ys))(jr.split(key, 2))
    return -jnp.mean(joint) - guide.entropy(), {"joint": joint}


@eqx.filter_jit
def make_step(guide, opt_state, xs, ys, key, optim):
    (loss, aux), grads = negative_elbo(guide, xs, ys, key)
    updates, opt_state = optim.update(grads, opt_state, guide)
    return eqx.apply_updates(guide, updates), opt_state, loss, aux


def main():
    guide = MeanField.around(Regression(jnp.zeros(2), jnp.array(0.5)))
    optim = optax.adam(1e-1)
    opt_state = optim.init(eqx.filter(guide, eqx.is_inexact_array))
    xs, ys = jnp.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), jnp.array([1.0, 2.0, 3.0])
    trace = []
    for key in jr.split(jr.PRNGKey(0), 3):
        guide, opt_state, loss, aux = make_step(guide, opt_state, xs, ys, key, optim)
        trace.append((loss, aux))
    return guide, trace

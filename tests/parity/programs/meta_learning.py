"""MAML: gradients through updates of a model, inner rates that are learnt for each leaf."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class MetaLearner(eqx.Module):
    model: eqx.nn.MLP
    rates: eqx.nn.MLP

    def __init__(self, model, rate=0.1):
        self.model = model
        self.rates = jax.tree.map(lambda p: jnp.full((), rate) if eqx.is_array(p) else None, model)

    def adapt(self, task, steps=2):
        model = self.model
        for _ in range(steps):
            grads = eqx.filter_grad(loss)(model, *task["support"])
            updates = jax.tree.map(lambda rate, g: -rate * g, self.rates, grads)
            model = eqx.apply_updates(model, updates)
        return model


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit
@eqx.filter_value_and_grad
def meta_loss(learner, tasks):
    one = lambda task: loss(learner.adapt(task), *task["query"])
    return jnp.mean(jax.vmap(one)(tasks))


def main():
    learner = MetaLearner(eqx.nn.MLP(1, 1, 2, 1, jnp.tanh, key=jr.PRNGKey(0)))
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3, 1)
    tasks = {"support": (x, jnp.sin(x)), "query": (x + 0.1, jnp.sin(x + 0.1))}
    value, grads = meta_loss(learner, tasks)
    return value, jax.tree.leaves(grads), learner.rates.layers[0].weight

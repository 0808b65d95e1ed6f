"""Freezing: a filter spec made by tree_at, a partition by path, stop_gradient by tree_map."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax


def head_only(model):
    spec = jtu.tree_map(lambda _: False, model)
    return eqx.tree_at(
        lambda s: (s.layers[-1].weight, s.layers[-1].bias), spec, replace=(True, True)
    )


def by_name(model, wanted):
    mark = lambda path, leaf: eqx.is_array(leaf) and any(wanted in jtu.keystr((k,)) for k in path)
    return jtu.tree_map_with_path(mark, model)


@eqx.filter_jit
def make_step(model, x, spec, opt_state, optim):
    diff, static = eqx.partition(model, spec)

    @eqx.filter_grad
    def loss(diff, static, x):
        return jnp.sum(eqx.combine(diff, static)(x) ** 2)

    updates, opt_state = optim.update(loss(diff, static, x), opt_state)
    return eqx.apply_updates(model, updates), opt_state


def frozen(module):
    stop = lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x
    return jtu.tree_map(stop, module)


def main():
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.PRNGKey(0))
    x, optim = jnp.ones(2), optax.sgd(0.1)
    results = []
    for spec in (head_only(model), by_name(model, "bias")):
        opt_state = optim.init(eqx.filter(model, spec))
        new, _ = make_step(model, x, spec, opt_state, optim)
        changed = [
            bool(jnp.any(a != b))
            for a, b in zip(
                jtu.tree_leaves(eqx.filter(new, eqx.is_array)),
                jtu.tree_leaves(eqx.filter(model, eqx.is_array)),
            )
        ]
        results.append((changed, new.layers[-1].bias))
    body_frozen = lambda m: jnp.sum(m.layers[1](jax.nn.relu(frozen(m.layers[0])(x))))
    grads = eqx.filter_grad(body_frozen)(model)
    return results, [layer.weight for layer in grads.layers]

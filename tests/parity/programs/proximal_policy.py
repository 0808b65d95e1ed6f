"""A clipped policy-gradient loss over an actor-critic with shared trunk; batches are Modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray


class ActorCritic(eqx.Module):
    trunk: eqx.nn.Sequential
    actor: eqx.nn.Linear
    critic: eqx.nn.Linear

    def __init__(self, obs: int, actions: int, *, key: PRNGKeyArray):
        k1, k2, k3 = jr.split(key, 3)
        self.trunk = eqx.nn.Sequential([eqx.nn.Linear(obs, 4, key=k1), eqx.nn.Lambda(jnp.tanh)])
        self.actor = eqx.nn.Linear(4, actions, key=k2)
        self.critic = eqx.nn.Linear(4, "scalar", key=k3)

    def __call__(
        self, obs: Float[Array, " obs"]
    ) -> tuple[Float[Array, " actions"], Float[Array, ""]]:
        hidden = self.trunk(obs)
        return self.actor(hidden), self.critic(hidden)


class Rollout(eqx.Module):
    obs: Float[Array, "batch obs"]
    action: Int[Array, " batch"]
    log_prob: Float[Array, " batch"]
    reward: Float[Array, " batch"]

    def advantages(self, values, gamma=0.9):
        def back(carry, inputs):
            reward, value = inputs
            carry = reward + gamma * carry
            return carry, carry - value

        return jax.lax.scan(back, jnp.array(0.0), (self.reward, values), reverse=True)[1]


def loss_fn(model, rollout, *, clip: float = 0.2, entropy_weight: float = 0.01):
    logits, values = eqx.filter_vmap(model)(rollout.obs)
    log_probs = jax.nn.log_softmax(logits)
    chosen = jax.vmap(lambda row, a: row[a])(log_probs, rollout.action)
    advantage = rollout.advantages(values)
    ratio = jnp.exp(chosen - rollout.log_prob)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    gain = jnp.minimum(ratio * jax.lax.stop_gradient(advantage), clipped * advantage)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
    metrics = {"entropy": jnp.mean(entropy), "clipped": jnp.mean(ratio != clipped)}
    return jnp.mean(advantage**2 - gain - entropy_weight * entropy), metrics


@eqx.filter_jit(donate="none")
def update(model, opt_state, rollout, optimizer):
    grads, metrics = eqx.filter_grad(loss_fn, has_aux=True)(model, rollout, clip=0.1)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, metrics


def main():
    model = ActorCritic(3, 2, key=jr.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    rollout = Rollout(
        jr.normal(jr.key(1), (4, 3)), jnp.array([0, 1, 1, 0]), jnp.full(4, -0.7), jnp.arange(4.0)
    )
    for _ in range(2):
        model, opt_state, metrics = update(model, opt_state, rollout, optimizer)
    return (
        jax.tree.leaves(eqx.filter(model, eqx.is_array)),
        metrics,
        eqx.filter_eval_shape(model, rollout.obs[0]),
    )

"""A policy whose replay buffer lives in State."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Replay(eqx.Module):
    storage: eqx.nn.StateIndex
    cursor: eqx.nn.StateIndex
    capacity: int = eqx.field(static=True)

    def __init__(self, capacity, example):
        empty = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), example)
        self.storage = eqx.nn.StateIndex(empty)
        self.cursor = eqx.nn.StateIndex(jnp.array(0, jnp.int32))
        self.capacity = capacity

    def add(self, transition, state):
        index = state.get(self.cursor)
        storage = jax.tree.map(
            lambda buffer, new: buffer.at[index % self.capacity].set(new),
            state.get(self.storage),
            transition,
        )
        return state.set(self.storage, storage).set(self.cursor, index + 1)

    def sample(self, key, n, state):
        size = jnp.minimum(state.get(self.cursor), self.capacity)
        index = jr.randint(key, (n,), 0, size)
        return jax.tree.map(lambda buffer: buffer[index], state.get(self.storage))


class Agent(eqx.Module):
    q: eqx.nn.Linear
    replay: Replay

    def __init__(self, size, actions, *, key):
        self.q = eqx.nn.Linear(size, actions, key=key)
        example = {"obs": jnp.zeros(size), "action": jnp.array(0), "reward": jnp.array(0.0)}
        self.replay = Replay(4, example)

    def loss(self, batch):
        values = jax.vmap(self.q)(batch["obs"])
        chosen = jnp.take_along_axis(values, batch["action"][:, None], axis=1)[:, 0]
        return jnp.mean((chosen - batch["reward"]) ** 2)


@eqx.filter_jit
def interact(agent, state, obs, key):
    act, learn = jr.split(key)
    action = jr.categorical(act, agent.q(obs))
    transition = {"obs": obs, "action": action, "reward": jnp.sum(obs)}
    state = agent.replay.add(transition, state)
    loss, grads = eqx.filter_value_and_grad(Agent.loss)(agent, agent.replay.sample(learn, 3, state))
    return eqx.apply_updates(agent, jax.tree.map(lambda g: -0.1 * g, grads)), state, loss


def main():
    agent, state = eqx.nn.make_with_state(Agent)(2, 3, key=jr.PRNGKey(0))
    losses = []
    for i, key in enumerate(jr.split(jr.PRNGKey(1), 6)):
        agent, state, loss = interact(agent, state, jnp.array([0.1 * i, 1.0]), key)
        losses.append(loss)
    return agent.q, losses, state.get(agent.replay.cursor), state.get(agent.replay.storage)

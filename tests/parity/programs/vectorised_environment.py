"""An environment with a wrapper that delegates by __getattr__, vectorised by vmap over methods."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class EnvState(eqx.Module):
    x: jax.Array
    time: jax.Array


class Pole(eqx.Module):
    force: float = 1.0
    horizon: int = eqx.field(static=True, default=3)

    def reset(self, key):
        state = EnvState(jr.uniform(key, (2,), minval=-0.1, maxval=0.1), jnp.array(0))
        return state.x, state

    def step(self, state, action):
        push = jnp.where(action == 1, self.force, -self.force)
        x = state.x + 0.1 * jnp.stack([state.x[1], jnp.sin(state.x[0]) + push])
        state = EnvState(x, state.time + 1)
        return x, state, -jnp.abs(x[0]), state.time >= self.horizon


class Wrapper(eqx.Module):
    env: eqx.Module

    def __getattr__(self, name):
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


class AutoReset(Wrapper):
    def step(self, state, action, key):
        obs, state, reward, done = self.env.step(state, action)
        new_obs, new_state = self.env.reset(key)
        pick = lambda a, b: jnp.where(done, a, b)
        return pick(new_obs, obs), jax.tree.map(pick, new_state, state), reward, done


class Vectorised(Wrapper):
    def reset(self, keys):
        return eqx.filter_vmap(self.env.reset)(keys)

    def step(self, state, action, keys):
        return jax.vmap(self.env.step)(state, action, keys)


@eqx.filter_jit
def rollout(env, key, n=5):
    obs, state = env.reset(jr.split(key, 2))

    def body(carry, key):
        obs, state = carry
        action = (obs[:, 0] < 0).astype(int)
        obs, state, reward, done = env.step(state, action, jr.split(key, 2))
        return (obs, state), (reward, done)

    return jax.lax.scan(body, (obs, state), jr.split(key, n))


def main():
    env = Vectorised(AutoReset(Pole(2.0)))
    try:
        env.no_such_thing
    except AttributeError as error:
        missing = type(error).__name__
    return rollout(env, jr.key(0)), env.horizon, env.force, missing, hasattr(env, "render")

"""A PID controller: its state is a Module, carried through a scan and changed by copies."""

import dataclasses
from typing import Optional

import equinox as eqx
import jax
import jax.numpy as jnp


class PIDState(eqx.Module):
    integral: jax.Array
    last_error: jax.Array

    @classmethod
    def zeros(cls, n):
        return cls(integral=jnp.zeros(n), last_error=jnp.zeros(n))


class PID(eqx.Module):
    kp: jax.Array = eqx.field(converter=jnp.asarray)
    ki: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)
    kd: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)
    limits: Optional[tuple[float, float]] = eqx.field(static=True, default=None)

    def __call__(self, state: PIDState, error, dt=0.1):
        integral = state.integral + error * dt
        derivative = (error - state.last_error) / dt
        control = self.kp * error + self.ki * integral + self.kd * derivative
        if self.limits is not None:
            control = jnp.clip(control, *self.limits)
        return dataclasses.replace(state, integral=integral, last_error=error), control


@eqx.filter_jit
def simulate(controller, target, steps):
    def step(carry, _):
        state, y = carry
        state, control = controller(state, target - y)
        y = y + 0.1 * (control - 0.2 * y)
        return (state, y), (y, control)

    return jax.lax.scan(step, (PIDState.zeros(2), jnp.zeros(2)), None, length=steps)


def main():
    target = jnp.array([1.0, -1.0])
    final, path = simulate(PID(1.0, 0.3, 0.05, limits=(-0.5, 0.5)), target, 6)
    gain = eqx.filter_grad(lambda pid: jnp.sum((simulate(pid, target, 4)[0][1] - target) ** 2))
    return final, path, gain(PID(1.5, 0.1)), PID(1)

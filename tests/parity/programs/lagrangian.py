"""A double pendulum from its Lagrangian: nested derivatives of a bound method, trees as state."""

import equinox as eqx
import jax
import jax.numpy as jnp


class DoublePendulum(eqx.Module):
    masses: tuple[float, float] = (1.0, 1.0)
    lengths: jax.Array = eqx.field(default_factory=lambda: jnp.array([1.0, 0.5]))
    g: float = eqx.field(default=9.81, kw_only=True, static=True)

    def lagrangian(self, q, v):
        (m1, m2), (l1, l2) = self.masses, self.lengths
        t1 = 0.5 * m1 * (l1 * v[0]) ** 2
        cross = 2 * l1 * l2 * v[0] * v[1] * jnp.cos(q[0] - q[1])
        t2 = 0.5 * m2 * ((l1 * v[0]) ** 2 + (l2 * v[1]) ** 2 + cross)
        height = -(m1 + m2) * l1 * jnp.cos(q[0]) - m2 * l2 * jnp.cos(q[1])
        return t1 + t2 - self.g * height

    def acceleration(self, q, v):
        mass = eqx.filter_hessian(lambda v: self.lagrangian(q, v))(v)
        coriolis = jax.jacfwd(jax.grad(self.lagrangian, argnums=1), argnums=0)(q, v) @ v
        force = jax.grad(self.lagrangian)(q, v)
        return jnp.linalg.solve(mass, force - coriolis)


@eqx.filter_jit
def flow(system, q, v, dt=0.01, n=4):
    def body(carry, _):
        q, v = carry
        v = v + dt * system.acceleration(q, v)
        return (q + dt * v, v), system.lagrangian(q, v)

    return jax.lax.scan(body, (q, v), None, length=n)


def main():
    q, v = jnp.array([0.3, -0.2]), jnp.array([0.0, 0.1])
    system = DoublePendulum()
    heavier = DoublePendulum((1.0, 2.0), g=1.62)
    tangent = eqx.filter_jvp(lambda s: s.lagrangian(q, v), (system,), (system,))
    return flow(system, q, v), flow(heavier, q, v), tangent

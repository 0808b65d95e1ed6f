"""A stencil on a grid: boundary conditions are strategies, the grid's shape is static."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp


class Boundary(eqx.Module):
    @abc.abstractmethod
    def pad(self, u): ...


class Dirichlet(Boundary):
    value: float = 0.0

    def pad(self, u):
        return jnp.pad(u, 1, constant_values=self.value)


class Periodic(Boundary):
    def pad(self, u):
        return jnp.pad(u, 1, mode="wrap")


class Grid(eqx.Module):
    shape: tuple[int, ...] = eqx.field(static=True)
    extent: tuple[float, ...] = eqx.field(static=True, converter=lambda e: tuple(map(float, e)))
    boundary: Boundary = Periodic()

    @property
    def spacing(self):
        return tuple(e / n for e, n in zip(self.extent, self.shape))

    def laplacian(self, u):
        padded = self.boundary.pad(u)
        dx, dy = self.spacing
        inner = slice(1, -1)
        across = padded[2:, inner] - 2 * u + padded[:-2, inner]
        along = padded[inner, 2:] - 2 * u + padded[inner, :-2]
        return across / dx**2 + along / dy**2


class Heat(eqx.Module):
    grid: Grid
    diffusivity: jax.Array
    source: jax.Array | None = None

    def rhs(self, u):
        du = self.diffusivity * self.grid.laplacian(u)
        return du if self.source is None else du + self.source

    @eqx.filter_jit
    def run(self, u, dt, n):
        return jax.lax.fori_loop(0, n, lambda i, u: u + dt * self.rhs(u), u)


def main():
    u = jnp.arange(12.0).reshape(4, 3) / 10
    periodic = Grid((4, 3), (4, 3))
    walls = Grid((4, 3), (2, 1), Dirichlet(1.0))
    runs = [Heat(grid, jnp.array(0.1)).run(u, 0.1, 3) for grid in (periodic, walls)]
    driven = Heat(walls, jnp.array(0.1), source=jnp.ones((4, 3)))
    sensitivity = eqx.filter_grad(lambda heat: jnp.sum(heat.run(u, 0.1, 2)))(driven)
    return (
        runs,
        sensitivity,
        walls.spacing,
        hash(periodic) == hash(Grid((4, 3), [4, 3])),
        repr(periodic),
    )

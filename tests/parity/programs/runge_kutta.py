"""A family of explicit Runge-Kutta steppers: abstract class variables, tableaus, one driver."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Tableau(eqx.Module):
    a: tuple[np.ndarray, ...]
    b: np.ndarray
    c: np.ndarray

    def __check_init__(self):
        if len(self.a) != len(self.b) - 1:
            raise ValueError("one row of a for each stage but the first")


class AbstractStepper(eqx.Module):
    tableau: eqx.AbstractClassVar[Tableau]
    order: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def name(self) -> str: ...

    def step(self, f, t, y, dt, args):
        ks = [f(t, y, args)]
        for row, c in zip(self.tableau.a, self.tableau.c):
            increment = sum(float(weight) * k for weight, k in zip(row, ks))
            ks.append(f(t + float(c) * dt, y + dt * increment, args))
        return y + dt * sum(float(b) * k for b, k in zip(self.tableau.b, ks))


class Heun(AbstractStepper):
    tableau = Tableau((np.array([1.0]),), np.array([0.5, 0.5]), np.array([1.0]))
    order = 2

    def name(self):
        return "heun"


class RK4(AbstractStepper):
    tableau = Tableau(
        (np.array([0.5]), np.array([0.0, 0.5]), np.array([0.0, 0.0, 1.0])),
        np.array([1, 2, 2, 1]) / 6,
        np.array([0.5, 0.5, 1.0]),
    )
    order = 4

    def name(self):
        return "rk4"


@eqx.filter_jit
def solve(stepper, f, y0, args, n):
    def body(carry, _):
        t, y = carry
        y = stepper.step(f, t, y, 0.1, args)
        return (t + 0.1, y), y

    return jax.lax.scan(body, (jnp.array(0.0), y0), None, length=n)


def main():
    field = lambda t, y, args: -args["rate"] * y + jnp.sin(t)
    runs = [
        (s.name(), s.order, solve(s, field, jnp.ones(2), {"rate": jnp.array(0.5)}, 5))
        for s in (Heun(), RK4())
    ]
    try:
        AbstractStepper()
    except TypeError:
        runs.append("abstract")
    try:
        Tableau((), np.ones(3), np.ones(2))
    except ValueError as error:
        runs.append(str(error))
    return runs, Heun() == Heun(), Heun() == RK4(), len(jax.tree.leaves(Heun()))

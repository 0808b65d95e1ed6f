"""Structural engineering: the lightest plane truss that bears several load cases.

Bars, materials and supports are Modules; the stiffness matrix is assembled from them, solved for
each load case, and the sections are found by gradients through the solve, under stress limits that
become stricter. A report, checks in compiled code, and an editable design go with it.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int


class Material(eqx.Module):
    name: str = eqx.field(static=True)
    stiffness: float
    density: float = 1.0
    strength: float = eqx.field(default=1.0, kw_only=True)

    def __check_init__(self):
        if self.stiffness <= 0:
            raise ValueError(f"{self.name}: stiffness must be positive")


class Verdict(eqx.Enumeration):
    holds = "All bars hold."
    yields = "A bar yields under tension."
    buckles = "A bar buckles."


class AbstractSection(eqx.Module):
    """How a design variable becomes an area and a moment of inertia."""

    inertia_factor: eqx.AbstractClassVar[float]
    raw: eqx.AbstractVar[Float[Array, " bars"]]

    @property
    @abc.abstractmethod
    def area(self) -> Float[Array, " bars"]: ...

    @property
    def inertia(self):
        return self.inertia_factor * self.area**2


class Round(AbstractSection):
    raw: Float[Array, " bars"] = eqx.field(converter=jnp.asarray)
    inertia_factor: ClassVar[float] = 1 / (4 * np.pi)

    @property
    def area(self):
        return jax.nn.softplus(self.raw) + 1e-3


class Tube(Round):
    ratio: float = eqx.field(static=True, default=0.8)
    inertia_factor: ClassVar[float] = 0.3

    @property
    def area(self):
        return super().area * (1 - self.ratio**2)


class Loads(eqx.Module):
    """Load cases, stacked."""

    forces: Float[Array, "cases nodes 2"]
    names: tuple[str, ...] = eqx.field(static=True)

    @classmethod
    def of(cls, n_nodes, **cases: dict[int, tuple[float, float]]):
        forces = np.zeros((len(cases), n_nodes, 2), np.float32)
        for i, case in enumerate(cases.values()):
            for node, force in case.items():
                forces[i, node] = force
        return cls(jnp.asarray(forces), tuple(cases))

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        return zip(self.names, self.forces)


class Truss(eqx.Module):
    nodes: Float[Array, "nodes 2"]
    bars: Int[np.ndarray, "bars 2"] = eqx.field(converter=np.asarray)
    fixed: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    material: Material
    section: AbstractSection
    solver: Callable = eqx.field(static=True, default=jnp.linalg.solve)

    @property
    def directions(self):
        start, end = self.nodes[self.bars[:, 0]], self.nodes[self.bars[:, 1]]
        length = jnp.linalg.norm(end - start, axis=-1)
        return (end - start) / length[:, None], length

    def stiffness(self):
        unit, length = self.directions
        k = self.material.stiffness * self.section.area / length
        both = jnp.concatenate([-unit, unit], axis=-1)
        local = k[:, None, None] * both[:, :, None] * both[:, None, :]
        index = (2 * self.bars[:, :, None] + np.arange(2)).reshape(len(self.bars), 4)
        size = 2 * len(self.nodes)
        total = jnp.zeros((size, size)).at[index[:, :, None], index[:, None, :]].add(local)
        held = np.array(self.fixed)
        return total.at[held].set(0.0).at[:, held].set(0.0).at[held, held].set(1.0)

    def displacements(self, force):
        force = force.ravel().at[np.array(self.fixed)].set(0.0)
        moved = self.solver(self.stiffness(), force)
        moved = eqx.error_if(moved, ~jnp.all(jnp.isfinite(moved)), "the truss is a mechanism")
        return moved.reshape(-1, 2)

    def __call__(self, force) -> dict[str, Any]:
        moved = self.displacements(force)
        unit, length = self.directions
        strain = jnp.sum(unit * (moved[self.bars[:, 1]] - moved[self.bars[:, 0]]), -1) / length
        stress = self.material.stiffness * strain
        critical = np.pi**2 * self.material.stiffness * self.section.inertia
        buckling = critical / (length**2 * self.section.area)
        return {"moved": moved, "stress": stress, "buckling": buckling}

    @property
    def mass(self):
        return self.material.density * jnp.sum(self.section.area * self.directions[1])

    def check(self, force) -> Verdict:
        answer = self(force)
        yields = jnp.any(answer["stress"] > self.material.strength)
        buckles = jnp.any(-answer["stress"] > answer["buckling"])
        first = Verdict.where(yields, Verdict.yields, Verdict.holds)
        return Verdict.where(buckles, Verdict.buckles, first)


class Penalty(eqx.Module):
    weight: float
    power: int = eqx.field(static=True, default=2)

    def __call__(self, truss, loads):
        answers = jax.vmap(truss)(loads.forces)
        over = jnp.maximum(answers["stress"] - truss.material.strength, 0.0)
        under = jnp.maximum(-answers["stress"] - answers["buckling"], 0.0)
        return self.weight * jnp.sum(over**self.power + under**self.power)

    def stricter(self, factor):
        return dataclasses.replace(self, weight=self.weight * factor)


def only_sections(truss):
    nothing = jax.tree.map(lambda _: False, truss)
    return eqx.tree_at(lambda t: t.section.raw, nothing, True)


@eqx.filter_jit(donate="none")
def improve(truss, opt_state, loads, penalty, optimizer):
    chosen, rest = eqx.partition(truss, only_sections(truss))

    @eqx.filter_value_and_grad(has_aux=True)
    def cost(chosen):
        truss = eqx.combine(chosen, rest)
        return truss.mass + penalty(truss, loads), truss.mass

    (value, mass), gradient = cost(chosen)
    updates, opt_state = optimizer.update(gradient, opt_state, chosen)
    return eqx.apply_updates(truss, updates), opt_state, value, mass


def report(truss, loads):
    verdicts = {name: Verdict[truss.check(force)] for name, force in loads}
    return f"{type(truss.section).__name__}, {truss.material.name}: {verdicts}"


def main():
    nodes = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    bars = [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]
    steel = Material("steel", 100.0, strength=2.0)
    truss = Truss(nodes, bars, [0, 1, 4, 5], steel, Round(jnp.zeros(5)))
    loads = Loads.of(4, down={3: (0.0, -1.0)}, side={1: (0.5, 0.0), 3: (0.5, -0.5)})
    optimizer = optax.sgd(0.05, momentum=0.5)
    opt_state = optimizer.init(eqx.filter(truss, only_sections(truss)))
    penalty, path = Penalty(1.0), []
    for step in range(3):
        truss, opt_state, value, mass = improve(truss, opt_state, loads, penalty, optimizer)
        penalty = penalty.stricter(2.0) if step % 2 else penalty
        path.append((value, mass))
    hollow = eqx.tree_at(lambda t: t.section, truss, Tube(truss.section.raw, ratio=0.5))
    loose = dataclasses.replace(truss, bars=[bars[0]] * 5)
    try:
        jax.block_until_ready(eqx.filter_jit(loose.displacements)(loads.forces[0]))
        outcome = "stands"
    except RuntimeError as error:
        outcome = "mechanism" if "mechanism" in str(error) else "other"
    try:
        Material("air", 0.0)
    except ValueError as error:
        refused = str(error)
    texts = report(truss, loads), report(hollow, loads), outcome, refused, repr(steel)
    sensitivity = eqx.filter_grad(lambda t: jnp.sum(jax.vmap(t)(loads.forces)["moved"] ** 2))(truss)
    return truss, path, texts, sensitivity.nodes, sensitivity.section.raw, hollow.mass

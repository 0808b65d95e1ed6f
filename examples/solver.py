"""An adaptive solver: what its gradient costs, by each kind of loop and by the adjoint equation.

    pip install -e '.[examples]'
    python examples/solver.py                     # a minute on two cores
    python examples/solver.py --plot solver.png

The solver is a Module with parts: a method (of Bogacki and Shampine), a tolerance, the kind of its
loop. It chooses its steps, so nobody knows their number, and JAX's while loop has no gradient.

The equation is a ring of damped pendulums. The gradient of the energy that they have at the end, by
stiffness and damping, is computed in three ways, and its memory is read from the compiled program:

- the loop is *checkpointed*: it stores some states, and computes the others again;
- the loop is *bounded*: nested scans, each of which computes the one below again;
- the *adjoint* equation is solved from the end to the start, together with the states. It stores
  nothing. But what friction has taken out of a state does not come back: with the damping of 0.5 it
  is wrong by seven percent, and with `--damping 1` by a factor of hundreds.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pytreemod as pm

positive = pm.constraints.positive

Scalar = Float[Array, ""]
Ring = tuple[Float[Array, " ring"], Float[Array, " ring"]]  # angles and speeds
Flow = Callable[[Any], Any]  # the rate of change of a tree


# --- the solver ---------------------------------------------------------------------------------


def added(y: Any, h: Any, rates: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return `y` plus `h` times a weighted sum of rates."""
    used = [(rate, w) for rate, w in zip(rates, weights, strict=True) if w]
    sums = jax.tree.map(
        lambda *ks: sum(w * k for k, (_, w) in zip(ks, used)), *[k for k, _ in used]
    )
    return jax.tree.map(lambda y, s: y + h * s, y, sums)


class RungeKutta(pm.Module):
    """An explicit method, by its table: how the rates weigh in each stage, and in the error."""

    stages: tuple[tuple[float, ...], ...] = pm.field(static=True)  # the last one is the result
    error: tuple[float, ...] = pm.field(static=True)
    order: int = pm.field(static=True)

    def __call__(self, flow: Flow, y: Any, h: Scalar) -> tuple[Any, Any]:
        """Take a step of size `h`; return the result, and an estimate of its error."""
        rates, stage = [flow(y)], y
        for weights in self.stages:
            stage = added(y, h, rates, weights)
            rates.append(flow(stage))
        zero = jax.tree.map(jnp.zeros_like, y)
        return stage, added(zero, h, rates, self.error)


bogacki_shampine = RungeKutta(
    stages=((1 / 2,), (0, 3 / 4), (2 / 9, 1 / 3, 4 / 9)),
    error=(-5 / 72, 1 / 12, 1 / 9, -1 / 8),
    order=3,
)


class At(NamedTuple):
    """Where the solver is: the time, the solution, and the size of the step to try."""

    time: Scalar
    y: Any
    h: Scalar


class Solver(pm.Module):
    """Takes steps that are as long as the tolerance allows."""

    method: RungeKutta = bogacki_shampine
    tolerance: float = pm.field(default=1e-5, static=True)
    max_steps: int = pm.field(default=4096, static=True)
    kind: str = pm.field(default="checkpointed", static=True)
    checkpoints: int | None = pm.field(default=None, static=True)

    def __call__(self, flow: Flow, y: Any, duration: float) -> tuple[Any, Array]:
        """Return the solution after a time, and the number of steps that were tried."""

        def step(at: At) -> At:
            left = duration - at.time
            is_last = at.h >= left
            h = jnp.where(is_last, left, at.h)
            y, error = self.method(flow, at.y, h)
            # How to choose the steps is no part of the solution, and has no gradient.
            size = jax.lax.stop_gradient(self.size(at.y, error))
            factor = jnp.clip(0.9 * size ** (-1 / self.method.order), 0.2, 5.0)
            taken = At(jnp.where(is_last, duration, at.time + h), y, h)
            time, y, _ = pm.filter_cond(size <= 1, lambda: taken, lambda: at)
            return At(time, y, h * factor)

        last, steps = pm.filter_while_loop(
            lambda at: at.time < duration,
            step,
            At(jnp.zeros(()), y, jnp.asarray(0.01)),
            max_steps=self.max_steps,
            kind=self.kind,
            checkpoints=self.checkpoints,
            return_steps=True,
        )
        return last.y, steps

    def size(self, y: Any, error: Any) -> Scalar:
        """Return the error in units of the tolerance; a step is accepted up to one."""
        scaled = jax.tree.map(lambda e, y: e / (1 + jnp.abs(y)), error, y)
        flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(scaled)])
        return jnp.sqrt(jnp.mean(flat**2)) / self.tolerance + 1e-9


# --- the equation, and its gradients ------------------------------------------------------------


class Pendulums(pm.Module):
    """A ring of pendulums, each coupled to its neighbors by springs."""

    stiffness: Scalar = pm.field(constraint=positive)
    damping: Scalar = pm.field(constraint=positive)
    torque: Scalar

    def __call__(self, state: Ring) -> Ring:
        """Return the rates of change of angles and speeds."""
        angle, speed = state
        pull = jnp.roll(angle, 1) - 2 * angle + jnp.roll(angle, -1)
        force = self.stiffness * pull - jnp.sin(angle) + self.torque
        return speed, force - self.damping * speed


def energy(state: Ring) -> Scalar:
    """Return the mean energy in the pendulums, without their springs."""
    angle, speed = state
    return jnp.mean(speed**2 / 2 + 1 - jnp.cos(angle))


def through_the_loop(solver: Solver, model: Pendulums, start: Ring, duration: float) -> Pendulums:
    """Differentiate the program: backwards through the steps of the solver."""
    return pm.filter_grad(lambda model: energy(solver(model, start, duration)[0]))(model)


def by_the_adjoint(solver: Solver, model: Pendulums, start: Ring, duration: float) -> Pendulums:
    """Solve the adjoint equation, from the end to the start."""

    def backwards(everything: tuple[Ring, Ring, Pendulums]) -> tuple[Ring, Ring, Pendulums]:
        state, adjoint, _ = everything
        rates, pull = pm.filter_vjp(lambda model, state: model(state), model, state)
        by_model, by_state = pull(adjoint)
        return jax.tree.map(jnp.negative, rates), by_state, by_model

    end, _ = solver(model, start, duration)
    nothing = jax.tree.map(jnp.zeros_like, model)
    return solver(backwards, (end, jax.grad(energy)(end), nothing), duration)[0][2]


# --- the measurement ----------------------------------------------------------------------------


class Row(NamedTuple):
    """What a gradient costs, and how wrong it is."""

    name: str
    kilobytes: float
    milliseconds: float
    error: float


def compiled(way: Callable[..., Pendulums], *given: Any) -> tuple[Callable[[], Array], float]:
    """Compile a gradient; return what runs it, and its memory in kilobytes."""
    *trees, duration = given

    @jax.jit
    def gradient(*trees: Any) -> Array:
        return jnp.stack(jax.tree.leaves(way(*trees, duration)))

    program = gradient.lower(*trees).compile()
    memory = program.memory_analysis().temp_size_in_bytes / 1e3
    return lambda: program(*trees).block_until_ready(), memory


def measure(model: Pendulums, start: Ring, duration: float, stored: Sequence[int]) -> list[Row]:
    """Measure every way; the truth is the gradient with a tolerance that is far smaller."""
    ways: dict[str, tuple[Callable[..., Pendulums], Solver]] = {}
    for count in stored:
        ways[f"checkpointed, {count} stored"] = through_the_loop, Solver(checkpoints=count)
    ways["bounded, 4096 steps"] = through_the_loop, Solver(kind="bounded")
    ways["the adjoint equation"] = by_the_adjoint, Solver(kind="lax")
    exact = Solver(tolerance=1e-9, max_steps=1 << 20, checkpoints=300)
    truth = compiled(through_the_loop, exact, model, start, duration)[0]()

    programs = {name: compiled(*way, model, start, duration) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    # In turns, and the best of each: other programs on the machine slow down all of them alike.
    for _ in range(15):
        for name, (run, _) in programs.items():
            began = perf_counter()
            run()
            times[name].append(perf_counter() - began)
    rows = []
    for name, (run, memory) in programs.items():
        error = jnp.linalg.norm(run() - truth) / jnp.linalg.norm(truth)
        rows.append(Row(name, memory, 1e3 * min(times[name]), float(error)))
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Save a picture of memory against time."""
    # Imported here, and drawn without pyplot, which needs a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    stored = [row for row in rows if row.name.startswith("checkpointed")]
    axes.plot([r.milliseconds for r in stored], [r.kilobytes for r in stored], "o-")
    for row in rows:
        if row not in stored:
            axes.plot(row.milliseconds, row.kilobytes, "s")
        axes.annotate(f"  {row.name}", (row.milliseconds, row.kilobytes), fontsize=9)
    axes.set(xlabel="milliseconds", ylabel="kilobytes", xscale="log", yscale="log")
    axes.margins(0.3, 0.1)
    figure.savefig(path, dpi=150)


# --- the command --------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ring", type=int, default=200, help="number of pendulums")
    parser.add_argument("--duration", type=float, default=20.0)
    parser.add_argument("--damping", type=float, default=0.5)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture of the costs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, and print a table."""
    options = parse(arguments)
    with jax.enable_x64(True):
        model = Pendulums(
            stiffness=jnp.asarray(4.0),
            damping=jnp.asarray(options.damping),
            torque=jnp.asarray(1.5),
        )
        places = 2 * jnp.pi * jnp.arange(options.ring) / options.ring
        start = (2 * jnp.sin(places) + jnp.sin(3 * places), jnp.zeros(options.ring))
        _, steps = Solver()(model, start, options.duration)
        print(f"{options.ring} pendulums, {steps} steps forward")
        rows = measure(model, start, options.duration, (3, 10, 30, 100, 300))
    print(f"{'gradient':24}{'memory':>10}{'time':>10}{'error':>10}")
    for name, kilobytes, milliseconds, error in rows:
        print(f"{name:24}{kilobytes:7.0f} kB{milliseconds:7.1f} ms{error:10.0e}")
    if options.plot:
        plot(rows, options.plot)
        print(f"memory against time in {options.plot}")
    return rows


if __name__ == "__main__":
    main()

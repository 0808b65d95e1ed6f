"""Where the time goes, step by step, in operations that miss their target.

    python -m benchmarks.shares [--quick] [--json]

Each row of a group does everything that the row above it does, and one thing more, with minimal
code. The difference between the two times is the share of that thing. The first row is the
baseline, and the last is pytreemod. The rows between show the time that Python or JAX takes,
without any code of a library.
"""

import functools as ft
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import pytreemod as pm
from benchmarks.construction import Plain, with_own_init
from benchmarks.flattening import rebuilding
from benchmarks.libraries import OURS
from benchmarks.measuring import UNROLLED, Burst, race, unrolled
from benchmarks.networks import nested_dicts, network_class
from benchmarks.tables import Benchmark, Row, ratio_row, short, with_unit

ADDS, RATIO = "this alone", "ratio to the first"
DEPTH = 21


@dataclass(frozen=True)
class Step:
    """A row: what it adds to the row above it, and a burst with all steps so far."""

    label: str
    burst: Burst


# --- reading a field -----------------------------------------------------------------------------


class Binding:
    """A descriptor that yields to the instance's attributes, as functions do."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self


def reading_steps() -> list[Step]:
    """From a plain object to a Module, whose fields may still be pending."""

    class Plain:
        def __init__(self, weight: jax.Array):
            self.weight = weight

    class Shadowing(Plain):
        weight: Any = Binding()

    class Affine(pm.Module):
        weight: jax.Array

    weight = jnp.ones(3)
    keeping = Plain(weight)
    keeping.__dict__ = {"weight": weight}
    nodes = {
        "a plain object": Plain(weight),
        "with its own __dict__": keeping,
        "whose class has an attribute of that name": Shadowing(weight),
        "and is a Module: pytreemod": Affine(weight),
    }
    return [Step(label, unrolled("node.weight", node=node)) for label, node in nodes.items()]


# --- calling a method ----------------------------------------------------------------------------


def method_steps() -> list[Step]:
    """From a function to a bound method that is a pytree."""

    def apply(self: Any, x: Any) -> Any:
        return x

    class Function:
        """A descriptor that does not bind."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return ignoring

    class Binding:
        """A descriptor that binds in C."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return ft.partial(apply, instance)

    def ignoring(x: Any) -> Any:
        return x

    class Owner:
        method = apply
        function = Function()
        binding = Binding()

    class Affine(pm.Module):
        weight: jax.Array

        def method(self, x: Any) -> Any:
            return x

    owner, module = Owner(), Affine(jnp.ones(3))
    return [
        Step("a method of a plain class", unrolled("owner.method(1)", owner=owner)),
        Step("found by a descriptor in Python", unrolled("owner.function(1)", owner=owner)),
        Step("that binds it, by a partial in C", unrolled("owner.binding(1)", owner=owner)),
        Step("that is a pytree: pytreemod", unrolled("module.method(1)", module=module)),
    ]


# --- constructing by a custom __init__ -----------------------------------------------------------


def construction_steps() -> list[Step]:
    """From a class without checks to a Module."""

    class Open:
        __init__ = with_own_init(pm).__init__

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Overseen(Open, metaclass=Meta):
        """Can run code when an instance is complete."""

    class Watched(Overseen):
        """Can run code for each assignment."""

        def __setattr__(self, name: str, value: Any) -> None:
            self.__dict__[name] = value

    values = (jnp.ones((3, 2)), jnp.zeros(3), 3, 0.5, True)

    def making(cls: type) -> Burst:
        return unrolled("cls(*values)", cls=cls, values=values)

    return [
        Step("a frozen dataclass", making(Plain)),
        Step("a plain class instead", making(Open)),
        Step("whose metaclass has a __call__", making(Overseen)),
        Step("and that has a __setattr__", making(Watched)),
        Step("checks, division, freezing: pytreemod", making(with_own_init(pm))),
    ]


# --- flattening ----------------------------------------------------------------------------------


class Empty:
    """Flattened by an attribute that is read in C; unflattened by an empty function."""

    def __init__(self, children: tuple[Any, ...]):
        self.flat = children, None


class Rebuilt(Empty):
    """Unflattened by making an empty object."""


def unflatten_empty(aux: None, children: Any) -> None:
    """Return None."""


def unflatten_rebuilt(aux: None, children: Any) -> Rebuilt:
    """Return a new object without its children."""
    return object.__new__(Rebuilt)


jtu.register_pytree_node(Empty, attrgetter("flat"), unflatten_empty)
jtu.register_pytree_node(Rebuilt, attrgetter("flat"), unflatten_rebuilt)


def chain(node: type[Empty], depth: int) -> Any:
    """Nodes in the shape of the networks in `flattening.py`."""
    layers = [node((jnp.zeros(2), jnp.zeros(2))) for _ in range(depth)]
    return node((layers,))


def flattening_steps() -> list[Step]:
    """From nodes that JAX rebuilds in C++ to Modules."""
    return [
        Step("nested dicts", rebuilding(nested_dicts(DEPTH))),
        Step("an attribute, and an empty function in Python", rebuilding(chain(Empty, DEPTH))),
        Step("that makes a new object", rebuilding(chain(Rebuilt, DEPTH))),
        Step("which has its children: pytreemod", rebuilding(network_class(OURS, pm)(DEPTH))),
    ]


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """An operation that is divided into steps."""

    title: str
    steps: Callable[[], list[Step]]
    share: float


GROUPS = (
    Group("reading a field", reading_steps, 1 / UNROLLED),
    Group("calling a method", method_steps, 1 / UNROLLED),
    Group("constructing by a custom __init__", construction_steps, 1 / UNROLLED),
    Group("flattening and unflattening, per module", flattening_steps, 1 / (DEPTH + 1)),
)


def rows(quick: bool) -> Iterator[Row]:
    """Each group, step by step."""
    for group in GROUPS:
        bursts = {step.label: step.burst for step in group.steps()}
        times = race(bursts, rounds=4 if quick else 60)
        measured = ratio_row(group.title, times, share=group.share).numbers
        yield Row(group.title, "", {ADDS: "", RATIO: ""}, {})
        before = 0.0
        for label, numbers in measured.items():
            seconds = numbers["seconds"]["median"]
            cells = {ADDS: with_unit(seconds - before) if seconds > before else "nothing"}
            cells[RATIO] = short(numbers["ratio"]["median"])
            yield Row(f"  {label}", with_unit(seconds), cells, numbers)
            before = seconds


BENCHMARK = Benchmark("Where the time goes", "up to here", rows, (ADDS, RATIO))

if __name__ == "__main__":
    BENCHMARK.main()

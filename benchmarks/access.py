"""The time to read a field and to call a method.

    python -m benchmarks.access [--quick] [--json]

The baseline is an instance of a frozen dataclass. `filter_jit` returns a model before its nodes are
built, and a descriptor for each field builds them on the first read. Separate rows measure such
models.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.libraries import FILTERING, installed
from benchmarks.measuring import UNROLLED, unrolled
from benchmarks.tables import Benchmark, Row, raced

PYTHON = "Python"
READ, CALL = 1.0, 8.0


@dataclass(frozen=True)
class Plain:
    """The baseline."""

    weight: jax.Array
    bias: jax.Array
    size: int

    def __call__(self, x: Any) -> Any:
        return x

    def apply(self, x: Any) -> Any:
        return x


def filtering_class(library: Any) -> type:
    """The same class as a Module of Equinox or pytreemod."""

    class Affine(library.Module):
        weight: jax.Array
        bias: jax.Array
        size: int = library.field(static=True)

        def __call__(self, x: Any) -> Any:
            return x

        def apply(self, x: Any) -> Any:
            return x

    return Affine


def nnx_class(nnx: Any) -> type:
    """The same class as a Module of NNX."""

    class Affine(nnx.Module):
        def __init__(self, weight: jax.Array, bias: jax.Array, size: int):
            self.weight = nnx.Param(weight)
            self.bias = nnx.Param(bias)
            self.size = size

        def __call__(self, x: Any) -> Any:
            return x

        def apply(self, x: Any) -> Any:
            return x

    return Affine


def fresh(plain: Any, libraries: dict[str, Any]) -> dict[str, Any]:
    """For each library, an instance of a new class."""
    values = (plain.weight, plain.bias, plain.size)
    made = {PYTHON: plain}
    for name, library in libraries.items():
        cls = nnx_class(library) if name == "NNX" else filtering_class(library)
        made[name] = cls(*values)
    return made


def after_jit(plain: Any, libraries: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two instances of a class that `filter_jit` has returned: one made by hand, one returned."""
    filtering = {name: lib for name, lib in libraries.items() if name in FILTERING}
    made = fresh(plain, filtering)
    returned = {PYTHON: plain}
    for name, library in filtering.items():
        returned[name] = library.filter_jit(lambda model: model)(made[name])
    # The first read builds the model; only later reads are measured.
    assert all(node.size == plain.size for node in returned.values())
    return made, returned


@dataclass(frozen=True)
class Statement:
    """A statement about `model` and `x`."""

    label: str
    statement: str
    limit: float


READS = (
    Statement("reading a field", "model.weight", READ),
    Statement("reading a configuration field", "model.size", READ),
)
CALLS = (
    Statement("calling a method", "model.apply(x)", CALL),
    Statement("calling the instance", "model(x)", CALL),
)


def rows(quick: bool) -> Iterator[Row]:
    """Reads and calls: of new classes, then of classes that a jitted call has returned."""
    rounds = 4 if quick else 60
    libraries = installed()
    plain = Plain(jnp.ones((3, 2)), jnp.zeros(3), 3)

    def row(
        operation: Statement, models: dict[str, Any], where: str = "", *, limited: bool = True
    ) -> Row:
        bursts = {name: unrolled(operation.statement, model=m, x=1) for name, m in models.items()}
        limit = operation.limit if limited else None
        return raced(
            operation.label + where, bursts, rounds=rounds, share=1 / UNROLLED, limit=limit
        )

    models = fresh(plain, libraries)
    for operation in (*READS, *CALLS):
        yield row(operation, models)
    made, returned = after_jit(plain, libraries)
    kinds: tuple[tuple[str, dict[str, Any], Callable[[Statement], bool]], ...] = (
        (", class returned by jit", made, lambda operation: operation in CALLS),
        (", instance returned by jit", returned, lambda operation: operation in CALLS),
    )
    for where, instances, is_limited in kinds:
        for operation in (READS[0], CALLS[0]):
            yield row(operation, instances, where, limited=is_limited(operation))


BENCHMARK = Benchmark("Reading a field and calling a method, against plain Python", PYTHON, rows)

if __name__ == "__main__":
    BENCHMARK.main()

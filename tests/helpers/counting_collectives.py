"""Count the communication between devices in the text of a compiled program."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
_COLLECTIVE = re.compile(rf" = (.*?) ({KINDS})(?:-start)?\(")
_CALLED = re.compile(r"(?:body|calls|to_apply)=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Collectives(NamedTuple):
    """The number of collectives in one call, and the number of their elements, by kind.

    An all-reduce of several arrays counts once. The elements are those of the result; for a
    reduce-scatter those of the operand, so that it is comparable with an all-reduce.
    """

    numbers: Counter[str]
    elements: Counter[str]

    @property
    def number(self) -> int:
        """The number of collectives of all kinds."""
        return self.numbers.total()

    @property
    def size(self) -> int:
        """The number of elements of all kinds."""
        return self.elements.total()


def collectives(text: str, devices: int = 8) -> Collectives:
    """The collectives of a compiled program, from its `lowered.compile().as_text()`.

    The body of a loop counts as often as it runs.
    """
    bodies = _bodies(text)
    numbers: Counter[str] = Counter()
    elements: Counter[str] = Counter()

    def add(name: str, times: int) -> None:
        for line in bodies[name]:
            trips = _TRIPS.search(line)
            assert trips or " while(" not in line, "a loop of unknown length"
            inner = times * int(trips[1]) if trips else times
            found = _COLLECTIVE.search(line)
            if found:
                kind = found[2]
                each = _elements(found[1]) * (devices if kind == "reduce-scatter" else 1)
                numbers[kind] += times
                elements[kind] += times * each
                continue
            called = _CALLED.findall(line)
            for some in _BRANCHES.findall(line):
                called += re.findall(r"%([\w.-]+)", some)
            for other in called:
                add(other, inner)

    add(next(name for name in bodies if name.startswith("ENTRY ")), 1)
    return Collectives(numbers, elements)


def _bodies(text: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        begins = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
        if begins:
            lines = bodies[f"{begins[1] or ''}{begins[2]}"] = []
        else:
            lines.append(line)
    return bodies


def _elements(shapes: str) -> int:
    return sum(
        math.prod(map(int, filter(None, dims.split(","))))
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
    )

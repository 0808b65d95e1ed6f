"""What the devices of a compiled program tell each other, counted in its text."""

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
    """By kind: how many run in one call, and how many elements they concern.

    An all-reduce of several arrays counts once. What an instruction concerns is what it gives;
    of a reduce-scatter what it takes, so that it compares with an all-reduce.
    """

    numbers: Counter[str]
    elements: Counter[str]

    @property
    def number(self) -> int:
        """Of all kinds."""
        return self.numbers.total()

    @property
    def size(self) -> int:
        """Elements, of all kinds."""
        return self.elements.total()


def collectives(text: str, devices: int = 8) -> Collectives:
    """Those of a compiled program, as `lowered.compile().as_text()` shows it.

    A loop's body counts as often as it runs.
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

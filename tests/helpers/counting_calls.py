"""Count the work of a function, because times vary on busy machines."""

import sys
from collections.abc import Callable


def calls_of(fn: Callable[[], object]) -> int:
    """The number of functions that run while `fn` does, Python's and C's."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


def is_linear(make: Callable[[int], Callable[[], object]], n: int = 40) -> bool:
    """Whether the work of `make(n)` grows linearly with n, not with its square.

    Args:
        make: returns the function for a size; its own work does not count.
        n: the smallest of three sizes.
    """
    counts = []
    for size in (n, 2 * n, 4 * n):
        fn = make(size)
        fn()  # work that happens once, whatever the size
        counts.append(calls_of(fn))
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    return second < 2.2 * first

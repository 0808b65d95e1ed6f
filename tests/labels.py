"""Names for the cases of parametrized tests."""

import re


def label(value: object) -> str:
    """A value as text, without addresses: the names must be the same in every process.

    Sets are sorted, because the order of their members differs from process to process.

    Examples:
        >>> label(frozenset({"b", "a"})), label(({2, 1}, "x"))
        ("frozenset({'a', 'b'})", "({1, 2}, 'x')")
    """
    return re.sub(r" at 0x[0-9a-f]+", "", _text(value) if _has_set(value) else str(value))


def _has_set(value: object) -> bool:
    if isinstance(value, (set, frozenset)):
        return True
    return type(value) in (tuple, list) and any(map(_has_set, value))


def _text(value: object) -> str:
    if isinstance(value, (set, frozenset)) and value:
        inside = "{" + ", ".join(sorted(map(_text, value))) + "}"
        return inside if type(value) is set else f"{type(value).__name__}({inside})"
    if type(value) in (tuple, list) and _has_set(value):
        inside = ", ".join(map(_text, value)) + ("," if value and len(value) == 1 else "")
        return f"({inside})" if type(value) is tuple else f"[{inside.rstrip(',')}]"
    return repr(value)

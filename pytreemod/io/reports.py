"""What a load did, for each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

_SHOWN = 10
"""How many of each kind are printed."""


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What [`load`][pytreemod.load] did; the second value of `load(..., strict=False)`.

    Names are those of `like`, such as `layers.2.weight`. Printed, it begins with how many there are
    of each kind, and has the first few of each; the fields have all of them.

    Fields:
        loaded: leaves that have the file's values now.
        missing: leaves that keep the values of `like`, for the file has none for them.
        unexpected: leaves of the file that are in no place of `like`.
        renamed: pairs of a leaf's name and its name in the file, where these differ.
        reshaped: leaves whose shape in the file is another one: by axes of size 1, or because
            layers are one `Stack` here, and a list there.
        cast: leaves that `cast` has given another dtype.
        configuration: what the file says differently of the model's configuration; `like` is right.
        migrated: Modules of an older version of their class, with both versions (see
            [`migration`][pytreemod.migration]).

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model)
        >>> like = {"old": model, "new": model}
        >>> like, report = pm.load("model.safetensors", like, strict=False, rename={"": "old"})
        >>> print(report)
        LoadReport: 2 loaded, 2 missing, 2 renamed
          loaded
            old.weight
            old.bias
          missing
            new.weight
            new.bias
          renamed
            old.weight, from weight
            old.bias, from bias
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()
    migrated: tuple[str, ...] = ()

    def __repr__(self) -> str:
        told: dict[str, Sequence[str]] = {
            field.name: [_line(item) for item in getattr(self, field.name)]
            for field in fields(self)
        }
        # How much was loaded is told though it be nothing.
        there = [title for title, rows in told.items() if rows or title == "loaded"]
        counts = [f"{len(told[title])} {title}" for title in there]
        lines = [f"LoadReport: {', '.join(counts)}"]
        for title, rows in told.items():
            lines += [f"  {title}"] if rows else []
            lines += [f"    {row}" for row in rows[:_SHOWN]]
            lines += [f"    and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
        return "\n".join(lines)

    __str__ = __repr__


def _line(item: str | tuple[str, str]) -> str:
    return item if isinstance(item, str) else f"{item[0]}, from {item[1]}"

"""`diff`: the differences between two trees, or files, by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pytreemod.io.configuration import configuration_of, differences
from pytreemod.io.container import Entry, StrPath, opened
from pytreemod.io.loading import description_of, form_text
from pytreemod.io.names import places_of
from pytreemod.io.renaming import Renaming
from pytreemod.io.saving import table_of
from pytreemod.tree.comparison import largest_difference
from pytreemod.tree.printing import report_text
from pytreemod.typing import PyTree, is_instance


@dataclass(frozen=True, repr=False)
class Diff:
    """The result of [`diff`][pytreemod.diff]: false if there is no difference.

    Fields:
        added: leaves that only the second tree has, each with its form.
        removed: leaves that only the first tree has.
        configuration: different classes and configuration, with both texts.
        forms: leaves of different shapes or dtypes, with both.
        values: leaves with different numbers: how far apart, and how many.
    """

    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    configuration: Sequence[str] = ()
    forms: Sequence[str] = ()
    values: Sequence[str] = ()

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __repr__(self) -> str:
        return report_text("Diff", vars(self)) if self else "Diff: none"


def diff(a: PyTree | StrPath, b: PyTree | StrPath) -> Diff:
    """Compare two trees, or files, by the names that leaves have in files.

    So a Stack and a list of its layers are equal.

    Args:
        a: a tree, or the path of a file.
        b: another one.

    Returns:
        The differences, which are printed as a table of paths.

    Examples:
        >>> import numpy as np
        >>> diff({"w": np.ones(2)}, {"w": np.array([1.0, 3.0])})
        Diff: 1 values
          values
            w: 1 of 2 differ, by 2
    """
    with ExitStack() as files:
        (ours, mine), (theirs, others) = (_parts_of(each, files) for each in (a, b))
        both = [name for name in ours if name in theirs]
        forms = {n: (form_text(ours[n]), form_text(theirs[n])) for n in both}
        same = (name for name, (x, y) in forms.items() if x == y)
        found = {n: largest_difference(ours[n].read(), theirs[n].read()) for n in same}
        return Diff(
            added=[f"{n}: {form_text(x)}" for n, x in theirs.items() if n not in ours],
            removed=[f"{n}: {form_text(x)}" for n, x in ours.items() if n not in theirs],
            configuration=[
                f"{name or 'the tree'}: {text or 'nothing'} -> {other or 'nothing'}"
                for name, text, other in differences(mine, others, ours, theirs)
            ],
            forms=[f"{n}: {x} -> {y}" for n, (x, y) in forms.items() if x != y],
            values=[f"{n}: {x[2]} of {x[3]} differ, by {x[0]:.3g}" for n, x in found.items() if x],
        )


def _parts_of(tree: Any, files: ExitStack) -> tuple[dict[str, Entry], dict[str, str]]:
    if is_instance(tree, (str, os.PathLike)):
        table, texts = files.enter_context(opened(tree))
        return table, description_of(texts, tree, Renaming(None))[0]
    places = [*places_of(tree)]
    return table_of(places, "diff"), configuration_of(places)

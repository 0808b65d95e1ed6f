"""`pytreemod.testing`: assertions about trees; errors list the paths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax.numpy as jnp
import numpy as np

from pytreemod.errors import explain
from pytreemod.tree.comparison import compare, have_one_type, largest_difference
from pytreemod.tree.paths import pattern_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.selecting import as_selector
from pytreemod.typing import FilterSpec, PyTree, jtu

_NEAR = {"float16": 1e-3, "float32": 1e-5, "complex64": 1e-5, "float64": 1e-10, "complex128": 1e-10}


def assert_trees_close(
    actual: PyTree, expected: PyTree, rtol: float | None = None, atol: float | None = None
) -> None:
    """Assert that two trees agree: structure, configuration, shapes, dtypes, and (nearly) numbers.

    NaN equals NaN. Integers, booleans and keys must be equal.

    Args:
        actual: a tree.
        expected: the expected tree.
        rtol: relative tolerance of floating arrays; None for one by dtype: 1e-5 for float32, 1e-3
            for float16, 1e-2 for bfloat16 and narrower ones, 1e-10 for float64.
        atol: absolute tolerance; None for `rtol`.

    Raises:
        AssertionError: if they differ; the error names each path.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.testing.assert_trees_close({"a": jnp.ones(2)}, {"a": jnp.ones(2) + 1e-7})
    """
    texts = _differences(actual, expected, rtol, atol)
    _fail_if([f"{p}: {text}" for p, text in texts.items() if text], "trees that agree")


def assert_changed(
    before: PyTree, after: PyTree, only: FilterSpec | Sequence[FilterSpec] = ...
) -> None:
    """Assert that chosen leaves changed, and no others, for instance in a training step.

    Args:
        before: a tree.
        after: the tree later, of the same structure.
        only: the leaves that may change: a path (`"head.**"`), a class, a selector. Or a list
            of these; each must pick at least one leaf that has changed. Of `[]`, none may change.

    Raises:
        AssertionError: if another leaf has changed, or none of the expected ones; the error names
            each path.
        SpecError: if `only` does not fit the tree.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> before = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> after = pm.tree_at(lambda m: m.layers[1].bias, before, replace_fn=lambda b: b + 1)
        >>> pm.testing.assert_changed(before, after, only="layers.1.**")
    """
    texts = _differences(before, after, 0.0, 0.0)
    changed = [path for path, text in texts.items() if text]
    specs: list[Any] = [*only] if isinstance(only, (list, tuple)) else [only]
    picked = [dict.fromkeys(compress(texts, as_selector(spec).mask(before))) for spec in specs]
    others = [path for path in changed if not any(path in own for own in picked)]
    _fail_if(others, f"no change outside of {only!r}")
    for spec, own in zip(specs, picked, strict=True):
        if own.keys().isdisjoint(changed):
            _fail_if([*own] or ["no leaf"], f"a change in {spec!r}")


def _differences(one: PyTree, other: PyTree, *near: float | None) -> dict[str, str]:
    """Return how far two trees are apart at each path, "" if close; refuse other differences."""
    others = [each.line() for each in compare(one, other, have_one_type)]
    _fail_if(others, "one structure and configuration")
    pairs = zip(jtu.tree_leaves_with_path(one), jtu.tree_leaves(other), strict=True)
    return {pattern_text(path): _far(a, b, *near) for (path, a), b in pairs}


def _far(a: Any, b: Any, rtol: float | None, atol: float | None) -> str:
    differ = largest_difference(a, b) if is_array(a) else None
    if differ is None:
        return ""
    if jnp.issubdtype(a.dtype, jnp.inexact):
        rtol = _NEAR.get(str(a.dtype), 1e-2) if rtol is None else rtol
        wide: Any = np.complex128 if a.dtype.kind == "c" else np.float64
        x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        if np.allclose(x, y, rtol, rtol if atol is None else atol, equal_nan=True):
            return ""
    return "largest difference {:.3g}, relative {:.3g}, {} of {}".format(*differ)


def _fail_if(places: Sequence[str], expected: str) -> None:
    if places:
        raise AssertionError(explain(f"expected {expected}", at=places, most=20))

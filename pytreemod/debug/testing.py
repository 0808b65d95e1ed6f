"""`pytreemod.testing`: assertions about trees; errors list the paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, explain
from pytreemod.tree.comparison import largest_difference
from pytreemod.tree.differences import compare
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import Location, locations
from pytreemod.tree.paths import pattern_text, some_of
from pytreemod.tree.predicates import is_array
from pytreemod.tree.selecting import Locations, as_selector
from pytreemod.typing import FilterSpec, PyTree, Tracer, jtu

_TOLERANCES = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5, "complex64": 1e-5}
"""Relative and absolute, by dtype; narrower ones use that of bfloat16, wider ones 1e-10."""


def assert_trees_close(
    actual: PyTree, expected: PyTree, rtol: float | None = None, atol: float | None = None
) -> None:
    """Assert that two trees agree: structure, configuration, shapes, dtypes, and (nearly) numbers.

    NaN equals NaN. Integers, booleans and keys must be equal.

    Args:
        actual: a tree.
        expected: the expected tree.
        rtol: relative tolerance of floating arrays; None for one by dtype: 1e-5 for float32, 1e-3
            for float16, 1e-2 for bfloat16, 1e-10 for float64.
        atol: absolute tolerance; None for `rtol`.

    Raises:
        AssertionError: if they differ; the error names each path.
        ArgumentError: if an array is traced.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.testing.assert_trees_close({"a": jnp.ones(2)}, {"a": jnp.ones(2) + 1e-7})
    """
    _refuse_traced("assert_trees_close", actual, expected)
    found = [each.line() for each in compare(actual, expected, _have_one_type)]
    if not found:
        pairs = zip(jtu.tree_leaves_with_path(actual), jtu.tree_leaves(expected), strict=True)
        for (path, a), b in pairs:
            text = _far(a, b, rtol, atol) if is_array(a) else ""
            found += [f"{pattern_text(path)}: {text}"] if text else []
    _fail_if(found, "assert_trees_close", "trees that agree", "difference")


def assert_changed(
    before: PyTree, after: PyTree, only: FilterSpec | Sequence[FilterSpec] = ...
) -> None:
    """Assert that chosen leaves changed, and no others, for instance in a training step.

    Args:
        before: a tree.
        after: the tree later, of the same structure.
        only: the leaves that may change: a path (`"head.**"`), a class, a selector. Or a list
            of these; each must pick at least one leaf that has changed.

    Raises:
        AssertionError: if another leaf has changed, or none of the expected ones; the error names
            each path.
        SpecError: if `only` does not fit the tree.
        ArgumentError: if an array is traced.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> before = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> after = pm.tree_at(lambda m: m.layers[1].bias, before, replace_fn=lambda b: b + 1)
        >>> pm.testing.assert_changed(before, after, only="layers.1.**")
    """
    where = "assert_changed"
    locs, changed = _changes(where, before, after)
    specs: list[Any] = [*only] if isinstance(only, (list, tuple)) else [only]
    masks = [as_selector(spec).mask(before) for spec in specs]
    rows = [*zip(locs, changed, *masks, strict=True)]
    outside = [pattern_text(loc.path) for loc, has, *chosen in rows if has and not any(chosen)]
    expected = f"changes in {', '.join(map(_shown, specs)) or 'no leaf'} only"
    _fail_if(outside, where, expected, "other change")
    for spec, mask in zip(specs, masks, strict=True):
        picked = [pair for pair, is_in in zip(rows, mask, strict=True) if is_in]
        if not any(has for _, has, *_ in picked):
            names = [pattern_text(loc.path) for loc, *_ in picked]
            got = f"no change in {some_of(names) or 'no leaves'}"
            raise AssertionError(explain(where, f"a change in {_shown(spec)}", got))


def assert_unchanged(before: PyTree, after: PyTree, selector: FilterSpec = ...) -> None:
    """Assert that chosen leaves have not changed, number for number.

    Args:
        before: a tree.
        after: the tree later, of the same structure.
        selector: picks the leaves; all by default.

    Raises:
        AssertionError: if one has changed; the error names each path.
        SpecError: if the selector does not fit the tree.
        ArgumentError: if an array is traced.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> before = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> after = pm.tree_at(lambda m: m.layers[1].bias, before, replace_fn=lambda b: b + 1)
        >>> pm.testing.assert_unchanged(before, after, "layers.0.**")
    """
    where = "assert_unchanged"
    locs, changed = _changes(where, before, after)
    chosen = as_selector(selector).mask(before)
    rows = zip(locs, changed, chosen, strict=True)
    found = [pattern_text(loc.path) for loc, has, is_in in rows if has and is_in]
    _fail_if(found, where, f"no change in {_shown(selector)}", "change")


def _changes(where: str, before: PyTree, after: PyTree) -> tuple[Locations, list[bool]]:
    """Return the leaves of a tree, and whether the numbers of each have changed."""
    _refuse_traced(where, before, after)
    others = [d.line() for d in compare(before, after, _have_one_type)]
    _fail_if(others, where, "trees of one structure", "difference")
    locs = Locations(locations(before))
    pairs = zip(locs, jtu.tree_leaves(after), strict=True)
    return locs, [_has_changed(loc, leaf) for loc, leaf in pairs]


def _has_changed(loc: Location, leaf: Any) -> bool:
    return is_array(leaf) and leaf is not loc.leaf and bool(largest_difference(loc.leaf, leaf))


def _have_one_type(a: Any, b: Any) -> bool:
    if is_array(a) and is_array(b):
        return a.shape == b.shape and a.dtype == b.dtype
    return not is_array(a) and not is_array(b) and are_one(a, b)


def _far(a: Any, b: Any, rtol: float | None, atol: float | None) -> str:
    """Return how far apart two arrays are; "" if they are close."""
    found = largest_difference(a, b)
    if found is None:
        return ""
    largest, relative, count, size = found
    if jnp.issubdtype(a.dtype, jnp.inexact):
        wide = {"float64": 1e-10, "complex128": 1e-10}
        near = _TOLERANCES.get(str(a.dtype), wide.get(str(a.dtype), 1e-2))
        rtol = near if rtol is None else rtol
        x, y = (np.asarray(each).astype(_wide(each)) for each in (a, b))
        if np.allclose(x, y, rtol, rtol if atol is None else atol, equal_nan=True):
            return ""
    return f"largest difference {largest:.3g}, relative {relative:.3g}, {count} of {size}"


def _wide(array: Any) -> Any:
    return np.complex128 if array.dtype.kind == "c" else np.float64


def _shown(selector: Any) -> str:
    return "the tree" if selector is ... else repr(selector)


def _fail_if(found: Sequence[str], where: str, expected: str, noun: str) -> None:
    if found:
        got = f"{len(found)} {noun}{'s' * (len(found) > 1)}"
        raise AssertionError(explain(where, expected, got, at=found, most=_SHOWN))


def _refuse_traced(where: str, *trees: PyTree) -> None:
    pairs = [pair for tree in trees for pair in jtu.tree_leaves_with_path(tree)]
    places = dict.fromkeys(pattern_text(path) for path, leaf in pairs if isinstance(leaf, Tracer))
    if places:
        hint = "compare outside filter_jit and other transforms"
        expected, got = "arrays with values", "traced arrays"
        raise ArgumentError(where, expected, got, at=places, hint=hint)


_SHOWN = 20
"""How many paths are shown."""

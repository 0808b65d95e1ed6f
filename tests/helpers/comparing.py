"""Compare trees without the library: field by field, leaf by leaf."""

from typing import Any

import jax
import numpy as np

from pytreemod import BoundMethod, Module
from pytreemod.state.tokens import Unnamed
from pytreemod.transform.wrapping import Transformed
from pytreemod.tree.instances import all_stored
from tests.helpers.trees import Registered


def field_names(module: Module) -> list[str]:
    """The fields of a Module that are set."""
    return list(all_stored(module))


def differences(a: Any, b: Any, path: str = "root", *, identical: bool = False) -> list[str]:
    """Where two trees differ in type, fields or leaves; `identical`: leaves are one object."""
    if type(a) is not type(b) and not (is_jax_array(a) and is_jax_array(b)):
        return [f"{path}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, Module):
        names = field_names(a)
        if names != field_names(b):
            return [f"{path}: fields {names} and {field_names(b)}"]
        pairs = [(f".{n}", getattr(a, n), getattr(b, n)) for n in names if n in vars(a)]
        if len(pairs) < len(names):
            # What reads as something else is made anew by each reading.
            pairs.append((" (leaves)", jax.tree.leaves(a), jax.tree.leaves(b)))
            if jax.tree.structure(a) != jax.tree.structure(b):
                return [f"{path}: two structures"]
    elif isinstance(a, dict):
        if list(map(repr, sorted(a, key=repr))) != list(map(repr, sorted(b, key=repr))):
            return [f"{path}: keys {list(a)} and {list(b)}"]
        pairs = [(f"[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, BoundMethod):
        pairs = [(".__func__", a.__func__, b.__func__), (".__self__", a.__self__, b.__self__)]
    elif isinstance(a, Transformed):
        pairs = [(".__wrapped__", a.fn, b.fn), (".options", a.options, b.options)]
    elif isinstance(a, Registered):
        pairs = [(".value", a.value, b.value), (".note", a.note, b.note)]
    elif isinstance(a, Unnamed):
        # By design, they are equal only to themselves; a copy must be different.
        return []
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        pairs = [(f"[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        same = a is b if identical else leaves_agree(a, b)
        return [] if same else [f"{path}: {a!r} and {b!r}"]
    return [
        found
        for step, x, y in pairs
        for found in differences(x, y, path + step, identical=identical)
    ]


def is_jax_array(value: Any) -> bool:
    """Whether `value` is a JAX array of any kind."""
    return isinstance(value, jax.Array)


def leaves_agree(a: Any, b: Any) -> bool:
    """Whether two leaves of one type agree: arrays by dtype and value; NaN equals NaN."""
    if is_jax_array(a) or isinstance(a, (np.ndarray, np.generic)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if is_jax_array(a) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        return np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.inexact))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)  # Distinguishes 0.0 from -0.0; NaN equals NaN.
    return a is b or bool(a == b)


def assert_same(a: Any, b: Any) -> None:
    """The two trees agree in everything."""
    assert differences(a, b) == []


def assert_identical(a: Any, b: Any) -> None:
    """The two trees agree in everything, and their leaves are the same objects."""
    assert differences(a, b, identical=True) == []


def assert_close(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The two trees have one structure and, up to rounding, the same numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol)

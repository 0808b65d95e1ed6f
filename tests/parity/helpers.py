"""Run one program under two imports, and compare the results.

The files of this folder have small programs for Equinox's public names. Each is a function of the
library: it runs once with `import equinox as eqx` and once with `import pytreemod as eqx`, and the
two results are compared. `test_deviations.py` has the intended differences, and shows both sides.

Owns: the decorator that makes a test of a program, the comparison of results, and the small
things that programs share. Nothing here knows how either library works inside.
"""

import dataclasses
import functools as ft
import inspect
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod

RTOL, ATOL = 1e-5, 1e-6


def same_under_both_imports(
    program: Callable[..., Any] | None = None, *, equinox_warns: str | None = None
) -> Any:
    """Make a test of `program(eqx, ...)`: its result under Equinox is its result under pytreemod.

    Args:
        program: takes the library, then pytest's own arguments; returns the result to compare.
        equinox_warns: pattern of a warning that Equinox gives here, and that is let pass on its
            side only. The reason is beside it.
    """
    if program is None:
        return ft.partial(same_under_both_imports, equinox_warns=equinox_warns)

    @ft.wraps(program)
    def test(**arguments: Any) -> None:
        with equinox_may_warn(equinox_warns):
            theirs = program(equinox, **arguments)
        ours = program(pytreemod, **arguments)
        assert theirs is not None, "a program must return what is to be compared"
        assert_same(theirs, ours)

    signature = inspect.signature(program)
    test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return test


@contextmanager
def equinox_may_warn(pattern: str | None) -> Iterator[None]:
    """Let pass the warnings that match `pattern`, where there is one."""
    with warnings.catch_warnings():
        if pattern is not None:
            warnings.filterwarnings("ignore", message=pattern)
        yield


def assert_same(theirs: Any, ours: Any, where: str = "result") -> None:
    """Compare two results: structures, types, strings and numbers exactly, arrays by allclose."""
    if isinstance(theirs, BaseException):
        expected = plain_kind(theirs)
        assert isinstance(ours, expected), f"{where}: {ours!r} is no {expected.__name__}"
    elif is_struct(theirs):
        assert is_struct(ours), f"{where}: {theirs!r} against {ours!r}"
        assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype), where
    elif isinstance(theirs, (jax.Array, np.ndarray, np.generic)):
        assert_same_array(theirs, ours, where)
    elif isinstance(theirs, float):
        assert type(ours) is float, f"{where}: {theirs!r} against {ours!r}"
        close = math.isclose(theirs, ours, rel_tol=RTOL, abs_tol=ATOL)
        assert close or (math.isnan(theirs) and math.isnan(ours)), f"{where}: {theirs} vs {ours}"
    else:
        assert_same_structure(theirs, ours, where)


def assert_same_structure(theirs: Any, ours: Any, where: str) -> None:
    """The part of `assert_same` that looks inside containers, Modules and names."""
    if callable(theirs) and not dataclasses.is_dataclass(type(theirs)):
        name = getattr(theirs, "__qualname__", theirs)
        assert theirs is ours or name == getattr(ours, "__qualname__", None), f"{where}: {ours!r}"
        return
    assert type(theirs).__qualname__ == type(ours).__qualname__, f"{where}: {theirs!r}, {ours!r}"
    if isinstance(theirs, Mapping):
        assert set(theirs) == set(ours), f"{where}: keys {list(theirs)} against {list(ours)}"
        for key in theirs:
            assert_same(theirs[key], ours[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(theirs) == len(ours), f"{where}: {theirs!r} against {ours!r}"
        for index, pair in enumerate(zip(theirs, ours, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif dataclasses.is_dataclass(theirs):
        names = [field.name for field in dataclasses.fields(theirs)]
        assert names == [field.name for field in dataclasses.fields(ours)], where
        for name in names:
            assert_same(getattr(theirs, name), getattr(ours, name), f"{where}.{name}")
    elif isinstance(theirs, (str, bytes, bool, int, complex, set, frozenset, np.dtype)):
        assert theirs == ours, f"{where}: {theirs!r} against {ours!r}"
    else:
        assert theirs is ours, f"{where}: no rule to compare {theirs!r} with {ours!r}"


def assert_same_array(theirs: Any, ours: Any, where: str) -> None:
    """Same library, shape, dtype and weak type, and close values."""
    assert isinstance(theirs, jax.Array) == isinstance(ours, jax.Array), f"{where}: {type(ours)}"
    assert theirs.shape == ours.shape, f"{where}: shape {theirs.shape} against {ours.shape}"
    assert theirs.dtype == ours.dtype, f"{where}: dtype {theirs.dtype} against {ours.dtype}"
    if isinstance(theirs, jax.Array):
        assert theirs.aval.weak_type == ours.aval.weak_type, f"{where}: weak type"
    if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
        theirs, ours = jax.random.key_data(theirs), jax.random.key_data(ours)
    np.testing.assert_allclose(
        np.asarray(ours), np.asarray(theirs), rtol=RTOL, atol=ATOL, err_msg=where
    )


def is_struct(value: Any) -> bool:
    """Whether `value` is a shape and dtype without numbers."""
    return isinstance(value, jax.ShapeDtypeStruct)


def plain_kind(error: BaseException) -> type[BaseException]:
    """The first built-in class of `error`, which a user would write after `except`."""
    stdlib = {"builtins", "dataclasses"}
    return next(kind for kind in type(error).__mro__ if kind.__module__ in stdlib)


def caught(call: Callable[[], Any], *, about: str = "") -> Exception:
    """The error that `call` raises, whose text has to contain `about`."""
    try:
        value = call()
    except Exception as error:
        raised = error
    else:
        pytest.fail(f"nothing was raised; the call returned {value!r}")
    assert about in str(raised), f"expected a text about {about!r}, got {raised!r}"
    return raised


def outcome(call: Callable[[], Any], *kinds: type[Exception]) -> Any:
    """The result of `call`, or "refused" if it raises one of these errors."""
    try:
        return call()
    except kinds:
        return "refused"


class raises(NamedTuple):
    """A result of `deviation`: an error of this class, with this in its text."""

    kind: type[BaseException]
    match: str


def deviation(*, theirs: Any, ours: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of `program(eqx)`, whose result differs on purpose: what each library makes."""

    def decorate(program: Callable[..., Any]) -> Any:
        @ft.wraps(program)
        def test() -> None:
            for library, expected in ((equinox, theirs), (pytreemod, ours)):
                if isinstance(expected, raises):
                    with pytest.raises(expected.kind, match=expected.match):
                        program(library)
                else:
                    assert_same(expected, program(library), library.__name__)

        test.__signature__ = inspect.Signature()
        return test

    return decorate


def with_known_weights(tree: Any) -> Any:
    """The tree with every float array refilled from its path: the same numbers in both libraries.

    Initial values are random and each library may draw them in its own way, so a comparison of
    outputs needs weights that do not come from there.
    """

    def refill(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        generator = np.random.default_rng(zlib.crc32(jtu.keystr(path).encode()))
        return jnp.asarray(generator.normal(size=leaf.shape, scale=0.5), leaf.dtype)

    return jtu.tree_map_with_path(refill, tree)


def array_paths(tree: Any) -> list[str]:
    """Where the arrays of a tree are, in order: `[".layers[0].weight", ...]`."""
    leaves, _ = jtu.tree_flatten_with_path(tree)
    return [jtu.keystr(path) for path, leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray))]


def ramp(*shape: int, start: float = -1.0, stop: float = 1.0) -> jax.Array:
    """Numbers that are all different, in order: `shape` filled from `start` to `stop`."""
    return jnp.asarray(np.linspace(start, stop, math.prod(shape), dtype=np.float32).reshape(shape))

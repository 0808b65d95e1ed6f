"""From the numbers in a file to a leaf: an array of JAX, of NumPy, or of keys."""

from __future__ import annotations

import functools as ft
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe, short_dtype
from pytreemod.io.configuration import Json
from pytreemod.io.leaf_names import as_ordered
from pytreemod.io.tables import Leaf, Name
from pytreemod.tree.kinds import PYTHON_SCALARS
from pytreemod.typing import untyped_jax

HINT_WIDTH = [
    "JAX has 64 bits only if told so; or cast what goes into `like`:",
    'jax.config.update("jax_enable_x64", True)',
    'pm.load(path, like, cast="float32")',
]


def is_too_wide(dtype: Any) -> bool:
    """Whether JAX would make another dtype of one, without a word."""
    return jax.dtypes.canonicalize_dtype(dtype) != dtype


def check_widths(leaves: Mapping[Name, Leaf], where: str) -> None:
    """Refuse arrays of 64 bits where JAX has 32.

    Raises:
        FileError: there is one that is to be an array of JAX.
    """
    for name, leaf in leaves.items():
        if leaf.form.get("is") == "jax" and is_too_wide(leaf.dtype):
            text = f"{short_dtype(leaf.dtype)} at {'.'.join(name)}"
            raise FileError(where, "dtypes that JAX has", text, hint=HINT_WIDTH)


def as_told(array: Any, form: Mapping[str, Json], where: str, name: str) -> Any:
    """A leaf of the form that the file tells.

    Raises:
        FileError: there is no such form, or no such generator of keys.
    """
    kind = form.get("is")
    if kind == "numpy":
        return array
    if kind == "scalar" and array.ndim == 0:
        return array[()]
    if kind == "key":
        return _as_keys(array, form.get("impl"), None, where, (name,))
    if kind != "jax":
        expected, got = "a kind of leaf that `pm.save` writes", describe(kind)
        raise FileError(where, expected, got, places=[name])
    return _weakly(_as_jax(array)) if form.get("weak") else _as_jax(array)


class DeviceTransfers:
    """Puts arrays into the leaves of `like`, as what these are and where they are.

    Arrays of JAX wait for others: to put 10,000 small ones in one call takes a third of the time of
    as many calls. `_WAITING = 0` switches that off.

    Args:
        leaves: of `like`; they are replaced.
        where: the call, for errors.
    """

    def __init__(self, leaves: list[Any], where: str):
        self.leaves, self.where = leaves, where
        self._waiting: list[tuple[int, Any, Any, Name]] = []
        self._bytes = 0

    def put(self, place: int, array: Any, impl: Json, name: Name) -> None:
        """Replace a leaf.

        Args:
            place: which leaf.
            array: what was read, in the shape of the old leaf; for keys, their numbers.
            impl: the generator of keys that the file tells, if it does.
            name: of the leaf, for errors.

        Raises:
            FileError: there is no such generator of keys.
            ArgumentError: an abstract leaf has a sharding that no array of its shape has.
        """
        old = self.leaves[place]
        if type(old) in PYTHON_SCALARS:
            self.leaves[place] = array.item()
        elif is_key(old):
            self.leaves[place] = _as_keys(array, impl, _sharding_of(old), self.where, name)
        elif isinstance(old, np.generic):
            self.leaves[place] = array[()]
        elif isinstance(old, np.ndarray):
            self.leaves[place] = as_ordered(array, cast("Any", old).dtype)
        else:
            if getattr(old, "weak_type", False):
                array = _weakly(_as_jax(array))
            self._waiting.append((place, array, _sharding_of(old), name))
            self._bytes += array.nbytes
            if self._bytes > _WAITING:
                self._put_all()

    def _put_all(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        # JAX takes no None among shardings.
        for is_placed in (False, True):
            group = [each for each in waiting if (each[2] is not None) is is_placed]
            if group:
                places, arrays, shardings, _ = zip(*group, strict=True)
                try:
                    made = _as_jax([*arrays], [*shardings] if is_placed else None)
                except ValueError:
                    made = [self._put_one(*each) for each in group]
                for place, array in zip(places, made, strict=True):
                    self.leaves[place] = array

    def _put_one(self, place: int, array: Any, sharding: Any, name: Name) -> Any:
        try:
            return _as_jax(array, sharding)
        except ValueError as error:
            # JAX says why, but not of what.
            expected = "shardings in like that its arrays can have"
            got = f"{describe(array)} with {getattr(sharding, 'spec', sharding)}"
            places = [".".join(name)]
            raise ArgumentError(self.where, expected, got, places=places) from error

    def __enter__(self) -> DeviceTransfers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._put_all()


_WAITING = 1 << 24
"""Bytes that wait at most. A large array goes at once, so that no second model is in memory."""


def as_dtype(array: Any, dtype: Any, where: str, name: Name) -> Any:
    """An array in another dtype of its kind.

    Args:
        array: what was read.
        dtype: what it is cast to.
        where: the call, for errors.
        name: of the leaf, for errors.

    Raises:
        FileError: there are numbers in it that the dtype does not have.
    """
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    # Those of four bits can neither be compared nor cast into one another.
    plain = array.astype(np.int8) if is_whole and array.dtype.kind not in "iu" else array
    # NumPy would make infinities of what is too large, with a warning, and wrap whole numbers
    # around without one.
    with np.errstate(over="ignore"):
        made = plain.astype(dtype)
    if is_whole:
        lost = (plain < int(jnp.iinfo(dtype).min)) | (plain > int(jnp.iinfo(dtype).max))
    else:
        lost = ~np.isfinite(made) & np.isfinite(plain)
    if lost.any():
        raise FileError(
            where,
            f"numbers that {dtype} has",
            f"{plain[lost][0]}",
            places=[".".join(name)],
            hint=["leave it as it is, and cast others:", _HINT_CAST],
        )
    return made


_HINT_CAST = 'pm.load(..., cast=pm.by({"head.**": None, ...: "bfloat16"}))'


def keys_form(shape: tuple[int, ...], impl: Json) -> Any:
    """Shape and dtype of the keys that numbers of a shape are; None if they are none."""
    numbers = jax.ShapeDtypeStruct(shape, np.uint32)
    try:
        wrap = ft.partial(untyped_jax.random.wrap_key_data, impl=impl)
        return jax.eval_shape(wrap, numbers)
    except (ValueError, TypeError):
        return None


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys, or stands for one."""
    dtype = getattr(leaf, "dtype", None)
    # JAX takes microseconds to say that float32 is none.
    is_numpys = dtype is None or isinstance(dtype, np.dtype)
    return not is_numpys and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _as_jax(array: Any, sharding: Any = None) -> Any:
    # Each reading makes memory of its own, and nobody else writes into it: on the CPU `device_put`
    # takes that as it is, where `jnp.asarray` would copy it.
    return untyped_jax.device_put(array, sharding)


def _weakly(array: Any) -> Any:
    """An array whose dtype gives way to others, as that of a Python number does."""
    weak = jnp.asarray(array.dtype.type(0).item())
    # Of a dtype that no Python number has, JAX offers no way to make one.
    if weak.dtype != array.dtype:
        return array
    if array.ndim == 0:
        return jnp.asarray(array.item())
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)


def _as_keys(array: Any, impl: Json, sharding: Any, where: str, name: Name) -> Any:
    try:
        keys = untyped_jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
    except (ValueError, TypeError) as error:
        expected = "random keys of a generator that JAX has here"
        got = f"{describe(array)} of {describe(impl)}"
        raise FileError(where, expected, got, places=[".".join(name)]) from error
    return keys if sharding is None else untyped_jax.device_put(keys, sharding)


def _sharding_of(old: Any) -> Any:
    """Where an array of `like` was put; None for wherever JAX puts arrays."""
    if isinstance(old, jax.ShapeDtypeStruct):
        return old.sharding
    return old.sharding if isinstance(old, jax.Array) and old.committed else None

"""Rules for arrays with another form in a file: transposed, reordered, or several as one.

Tables of names (`rename=` of `load` and `save`) and the layouts of PyTorch's layers have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pytreemod.errors import ArgumentError, describe


@dataclass(frozen=True, init=False)
class Relaid:
    """A rule for an array that has another form in a file, or in PyTorch.

    **Laws.** `to(back(x)) == x`, for every array of the file. A load checks that with its own
    numbers, for the first array that a rule meets, before anything is read.

    Attributes:
        name: the name of the array on the other side: in `like` for `load(rename=)`, in the
            file for `save(rename=)`.
        to: converts our array to the file's; both are NumPy arrays.
        back: converts the file's array to ours; if None, `to` is its own inverse.

    Examples:
        A matrix that is the transpose of the file's:

        >>> rule = Relaid("weight", to=np.transpose)
        >>> rule.back(np.ones((3, 4))).shape
        (4, 3)

        Rotary heads of Meta's Llama, whose rows are interleaved, and were sorted by Hugging Face:

        >>> def interleave(weight):
        ...     return weight.reshape(2, 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
        >>> rule = Relaid("layers.*.query.weight", to=interleave)
        >>> rule.back(np.arange(8.0).reshape(8, 1))[:, 0]
        array([0., 2., 1., 3., 4., 6., 5., 7.])
    """

    name: str
    to: Callable[[Any], Any]
    back: Callable[[Any], Any]

    def __init__(
        self,
        name: str,
        to: Callable[[Any], Any],
        back: Callable[[Any], Any] | None = None,
    ):
        _assign(self, (name, to, to if back is None else back))


@dataclass(frozen=True, init=False)
class Packed:
    """A rule for several arrays that are one in a file, or in PyTorch, concatenated along an axis.

    In a table of names, write it for the concatenated array, with the names of all parts:
    `Packed(names, ...)`. Or write it for each part, with the name of the concatenated array:
    `Packed(name, part, sizes)`.

    Attributes:
        names: the names of the parts, in order; or only the name of the concatenated array.
        part: the index of this part; None for all parts.
        sizes: the length of each part along the axis; if None, all have the same length.
        axis: the axis along which the parts are concatenated.
        to: converts our array to the file's part, both in NumPy; None for no conversion.
        back: converts the file's part to ours; if None, `to` is its own inverse.

    Raises:
        ArgumentError: if there are no names, or no such part.

    Examples:
        GPT-2's, whose matrices are transposed as well:

        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> names = ["query.weight", "key.weight", "value.weight"]
        >>> rule = pm.Packed(names, axis=1, to=jnp.transpose)
        >>> rule.part, rule.sizes
        (None, None)

        For each part, to write them as one:

        >>> rows = (2, 1)
        >>> names = {"opening": pm.Packed("gates", 0, rows), "closing": pm.Packed("gates", 1, rows)}
        >>> gates = {"opening": jnp.zeros(2), "closing": jnp.ones(1)}
        >>> pm.save("gates.safetensors", gates, rename=names)
        >>> pm.load("gates.safetensors")["gates"].tolist()
        [0.0, 0.0, 1.0]
    """

    names: tuple[str, ...]
    part: int | None
    sizes: tuple[int, ...] | None
    axis: int
    to: Callable[[Any], Any] | None
    back: Callable[[Any], Any] | None

    def __init__(
        self,
        names: str | Sequence[str],
        part: int | None = None,
        sizes: Sequence[int] | None = None,
        *,
        axis: int = 0,
        to: Callable[[Any], Any] | None = None,
        back: Callable[[Any], Any] | None = None,
    ):
        where = "Packed(names)"
        found = (names,) if isinstance(names, str) else tuple(names)
        if not found or not all(isinstance(name, str) for name in cast("Any", found)):
            raise ArgumentError(where, "a name, or one for each part", describe(names))
        lengths = None if sizes is None else tuple(sizes)
        if isinstance(names, str) is (part is None):
            expected = "the names of all parts; or one name, and the number of this part"
            hint = ["write one of these:", 'pm.Packed(["query", "key", "value"])']
            hint += ['pm.Packed("query_key_value", 0, (8, 8, 8))']
            raise ArgumentError(where, expected, describe(names), hint=hint)
        count = len(found) if part is None else len(lengths or (None,) * (part + 1))
        if (lengths is not None and len(lengths) != count) or not 0 <= (part or 0) < count:
            got = f"part={part}, sizes={lengths}"
            raise ArgumentError("Packed(part, sizes)", "a length for each part", got)
        if to is None and back is not None:
            raise ArgumentError("Packed(to)", "a function that undoes `back`", "None")
        _assign(self, (found, part, lengths, axis, to, to if back is None else back))

    def among_zeros(self, array: Any) -> tuple[Any, ...]:
        """Return the concatenated array with this part in its position, and zeros elsewhere.

        This makes it a case of `torch_layouts.Summed`: all arrays of one name are added up.

        Args:
            array: our array, in NumPy.

        Raises:
            ValueError, IndexError: if its length is not that of this part.
        """
        given = np.asarray(array if self.to is None else self.to(array))
        sizes, part = cast("Any", self.sizes), cast("int", self.part)
        # (It raises the error if there is no such axis.)
        if given.shape[self.axis] != sizes[part]:
            raise ValueError(given.shape)
        shape = [*given.shape]
        shape[self.axis] = sum(sizes)
        whole = np.zeros(shape, given.dtype)
        self._cut(whole)[...] = given
        return (whole,)

    def part_of(self, whole: Any) -> Any:
        """Return this part of the concatenated array, in our form.

        Args:
            whole: the file's array, in NumPy.
        """
        found = self._cut(whole)
        return found if self.back is None else self.back(found)

    def _cut(self, whole: Any) -> Any:
        sizes, part = cast("Any", self.sizes), cast("int", self.part)
        start = sum(sizes[:part])
        place = slice(start, start + sizes[part])
        return whole[(*[slice(None)] * (self.axis % whole.ndim), place)]


def _assign(rule: Any, values: tuple[Any, ...]) -> None:
    for name, value in zip(rule.__dataclass_fields__, values, strict=True):
        object.__setattr__(rule, name, value)

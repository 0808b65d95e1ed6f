"""What the layers that normalize each example have in common.

Each has an optional weight and bias, ignores keys, and hands back a State that is passed in, so
that it may replace a `BatchNorm`. A layer adds its formula, and how its input is checked.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, overload

from jaxtyping import Array, Shaped

from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_dtype,
    check_floating,
    check_state,
    named,
    own_arrays,
)
from pytreemod.nn.calling import ABSENT, Absence, Absent, ignores_key
from pytreemod.nn.initializing import Initializer, initial_affine
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State
from pytreemod.typing import AnyArray


class Normalization(Layer, is_abstract=True):
    """Base of layers that normalize each example by itself."""

    shown: ClassVar[tuple[str, ...]] = ()
    """The fields that errors show."""

    @overload
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]: ...

    @overload
    def __call__(
        self, x: AnyArray, state: State, *, key: KeyLike | None = None
    ) -> tuple[Shaped[Array, ...], State]: ...

    @ignores_key
    def __call__(
        self,
        x: AnyArray,
        state: State | Absent = ABSENT,
        *,
        key: KeyLike | None = None,
    ) -> Shaped[Array, ...] | tuple[Shaped[Array, ...], State]:
        """Normalize x; `key` is ignored, `state` handed back if given."""
        del key
        where = Title(self, *self.shown)
        check_state(where, state)
        weight, bias = own_arrays(where, "weight", "bias")
        x = check_array(where, x)
        check_floating(where, x)
        out = self._normalize(where, x, weight, bias)
        return out if isinstance(state, Absence) else (out, state)

    @abstractmethod
    def _normalize(self, where: Title, x: Array, weight: Any, bias: Any) -> Array:
        """The formula, for a floating array whose shape is not checked yet."""

    def _start(
        self: Any,
        dtype: Any,
        weight_init: Initializer | None,
        bias_init: Initializer | None,
        key: KeyLike | None,
    ) -> None:
        """Set weight and bias, when the configuration is set."""
        dtype, shapes = check_dtype(named(self, "dtype"), dtype, real=True), self.__array_shapes__()
        sizes, inits = (shapes["weight"], shapes["bias"]), (weight_init, bias_init)
        self.weight, self.bias = initial_affine(self, sizes, dtype, inits, key)

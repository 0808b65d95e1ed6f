"""Modules in a file whose annotations are all strings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod import AbstractClassVar, AbstractVar

if TYPE_CHECKING:
    from collections.abc import Callable


class Written(pm.Module):
    """Data, configuration, a class variable and a name for type checkers only."""

    weight: jax.Array
    act: Callable[[jax.Array], jax.Array]
    size: int = pm.field(static=True, default=2)
    kind: ClassVar[str] = "written"


class Interface(pm.Module):
    """Abstract attributes, written in two ways."""

    weight: AbstractVar[jax.Array]
    names: pm.AbstractClassVar[list[str]]
    label: AbstractClassVar[str]


class Provided(Interface):
    """A class that provides them."""

    weight: jax.Array
    names: ClassVar[list[str]] = ["a"]
    label = "b"


class Initialized(pm.Module):
    """An `InitVar`, which is not a field."""

    weight: jax.Array = pm.field(init=False)
    size: dataclasses.InitVar[int] = 3

    def __post_init__(self, size: int) -> None:
        self.weight = jnp.ones(size)


class Pair(pm.Module):
    """A class whose annotation is the class itself."""

    left: Pair | jax.Array
    right: Pair | None = None

"""Converters of every kind: functions, classes, partials, nested, inherited, with defaults."""

import functools as ft
from typing import Optional, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def optional(converter):
    return lambda x: None if x is None else converter(x)


def to_pair(x):
    return (x, x) if isinstance(x, int) else tuple(x)


float_field = ft.partial(eqx.field, converter=ft.partial(jnp.asarray, dtype=jnp.float32))


class Interval(eqx.Module):
    low: jax.Array = float_field()
    high: jax.Array = float_field(default=np.inf)

    @classmethod
    def parse(cls, value):
        return value if isinstance(value, cls) else cls(*value)

    def __contains__(self, x):
        return bool(self.low <= x) and bool(x <= self.high)


class Box(eqx.Module):
    interval: Interval = eqx.field(converter=Interval.parse)
    kernel: tuple[int, int] = eqx.field(converter=to_pair, static=True, default=3)
    mean: Optional[jax.Array] = eqx.field(converter=optional(jnp.asarray), default=None)
    steps: Union[int, tuple] = eqx.field(converter=tuple, default_factory=lambda: [1, 2])
    table: dict = eqx.field(converter=dict, kw_only=True, default=(("a", 1),))


class Sub(Box):
    kernel: tuple[int, int] = (5, 5)
    extra: str = eqx.field(converter=str.upper, default="x", static=True)

    def __post_init__(self):
        self.mean = [1.0, 2.0] if self.mean is None else self.mean


class Own(eqx.Module):
    values: list[jax.Array] = eqx.field(converter=lambda xs: [jnp.asarray(x) for x in xs])
    n: int = eqx.field(converter=int)

    def __init__(self, *values):
        self.n = str(len(values))
        self.values = values


def main():
    boxes = Box((0, 1)), Box(Interval(-1.0), kernel=(1, 2), mean=0.5, table=[("k", 2)]), Sub([2, 3])
    mapped = jax.tree.map(lambda x: x, boxes[0])
    try:
        Box(3)
    except TypeError:
        refused = True
    return (
        boxes,
        Own(1.0, 2),
        0.5 in boxes[0].interval,
        mapped,
        refused,
        Box.kernel,
        Sub((0, 1), 7).kernel,
    )

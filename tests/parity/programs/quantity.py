"""Numbers with units: operators, a static hashable unit, __jax_array__, formatting, comparison."""

from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp


class Unit(eqx.Module):
    powers: tuple[tuple[str, Fraction], ...] = eqx.field(static=True)

    def __init__(self, **powers):
        self.powers = tuple(sorted((k, Fraction(v)) for k, v in powers.items() if v))

    def __mul__(self, other):
        total = dict(self.powers)
        for name, power in other.powers:
            total[name] = total.get(name, 0) + power
        return Unit(**total)

    def __pow__(self, n):
        return Unit(**{name: power * Fraction(n) for name, power in self.powers})

    def __truediv__(self, other):
        return self * other**-1

    def __str__(self):
        return " ".join(f"{n}^{p}" if p != 1 else n for n, p in self.powers) or "1"


class Quantity(eqx.Module):
    value: jax.Array = eqx.field(converter=jnp.asarray)
    unit: Unit

    def _same(self, other):
        if self.unit != other.unit:
            raise TypeError(f"{self.unit} is not {other.unit}")
        return other.value

    def __add__(self, other):
        return Quantity(self.value + self._same(other), self.unit)

    def __sub__(self, other):
        return self + -1 * other

    def __mul__(self, other):
        if isinstance(other, Quantity):
            return Quantity(self.value * other.value, self.unit * other.unit)
        return Quantity(self.value * other, self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return Quantity(self.value / other.value, self.unit / other.unit)

    def __lt__(self, other):
        return self.value < self._same(other)

    def __eq__(self, other):
        return self.unit == other.unit and jnp.all(self.value == other.value)

    __hash__ = None

    def __jax_array__(self):
        if self.unit != Unit():
            raise TypeError("only a plain number is an array")
        return self.value

    def __format__(self, spec):
        return f"{self.value:{spec}} {self.unit}"


def main():
    metre, second = Unit(m=1), Unit(s=1)
    d, t = Quantity(3.0, metre), Quantity([1.0, 2.0], second)
    speed = eqx.filter_jit(lambda d, t: d / t)(d, t)
    gradient = eqx.filter_grad(lambda d: ((d * d) / Quantity(1.0, metre**2)).value)(d)
    try:
        d + t
    except TypeError as error:
        refused = str(error)
    angle = jnp.sin(d / d)
    return (
        speed.value,
        str(speed.unit),
        f"{d:.1f}",
        gradient.value,
        refused,
        angle,
        d == d,
        d - d < d,
        hash(metre) == hash(Unit(m=1)),
    )

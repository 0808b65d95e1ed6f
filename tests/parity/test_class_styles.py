"""Whole small programs whose classes are put together in the styles that users write."""

import abc
import inspect
import typing
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.parity.helpers import ramp, same_under_both_imports


# It does not see that the value is a property's, and no field's.
@same_under_both_imports(equinox_warns=r"(?s).*init=False")
def test_a_property_or_method_is_in_the_place_of_a_field(eqx):
    """An interface by plain fields, which some subclasses compute."""

    class Term(eqx.Module):
        scale: Any = eqx.field(init=False)
        drift: Callable = eqx.field(init=False)

        def __call__(self, x):
            return self.scale * self.drift(x)

    class Linear(Term):
        rate: jax.Array

        @property
        def scale(self):
            return 2 * self.rate

        def drift(self, x):
            return self.rate * x

    class Decay(Linear):
        drift = staticmethod(jnp.negative)

    def program(kind):
        term = kind(ramp(2))
        grads = eqx.filter_grad(lambda t, x: jnp.sum(t(x)))(term, jnp.ones(2))
        return eqx.filter_jit(term)(jnp.ones(2)), grads.rate, len(jtu.tree_leaves(term))

    return program(Linear), program(Decay)


@same_under_both_imports
def test_an_own_init_leaves_out_what_a_subclass_computes(eqx):
    """The field that the base declares and does not set is a property of the subclass."""

    class Space(eqx.Module):
        low: float
        size: int

        def __init__(self, low):
            self.low = low

    class Unit(Space):
        @property
        def size(self):
            return 1

    class Grid(Unit):
        step: float = 0.5

    unit, grid = Unit(2.0), Grid(3.0)
    return unit.size, jtu.tree_leaves(unit), grid.size, grid.step, grid.low


@same_under_both_imports
def test_methods_of_plain_bases_are_passed_around(eqx):
    """Of a mixin, an ABC and a generic base: differentiated, and stored."""

    class Integrates:
        def integrate(self, x, dt):
            return x + dt * self.field(x)

    class AbstractField(abc.ABC):
        @abc.abstractmethod
        def field(self, x):
            """A field that moves x."""

        def jacobian(self, x):
            return jax.jacfwd(self.field)(x)

    class Pendulum(Integrates, AbstractField, eqx.Module):
        rate: jax.Array

        def field(self, x):
            return -self.rate * jnp.sin(x)

    class Damped(Pendulum):
        loss: jax.Array

        def integrate(self, x, dt):
            return self.loss * super().integrate(x, dt)

    class Step(eqx.Module):
        method: Callable
        dt: float

        def __call__(self, x):
            return self.method(x, self.dt)

    @eqx.filter_jit
    def call(method, *args):
        return method(*args)

    pendulums = [Pendulum(ramp(2)), Pendulum(2 * ramp(2))]
    steps = [call(p.integrate, jnp.ones(2), 0.1) for p in pendulums]
    damped = Damped(ramp(2), jnp.asarray(0.5))
    grads = eqx.filter_grad(lambda s: jnp.sum(s(jnp.ones(2))))(Step(damped.integrate, 0.1))
    grads = jtu.tree_leaves(grads)
    return steps, grads, damped.jacobian(jnp.ones(2)), call(damped.jacobian, ramp(2))


def told(make: Callable[[], Any]) -> tuple[Any, bool]:
    """The result of `make`, and whether it warns."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = make()
    return made, bool(found)


@same_under_both_imports
def test_what_is_rarely_meant_is_told_and_works(eqx):
    """Arrays in static fields, functions from JAX, an `__init__` beside a `__post_init__`."""

    class Grid(eqx.Module):
        weight: jax.Array
        points: Any = eqx.field(static=True)

        def __call__(self, x):
            return self.weight * x + self.points

    class Net(eqx.Module):
        function: Callable

        def __call__(self, x):
            return self.function(x)

    def both():
        class Both(eqx.Module):
            size: int

            def __init__(self):
                self.size = 1

            def __post_init__(self):
                self.size = 2

        return Both().size

    def old():
        class Old(eqx.Module):
            weight: jax.Array
            size: int = eqx.static_field(default=3)

        return jtu.tree_structure(Old(ramp(2))).num_leaves

    grid, is_told = told(lambda: Grid(ramp(2), np.arange(2.0, dtype=np.float32)))
    net, is_net_told = told(lambda: Net(jax.vmap(Grid(ramp(2), (0.0, 1.0)[0]))))
    called = eqx.filter_jit(grid)(2.0), jtu.tree_map(lambda x: 2 * x, grid)(1.0)
    return called, is_told, net(ramp(3, 2)), is_net_told, told(both), told(old)


@same_under_both_imports(equinox_warns="A JAX array is being set as static")
def test_numpy_scalars_are_sizes(eqx):
    """A product of a shape, in a static field."""

    class Flat(eqx.Module):
        size: int = eqx.field(static=True)

        def __call__(self, x):
            return jnp.reshape(x, (self.size,))

    flat = Flat(np.prod((2, 3)))
    return eqx.filter_jit(flat)(ramp(2, 3)), flat == Flat(np.prod((3, 2))), hash(flat) == hash(flat)


@same_under_both_imports
def test_what_tools_read_of_a_class(eqx):
    """Type hints, signatures and docstrings; slots; a field that is taken back."""

    class Layer(eqx.Module):
        """A layer."""

        __slots__ = ("scale",)
        weight: jax.Array

        def __init__(self, weight: jax.Array) -> None:
            """Make a layer."""
            self.weight = None
            del self.weight
            self.weight = weight

        def apply(self, x):
            """Apply it."""
            return self.weight * x

    class Sub(Layer):
        size: int = 3

    kept = vars(Layer)["apply"]
    docs = Layer.__doc__, Sub.__init__.__doc__, Layer.apply.__doc__, kept.__doc__, kept.__module__
    return docs, list(typing.get_type_hints(Sub)), str(inspect.signature(Sub)), Sub(ramp(2)).weight

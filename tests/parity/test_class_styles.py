"""Whole small programs whose classes are put together in the styles that users write."""

import abc
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

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


@same_under_both_imports
def test_converters_run_once_after_init(eqx):
    """A converter gets the value that `__init__` or `__post_init__` assigned, or a default."""
    seen = []

    def convert(value):
        seen.append(value)
        return jnp.asarray(value, jnp.float32)

    class Generated(eqx.Module):
        value: jax.Array = eqx.field(converter=convert)
        other: jax.Array = eqx.field(converter=convert, default=5)

    class Own(eqx.Module):
        value: jax.Array = eqx.field(converter=convert)

        def __init__(self):
            self.value = 7
            self.value = (1, 2)

    class Prepared(eqx.Module):
        value: jax.Array = eqx.field(converter=convert)

        def __post_init__(self):
            seen.append(("post_init", self.value))
            self.value = self.value + 1

    return Generated([1, 2]), Own(), Prepared(4), seen


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

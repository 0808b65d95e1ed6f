"""Whole small programs whose classes are put together in the styles that users write."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.parity.helpers import ramp, same_under_both_imports


@same_under_both_imports
def test_a_template_method_builds_the_fields_of_subclasses(eqx):
    """The base's `__init__` calls what the subclass writes; the fields are the subclass's."""

    class Solver(eqx.Module):
        def __init__(self, *args, key):
            self.build(*args, key=key)

        @abc.abstractmethod
        def build(self, *args, key):
            """Set the fields."""

    class Newton(Solver):
        rate: jax.Array
        steps: int = eqx.field(static=True)
        name: str = eqx.field(static=True, default="newton")

        def build(self, steps, *, key):
            self.rate = jax.random.uniform(key, (2,))
            self.steps = steps

        def __call__(self, x):
            for _ in range(self.steps):
                x = x - self.rate * (x**2 - 2)
            return x

    solver = Newton(3, key=jax.random.key(0))
    return solver, eqx.filter_jit(solver)(jnp.ones(2))


@same_under_both_imports
def test_an_init_sets_whatever_it_is_given(eqx):
    """By keyword, or in the order of the fields."""

    class Config(eqx.Module):
        def __init__(self, *args, **kwargs):
            names = [f.name for f in dataclasses.fields(self)]
            for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
                setattr(self, name, value)

    class Train(Config):
        rate: float
        steps: int

    class Long(Train):
        decay: float = 0.5

    return Train(0.1, 2), Train(steps=2, rate=0.1), Long(0.1, steps=3), Long(1.0, 2, 0.25)


@same_under_both_imports
def test_a_plain_mixin_has_the_init(eqx):
    """It knows no Module, and sets what the Module declares."""

    class Sized(abc.ABC):
        def __init__(self, size):
            self.size = size
            self.reset()

        @abc.abstractmethod
        def reset(self):
            """Set the rest."""

    class Buffer(Sized, eqx.Module):
        size: int = eqx.field(static=True)
        items: jax.Array

        def reset(self):
            self.items = jnp.zeros(self.size)

    return Buffer(2), eqx.tree_at(lambda b: b.items, Buffer(2), jnp.ones(2))


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
    return unit.size, jtu.tree_leaves(unit), grid.size, grid.step, dataclasses.asdict(grid)


@same_under_both_imports
def test_methods_of_plain_bases_are_passed_around(eqx):
    """Of a mixin, an ABC and a generic base: differentiated, stored, compiled once."""

    class Integrates:
        def integrate(self, x, dt):
            return x + dt * self.field(x)

    class AbstractField(abc.ABC):
        @abc.abstractmethod
        def field(self, x):
            """What moves x."""

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

    traces = []

    @eqx.filter_jit
    def call(method, *args):
        traces.append(method)
        return method(*args)

    pendulums = [Pendulum(ramp(2)), Pendulum(2 * ramp(2))]
    steps = [call(p.integrate, jnp.ones(2), 0.1) for p in pendulums]
    damped = Damped(ramp(2), jnp.asarray(0.5))
    grads = eqx.filter_grad(lambda s: jnp.sum(s(jnp.ones(2))))(Step(damped.integrate, 0.1))
    grads = jtu.tree_leaves(grads)
    return steps, len(traces), grads, damped.jacobian(jnp.ones(2)), call(damped.jacobian, ramp(2))


@same_under_both_imports
def test_equal_instances_have_equal_methods(eqx):
    """As functions of configuration they are compared by value."""

    class Loss(eqx.Module):
        power: int

        def __call__(self, x):
            return x**self.power

        def half(self, x):
            return 0.5 * self(x)

    class Model(eqx.Module):
        weight: jax.Array
        loss: Callable = eqx.field(static=True)

    traces = []

    @eqx.filter_jit
    def call(model):
        traces.append(model)
        return model.loss(model.weight)

    values = [call(Model(ramp(2), Loss(power).half)) for power in (2, 2, 3, 2)]
    same = Loss(2).half == Loss(2).half, hash(Loss(2).half) == hash(Loss(2).half)
    return values, len(traces), same, Loss(2).half == Loss(3).half

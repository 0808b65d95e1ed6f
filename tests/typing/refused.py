"""Mistakes that a type checker must find: a line whose error goes missing is itself an error."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import jax
import jax.numpy as jnp

import pytreemod as pm


class Model(pm.Module):
    """A Module."""

    weight: jax.Array
    size: int = pm.field(static=True)
    scale: float = pm.field(converter=float, default="1.0")
    count: int = pm.field(default="three")  # pyright: ignore[reportAssignmentType]
    flag: bool = pm.field(static="yes", default=True)  # pyright: ignore[reportArgumentType, reportCallIssue, reportUnknownVariableType]

    @pm.filter_jit
    def method(self, x: jax.Array) -> jax.Array:
        """A jitted method."""
        return self.weight * x


class Custom(pm.Module):
    """An `__init__` of its own."""

    weight: jax.Array

    def __init__(self, size: int):
        self.weight = jnp.zeros(size)
        self.weight = size  # pyright: ignore[reportAttributeAccessIssue]


class Norm(pm.Module):
    """To a checker, an abstract attribute is a field."""

    eps: pm.AbstractVar[float]


class FixedNorm(Norm):
    """So it complains of a property in its place, which is right for us."""

    @property
    def eps(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Provided."""
        return 1e-5


@pm.filter_jit(donate="model")
def step(model: Model, x: jax.Array) -> Model:
    """A jitted function."""
    return model


def loss(model: Model, x: jax.Array) -> jax.Array:
    """A loss."""
    return jnp.sum(model.weight * x)


def construct(x: jax.Array) -> None:
    """Wrong arguments of constructors."""
    Model(x)  # pyright: ignore[reportCallIssue]
    Model(x, "3")  # pyright: ignore[reportArgumentType]
    Model(x, 3, 1.0, 2, True, 4)  # pyright: ignore[reportCallIssue]
    Model(x, 3, wieght=x)  # pyright: ignore[reportCallIssue]
    Custom(weight=x)  # pyright: ignore[reportCallIssue]
    Custom("3")  # pyright: ignore[reportArgumentType]


def read(model: Model) -> None:
    """Misspelt fields."""
    print(model.wieght)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType]
    pm.tree_at(lambda m: m.wieght, model, 1)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownLambdaType]


def transform(model: Model, x: jax.Array) -> None:
    """Wrong arguments and results of transformed functions."""
    step(model)  # pyright: ignore[reportCallIssue]
    step(x, model)  # pyright: ignore[reportArgumentType]
    model.method("x")  # pyright: ignore[reportArgumentType]
    step(model, x).wieght  # pyright: ignore[reportAttributeAccessIssue]
    pm.filter_jit(3)  # pyright: ignore[reportArgumentType]
    pm.filter_grad(loss)(x, x)  # pyright: ignore[reportArgumentType]
    pm.filter_grad(loss)(model=model, x=x)  # pyright: ignore[reportCallIssue]
    pm.filter_grad(loss, has_aux=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    pm.filter_vmap(loss)(model)  # pyright: ignore[reportCallIssue]


def lower(model: Model, x: jax.Array) -> None:
    """The price of keeping types: the checker does not know of a jitted function's own methods."""
    step.lower(model, x)  # pyright: ignore[reportFunctionMemberAccess]


def keep_state(state: pm.State, index: pm.StateIndex[jax.Array]) -> None:
    """A token's value has one type."""
    state.set(index, "three")  # pyright: ignore[reportArgumentType]
    pm.make_with_state(Custom)("three")  # pyright: ignore[reportArgumentType]

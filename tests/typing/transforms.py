"""Transforms: decorated functions and methods keep the types that they were written with."""

from collections.abc import Callable
from typing import Any, TypeVar, assert_type

import jax
import jax.numpy as jnp

import pytreemod as pm

M = TypeVar("M", bound=pm.Module)
Step = Callable[["Model", jax.Array], "Model"]


class Model(pm.Module):
    """A Module with decorated methods of every kind."""

    weight: jax.Array
    size: int = pm.field(static=True)

    @pm.filter_jit
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """A jitted `__call__`."""
        return self.weight * x if train else x

    @pm.filter_jit(donate="x")
    def scaled(self, x: jax.Array, by: float = 1.0) -> tuple[jax.Array, int]:
        """A jitted method, with options."""
        return self.weight * x * by, self.size

    @staticmethod
    @pm.filter_jit
    def make(x: jax.Array) -> "Model":
        """A jitted static method."""
        return Model(x, 1)

    @classmethod
    def build(cls, size: int) -> "Model":
        """A class method."""
        return cls(jnp.zeros(size), size)

    @pm.filter_vmap(in_axes=(None, 0))
    def mapped(self, x: jax.Array) -> jax.Array:
        """A mapped method."""
        return self.weight * x

    @pm.filter_checkpoint(policy=None)
    def saved(self, x: jax.Array) -> jax.Array:
        """A rematerialized method."""
        return self.weight * x

    @pm.filter_grad
    def slope(self, x: jax.Array) -> jax.Array:
        """The gradient with respect to the model itself."""
        return jnp.sum(self.weight * x)


@pm.filter_jit
def step(model: Model, x: jax.Array, *, rate: float = 0.1) -> tuple[Model, jax.Array]:
    """A jitted function."""
    return model, x * rate


@pm.filter_jit(donate=("model",), inline=True)
def train(model: Model, x: jax.Array) -> Model:
    """A jitted function, with options."""
    return step(model, x)[0]


@pm.filter_jit
def same(model: M, x: jax.Array) -> M:
    """A generic jitted function."""
    del x
    return model


def loss(model: Model, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """A loss."""
    return jnp.sum(model(x)) * scale


def loss_and_count(model: Model, x: jax.Array) -> tuple[jax.Array, int]:
    """A loss with an auxiliary result."""
    return loss(model, x), 3


@pm.filter_grad(has_aux=True)
def decorated(model: Model, x: jax.Array) -> tuple[jax.Array, str]:
    """A decorator with `has_aux`."""
    return loss(model, x), "aux"


@pm.filter_value_and_grad(wrt=pm.is_inexact_array)
def selected(model: Model, x: jax.Array) -> jax.Array:
    """A decorator with `wrt`."""
    return loss(model, x)


def jit(model: Model, x: jax.Array) -> None:
    """`filter_jit` changes no type."""
    assert_type(step(model, x, rate=0.2), tuple[Model, jax.Array])
    assert_type(train(model, x), Model)
    assert_type(same(model, x), Model)
    assert_type(model(x, train=True), jax.Array)
    assert_type(model.scaled(x, by=2.0), tuple[jax.Array, int])
    assert_type(Model.make(x), Model)
    assert_type(model.make(x), Model)
    assert_type(Model.build(3), Model)
    assert_type(pm.filter_jit(model)(x), jax.Array)
    assert_type(pm.filter_jit(Model)(x, 3), Model)
    accepted: Step = train
    called: Callable[[jax.Array], jax.Array] = model
    method: Callable[[jax.Array], tuple[jax.Array, int]] = model.scaled
    assert_type(accepted(model, x), Model)
    assert_type(called(x), jax.Array)
    assert_type(method(x), tuple[jax.Array, int])


def grad(model: Model, x: jax.Array) -> None:
    """A gradient has the type of the first argument."""
    assert_type(pm.filter_grad(loss)(model, x, scale=2.0), Model)
    assert_type(pm.filter_grad(loss_and_count, has_aux=True)(model, x), tuple[Model, int])
    assert_type(pm.filter_value_and_grad(loss)(model, x), tuple[jax.Array, Model])
    assert_type(
        pm.filter_value_and_grad(loss_and_count, has_aux=True)(model, x),
        tuple[tuple[jax.Array, int], Model],
    )
    assert_type(decorated(model, x), tuple[Model, str])
    assert_type(selected(model, x), tuple[jax.Array, Model])
    assert_type(model.slope(x), Model)
    assert_type(pm.filter_grad(pm.filter_jit(loss))(model, x), Model)
    assert_type(pm.filter_grad(loss, argnums=1)(model, x), Any)
    assert_type(pm.filter_value_and_grad(argnums=(0, 1))(loss)(model, x), Any)
    assert_type(pm.trainable(model), tuple[Model, Model])


def grad_of_anything(fn: Callable[..., Any], untyped: Any) -> None:
    """Without types, the result is Any: never an error in strict mode."""
    assert_type(pm.filter_grad(fn)(1), Any)
    assert_type(pm.filter_value_and_grad(untyped)(1), tuple[Any, Any])


def other(model: Model, x: jax.Array) -> None:
    """The other transforms."""
    assert_type(pm.filter_vmap(loss)(model, x), jax.Array)
    assert_type(pm.filter_vmap(Model)(x, 3), Model)
    assert_type(pm.filter_vmap(model, axis_size=3)(x), jax.Array)
    assert_type(pm.filter_pmap(loss)(model, x), jax.Array)
    assert_type(model.mapped(x), jax.Array)
    assert_type(model.saved(x), jax.Array)
    assert_type(pm.filter_checkpoint(loss)(model, x), jax.Array)
    assert_type(pm.filter_eval_shape(Model, x, 3), Model)
    assert_type(pm.filter_eval_shape(loss, model, jax.ShapeDtypeStruct((), x.dtype)), jax.Array)
    _, shapes, static = pm.filter_make_jaxpr(loss)(model, x)
    assert_type((shapes, static), tuple[Any, Any])
    assert_type(pm.filter_closure_convert(loss, model, x)(model, x), Any)


def counted(model: Model, x: jax.Array) -> None:
    """What counts traces changes no type either."""
    once = pm.filter_jit(pm.debug.assert_max_traces(loss, max_traces=1))
    assert_type(once(model, x), jax.Array)
    assert_type(pm.debug.get_num_traces(once), int)

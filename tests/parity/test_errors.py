"""The same mistake is caught by the same `except` clause.

Each mistake raises under both libraries, and pytreemod's error is an instance of the built-in class
that Equinox's error derives from. The messages differ on purpose; they have their own tests.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.parity.helpers import caught, ramp, same_under_both_imports


def layer_class(eqx):
    """A class with one field."""

    class Layer(eqx.Module):
        weight: Any

        def method(self):
            return self.weight

    return Layer


def field_not_set(eqx):
    class Layer(eqx.Module):
        weight: Any
        bias: Any

        def __init__(self):
            self.weight = 1

    Layer()


def undeclared_attribute(eqx):
    class Layer(eqx.Module):
        weight: Any

        def __init__(self):
            self.weight = 1
            self.wieght = 2

    Layer()


def own_method_assigned(eqx):
    class Layer(eqx.Module):
        function: Any

        def __init__(self):
            self.function = self.method

        def method(self):
            return 1

    Layer()


def method_name_assigned(eqx):
    class Layer(eqx.Module):
        weight: Any

        def __init__(self):
            self.weight = 1
            self.method = 2

        def method(self):
            return 1

    Layer()


def assignment_in_a_method(eqx):
    class Layer(eqx.Module):
        count: int

        def __call__(self):
            self.count += 1

    Layer(1)()


def required_field_under_an_inherited_init(eqx):
    class Base(eqx.Module):
        weight: Any

        def __init__(self):
            self.weight = 1

    class Derived(Base):
        bias: Any

    Derived()


def required_field_after_a_default(eqx):
    class Layer(eqx.Module):
        weight: Any = 1
        bias: Any

    Layer(bias=1)


def mutable_default(eqx):
    class Layer(eqx.Module):
        parts: Any = []  # noqa: RUF012  (the mistake)

    Layer()


def default_and_factory(eqx):
    class Layer(eqx.Module):
        parts: Any = eqx.field(default=1, default_factory=list)

    Layer()


def failing_converter(eqx):
    class Layer(eqx.Module):
        size: int = eqx.field(converter=int)

    Layer("three")


def failing_post_init(eqx):
    class Layer(eqx.Module):
        size: int

        def __post_init__(self):
            raise LookupError("in __post_init__")

    Layer(3)


def computing_where(eqx):
    eqx.tree_at(lambda t: t["a"] + 1, {"a": ramp(2), "b": 1}, 0)


def branching_where(eqx):
    eqx.tree_at(lambda t: t[0] if t[0] > 0 else t[1], [ramp(1), ramp(2)], 0)


def updated_with_another_structure(eqx):
    eqx.apply_updates({"a": ramp(2)}, {"b": ramp(2)})


def vmap_of(eqx, *args, **options):
    eqx.filter_vmap(lambda *xs: sum(jnp.sum(x) for x in xs), **options)(*args)


def state_set_twice(eqx):
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.int32(0))

    layer, state = eqx.nn.make_with_state(Counter)()
    state.set(layer.index, jnp.int32(1))
    state.set(layer.index, jnp.int32(2))


KEY = jax.random.key(0)

MODULES = {
    "field not set": field_not_set,
    "undeclared attribute": undeclared_attribute,
    "own method assigned": own_method_assigned,
    "method name assigned": method_name_assigned,
    "assignment in a method": assignment_in_a_method,
    "required field under an inherited init": required_field_under_an_inherited_init,
    "required field after a default": required_field_after_a_default,
    "mutable default": mutable_default,
    "default and factory": default_and_factory,
    "failing converter": failing_converter,
    "failing post init": failing_post_init,
    "static twice": lambda eqx: eqx.field(static=True, metadata={"static": False}),
    "converter twice": lambda eqx: eqx.field(converter=int, metadata={"converter": str}),
    "unknown argument of field": lambda eqx: eqx.field(statik=True),
    "Module without fields called": lambda eqx: layer_class(eqx)(1)(2),
    "attribute missing": lambda eqx: layer_class(eqx)(1).wieght,
    "assigned": lambda eqx: setattr(layer_class(eqx)(1), "weight", 2),
    "update wrapper without __wrapped__": lambda eqx: eqx.module_update_wrapper(
        layer_class(eqx)(1)
    ),
    "replace of an unknown field": lambda eqx: dataclasses.replace(layer_class(eqx)(1), bias=2),
}

TREES = {
    "where computes": computing_where,
    "where branches on a value": branching_where,
    "where names a static value": lambda eqx: eqx.tree_at(lambda t: 3, [1], 2),
    "updates of another structure": updated_with_another_structure,
    "nothing to combine with": lambda eqx: eqx.combine([1], {"a": 1}),
}

TRANSFORMS = {
    "jit: static_argnums": lambda eqx: eqx.filter_jit(jnp.sin, static_argnums=0),
    "jit: donate_argnums": lambda eqx: eqx.filter_jit(jnp.sin, donate_argnums=0),
    "jit: not a function": lambda eqx: eqx.filter_jit(3)(ramp(2)),
    "jit: branch on a tracer": lambda eqx: eqx.filter_jit(lambda x: 1 if x else 2)(jnp.array(True)),
    "jit: missing argument": lambda eqx: eqx.filter_jit(lambda x: x)(),
    "jit: float of a tracer": lambda eqx: eqx.filter_jit(float)(jnp.float32(1.0)),
    "grad: no argument": lambda eqx: eqx.filter_grad(lambda: 1.0)(),
    "grad: argument by keyword": lambda eqx: eqx.filter_grad(jnp.sum)(a=ramp(2)),
    "grad: vector loss": lambda eqx: eqx.filter_grad(jnp.sin)(ramp(2)),
    "grad: integer loss": lambda eqx: eqx.filter_grad(lambda x: 1 + 0 * x.astype(int))(
        jnp.ones(())
    ),
    "grad: loss is no array": lambda eqx: eqx.filter_grad(lambda x: "text")(ramp(2)),
    "grad: aux is missing": lambda eqx: eqx.filter_grad(jnp.sum, has_aux=True)(ramp(2)),
    "vmap: sizes differ": lambda eqx: vmap_of(eqx, ramp(2), ramp(3)),
    "vmap: size differs from axis_size": lambda eqx: vmap_of(eqx, ramp(2), axis_size=3),
    "vmap: scalar on axis 0": lambda eqx: vmap_of(eqx, ramp(2), jnp.float32(1.0)),
    "vmap: axis out of range": lambda eqx: vmap_of(eqx, ramp(2), in_axes=3),
    "vmap: nothing mapped": lambda eqx: vmap_of(eqx, ramp(2), in_axes=None),
    "vmap: unknown name": lambda eqx: eqx.filter_vmap(jnp.sum, in_axes={"z": 0})(ramp(2)),
    "vmap: number on axis 0": lambda eqx: vmap_of(eqx, ramp(2), 1.0, in_axes=(0, 0)),
    "vmap: mapped output declared shared": lambda eqx: eqx.filter_vmap(lambda x: x, out_axes=None)(
        ramp(2)
    ),
    "eval_shape: shapes clash": lambda eqx: eqx.filter_eval_shape(jnp.dot, ramp(2), ramp(3)),
}

CHECKS_AND_RULES = {
    "error_if: unknown on_error": lambda eqx: eqx.error_if(ramp(2), True, "m", on_error="stop"),
    "error_if: unknown on_error, compiled": lambda eqx: eqx.filter_jit(
        lambda x: eqx.error_if(x, x[0] > 9, "m", on_error="stop")
    )(ramp(2)),
    "branched_error_if: index too large": lambda eqx: eqx.branched_error_if(
        ramp(2), True, 2, ["a", "b"]
    ),
    "branched_error_if: index too small": lambda eqx: eqx.branched_error_if(
        ramp(2), True, -3, ["a", "b"]
    ),
    "branched_error_if: no messages": lambda eqx: eqx.branched_error_if(ramp(2), True, 0, []),
    "custom_jvp: no rule": lambda eqx: eqx.filter_custom_jvp(jnp.sin)(ramp(2)),
    "custom_jvp: no rule, differentiated": lambda eqx: jax.jvp(
        eqx.filter_custom_jvp(jnp.sin), (ramp(2),), (ramp(2),)
    ),
    "custom_vjp: no rule": lambda eqx: eqx.filter_custom_vjp(jnp.sin)(ramp(2)),
}

LAYERS = {
    "State used twice": state_set_twice,
    "Linear: no key": lambda eqx: eqx.nn.Linear(2, 3),
    "Linear: number for a key": lambda eqx: eqx.nn.Linear(2, 3, key=0),
    "Linear: negative size": lambda eqx: eqx.nn.Linear(-2, 3, key=KEY),
    "Conv2d: no spatial axes": lambda eqx: eqx.nn.Conv2d(2, 3, 3, key=KEY)(ramp(2)),
    "Conv2d: channels and groups": lambda eqx: eqx.nn.Conv2d(3, 4, 2, groups=2, key=KEY),
    "Conv2d: kernel of three sizes": lambda eqx: eqx.nn.Conv2d(1, 1, (1, 2, 3), key=KEY),
    "Conv2d: unknown padding": lambda eqx: eqx.nn.Conv2d(1, 1, 2, padding="NONE", key=KEY),
    "Conv2d: unknown padding mode": lambda eqx: eqx.nn.Conv2d(1, 1, 2, padding_mode="no", key=KEY),
    "LayerNorm: wrong shape": lambda eqx: eqx.nn.LayerNorm(3)(ramp(4)),
    "Embedding: no sizes": lambda eqx: eqx.nn.Embedding(),
    "Embedding: no key": lambda eqx: eqx.nn.Embedding(3, 2),
    "Dropout: no key": lambda eqx: eqx.nn.Dropout(0.5)(ramp(2)),
    "BatchNorm: unknown mode": lambda eqx: eqx.nn.BatchNorm(3, axis_name="b", mode="other"),
    "Sequential: layer is called wrongly": lambda eqx: eqx.nn.Sequential(
        [eqx.nn.Linear(2, 3, key=KEY)]
    )(),
}


@pytest.mark.parametrize("mistake", MODULES)
@same_under_both_imports
def test_mistakes_with_modules(eqx, mistake):
    """Declaring, constructing and changing Modules."""
    return caught(ft.partial(MODULES[mistake], eqx))


@pytest.mark.parametrize("mistake", TREES)
@same_under_both_imports
def test_mistakes_with_trees(eqx, mistake):
    """Editing and combining trees."""
    return caught(ft.partial(TREES[mistake], eqx))


@pytest.mark.parametrize("mistake", TRANSFORMS)
@same_under_both_imports
def test_mistakes_with_transforms(eqx, mistake):
    """Options, arguments and losses that do not fit."""
    return caught(ft.partial(TRANSFORMS[mistake], eqx))


@pytest.mark.parametrize("mistake", CHECKS_AND_RULES)
@same_under_both_imports
def test_mistakes_with_checks_and_rules(eqx, mistake):
    """The arguments of a check, and the derivative of a function with a custom rule."""
    return caught(ft.partial(CHECKS_AND_RULES[mistake], eqx))


@pytest.mark.parametrize("mistake", LAYERS)
@same_under_both_imports
def test_mistakes_with_layers_and_state(eqx, mistake):
    """Sizes, keys, shapes and States that do not fit."""
    return caught(ft.partial(LAYERS[mistake], eqx))

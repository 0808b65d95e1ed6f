"""What training refuses, because it would train something else, or nothing: one table.

`tests/messages.md` has the most common mistakes. The error has the path, or the name.
"""

import functools as ft
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import constraints, nn
from pytreemod.errors import ArgumentError, FieldError, ShapeError, SpecError, StructureError
from tests.helpers.trees import Boxed, affine, ramp

KEY = jax.random.key(0)
AFFINE, NORM = affine(3, 2), nn.LayerNorm(3)
LINEAR, MLP = nn.Linear(3, 4, key=KEY), nn.MLP(3, 3, 3, 1, key=KEY)
TIED = pm.tie(MLP, "layers[1].weight", to="layers[0].weight")
NOISY = [AFFINE, nn.Dropout(0.5)]
QUIET = pm.inference_mode(NOISY)
LORA = pm.select.role("lora")
SGD, MOMENTUM = optax.sgd(1.0), optax.sgd(1.0, momentum=0.9)
SUMS = optax.stateless(lambda grads, params: jax.tree.map(jnp.sum, grads))


def updated(model, grads, rules=SGD, before=None, like=None, **extra):
    """One step of an optimizer that is made for the model, or for another one."""
    opt = pm.Optimizer(rules, before=before).init(model if like is None else like)
    return opt.update(model, grads=grads, **extra)


def small(model, form="int8"):
    return pm.quantize(model, form)


def only(selector, value):
    """A rule for some leaves, which leaves the others as they are."""
    return pm.by({selector: value, ...: None})


def put(constraint, value):
    return constraint.constrain(value, "M.x")


def ones(*shape, dtype=None):
    return {"a": jnp.ones(shape, dtype)}


TABLE = {
    "Optimizer": [
        (lambda: pm.Optimizer(pm.by({...: None})).init(AFFINE), ArgumentError, "no floating array"),
        (lambda: updated(AFFINE, AFFINE, pm.by({"weight": SGD})), SpecError, "1 of 2 .* no rule"),
        (lambda: updated([AFFINE], [{"weight": ramp(2)}]), ValueError, "Affine"),
        (lambda: updated(QUIET, QUIET, MOMENTUM, like=NOISY), ValueError, "Dropout"),
        (
            lambda: updated(TIED, TIED, like=MLP),
            StructureError,
            "with 4 leaves, .* the model has 3",
        ),
        (lambda: updated(AFFINE, AFFINE, optax.identity(), valeu=1), ArgumentError, "'valeu'"),
        # A gradient and a state that would be broadcast, sums, an imaginary part.
        (
            lambda: updated(AFFINE, AFFINE.replace(weight=jnp.ones((3, 1)))),
            StructureError,
            r"grads\.weight: f32\[3,1\]",
        ),
        (lambda: updated(AFFINE, AFFINE, MOMENTUM, like=affine(1, 2)), ShapeError, "another shape"),
        (lambda: updated(AFFINE, AFFINE, before=SUMS), StructureError, r"model\.weight"),
        (lambda: updated(ones(2), {"a": ramp(2) * 1j}), StructureError, r"model\['a'\]"),
    ],
    "with_precision": [
        (lambda: pm.with_precision(MLP, only("layers.0.weight", "bf16")), SpecError, r"layers\.0"),
        (lambda: pm.with_precision(MLP, only(LORA, "bf16")), SpecError, "'lora'.* picks no Module"),
        (lambda: pm.with_precision(small(MLP), only(pm.Computed, "bf16")), SpecError, "no Module"),
        # Arrays without a precision, or without a call that would cast them.
        (
            lambda: pm.with_precision([MLP, NORM], pm.by({nn.Linear: "bf16"})),
            SpecError,
            r"\[1\]\.weight",
        ),
        (lambda: pm.with_precision(Boxed(ramp(2)), "compute=bf16"), SpecError, "content"),
        (lambda: pm.with_precision(MLP, "bf16", methods="decode"), SpecError, "decode"),
        (lambda: pm.with_precision(MLP, "params=float32,computer=bf16"), TypeError, "computer"),
        (lambda: pm.with_precision(MLP, "int32"), ArgumentError, "int32"),
    ],
    "quantize": [
        (lambda: small(MLP, "int2"), ArgumentError, "int2"),
        (lambda: small(MLP, only("**.bias", "int8")), SpecError, r"layers\[0\]\.bias"),
        # Groups that do not divide a row.
        (lambda: small(MLP, "int4,group_size=2"), ArgumentError, "group_size"),
        (lambda: small(small(MLP), only("**.weight", "int4")), SpecError, r"layers\[0\]\.weight"),
        (lambda: small(pm.map_parameters(jnp.exp, LINEAR, "weight")), SpecError, "weight"),
        (lambda: small([small(LINEAR), LINEAR]), SpecError, "computed leaf already"),
        (lambda: small({"w": jnp.zeros((9, 2)).at[2, 1].set(jnp.nan)}), ArgumentError, "w"),
    ],
    "lora": [
        (lambda: pm.lora(MLP, ..., 0, key=KEY), ArgumentError, "at least 1, got 0"),
        (lambda: pm.lora(MLP, ..., 2.5, key=KEY), ArgumentError, "at least 1, got 2.5"),
        (lambda: pm.lora(MLP, "**.bias", key=KEY), SpecError, r"layers\[0\]\.bias"),
        (lambda: pm.lora(TIED, "layers[1].weight", key=KEY), SpecError, r"layers\[1\]\.weight"),
        (
            lambda: pm.lora(pm.lora(MLP, ..., key=KEY), ..., key=KEY),
            SpecError,
            r"layers\[0\]\.weight",
        ),
    ],
    "map_parameters": [
        *(
            (ft.partial(pm.map_parameters, fn, NORM, ...), ArgumentError, "a function, got")
            for fn in ("exp", LINEAR)
        ),
        (lambda: pm.map_parameters(jnp.exp, [jnp.arange(3)], ...), ArgumentError, r"\[0\]"),
        (
            lambda: pm.map_parameters(jnp.exp, pm.map_parameters(jnp.exp, NORM, "weight"), ...),
            ArgumentError,
            "weight",
        ),
        (lambda: pm.map_parameters(jnp.exp, NORM, nn.Conv2d), SpecError, "Conv2d"),
        # An inverse that is none.
        (
            lambda: pm.map_parameters(lambda x: x[None], NORM, "weight", lambda x: x),
            ShapeError,
            r"\(1, 3\)",
        ),
    ],
    "constraints": [
        (lambda: put(constraints.simplex, jnp.ones(())), ShapeError, r"M\.x"),
        (lambda: put(constraints.lower_cholesky, jnp.ones((2, 3))), ShapeError, r"f32\[2,3\]"),
        (lambda: put(constraints.orthogonal, jnp.ones((2, 3))), ShapeError, r"f32\[2,3\]"),
        (lambda: put(constraints.positive, jnp.ones((), complex)), FieldError, "c64"),
        (lambda: constraints.bijection(jnp.exp, 2), ArgumentError, r"\(inverse\).*function, got 2"),
        (lambda: constraints.bijection(LINEAR, jnp.log), ArgumentError, r"\(forward\).*got Linear"),
        (lambda: constraints.interval(2, 1), ArgumentError, "interval"),
        (lambda: constraints.greater_than(math.nan), ArgumentError, "greater_than"),
    ],
    "LossScale": [
        # One over the factor would be zero, or the factor would not grow.
        (lambda: pm.LossScale(1e-40), ArgumentError, "initial"),
        (lambda: pm.LossScale(2.0**127), ArgumentError, "initial"),
        (lambda: pm.LossScale(growth=0.5), ArgumentError, "growth"),
        (lambda: pm.LossScale(period=0), ArgumentError, "period"),
        (lambda: pm.LossScale(0.5), ArgumentError, "minimum"),
        (lambda: pm.LossScale().adjust(jnp.asarray([True])), ArgumentError, "grads_finite"),
        (lambda: pm.select_tree(jnp.asarray(True), ones(2), ones(3)), StructureError, "a"),
        (lambda: pm.select_tree(True, ones(2), ones(2, dtype=jnp.float16)), StructureError, "a"),
        (lambda: pm.select_tree(jnp.asarray(True), ["one"], ["two"]), StructureError, "one"),
    ],
}


@pytest.mark.parametrize("kind", TABLE)
def test_what_would_train_something_else_is_refused(kind):
    """Also where JAX promotes and broadcasts, as it does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for use, error, word in TABLE[kind]:
            with pytest.raises(error, match=word):
                use()

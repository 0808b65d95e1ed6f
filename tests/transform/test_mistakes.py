"""Mistakes whose result would be wrong in silence are refused, and the error names the place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod.errors import (
    ArgumentError,
    DerivativeError,
    RuleError,
    ShapeError,
    SpecError,
    StructureError,
)
from tests.helpers.meshes import MESH
from tests.helpers.trees import ramp


class Model(pm.Module):
    """An array and a name."""

    w: jax.Array
    name: str = "m"

    def __call__(self, x):
        return (self.w * x.sum()).sum()


X, V = ramp(3, 2), ramp(3)
MODEL = Model(X)


def total(x):
    """A scalar."""
    return x.sum()


def two(x, y):
    """A scalar of two arguments."""
    return (x * y).sum()


def mapped(in_specs, out_specs, fn=lambda tree: tree):
    """Under filter_jit, where a shard_map is used."""
    return pm.filter_jit(pm.filter_shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs))


PATHS = {
    "jit: strings": (
        lambda: pm.filter_jit(total)({"a": np.array(["b"])}),
        ArgumentError,
        r"\['a'\]",
    ),
    "jit: compiled for others": (
        lambda: pm.filter_jit(two).lower(X, y=X).compile()(X, y=V),
        ArgumentError,
        r"f32\[3,2\]|f32\[3\]",
    ),
    "vmap: sizes": (
        lambda: pm.filter_vmap(lambda m, x: m(x))(MODEL, {"b": jnp.ones(4)}),
        ShapeError,
        r"(?s)m\.w.*x\['b'\]",
    ),
    "vmap: no axis": (
        lambda: pm.filter_vmap(two)(X, {"a": [jnp.asarray(1.0)]}),
        ShapeError,
        r"y\['a'\]\[0\]",
    ),
    "vmap: differs": (
        lambda: pm.filter_vmap(lambda x: {"y": x}, out_axes=None)(V),
        SpecError,
        r"result\['y'\]",
    ),
    "vmap: structure": (
        lambda: pm.filter_vmap(lambda x: {"y": x}, out_axes={"z": 0})(V),
        SpecError,
        "result",
    ),
    "pmap: sizes": (lambda: pm.filter_pmap(two)(V, {"a": jnp.ones(2)}), ShapeError, r"y\['a'\]"),
    "grad: wrt": (lambda: pm.filter_grad(total, wrt="zz")(MODEL), SpecError, "zz"),
    "grad: nothing": (
        lambda: pm.filter_grad(lambda n: 0.0)({"n": 3}),
        ArgumentError,
        r"n\['n'\]",
    ),
    "jvp: shapes": (
        lambda: pm.filter_jvp(total, ({"a": X},), ({"a": V},)),
        DerivativeError,
        r"\['a'\]",
    ),
    "vjp: shapes": (lambda: pm.filter_vjp(total, X)[1](X), DerivativeError, r"f32\[3,2\]"),
    "linearize: shapes": (
        lambda: pm.filter_linearize(lambda x: total(x["a"]), {"a": X})[1]({"a": V}),
        DerivativeError,
        r"\['a'\]",
    ),
    "scan: sizes": (
        lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, {"a": V, "b": jnp.ones(4)}),
        ShapeError,
        r"(?s)xs\['a'\].*xs\['b'\]",
    ),
    "map: no axis": (
        lambda: pm.filter_map(lambda x: x, {"a": jnp.asarray(1.0)}),
        ShapeError,
        r"xs\['a'\]",
    ),
    "cond: results": (
        lambda: pm.filter_cond(True, lambda m: m, lambda m: m.replace(name="n"), MODEL),
        StructureError,
        r"\.name",
    ),
    "switch: results": (
        lambda: pm.filter_switch(0, [total, total, lambda x: x], X),
        StructureError,
        r"branches\[2\]",
    ),
    "closure_convert": (
        lambda: pm.filter_closure_convert(lambda x: total(x["a"]), {"a": X})({"a": V}),
        StructureError,
        r"\['a'\]",
    ),
    "shard_map: sizes": (lambda: mapped(P("data"), P())({"a": V}), ShapeError, r"\['a'\]"),
    "shard_map: rank": (
        lambda: mapped(P("data", "model", None), P())({"a": X}),
        ShapeError,
        r"\['a'\]",
    ),
    "shard_map: differs": (
        lambda: mapped(P("data"), P())({"a": jnp.ones(4)}),
        SpecError,
        r"result\['a'\]",
    ),
    "stack": (
        lambda: pm.stack([MODEL, Model(X, "other")]),
        StructureError,
        r"\.name",
    ),
    "unstack": (lambda: pm.unstack({"a": V, "b": jnp.ones(4)}), ShapeError, r"\['b'\]"),
}


@pytest.mark.parametrize(("call", "error", "where"), PATHS.values(), ids=PATHS)
def test_errors_name_the_path(call, error, where):
    """G17: an argument or a result that does not fit is named by its path."""
    with pytest.raises(error, match=where):
        call()


NAMES = {
    "donate": (lambda: pm.filter_jit(total, donate="zz"), "zz"),
    "in_axes": (lambda: pm.filter_vmap(total, in_axes={"zz": 0})(X), "zz"),
    "in_shardings": (lambda: pm.filter_jit(total, in_shardings={"zz": None})(X), "zz"),
    "in_specs": (lambda: mapped({"zz": P()}, P())(X), "zz"),
    "argnums twice": (lambda: pm.filter_grad(two, argnums=(0, 0))(X, X), r"argnums"),
    "by keyword": (lambda: pm.filter_grad(total)(x=X), "'?x'?"),
    "static_argnums": (lambda: pm.filter_jit(total, static_argnums=0), "static_argnums"),
    "donate_argnums": (lambda: pm.filter_jit(total, donate_argnums=0), "donate_argnums"),
}


@pytest.mark.parametrize(("call", "name"), NAMES.values(), ids=NAMES)
def test_a_name_that_would_mean_nothing_is_refused(call, name):
    """A misspelt argument would be neither mapped, laid out, donated nor differentiated."""
    with pytest.raises((ArgumentError, SpecError), match=name):
        call()


@pytest.mark.parametrize("make", [pm.filter_custom_jvp, pm.filter_custom_vjp])
def test_a_function_without_its_rule_is_refused(make):
    """It would be differentiated as if it had none."""
    with pytest.raises(RuleError, match="def_"):
        make(total)(X)


def test_a_set_is_refused_as_a_static_value():
    """It has no hash, and could change after the program was compiled."""
    with pytest.raises(ArgumentError, match=r"\{1, 2\}"):
        pm.filter_jit(lambda x, s: x)(X, {1, 2})

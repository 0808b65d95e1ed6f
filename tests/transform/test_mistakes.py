"""Mistakes, transform by transform: each is an error of ours that names the argument or the path.

Where Python's or JAX's own message is the right one, it arrives undisturbed.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod.errors import (
    ArgumentError,
    DerivativeError,
    ShapeError,
    SpecError,
    StructureError,
)
from tests.helpers.meshes import DEVICES
from tests.helpers.trees import ramp

MESH = Mesh(np.array(DEVICES).reshape(4, 2), ("a", "b"))


class M(pm.Module):
    w: jax.Array
    name: str = "m"

    def __call__(self, x):
        return (self.w * x.sum()).sum()


x, v, s = ramp(3, 2), ramp(3), jnp.asarray(1.0)
m = M(x)


def f(x):
    return x.sum()


def two(x, y):
    return (x * y).sum()


def S(fn, mesh=MESH, **options):
    """Under filter_jit, where a shard_map is used."""
    return pm.filter_jit(pm.filter_shard_map(fn, mesh=mesh, **options))


# The call and the class of error; where it says that it was, what it got, and the first place.
# fmt: off
MISTAKES = {
    "jit bad option": (lambda: pm.filter_jit(f, static_argnums=0), ArgumentError,
        "filter_jit", "static_argnums=", ""),
    "jit static name": (lambda: pm.filter_jit(f, static="zz"), ArgumentError,
        "filter_jit(static)", "'zz'", ""),
    "jit donate name": (lambda: pm.filter_jit(f, donate="zz"), ArgumentError,
        "filter_jit(donate)", "'zz'", ""),
    "jit unhashable": (lambda: pm.filter_jit(lambda x, s: x)(x, {1, 2}), ArgumentError,
        "static argument", "{1, 2}", "s"),
    "jit in_sh 3": (lambda: pm.filter_jit(f, in_shardings=3)(x), SpecError,
        "filter_jit(in_shardings)", "3", "x"),
    "jit in_sh name": (lambda: pm.filter_jit(f, in_shardings={"zz": None})(x), ArgumentError,
        "filter_jit(in_shardings)", "'zz'", ""),
    "jit out_sh": (lambda: pm.filter_jit(f, out_shardings={"zz": None})(x), SpecError,
        "filter_jit(out_shardings)", "another structure",
        "result: dict of 1 where the tree has f32[]"),
    "jit text": (lambda: pm.filter_jit(f)({"a": np.array(["b"])}), ArgumentError,
        "argument", "1 of text, dates or objects", "x['a']: str32[1]"),
    "jit records": (lambda: pm.filter_jit(two)(x, np.zeros(2, [("a", "f4")])), ArgumentError,
        "argument", "1 of text, dates or objects", "y: void32[2]"),
    "jit compiled": (lambda: pm.filter_jit(two).lower(x, y=x).compile()(x, y=v), ArgumentError,
        "compiled two", "others", "y: f32[3,2] before, now f32[3]"),
    "jit compiled module": (lambda: pm.filter_jit(m.__call__).lower(x).compile()(v), ArgumentError,
        "compiled __call__", "others", "x: f32[3,2] before, now f32[3]"),
    "vmap axis_name": (lambda: pm.filter_vmap(f, axis_name=["a"]), ArgumentError,
        "filter_vmap(axis_name)", "['a']", ""),
    "pmap axis_name": (lambda: pm.filter_pmap(f, axis_name=["a"]), ArgumentError,
        "filter_pmap(axis_name)", "['a']", ""),
    "max_traces int": (lambda: pm.debug.assert_max_traces(3, max_traces=1), ArgumentError,
        "assert_max_traces(fn)", "3", ""),
    "branched index": (
        lambda: pm.branched_error_if(x, v > 0, np.array([0, 1]), ["a", "b"]), ShapeError,
        "branched_error_if(index)", "i64[2]", ""),
    "vmap axis big": (lambda: pm.filter_vmap(f, in_axes=5)(x), ShapeError,
        "filter_vmap of f", "f32[3,2]", ""),
    "vmap axis str": (lambda: pm.filter_vmap(f, in_axes="a")(x), SpecError,
        "filter_vmap(in_axes) for x", "'a'", "x"),
    "vmap tuple len": (lambda: pm.filter_vmap(two, in_axes=(0,))(x, x), SpecError,
        "filter_vmap(in_axes)", "1", ""),
    "vmap name": (lambda: pm.filter_vmap(f, in_axes={"zz": 0})(x), ArgumentError,
        "filter_vmap(in_axes)", "'zz'", ""),
    "vmap sizes": (lambda: pm.filter_vmap(two)(x, jnp.ones(4)), ShapeError,
        "filter_vmap of two", "2 sizes", "size 3 of x: f32[3,2], axis 0"),
    "vmap scalar": (lambda: pm.filter_vmap(f)(s), ShapeError,
        "filter_vmap of f", "f32[]", ""),
    "vmap number axis": (lambda: pm.filter_vmap(two, in_axes=(0, 0))(x, 3.0), ShapeError,
        "filter_vmap(in_axes) for y", "3.0", "y"),
    "vmap nothing": (lambda: pm.filter_vmap(lambda: 1)(), ArgumentError,
        "filter_vmap of <lambda>", "neither", ""),
    "vmap out None": (lambda: pm.filter_vmap(f, out_axes=None)(x), SpecError,
        "filter_vmap of f", "a result that differs from member to member", "result"),
    "vmap out big": (lambda: pm.filter_vmap(f, out_axes=5)(x), ShapeError,
        "filter_vmap(out_axes)", "others", "result: f32[] for each member, axis 5"),
    "vmap out str": (lambda: pm.filter_vmap(f, out_axes="q")(x), SpecError,
        "filter_vmap(out_axes)", "'q'", "result"),
    "vmap out prefix": (lambda: pm.filter_vmap(f, out_axes=(0, 1))(x), SpecError,
        "filter_vmap(out_axes)", "another structure",
        "result: tuple of 2 where the tree has f32[]"),
    "vmap out number": (lambda: pm.filter_vmap(lambda x: 3.0, out_axes=1)(x), ShapeError,
        "filter_vmap(out_axes)", "others", "result: f32[] for each member, axis 1"),
    "vmap by path": (lambda: pm.filter_vmap(f, in_axes=pm.by({"zz": 0, ...: 0}))(m), SpecError,
        "select.path('zz')", "none", ""),
    "vmap axis_size mismatch": (lambda: pm.filter_vmap(f, axis_size=7)(x), ShapeError,
        "filter_vmap of f", "2 sizes", "size 3 of x: f32[3,2], axis 0"),
    "vmap axis_size float": (lambda: pm.filter_vmap(lambda: 1, axis_size=2.0)(), ArgumentError,
        "filter_vmap(axis_size)", "2.0", ""),
    "vmap unknown kw": (lambda: pm.filter_vmap(f, nonsense=1)(x), ArgumentError,
        "filter_vmap", "nonsense=", ""),
    "pmap axis": (lambda: pm.filter_pmap(f, in_axes=5)(x), ShapeError,
        "filter_pmap of f", "f32[3,2]", ""),
    "pmap many": (lambda: pm.filter_pmap(f)(jnp.ones(20)), ShapeError,
        "filter_pmap of f", "20", ""),
    "pmap donate": (lambda: pm.filter_pmap(f, donate="zz")(x), ArgumentError,
        "filter_pmap(donate)", "'zz'", ""),
    "pmap unknown kw": (lambda: pm.filter_pmap(f, nonsense=1)(x), ArgumentError,
        "filter_pmap", "nonsense=", ""),
    "pmap out big": (lambda: pm.filter_pmap(f, out_axes=5)(x), ShapeError,
        "filter_pmap(out_axes)", "others", "result: f32[] for each member, axis 5"),
    "pmap devices": (lambda: pm.filter_pmap(f, devices=3)(x), ArgumentError,
        "filter_pmap(devices)", "3", ""),
    "grad kw": (lambda: pm.filter_grad(f)(x=x), ArgumentError,
        "filter_grad of f", "'x' by keyword", ""),
    "grad nothing": (lambda: pm.filter_grad(lambda n: n)(3), ArgumentError,
        "filter_grad of <lambda>", "none", "n: 3"),
    "grad argnum": (lambda: pm.filter_grad(f, argnums=4)(x), ArgumentError,
        "filter_grad of f", "1 positional arguments", ""),
    "grad argnum str": (lambda: pm.filter_grad(f, argnums="x")(x), ArgumentError,
        "filter_grad(argnums)", "'x'", ""),
    "grad argnum twice": (lambda: pm.filter_grad(two, argnums=(0, 0))(x, x), ArgumentError,
        "filter_grad(argnums)", "(0, 0)", ""),
    "grad wrt path": (lambda: pm.filter_grad(f, wrt="zz")(m), SpecError,
        "select.path('zz')", "none", ""),
    "grad wrt number": (lambda: pm.filter_grad(f, wrt=3)(x), SpecError,
        "filter_grad(wrt) for x", "3", ""),
    "grad wrt prefix": (lambda: pm.filter_grad(f, wrt=[True, True])(x), SpecError,
        "filter_grad(wrt) for x", "another structure", "x: list of 2 where the tree has f32[3,2]"),
    "grad nonscalar": (lambda: pm.filter_grad(lambda x: x)(x), ShapeError,
        "filter_grad of <lambda>", "f32[3,2]", ""),
    "grad str": (lambda: pm.filter_grad(lambda x: "loss")(x), ArgumentError,
        "filter_grad of <lambda>", "'loss'", ""),
    "grad Module": (lambda: pm.filter_grad(lambda x: m)(x), ArgumentError,
        "filter_grad of <lambda>", "a M", ""),
    "grad int loss": (lambda: pm.filter_grad(lambda x: jnp.asarray(3))(x), ArgumentError,
        "filter_grad of <lambda>", "i32[]", ""),
    "grad complex": (
        lambda: pm.filter_grad(lambda x: jax.lax.complex(x, x).sum())(x), ArgumentError,
        "filter_grad of <lambda>", "c64[]", ""),
    "grad aux missing": (lambda: pm.filter_grad(f, has_aux=True)(x), ArgumentError,
        "filter_grad of f", "f32[]", ""),
    "grad aux triple": (
        lambda: pm.filter_grad(lambda x: (x.sum(), 1, 2), has_aux=True)(x), ArgumentError,
        "filter_grad of <lambda>", "3 values", ""),
    "grad unknown kw": (lambda: pm.filter_grad(f, nonsense=1)(x), ArgumentError,
        "filter_grad", "nonsense=", ""),
    "grad no args": (lambda: pm.filter_grad(f)(), ArgumentError,
        "filter_grad of f", "0 positional arguments", ""),
    "jacfwd nothing": (lambda: pm.filter_jacfwd(f)(jnp.arange(3)), ArgumentError,
        "filter_jacfwd of f", "none", "x: i32[3]"),
    "jacfwd nonarray out": (lambda: pm.filter_jacfwd(lambda x: "a")(x), ArgumentError,
        "filter_jacfwd of <lambda>", "none", "result: 'a'"),
    "jacrev cplx": (lambda: pm.filter_jacrev(lambda x: jax.lax.complex(x, x))(x), DerivativeError,
        "filter_jacrev of <lambda>", "complex ones", "result: c64[3,2]"),
    "jacfwd cplx in": (
        lambda: pm.filter_jacfwd(lambda x: x)(jax.lax.complex(x, x)), DerivativeError,
        "filter_jacfwd of <lambda>", "complex ones", "x: c64[3,2]"),
    "jacfwd kw": (lambda: pm.filter_jacfwd(f)(x=x), ArgumentError,
        "filter_jacfwd of f", "'x' by keyword", ""),
    "jacfwd unknown": (lambda: pm.filter_jacfwd(f, nonsense=1)(x), ArgumentError,
        "filter_jacfwd", "nonsense=", ""),
    "hessian int": (lambda: pm.filter_hessian(f)(jnp.arange(3)), ArgumentError,
        "filter_hessian of f", "none", "x: i32[3]"),
    "hessian argn": (lambda: pm.filter_hessian(f, argnums=3)(x), ArgumentError,
        "filter_hessian of f", "1 positional arguments", ""),
    "jvp not tuple": (lambda: pm.filter_jvp(f, x, x), ArgumentError,
        "filter_jvp(primals)", "f32[3,2]", ""),
    "jvp len": (lambda: pm.filter_jvp(f, (x,), (x, x)), ArgumentError,
        "filter_jvp of f", "2 tangents", ""),
    "jvp shape": (lambda: pm.filter_jvp(f, (x,), (v,)), DerivativeError,
        "filter_jvp of f", "one that does not fit", "x: f32[3], for f32[3,2]"),
    "jvp struct": (lambda: pm.filter_jvp(f, (m,), (x,)), DerivativeError,
        "filter_jvp of f", "one that does not fit", "x: f32[3,2], for a M"),
    "jvp int tangent": (lambda: pm.filter_jvp(lambda n, x: x, (3, x), (1, x)), DerivativeError,
        "filter_jvp of <lambda>", "one that does not fit", "n: 1 instead of None, for 3"),
    "jvp one": (lambda: pm.filter_jvp(f, (x,)), ArgumentError,
        "filter_jvp", "primals alone", ""),
    "vjp ct shape": (lambda: pm.filter_vjp(f, x)[1](x), DerivativeError,
        "vjp_fn of f", "one that does not fit", "result: f32[3,2], for f32[]"),
    "vjp ct str": (lambda: pm.filter_vjp(lambda x: "a", x)[1]("a"), DerivativeError,
        "vjp_fn of <lambda>", "one that does not fit",
        "result: 'a' instead of None, for a leaf that is not differentiated"),
    "vjp ct missing": (lambda: pm.filter_vjp(f, x)[1](), ArgumentError,
        "vjp_fn of f", "0", ""),
    "linearize": (lambda: pm.filter_linearize(f, x)[1](v), DerivativeError,
        "f_jvp of f", "one that does not fit", "tangents[0]: f32[3], for f32[3,2]"),
    "linearize len": (lambda: pm.filter_linearize(f, x)[1](x, x), DerivativeError,
        "f_jvp of f", "one that does not fit", "tangents: a tuple of 2, for a tuple of 1"),
    "linear_transpose ct": (lambda: pm.filter_linear_transpose(f, x)(v), DerivativeError,
        "filter_linear_transpose of f", "one that does not fit", "result: f32[3], for f32[]"),
    "custom_jvp no rule": (lambda: pm.filter_custom_jvp(f)(x), DerivativeError,
        "filter_custom_jvp of f", "none", ""),
    "custom_vjp no rule": (lambda: pm.filter_custom_vjp(f)(x), DerivativeError,
        "filter_custom_vjp of f", "none", ""),
    "scan not pair": (lambda: pm.filter_scan(lambda c, x: c, 0.0, v), StructureError,
        "filter_scan of <lambda>", "f32[]", ""),
    "scan carry shape": (lambda: pm.filter_scan(lambda c, x: (x, None), v, v), StructureError,
        "filter_scan of <lambda>", "a change in 1 place", "carry: f32[3] -> f32[]"),
    "scan carry struct": (
        lambda: pm.filter_scan(lambda c, x: ((c, c), None), 0.0, v), StructureError,
        "filter_scan of <lambda>", "a change in 1 place", "carry: f32[] (weak) -> tuple of 2"),
    "scan carry static": (
        lambda: pm.filter_scan(lambda c, x: ({"a": "y"}, None), {"a": "x"}, v), StructureError,
        "filter_scan of <lambda>", "a change in 1 place", "carry['a']: 'x' -> 'y'"),
    "scan nothing": (lambda: pm.filter_scan(lambda c, x: (c, None), 0.0), ArgumentError,
        "filter_scan(xs)", "neither", ""),
    "scan len": (lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, v, length=7), ShapeError,
        "filter_scan(xs)", "2 numbers", "3 steps of xs: f32[3], axis 0"),
    "scan len str": (
        lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, None, length="a"), ArgumentError,
        "filter_scan(length)", "'a'", ""),
    "scan len neg": (
        lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, None, length=-1), ArgumentError,
        "filter_scan(length)", "-1", ""),
    "scan sizes": (
        lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, (v, jnp.ones(4))), ShapeError,
        "filter_scan(xs)", "2 numbers", "3 steps of xs[0]: f32[3], axis 0"),
    "scan scalar": (lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, s), ShapeError,
        "filter_scan(xs)", "one without", "xs: f32[]"),
    "scan number xs": (lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, 3), ArgumentError,
        "filter_scan(xs)", "neither", ""),
    "scan axis": (lambda: pm.filter_scan(lambda c, x: (c, None), 0.0, v, in_axes=2), ShapeError,
        "filter_scan(xs)", "one without", "xs: f32[3]"),
    "scan out None": (lambda: pm.filter_scan(lambda c, x: (c, x), 0.0, v, out_axes=None), SpecError,
        "filter_scan(out_axes)", "None", "result: f32[]"),
    "scan out big": (lambda: pm.filter_scan(lambda c, x: (c, x), 0.0, v, out_axes=3), SpecError,
        "filter_scan(out_axes)", "3", "result: f32[] in each step"),
    "scan out prefix": (
        lambda: pm.filter_scan(lambda c, x: (c, x), 0.0, v, out_axes=(0, 1)), SpecError,
        "filter_scan(out_axes)", "another structure",
        "result: tuple of 2 where the tree has f32[]"),
    "scan unroll str": (
        lambda: pm.filter_scan(lambda c, x: (c, x), 0.0, v, unroll="q"), ArgumentError,
        "filter_scan(unroll)", "'q'", ""),
    "scan reverse str": (
        lambda: pm.filter_scan(lambda c, x: (c, x), 0.0, v, reverse="q"), ArgumentError,
        "filter_scan(reverse)", "'q'", ""),
    "map nothing": (lambda: pm.filter_map(lambda x: x, 3), ArgumentError,
        "filter_map(xs)", "none", ""),
    "map batch0": (lambda: pm.filter_map(lambda x: x, v, batch_size=0), ArgumentError,
        "filter_map(batch_size)", "0", ""),
    "map scalar": (lambda: pm.filter_map(lambda x: x, s), ShapeError,
        "filter_map(xs)", "one without", "xs: f32[]"),
    "associative_scan shape": (
        lambda: pm.filter_associative_scan(lambda a, b: (a + b).sum(), v), StructureError,
        "filter_associative_scan of <lambda>", "a change in 1 place", "elems: f32[1] -> f32[]"),
    "associative_scan axis": (
        lambda: pm.filter_associative_scan(lambda a, b: a + b, v, axis=3), ShapeError,
        "filter_associative_scan(elems)", "one without", "elems: f32[3]"),
    "associative_scan axis str": (
        lambda: pm.filter_associative_scan(lambda a, b: a + b, v, axis="q"), ArgumentError,
        "filter_associative_scan(axis)", "'q'", ""),
    "associative_scan sizes": (
        lambda: pm.filter_associative_scan(lambda a, b: a, (v, jnp.ones(4))), ShapeError,
        "filter_associative_scan(elems)", "2 numbers", "3 steps of elems[0]: f32[3], axis 0"),
    "cond pred str": (lambda: pm.filter_cond("q", f, f, x), ArgumentError,
        "filter_cond(pred)", "'q'", ""),
    "cond pred vec": (lambda: pm.filter_cond(v > 0, f, f, x), ShapeError,
        "filter_cond(pred)", "bool[3]", ""),
    "cond notcallable": (lambda: pm.filter_cond(True, f, 3, x), ArgumentError,
        "filter_cond(false_fun)", "3", ""),
    "cond shapes": (lambda: pm.filter_cond(True, lambda x: x, lambda x: x.sum(), x), StructureError,
        "filter_cond of <lambda> and <lambda>", "1 difference",
        "result: f32[3,2] from true_fun, f32[] from false_fun"),
    "cond dtype": (lambda: pm.filter_cond(True, lambda x: x, lambda x: x > 0, x), StructureError,
        "filter_cond of <lambda> and <lambda>", "1 difference",
        "result: f32[3,2] from true_fun, bool[3,2] from false_fun"),
    "cond static": (lambda: pm.filter_cond(True, lambda x: "a", lambda x: "b", x), StructureError,
        "filter_cond of <lambda> and <lambda>", "1 difference",
        "result: 'a' from true_fun, 'b' from false_fun"),
    "switch idx float": (lambda: pm.filter_switch(1.0, [f, f], x), ArgumentError,
        "filter_switch(index)", "1.0", ""),
    "switch none": (lambda: pm.filter_switch(0, [], x), ArgumentError,
        "filter_switch(branches)", "none", ""),
    "switch notcallable": (lambda: pm.filter_switch(0, [f, 3], x), ArgumentError,
        "filter_switch(branches[1])", "3", ""),
    "switch mismatch": (lambda: pm.filter_switch(0, [f, f, lambda x: x], x), StructureError,
        "filter_switch", "1 difference",
        "result: f32[] from branches[0], f32[3,2] from branches[2]"),
    "while cond nonbool": (
        lambda: pm.filter_while_loop(lambda c: c, lambda c: c, 1.0), ArgumentError,
        "filter_while_loop(cond_fun) of <lambda>", "f32[]", ""),
    "while cond vec": (
        lambda: pm.filter_while_loop(lambda c: v > 0, lambda c: c, 1.0), ArgumentError,
        "filter_while_loop(cond_fun) of <lambda>", "bool[3]", ""),
    "while carry static": (
        lambda: pm.filter_while_loop(lambda c: True, lambda c: "b", "a"), StructureError,
        "filter_while_loop of <lambda>", "a change in 1 place", "val: 'a' -> 'b'"),
    "fori lower float": (lambda: pm.filter_fori_loop(0.0, 3, lambda i, c: c, 1.0), ArgumentError,
        "filter_fori_loop(lower)", "0.0", ""),
    "fori vec": (lambda: pm.filter_fori_loop(0, jnp.arange(3), lambda i, c: c, 1.0), ArgumentError,
        "filter_fori_loop(upper)", "i32[3]", ""),
    "fori unroll str": (
        lambda: pm.filter_fori_loop(0, 3, lambda i, c: c, 1.0, unroll="a"), ArgumentError,
        "filter_fori_loop(unroll)", "'a'", ""),
    "shard_map no mesh": (lambda: S(f, mesh=None, in_specs=P("a"), out_specs=P())(x), ArgumentError,
        "filter_shard_map of f", "none", ""),
    "shard_map rank": (
        lambda: S(lambda x: x, in_specs=P("a", "b", None, None), out_specs=P())(x), ShapeError,
        "filter_shard_map(in_specs)", "longer ones", "x: f32[3,2] with P('a', 'b', None, None)"),
    "shard_map out rank": (
        lambda: S(lambda x: x, in_specs=P(), out_specs=P("a", "b", "a"))(x), ShapeError,
        "filter_shard_map(out_specs)", "longer ones", "result: f32[3,2] with P('a', 'b', 'a')"),
    "shard_map axisname": (lambda: S(f, in_specs=P("zz"), out_specs=P())(x), SpecError,
        "filter_shard_map(in_specs)", "'zz'", "x: P('zz')"),
    "shard_map divide": (lambda: S(f, in_specs=P("a"), out_specs=P())(x), ShapeError,
        "filter_shard_map(in_specs)", "others", "x: f32[3,2], axis 0 over 'a' of size 4"),
    "shard_map out vary": (
        lambda: S(lambda x: x, in_specs=P("a"), out_specs=P())(jnp.ones(4)), SpecError,
        "filter_shard_map(out_specs)", "results that may differ from device to device",
        "result: f32[1] with P(), varies over 'a'"),
    "shard_map name": (lambda: S(f, in_specs={"zz": P()}, out_specs=P())(x), ArgumentError,
        "filter_shard_map(in_specs)", "'zz'", ""),
    "shard_map spec 3": (lambda: S(f, in_specs=3, out_specs=P())(x), SpecError,
        "filter_shard_map(in_specs)", "3", "x"),
    "shard_map mesh 3": (lambda: S(f, mesh=3, in_specs=P(), out_specs=P())(x), ArgumentError,
        "filter_shard_map(mesh)", "3", ""),
    "shard_map axis_names": (
        lambda: S(f, in_specs=P(), out_specs=P(), axis_names={"zz"})(x), ArgumentError,
        "filter_shard_map(axis_names)", "'zz'", ""),
    "shard_map axis_names int": (
        lambda: S(f, in_specs=P(), out_specs=P(), axis_names=3), ArgumentError,
        "filter_shard_map(axis_names)", "3", ""),
    "shard_map axis_names text": (
        lambda: S(f, in_specs=P(), out_specs=P(), axis_names="zz")(x), ArgumentError,
        "filter_shard_map(axis_names)", "'zz'", ""),
    "shard without a mesh": (lambda: pm.filter_shard({"y": x}, P("a")), ArgumentError,
        "filter_shard(device_or_shardings)", "none", "x['y']: f32[3,2] with P('a')"),
    "shard without a mesh, traced": (
        lambda: pm.filter_jit(lambda x: pm.filter_shard(x, P("a")))(x), ArgumentError,
        "filter_shard(device_or_shardings)", "none", "x: f32[3,2] with P('a')"),
    "shard 3": (lambda: pm.filter_shard(x, 3), SpecError,
        "filter_shard(device_or_shardings)", "3", "x"),
    "shard rank2": (lambda: pm.filter_shard(x, NamedSharding(MESH, P(None, None, "a"))), ShapeError,
        "filter_shard(device_or_shardings)", "longer ones", "x: f32[3,2] with P(None, None, 'a')"),
    "shard divide": (lambda: pm.filter_shard(x, NamedSharding(MESH, P("a"))), ShapeError,
        "filter_shard(device_or_shardings)", "another",
        "x: f32[3,2] with P('a') on a mesh of {'a': 4, 'b': 2}"),
    "shard prefix": (lambda: pm.filter_shard(x, [None, None]), SpecError,
        "filter_shard(device_or_shardings)", "another structure",
        "x: list of 2 where the tree has f32[3,2]"),
    "pure_callback notcallable": (
        lambda: pm.filter_pure_callback(3, x, result_shape_dtypes=x), ArgumentError,
        "filter_pure_callback(callback)", "3", ""),
    "checkify errors": (lambda: pm.filter_checkify(f, errors="q")(x), ArgumentError,
        "filter_checkify(errors)", "'q'", ""),
    "checkpoint policy": (lambda: pm.filter_checkpoint(f, policy=3)(x), ArgumentError,
        "filter_checkpoint(policy)", "3", ""),
    "closure_convert": (lambda: pm.filter_closure_convert(f, x)(v), StructureError,
        "closure-converted f", "others", "args[0]: f32[3,2] -> f32[3]"),
    "stack mismatch": (lambda: pm.stack([m, M(v)]), StructureError,
        "stack(trees)", "1 difference", "tree.w: f32[3,2] in trees[0], f32[3] in trees[1]"),
    "stack notlist": (lambda: pm.stack(m), ArgumentError,
        "stack(trees)", "M(w=f32[3,2])", ""),
    "stack text": (lambda: pm.stack("abc"), ArgumentError, "stack(trees)", "'abc'", ""),
    "stack dict": (lambda: pm.stack({"a": 1}), ArgumentError, "stack(trees)", "{'a': 1}", ""),
    "stack static": (lambda: pm.stack([m, M(x, "other")]), StructureError,
        "stack(trees)", "1 difference", "tree.name: 'm' in trees[0], 'other' in trees[1]"),
    "unstack sizes": (lambda: pm.unstack((v, jnp.ones(4))), ShapeError,
        "unstack(tree)", "2 sizes", "tree[0]: f32[3]"),
    "unstack scalar": (lambda: pm.unstack(s), ShapeError,
        "unstack(axis)", "0", "tree: f32[]"),
}
# fmt: on


@pytest.mark.parametrize(
    ("call", "error", "where", "got", "place"), MISTAKES.values(), ids=MISTAKES
)
def test_a_mistake_is_an_error_of_ours(call, error, where, got, place):
    """It says where: the transform and its argument, or the path; and what came."""
    text = rf"\A{re.escape(where)}: expected .+, got {re.escape(got)}\."
    with pytest.raises(error, match=text) as caught:
        call()

    assert not place or f"\n  at {place}" in str(caught.value)


# What a function takes is between Python and the function; what JAX cannot do, JAX says.
UNDISTURBED = {
    "jit missing": (lambda: pm.filter_jit(two)(x), TypeError, "two.* missing 1 .*'y'"),
    "vmap missing": (lambda: pm.filter_vmap(two)(x), TypeError, "two.* missing 1 .*'y'"),
    "grad missing": (lambda: pm.filter_grad(two)(x), TypeError, "two.* missing 1 .*'y'"),
    "jvp missing": (lambda: pm.filter_jvp(two, (x,), (x,)), TypeError, "two.* missing 1 .*'y'"),
    "jit keyword": (lambda: pm.filter_jit(f)(x, q=1), TypeError, "f.* unexpected keyword .*'q'"),
    "vmap keyword": (lambda: pm.filter_vmap(f)(x, q=x), TypeError, "f.* unexpected keyword .*'q'"),
    "cond arity": (lambda: pm.filter_cond(True, f, f), TypeError, "f.* missing 1 .*'x'"),
    "switch arity": (lambda: pm.filter_switch(0, [f, f]), TypeError, "f.* missing 1 .*'x'"),
    "scan arity": (lambda: pm.filter_scan(f, 0.0, v), TypeError, "f.* takes 1 .* but 2 were"),
    "fori arity": (lambda: pm.filter_fori_loop(0, 3, f, v), TypeError, "f.* takes 1 .* but 2 were"),
    "scan keyword": (lambda: pm.filter_scan(two, 0.0, v, q=1), TypeError, "filter_scan.*'q'"),
    "cond keyword": (lambda: pm.filter_cond(True, f, f, operand=x), TypeError, "filter_cond.*'op"),
    "shard_map without out_specs": (
        lambda: pm.filter_shard_map(f, mesh=MESH),
        TypeError,
        "filter_shard_map.* missing 1 .*'out_specs'",
    ),
    "callback without a shape": (
        lambda: pm.filter_pure_callback(f, x),
        TypeError,
        "filter_pure_callback.* missing 1 .*'result_shape_dtypes'",
    ),
    "axis name": (
        lambda: pm.filter_vmap(lambda x: jax.lax.psum(x, "q"))(x),
        NameError,
        "unbound axis name: q",
    ),
    "ordered callback under vmap": (
        lambda: pm.filter_vmap(lambda x: pm.filter_io_callback(print, x, ordered=True))(x),
        ValueError,
        "Cannot `vmap` ordered IO callback",
    ),
    "reverse mode of a while loop": (
        lambda: pm.filter_grad(
            lambda x: pm.filter_while_loop(lambda c: c < 9.0, lambda c: c + 1.0, x)
        )(s),
        ValueError,
        "Reverse-mode differentiation does not work for lax.while_loop",
    ),
    "derivative of a callback": (
        lambda: pm.filter_grad(lambda x: pm.filter_pure_callback(np.sin, x, result_shape_dtypes=x))(
            s
        ),
        ValueError,
        "Pure callbacks do not support JVP",
    ),
    "forward mode of a backward rule": (
        lambda: pm.filter_jacfwd(backward)(s),
        TypeError,
        "can't apply forward-mode autodiff",
    ),
}


@pm.filter_custom_vjp
def backward(x):
    return x * x


backward.def_fwd(lambda perturbed, x: (x * x, x))
backward.def_bwd(lambda x, g, perturbed, arg: 2 * x * g)


@pytest.mark.parametrize(("call", "error", "text"), UNDISTURBED.values(), ids=UNDISTURBED)
def test_what_is_not_ours_arrives_undisturbed(call, error, text):
    """The message of Python, or of JAX, and not a second one around it."""
    with pytest.raises(error, match=text) as caught:
        call()

    assert not isinstance(caught.value, pm.errors.PytreemodError)

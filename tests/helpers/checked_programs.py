"""Programs that contain a function, such as a check, in every place where one may be."""

import functools as ft

import jax
import jax.numpy as jnp

import pytreemod as pm
from tests.helpers.meshes import MESH


def unchanged(x):
    """Instead of a check, or of a transform."""
    return x


def squares(check):
    """A scalar function with the check inside."""
    return lambda x: jnp.sum(check(x) ** 2)


def _with_jvp_rule(check):
    made = pm.filter_custom_jvp(lambda x: check(x) ** 2)
    made.def_jvp(lambda primals, tangents: (primals[0] ** 2, check(primals[0]) * tangents[0]))
    return made


def _with_vjp_rule(check):
    made = pm.filter_custom_vjp(lambda x: x**2)
    made.def_fwd(lambda perturbed, x: (x**2, None))
    made.def_bwd(lambda residuals, g, perturbed, x: g * check(x))
    return made


ON_DATA = jax.sharding.PartitionSpec("data")

# Outside `filter_jit` they raise the error of a check, too, because JAX waits on a CPU.
FILTERED = {
    "filter_grad": lambda check: pm.filter_grad(pm.filter_jit(squares(check))),
    "filter_vmap": pm.filter_vmap,
    "scan": lambda check: lambda x: pm.filter_scan(lambda n, y: (n, check(y)), 0, x)[1],
    "map": lambda check: lambda x: pm.filter_map(check, x),
    "while": lambda check: (
        lambda x: pm.filter_while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, check(c[1])), (0, x)
        )
    ),
    "fori": lambda check: lambda x: pm.filter_fori_loop(0, 2, lambda i, x: check(x), x),
    "cond": lambda check: lambda x: pm.filter_cond(x[0] > -9, check, unchanged, x),
    "filter_jvp": lambda check: lambda x: pm.filter_jvp(pm.filter_jit(check), (x,), (x,)),
    "filter_vjp": lambda check: lambda x: pm.filter_vjp(pm.filter_jit(squares(check)), x)[1](x[0]),
    "checkpoint": lambda check: pm.filter_grad(squares(pm.filter_checkpoint(check))),
}
PROGRAMS = {
    **FILTERED,
    "call": lambda check: check,
    "jax.jit": jax.jit,
    "jax.vmap": jax.vmap,
    "jax.grad": lambda check: jax.grad(squares(check)),
    "hessian": lambda check: jax.hessian(lambda x: jnp.sum(check(x) ** 3)),
    "custom jvp": lambda check: jax.grad(lambda x: jnp.sum(_with_jvp_rule(check)(x))),
    "custom vjp": lambda check: jax.grad(lambda x: jnp.sum(_with_vjp_rule(check)(x))),
    "shard_map": pm.filter_shard_map(mesh=MESH, in_specs=ON_DATA, out_specs=ON_DATA),
}


def _over_jit(check):
    inner = jax.jit(check)
    return lambda x, scale: inner(x) * scale


def _over_scan(scan, check):
    body = lambda carry, y: (carry, check(y))  # noqa: E731
    return lambda x, scale: scan(body, 0, x)[1] * scale


# Functions whose inner function JAX has traced after the first call.
TRACED_BEFORE = {
    "jit": _over_jit,
    "scan": ft.partial(_over_scan, jax.lax.scan),
    "filter_scan": ft.partial(_over_scan, pm.filter_scan),
}

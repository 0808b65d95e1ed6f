"""Maps and derivatives of any trees are JAX's own of dicts of arrays: values, types, programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations

NAMES = ["grad", "value_and_grad", "jacfwd", "jacrev", "hessian", "jvp", "vjp", "linearize"]
NAMES += ["vmap", "checkpoint", "jit"]
PLAIN = SimpleNamespace(**{n: getattr(jax, n) for n in NAMES}, scan=jax.lax.scan)
OURS = SimpleNamespace(**{n: getattr(pm, f"filter_{n}") for n in [*NAMES, "scan"]})


def each(d):
    """An array, beside a string or None."""
    return {"y": jnp.sin(d["x"]) * d["x"], "s": d.get("s")}


def total(d):
    """A scalar."""
    return jnp.sum(each(d)["y"])


def tangent(d):
    """A direction for each floating array."""
    return jax.tree.map(lambda x: x if pm.is_inexact_array(x) else None, d)


def pulled(t, d):
    """The cotangents of the result itself."""
    y, back = t.vjp(each, d)
    return back(tangent(y))


def steps(d):
    """Three numbers of the type of x."""
    return jnp.asarray([0.25, 0.5, 0.75], jnp.asarray(d["x"]).dtype)


def scanned(t, d):
    """A loop whose steps depend on d."""
    return t.scan(
        lambda c, x: (jnp.tanh(c * d["x"] + x), c), jnp.sin(steps(d)[0] * d["x"]), steps(d)
    )


def mapped(t, f):
    """`f` of three scaled arrays, mapped."""
    return lambda d: t.vmap(lambda x: f({**d, "x": x * d["x"]}))(steps(d))


PROGRAMS = {
    "grad": lambda t: t.grad(total),
    "value_and_grad": lambda t: t.value_and_grad(lambda d: (total(d), each(d)["y"]), has_aux=True),
    "jacfwd": lambda t: t.jacfwd(each),
    "jacrev": lambda t: t.jacrev(each),
    "hessian": lambda t: t.hessian(total),
    "jvp": lambda t: lambda d: t.jvp(each, (d,), (tangent(d),)),
    "vjp": lambda t: lambda d: pulled(t, d),
    "linearize": lambda t: lambda d: t.linearize(each, d)[1](tangent(d)),
    "vmap": lambda t: lambda d: t.vmap(each, in_axes=-1, out_axes=-1)({"x": d["x"][..., None]}),
    "grad of a checkpoint": lambda t: t.grad(t.checkpoint(total)),
    "grad of jit": lambda t: t.grad(t.jit(total)),
    "grad of a scan": lambda t: t.grad(lambda d: scanned(t, d)[0].sum()),
    "Jacobian of a scan": lambda t: t.jacrev(lambda d: scanned(t, d)),
    "vmap of grad": lambda t: mapped(t, t.grad(total)),
    "grad of vmap": lambda t: t.grad(lambda d: mapped(t, total)(d).sum()),
    "vmap of a Hessian": lambda t: mapped(t, t.hessian(total)),
    "vmap of a scan": lambda t: mapped(t, lambda d: scanned(t, d)),
    "jvp of vjp": lambda t: lambda d: t.jvp(lambda d: pulled(t, d), (d,), (tangent(d),)),
    "grad of grad": lambda t: t.grad(lambda d: jnp.sum(t.grad(total)(d)["x"] ** 2)),
    "vmap of vmap": lambda t: mapped(t, mapped(t, each)),
}
programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
KINDS = {
    "half": jnp.asarray(0.5, jnp.float16),
    "bfloat16": jnp.asarray(0.5, jnp.bfloat16),
    "weak": jnp.asarray(0.5),
    "NumPy": np.float32(0.5),
    "64 bits": np.asarray(0.5),
}
REST = {"n": 2.0, "i": 3, "s": "a", "none": None, "f": max, "empty": {}, "key": jax.random.key(0)}
REST["old"], REST["ints"] = jax.random.PRNGKey(0), np.arange(3)


@programs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_results_are_those_of_jax(program, kind):
    """Values, dtypes and weak types, beside leaves of every other kind."""
    found = jax.tree.leaves(program(OURS)({"x": KINDS[kind], **REST}))
    expected = jax.tree.leaves(program(PLAIN)({"x": KINDS[kind]}))

    found = [x for x in found if pm.is_inexact_array(x)]
    assert [jax.typeof(x) for x in found] == [jax.typeof(x) for x in expected]
    assert_close(found, expected, rtol=1e-2 if "16" in kind or kind == "half" else 1e-5)


@programs
def test_no_operation_is_added(program):
    """The programs have the operations of JAX's on the arrays alone."""

    def arrays(transforms, rest):
        run = program(transforms)
        return lambda x: [
            x for x in jax.tree.leaves(run({"x": x, **rest})) if not isinstance(x, str)
        ]

    x = jnp.asarray(0.5, jnp.float32)
    assert equations(arrays(OURS, REST), x) == equations(arrays(PLAIN, {}), x)

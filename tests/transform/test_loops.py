"""`filter_while_loop` and `filter_fori_loop`, and the carry of every loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from tests.helpers.meshes import EXPLICIT, on
from tests.helpers.trees import Affine, Holder, affine, ramp


@pytest.mark.parametrize("upper", [3, jnp.asarray(3), np.int64(3)])
@pytest.mark.parametrize("jit", [lambda f: f, pm.filter_jit], ids=["eager", "jitted"])
def test_fori_loop_is_the_loop(upper, jit):
    """filter_fori_loop(a, b, f, x) == for i in range(a, b): x = f(i, x), bounds traced or not."""

    def step(i, v):
        return {"x": v["x"] * (i + 1), "m": v["m"]}

    init = {"x": 1, "m": "mode"}
    found = jit(lambda upper: pm.filter_fori_loop(1, upper, step, init))(upper)
    assert (int(found["x"]), found["m"]) == (6, "mode")
    assert int(pm.filter_fori_loop(3, 0, step, init)["x"]) == 1


# ---- the carry of every loop


def loops(scan, while_loop, fori_loop):
    """Each loop as a way to call a function of a carry twice."""
    small, more = lambda v: v[0] < 2, lambda f: lambda v: (v[0] + 1, f(v[1]))
    return {
        "scan": lambda f, x: scan(lambda c, _: (f(c), None), x, length=2)[0],
        "while": lambda f, x: while_loop(small, more(f), (0, x))[1],
        "fori": lambda f, x: fori_loop(0, 2, lambda i, v: f(v), x),
    }


LOOPS = loops(pm.filter_scan, pm.filter_while_loop, pm.filter_fori_loop)
JAXS = loops(jax.lax.scan, jax.lax.while_loop, jax.lax.fori_loop)
every_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
CHANGES = {
    "shape": (lambda m: m.replace(weight=m.weight[:1]), r"\.weight: f32\[2,3\] -> f32\[1,3\]"),
    "cast": (lambda m: m.replace(bias=m.bias > 0), r"\.bias: f32\[2\] -> bool\[2\]"),
    "class": (lambda m: Holder(m.weight), r"Affine -> Holder"),
    "two places": (lambda m: Affine(m.bias, m.weight), r"\.weight: .*\.bias: "),
}


@every_loop
@pytest.mark.parametrize(("change", "line"), CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled
def test_a_carry_that_changes_is_refused_by_path(loop, change, line):
    """G8: a loop has one structure; what a step changes in it is shown before and after."""
    with pytest.raises(StructureError, match=rf"(?s)filter_.*changes its type.*{line}"):
        loop(change, affine())


@every_loop
@pytest.mark.parametrize("static", ["text", jnp.tanh, None], ids=["text", "function", "None"])
def test_static_values_are_carried(loop, static):
    """They come back as they are, also without jit; and a step that changes one is refused."""
    for jit in (True, False):
        with jax.disable_jit(not jit):
            found = loop(lambda c: (c[0] + 1, c[1]), (0.0, static))
        assert (float(found[0]), found[1]) == (2.0, static)
    for other in ("other", ramp(2)):
        with pytest.raises(StructureError, match=r"\[1\]: .* -> "):
            loop(lambda c, other=other: (c[0], other), (jnp.float32(0), static))


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("init", [0, 0.0, 1j, True, np.int16(2), jnp.float32(1)], ids=repr)
@pytest.mark.sampled
def test_weak_types_are_those_of_jax(name, init):
    """A number takes the dtype that the step returns, as in jax.lax."""
    steps = [lambda c: c, lambda c: c + c]
    if type(init) in (int, float):
        steps.append(lambda c: c * jnp.bfloat16(2))
    for step in steps:
        found, expected = LOOPS[name](step, init), JAXS[name](step, init)
        # By value: outside of a program JAX returns a number that no step changes as it came.
        assert found == expected
        assert jax.typeof(found) == jax.typeof(expected)


def test_a_carry_that_is_split_otherwise_is_refused():
    """On explicit axes of a mesh how an array is split is part of its type."""
    places = on("data", mesh=EXPLICIT), on(None, "model", mesh=EXPLICIT)
    x, w = (pm.filter_shard(ramp(8, 8), place) for place in places)
    with pytest.raises(StructureError, match=r"(?s)filter_scan.*model"):
        pm.filter_scan(lambda c, _: (c @ w, None), x, length=2)

"""sow: values come out of every filtered transform, and out of nothing else."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.meshes import MESH, P
from tests.helpers.trees import ramp

X = ramp(3)  # [1, 2, 3]
TWICE = [2.0, 4.0, 6.0]


def f(x):
    return pm.sow("twice", 2 * x) + 1


def total(x):
    return jnp.sum(f(x) ** 2)


def captured(fn, *args):
    return pm.capture(fn)(*args)[1]


def steps(x):
    return pm.filter_scan(lambda c, _: (f(c), c), x, length=2)


def other(x):
    return pm.sow("twice", x)


# tests/transform/test_capturing.py has the other transforms.
PASSED = {
    "nothing": (f, TWICE),
    "vmap onto another axis": (
        pm.filter_vmap(lambda x: f(x * jnp.ones(2)), out_axes=1),
        [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]],
    ),
    "vmap of jit of scan": (pm.filter_vmap(pm.filter_jit(steps)), [[2, 6], [4, 10], [6, 14]]),
    "jacfwd": (pm.filter_jacfwd(f), TWICE),
    "jacrev": (pm.filter_jacrev(f), TWICE),
    "hessian": (pm.filter_hessian(total), TWICE),
    "checkify": (lambda x: pm.filter_checkify(f)(x)[1], TWICE),
    "map in batches": (lambda x: pm.filter_map(f, x, batch_size=2), TWICE),
    "cond": (lambda x: pm.filter_cond(x[0] > 0, f, other, x), TWICE),
}


@pytest.mark.parametrize(("fn", "expected"), PASSED.values(), ids=PASSED)
@pytest.mark.sampled
def test_what_is_sown_comes_out(fn, expected):
    """The values of a plain call, stacked by maps and loops; the result is as without a capture."""
    out, seen = pm.capture(fn)(X)

    assert list(seen) == ["twice"]
    np.testing.assert_array_equal(seen["twice"], expected)
    jax.tree.map(np.testing.assert_array_equal, out, fn(X))


@pm.filter_custom_jvp
def with_rule(x):
    """A function with a custom derivative, which sows."""
    return f(x)


with_rule.def_jvp(lambda primals, tangents: (primals[0], tangents[0]))

REFUSED = {
    "jax.jit": jax.jit(f),
    "jax.grad": jax.grad(total),
    "jax.lax.scan": lambda x: jax.lax.scan(lambda c, x: (f(c), x), 1.0, x),
    "filter_while_loop": lambda x: pm.filter_while_loop(lambda x: x[0] < 5, f, x),
    "vmap inside of jit": pm.filter_jit(jax.vmap(f)),
    "a function with a rule, compiled": pm.filter_jit(with_rule),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_what_could_not_come_out_is_refused(fn):
    """Also after a call without a capture, where it may be sown anywhere."""
    fn(X)
    with pytest.raises(StateError, match="twice"):
        pm.capture(fn)(X)
    fn(X)


def test_what_is_no_array_comes_out_as_it_is():
    """Law: sow(name, value) is value. Several members or steps have one value that is no array."""
    fn = pm.filter_jit(pm.filter_vmap(lambda x: pm.sow("both", {"how": "a", "x": x})["x"]))
    value = {"a": [X]}

    seen = captured(fn, X)
    assert seen["both"]["how"] == "a"
    np.testing.assert_array_equal(seen["both"]["x"], X)
    assert pm.capture(lambda: pm.sow("value", value))()[0] is pm.sow("value", value) is value


NAMES = [
    (["q#2", "q", "q"], ["q#2", "q", "q#3"]),
    (["q", "q", "q#2"], ["q", "q#3", "q#2"]),
    (["q#2", "q#2", "q#2#2"], ["q#2", "q#2#3", "q#2#2"]),
]


@pytest.mark.parametrize(("sown", "shown"), NAMES, ids=str)
def test_no_value_takes_the_place_of_another(sown, shown):
    """A number may equal a sown name: each value has its own entry, in the order of the calls."""

    def run(x):
        return [pm.sow(name, x + i) for i, name in enumerate(sown)]

    for call in (run, pm.filter_jit(run)):
        found = captured(call, X)
        assert list(found) == shown
        for i, value in enumerate(found.values()):
            np.testing.assert_array_equal(value, X + i)


def test_each_device_shows_its_own_value():
    """Stacked over all axes of the mesh, whatever the result is split over."""
    specs = {"mesh": MESH, "in_specs": P("data"), "out_specs": (None, P("data"))}
    fn = pm.filter_shard_map(lambda x: (jax.lax.psum(f(x).sum(), "data"), x), **specs)

    for call in (fn, pm.filter_jit(fn)):
        out, seen = pm.capture(call)(ramp(8))
        assert_same(out, fn(ramp(8)))
        np.testing.assert_array_equal(seen["twice"], 2 * ramp(8).reshape(4, 2).repeat(2, 0))
    labelled = lambda x: pm.sow("part", {"x": x, "how": "plain", "n": 2})["x"]  # noqa: E731
    seen = pm.capture(pm.filter_shard_map(labelled, **{**specs, "out_specs": P("data")}))(ramp(8))[
        1
    ]
    assert (seen["part"]["how"], seen["part"]["n"]) == ("plain", 2)


def test_shapes_show_nothing():
    """Where nothing runs, there is no value."""
    for shape in (ft.partial(pm.filter_eval_shape, f), pm.filter_jit(f).eval_shape):
        assert pm.capture(shape)(X) == (jax.ShapeDtypeStruct((3,), "float32"), {})


def test_a_check_in_a_captured_function_is_one():
    """A failed check is raised, as without a capture; afterwards nothing is left."""
    fn = pm.filter_jit(pm.filter_vmap(lambda x: f(pm.error_if(x, x < 0, "negative"))))

    np.testing.assert_array_equal(captured(fn, X)["twice"], TWICE)
    with pytest.raises(CheckError, match="negative"):
        pm.capture(fn)(-X)
    assert captured(lambda: None) == {}

"""Behavior that all loops share: the carry, and caching."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from tests.helpers.cells import Cell
from tests.helpers.comparing import assert_same
from tests.helpers.equations import equations
from tests.helpers.meshes import EXPLICIT, on
from tests.helpers.trees import Affine, Holder, affine, ramp

# ---- a carry that changes


CHANGES = {
    "shape": (lambda m: m.replace(weight=m.weight[:1]), r"weight"),
    "dtype": (lambda m: m.replace(weight=m.weight > 0), r"weight"),
    "None": (lambda m: m.replace(bias=None), r"bias"),
    "a string": (lambda m: m.replace(bias="b"), r"bias"),
    "configuration": (lambda m: Holder(m.weight), r"Holder"),
    "two places": (lambda m: Affine(m.bias, m.weight), r"weight[\s\S]*bias"),
}
LOOPS = {
    "scan": lambda f, x: pm.filter_scan(lambda c, _: (f(c), None), x, length=2),
    "while": lambda f, x: pm.filter_while_loop(lambda v: True, f, x),
    "fori": lambda f, x: pm.filter_fori_loop(0, 2, lambda i, v: f(v), x),
    "associative scan": lambda f, x: pm.filter_associative_scan(lambda a, b: f(a), x),
}


@pytest.mark.parametrize(("change", "where"), CHANGES.values(), ids=CHANGES)
def test_a_carry_that_changes_is_refused_by_path(change, where):
    """G8: a loop has one structure; what a step changes in it is named by path."""
    with pytest.raises(StructureError, match=rf"filter_scan[\s\S]*{where}"):
        LOOPS["scan"](change, affine())


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_refuses_a_carry_that_changes(loop):
    """A string that the step puts in an array's place is in no loop's result."""
    with pytest.raises(StructureError, match=r"bias"):
        LOOPS[loop](CHANGES["a string"][0], affine())


def test_a_carry_that_is_split_otherwise_is_refused():
    """On explicit axes of a mesh how an array is split is part of its type."""
    x, w = (
        pm.filter_shard(ramp(8, 8), on(*at, mesh=EXPLICIT)) for at in [("data",), (None, "model")]
    )

    with pytest.raises(StructureError, match=r"filter_scan[\s\S]*model"):
        pm.filter_scan(lambda c, _: (c @ w, None), x, length=2)


# ---- in every loop


def test_what_cannot_be_hashed_is_carried_all_the_same():
    """Leaves without a hash are compared by `==`; nothing is cached for them."""

    class Unhashable:
        __hash__ = None

        def __eq__(self, other):
            return isinstance(other, Unhashable)

    (_, found), _ = pm.filter_scan(
        lambda c, x: ((c[0] + x, Unhashable()), None), (jnp.float32(0), Unhashable()), ramp(2)
    )
    assert isinstance(found, Unhashable)


@pytest.mark.parametrize(
    "loop",
    [
        lambda f: pm.filter_scan(lambda c, x: (f(c), None), jnp.float32(1), length=2),
        lambda f: pm.filter_map(f, ramp(2)),
        lambda f: pm.filter_while_loop(lambda x: x < 3, f, jnp.float32(1)),
        lambda f: pm.filter_fori_loop(0, 2, lambda i, x: f(x), jnp.float32(1)),
        lambda f: pm.filter_cond(True, f, lambda x: x, jnp.float32(1)),
    ],
    ids=["scan", "map", "while", "fori", "cond"],
)
def test_nothing_outlives_the_function(loop):
    """The cache of a function is freed with it, and so are its captured values."""

    class Captured:
        value = 2.0

    captured = Captured()
    alive = weakref.ref(captured)
    loop(lambda x, captured=captured: x + captured.value)
    del captured
    gc.collect()
    assert alive() is None


def hand_scan(weight, c, xs):
    return jax.lax.scan(lambda c, x: (jnp.tanh(weight @ c + 0.5 * x),) * 2, c, xs)


@pytest.mark.parametrize(
    ("ours", "by_hand", "args"),
    [
        pytest.param(
            lambda w, c, xs: pm.filter_scan(Cell(w).step, c, xs),
            hand_scan,
            (ramp(2, 2), ramp(2), ramp(3, 2)),
            id="scan",
        ),
        pytest.param(
            lambda w, c, xs: pm.filter_scan(
                lambda c, x: x["cell"](c, x["x"]),
                c,
                {"cell": Cell(w), "x": xs},
                in_axes=pm.by({"x": 1, ...: None}),
                out_axes=1,
            ),
            lambda w, c, xs: (
                lambda c, ys: (c, jnp.moveaxis(ys, 0, 1))
            )(*hand_scan(w, c, jnp.moveaxis(xs, 1, 0))),
            (ramp(2, 2), ramp(2), ramp(2, 3)),
            id="scan along axis 1",
        ),
        pytest.param(
            lambda w, xs: pm.filter_map(Cell(w).advance, xs),
            lambda w, xs: jax.lax.map(lambda x: jnp.tanh(w @ x), xs),
            (ramp(2, 2), ramp(3, 2)),
            id="map",
        ),
        pytest.param(
            lambda w, x: pm.filter_while_loop(Cell(w).is_small, Cell(w).advance, x),
            lambda w, x: jax.lax.while_loop(
                lambda x: jnp.sum(jnp.abs(x * 0.5)) < 100.0, lambda x: jnp.tanh(w @ x), x
            ),
            (ramp(2, 2), ramp(2)),
            id="while",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("derivative", [False, True], ids=["value", "gradient"])
def test_no_operation_is_added(ours, by_hand, args, derivative):
    """The program has the operations of the one written by hand, and so has its derivative."""
    if derivative:
        ours, by_hand = (
            lambda *args, fn=fn: jax.jvp(lambda x: fn(x, *args[1:]), (args[0],), (args[0],))
            for fn in (ours, by_hand)
        )
    assert equations(ours, *args) == equations(by_hand, *args)


def test_without_jit():
    """Under jax.disable_jit the loops run in Python, with the same results."""
    with jax.disable_jit():
        found = pm.filter_scan(
            lambda c, x: ({**c, "n": c["n"] + x}, {"y": x, "s": "a"}), {"n": 0.0, "s": "b"}, ramp(3)
        )
        last = pm.filter_while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, "s"), (0, "s"))
    assert_same(found[1], {"y": ramp(3), "s": "a"})
    assert (float(found[0]["n"]), found[0]["s"], int(last[0])) == (6.0, "b", 3)

"""`filter_cond` and `filter_switch`: branches over any trees."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, StateError, StructureError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Holder, ramp

X = ramp(2)


class Net(pm.Module):
    """Arrays, a number, a function and a string, with methods to choose between."""

    weight: jax.Array
    bias: jax.Array
    rate: float = 0.5
    act: object = jnp.tanh
    name: str = "net"

    def __call__(self, x):
        return self.act(self.weight @ x)

    def shifted(self, x):
        return self(x) + self.bias


def net():
    """A small `Net`."""
    return Net(ramp(2, 2, start=np.float32(0.1)), ramp(2))


@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit, jax.jit])
def test_cond_is_the_conditional(pred, transform):
    """filter_cond(p, f, g, *args) == (f if p else g)(*args), for a Module in and out."""
    double, shift = lambda m: m.replace(weight=2 * m.weight), lambda m: m.replace(bias=m.bias + 1)
    model = net()
    choose = transform(lambda pred: pm.filter_cond(pred, double, shift, model).bias)

    assert_same(choose(jnp.asarray(pred)), (double if pred else shift)(model).bias)


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 7, np.int8(1), jnp.asarray(2)])
def test_switch_is_indexing(index):
    """filter_switch(i, fs, *args) == fs[clamped i](*args), for functions, Modules and methods."""
    branches, x = [net(), net().shifted, lambda x: -x], ramp(2)

    found = pm.filter_switch(index, branches, x)
    assert_close(found, branches[min(max(int(index), 0), 2)](x))


@pytest.mark.parametrize("value", [1, True, 0.0, "a", None, jnp.tanh, ("a", 1, {"b": None})])
def test_equal_values_stay_what_they_are(value):
    """What all branches return, and is no array, is returned itself."""
    found, array = pm.filter_cond(True, lambda: (value, np.ones(2)), lambda: (value, np.zeros(2)))

    assert_same(found, value)
    assert_close(array, jnp.ones(2))


def test_arrays_have_the_types_that_jax_gives_them():
    """Dtypes and weak types are those of jax.lax.cond."""
    strong, weak = lambda: jnp.float32(1), lambda: jnp.asarray(1.0)
    for branches in ((strong, weak), (weak, strong), (weak, weak), (strong, strong)):
        found, expected = (cond(True, *branches) for cond in (pm.filter_cond, jax.lax.cond))
        assert jax.typeof(found) == jax.typeof(expected)


def test_branches_are_traced_for_more_than_their_operands():
    """For the size of a mapped axis, too: a result for two was joined with another's for three."""

    def filled(value):
        size = jax.lax.axis_size
        return lambda x: {"x": x * 0 + jnp.full(size("i"), value), "n": size("i")}

    def choose(x):
        found = pm.filter_cond(x > 0, filled(2.0), filled(0.0), x)
        return found["x"] * found["n"]

    for n in (2, 3, 2, 4):
        found = jax.vmap(choose, axis_name="i")(jnp.ones(n))
        assert_close(found, jnp.full((n, n), 2.0 * n))


# ---- branches with different results


@ft.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
@dataclasses.dataclass
class Strict:
    """A node of another library's that takes arrays of two numbers alone."""

    w: jax.Array

    def __post_init__(self):
        if self.w.ndim != 1 or self.w.shape != (2,) or self.w.dtype != jnp.float32:
            raise ValueError("two numbers")


@pytest.mark.parametrize("wrap", [lambda x: x, Holder], ids=["bare", "in a Module"])
def test_nodes_that_look_at_their_children(wrap):
    """They were built with stand-ins of ours, which they refused; errors show them, too."""
    tree = wrap(Strict(ramp(2)))

    found = pm.filter_cond(True, lambda t: t, lambda t: t, tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    with pytest.raises(StructureError, match=r"result\[1\]: 'a' from true_fun, 'b' from false_fun"):
        pm.filter_cond(True, lambda t: (t, "a"), lambda t: (t, "b"), tree)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A static value that is compared by its fields."""

    value: object


F64 = np.dtype("float64")
UNEQUAL = [*[(1, 2), (1, 1.0), (1, True), (F64, "mean"), (F64, None), (Setting(1), Setting(2))]]


@pytest.mark.parametrize(("one", "other"), UNEQUAL, ids=str)
def test_what_python_calls_equal_is_not_one_result(one, other):
    """The branch that was not taken must not decide the result; nor the step of a loop."""
    for a, b in ((one, other), (other, one)):
        with pytest.raises(StructureError, match="filter_cond"):
            pm.filter_cond(jnp.asarray(True), lambda x: (x, a), lambda x: (x, b), X)  # noqa: B023
        if not isinstance(one, int):  # Numbers are arrays in a carry.
            with pytest.raises(StructureError, match="filter_scan"):
                pm.filter_scan(lambda c, _: ((c[0], b), None), (X, a), length=2)  # noqa: B023


DIFFERENT = {
    "shape": (lambda m: m.replace(weight=m.weight[:1]), r"\.weight: f32\[1,2\] from .*f32\[2,2\]"),
    "None": (lambda m: m.replace(bias=None), r"\.bias: None from .*f32\[2\]"),
    "two": (lambda m: m.replace(bias=None, rate=1), r"\.bias: .*\.rate: 1 from .*0\.5"),
}


@pytest.mark.parametrize(("change", "line"), DIFFERENT.values(), ids=DIFFERENT)
def test_branches_that_differ_are_shown_by_path(change, line):
    """Every path at which results differ, with both values; also in the second call."""
    for _ in range(2):
        with pytest.raises(StructureError, match=rf"(?s)filter_cond: .*{line}"):
            pm.filter_cond(True, change, lambda m: m, net())


@pytest.mark.parametrize("other", [None, ("b", "s"), ("a", "t"), ("a", jnp.ones(2))], ids=str)
def test_what_branches_show_to_a_capture_is_equal(other):
    """As many values of the same names, shapes and static values; then they come out."""

    def captured(first, second):
        return pm.capture(lambda x: pm.filter_cond(x > 0, first, second, x))(jnp.float32(3.0))

    shown = lambda name, more: lambda c: (pm.sow(name, (c, more)), c)[1]  # noqa: E731
    assert captured(shown("a", "s"), shown("a", "s")) == (3.0, {"a": (3.0, "s")})
    second = shown(*other) if other else lambda c: c
    with pytest.raises((StateError, StructureError), match="filter_cond: the branches"):
        captured(shown("a", "s"), second)


def test_no_branch_and_no_function_are_refused():
    """With the name of the argument."""
    for branches, text in (([], "no branch"), ([jnp.sin, 3], r"branches\[1\]")):
        with pytest.raises(ArgumentError, match=text):
            pm.filter_switch(0, branches)

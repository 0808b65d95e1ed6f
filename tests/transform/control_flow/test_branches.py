"""filter_cond and filter_switch: branches over any trees."""

import dataclasses
import functools as ft
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StructureError
from tests.goldens import refusals
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.trees import Holder, OwnInit, affine, double, ramp


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


class Scaled(pm.Module):
    """Multiplies."""

    scale: jax.Array

    def __call__(self, x):
        return self.scale * x

    def step(self, carry, x):
        return self(carry), x


def net():
    """A small `Net`."""
    return Net(ramp(2, 2, start=np.float32(0.1)), ramp(2))


def scale_weight(net):
    return net.replace(weight=2 * net.weight)


def shift_bias(net):
    return net.replace(bias=net.bias + 1)


both_ways = pytest.mark.parametrize("pred", [True, False])
jitted_or_not = pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit, jax.jit])


# ---- the law


@both_ways
@jitted_or_not
def test_cond_is_the_conditional(pred, transform):
    """filter_cond(p, f, g, *args) == (f if p else g)(*args), for a Module in and out."""
    model = net()
    choose = transform(lambda pred: pm.filter_cond(pred, scale_weight, shift_bias, model).bias)

    assert_same(choose(jnp.asarray(pred)), (scale_weight if pred else shift_bias)(model).bias)


@both_ways
def test_operands_of_all_kinds(pred):
    """Numbers, strings and functions in the operands reach the branches unchanged."""

    def first(x, how, n, fn):
        return {"x": fn(x) if how == "apply" else x, "n": n, "fn": fn, "how": how}

    def second(x, how, n, fn):
        return {"x": x * n, "n": n, "fn": fn, "how": how}

    operands = (ramp(2), "apply", 3, double)
    assert_same(
        pm.filter_cond(pred, first, second, *operands), (first if pred else second)(*operands)
    )


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 7, np.int8(1), jnp.asarray(2)])
def test_switch_is_indexing(index):
    """filter_switch(i, fs, *args) == fs[clamped i](*args), for functions, Modules and methods."""
    branches, x = [net(), net().shifted, lambda x: -x], ramp(2)

    found = pm.filter_switch(index, branches, x)
    assert_close(found, branches[min(max(int(index), 0), 2)](x))


def test_switch_over_unlike_modules():
    """Modules of different classes are branches, if they return the same."""
    branches = (affine(2, 2), OwnInit(2), nn.MLP(2, 2, 4, 1, key=jax.random.key(0)))

    for i, branch in enumerate(branches):
        found = pm.filter_jit(lambda bs, i: pm.filter_switch(i, bs, ramp(2)))(branches, i)
        assert_close(found, branch(ramp(2)))


def test_switch_of_one():
    """A single branch needs no choice."""
    assert_same(pm.filter_switch(5, [lambda m: {"m": m, "s": "a"}], net()), {"m": net(), "s": "a"})


# ---- results of branches


def number(value):
    """A branch that returns a number, array or whatever."""
    return lambda: value


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, 1, 1),
        (True, True, True),
        (0.0, 0.0, 0.0),
        ("a", "a", "a"),
        (None, None, None),
        (np.float32(1), np.float32(2), jnp.float32(1)),
    ],
)
def test_equal_leaves_stay_what_they_are(first, second, expected):
    """Numbers and strings on which all branches agree are returned themselves."""
    found = pm.filter_cond(True, number(first), number(second))

    assert_same(found, expected)


@pytest.mark.parametrize(
    ("first", "second", "dtype", "weak"),
    [
        pytest.param(1, 2, jnp.int32, True, id="ints"),
        pytest.param(1.0, 2.0, jnp.float32, True, id="floats"),
        pytest.param(0.0, -0.0, jnp.float32, True, id="zeros of both signs"),
        pytest.param(True, False, jnp.bool_, False, id="bools"),
        pytest.param(1, 2.0, jnp.float32, None, id="int and float"),
        pytest.param(1.5, jnp.float32(2), jnp.float32, None, id="float and array"),
        pytest.param(1.5, jnp.bfloat16(2), jnp.bfloat16, False, id="float and half"),
        pytest.param(3, np.int8(2), jnp.int8, False, id="int and NumPy scalar"),
        pytest.param(3, jnp.float16(2), jnp.float16, False, id="int and half"),
        pytest.param(jnp.asarray(1.5), jnp.bfloat16(2), jnp.bfloat16, False, id="weak array"),
        pytest.param(1j, 2.0, jnp.complex64, None, id="complex and float"),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.sampled
def test_numbers_take_the_dtype_of_what_they_meet(first, second, dtype, weak, swap):
    """A number that differs, or meets an array, becomes an array: as JAX promotes numbers."""
    pair = [second, first] if swap else [first, second]

    for pred, value in zip((True, False), pair, strict=True):
        found = pm.filter_cond(pred, *map(number, pair))
        assert (found.shape, found.dtype) == ((), dtype)
        assert complex(found) == complex(value)
        assert weak in (None, found.weak_type)


@both_ways
def test_one_branch_changes_a_number_the_other_passes_on(pred):
    """A Module whose number is changed by one branch alone comes out with an array there."""
    change = lambda m: m.replace(rate=m.rate * jnp.sum(m.bias))  # noqa: E731

    found = pm.filter_cond(pred, change, scale_weight, net())
    expected = (change if pred else scale_weight)(net())
    assert_same(found.weight, expected.weight)
    assert float(found.rate) == float(expected.rate)
    assert (found.act, found.name) == (jnp.tanh, "net")


def test_three_branches_with_numbers():
    """All branches of a switch are joined: numbers in some, arrays in others."""
    branches = [number([1, "a"]), number([jnp.bfloat16(2), "a"]), number([3.0, "a"])]

    for i in range(3):
        found = pm.filter_jit(lambda i: pm.filter_switch(i, branches))(jnp.asarray(i))
        assert (found[0].dtype, float(found[0]), found[1]) == (jnp.bfloat16, i + 1.0, "a")


def test_branches_are_traced_once_or_twice():
    """Once; again, if numbers have to become arrays for the first time; later calls not at all."""
    traces = []

    def noted(value):
        def branch(x):
            traces.append(value)
            return x * value, value

        return branch

    same, other = noted(2.0), noted(2.0)
    for start in (1.0, 2.0):
        pm.filter_cond(True, same, other, jnp.float32(start))
    assert len(traces) == 2
    other = noted(3.0)
    for pred in (True, False):
        found = pm.filter_cond(pred, same, other, jnp.float32(1.0))
        assert float(found[1]) == (2.0 if pred else 3.0)
    assert len(traces) == 6
    pm.filter_cond(True, same, other, jnp.ones(2))
    assert len(traces) == 8


def test_methods_are_traced_once_for_all_instances():
    """The arrays of Modules are inputs: another instance is another call of the same program."""
    traces = []

    class Scaled(pm.Module):
        scale: jax.Array

        def up(self, x):
            traces.append(None)
            return x * self.scale

        def down(self, x):
            traces.append(None)
            return x / self.scale

    def run(scale):
        model = Scaled(jnp.float32(scale))
        return float(pm.filter_cond(True, model.up, model.down, jnp.float32(3)))

    assert [run(1), run(2)] == [3.0, 6.0]
    assert len(traces) == 2


def test_x64_and_back():
    """Numbers become arrays of the precision of the day."""
    first, second = number(1.0), number(2.0)

    with jax.enable_x64(True):
        assert pm.filter_cond(True, first, second).dtype == jnp.float64
    assert pm.filter_cond(True, first, second).dtype == jnp.float32


# ---- other transforms


def test_cond_under_vmap():
    """With a condition for each member, each member gets its branch; State-like dicts included."""
    model = net()
    found = pm.filter_vmap(
        lambda p, x: pm.filter_cond(p, lambda m, x: (m(x), "a"), lambda m, x: (x, "a"), model, x)
    )(jnp.asarray([True, False]), ramp(2, 2))

    assert_close(found[0], jnp.stack([model(ramp(2, 2)[0]), ramp(2, 2)[1]]))
    assert found[1] == "a"


@both_ways
def test_gradient_of_cond(pred):
    """The gradient is that of the branch that was taken, for Modules that are branches, too."""

    def loss(model, x):
        return jnp.sum(pm.filter_cond(pred, model, model.shifted, x) ** 2)

    found = pm.filter_jit(pm.filter_grad(loss))(net(), ramp(2))
    branch = Net.__call__ if pred else Net.shifted
    expected = pm.filter_grad(lambda m, x: jnp.sum(branch(m, x) ** 2))(net(), ramp(2))
    assert_close(found, expected)


def test_cond_inside_cond_inside_scan():
    """Control flow nests."""

    def step(carry, x):
        inner = lambda m: pm.filter_cond(x > 2, shift_bias, lambda m: m, m)  # noqa: E731
        return pm.filter_cond(x > 1, inner, scale_weight, carry), carry.name

    model, names = pm.filter_jit(lambda xs: pm.filter_scan(step, net(), xs))(ramp(3))
    assert_same(model, shift_bias(scale_weight(net())))
    assert names == "net"


def test_state_through_branches():
    """A State goes in and comes out, changed or not."""
    norm, state = pm.make_with_state(nn.BatchNorm)(2)
    x = ramp(4, 2)

    def train(x, state):
        return norm(x, state)

    out, after = pm.filter_cond(True, train, lambda x, state: (x, state), x, state)
    expected, expected_state = norm(x, pm.make_with_state(nn.BatchNorm)(2)[1])
    assert_close(out, expected)
    assert_close(jax.tree.leaves(after), jax.tree.leaves(expected_state))


def test_without_jit():
    """Under jax.disable_jit the chosen branch alone runs."""
    with jax.disable_jit():
        found = pm.filter_cond(True, lambda m: (m, "a"), lambda m: 1 / 0, net())

    assert_same(found, (net(), "a"))


def test_without_jit_one_branch_after_the_other():
    """Under jax.disable_jit, results of both branches in different calls are joined."""
    first, second = number((1.0, "a")), number((2.0, "a"))

    with jax.disable_jit():
        found = [pm.filter_cond(pred, first, second) for pred in (True, False, True)]
    assert [(float(x), name) for x, name in found] == [(1.0, "a"), (2.0, "a"), (1.0, "a")]


def test_no_trace_outlives_its_call():
    """Tracers go when the trace is done, even if branches had to be traced twice."""

    def run(w, x):
        by_function = pm.filter_cond(x > 0, lambda: (1.0, w), lambda: (x + w, w))
        by_method = pm.filter_cond(x > 0, Scaled(w), Scaled(x).__call__, 2.0)
        steps, _ = pm.filter_scan(Scaled(w).step, x, length=2)
        return by_function, by_method, steps

    with jax.checking_leaks():
        jax.jit(run)(jnp.float32(1), jnp.float32(2))


@pytest.mark.parametrize("derivative", [False, True], ids=["value", "gradient"])
def test_no_operation_is_added(derivative):
    """The program has the operations of the one written by hand, and so has its derivative."""

    def ours(w, b, x, p, i):
        model = Net(w, b)
        y = pm.filter_cond(p, model, model.shifted, x)
        return pm.filter_switch(i, [lambda m: (m.weight, m), lambda m: (m.weight * 2, m)], model)[
            0
        ] @ y  # fmt: skip

    def by_hand(w, b, x, p, i):
        y = jax.lax.cond(
            p, lambda w, b, x: jnp.tanh(w @ x), lambda w, b, x: jnp.tanh(w @ x) + b, w, b, x
        )
        return jax.lax.switch(i, [lambda w, b: (w, w, b), lambda w, b: (w * 2, w, b)], w, b)[0] @ y

    args = (ramp(2, 2), ramp(2), ramp(2), jnp.asarray(True), jnp.asarray(1))
    if derivative:
        ours, by_hand = (
            lambda w, *args, fn=fn: jax.jvp(lambda w: fn(w, *args), (w,), (w,))
            for fn in (ours, by_hand)
        )
    assert equations(ours, *args) == equations(by_hand, *args)


# ---- mistakes


def test_the_branch_of_a_switch_is_named():
    """The first branch that differs from branches[0] is named by its number."""
    branches = [number([1.0, "a"]), number([2.0, "a"]), number([3.0, "b"])]

    for _ in range(2):  # The trace of the first call does not hide the mistake.
        with pytest.raises(
            StructureError,
            match=r"filter_switch: [\s\S]*"
            r"result\[1\]: 'a' from branches\[0\], 'b' from branches\[2\]",
        ):
            pm.filter_switch(0, branches)


# ---- threads


@pytest.mark.parametrize("interval", [1e-6, 5e-3])
@pytest.mark.parametrize("transform", ["cond", "switch", "in a program"])
@pytest.mark.sampled
def test_branches_to_promote_from_several_threads(transform, interval):
    """The first calls of shared branches, at once: each gets the result of a single thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        for _ in range(8):
            first, second = (lambda x: {"n": 1, "x": x}), (lambda x: {"n": 2.5, "x": x})

            def call(p, first=first, second=second):
                if transform == "cond":
                    return pm.filter_cond(p, first, second, jnp.float32(3))
                run = pm.filter_jit(pm.filter_switch) if transform != "switch" else pm.filter_switch
                return run(jnp.asarray(not p, int), [first, second], jnp.float32(3))

            start = threading.Barrier(4)

            def run(p, start=start, call=call):
                start.wait()
                return call(p)

            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(run, [True, False, True, False]))
            for p, result in zip([True, False, True, False], found, strict=True):
                assert_close(result, {"n": jnp.asarray(1.0 if p else 2.5), "x": jnp.float32(3)})
    finally:
        sys.setswitchinterval(before)


def test_branches_are_traced_for_more_than_their_operands():
    """For the size of a mapped axis, too: a result for two was joined with another's for three."""

    def zeros(x):
        return {"x": x * jnp.zeros(jax.lax.axis_size("i")), "n": jax.lax.axis_size("i")}

    def ones(x):
        return {"x": x + jnp.ones(jax.lax.axis_size("i")), "n": jax.lax.axis_size("i")}

    def choose(x):
        found = pm.filter_cond(x > 0, ones, zeros, x)
        return found["x"] * found["n"]

    for n in (2, 3, 2, 4):
        found = jax.vmap(choose, axis_name="i")(jnp.ones(n))
        assert_close(found, jnp.full((n, n), 2.0 * n))


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
    """They were built with stand-ins of ours, which they refused."""
    tree = wrap(Strict(ramp(2)))

    def total(tree):
        return jnp.sum(jax.tree.leaves(tree)[0])

    for found in (
        pm.filter_cond(True, lambda t: t, lambda t: t, tree),
        pm.filter_jit(lambda t: t)(tree),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert_close(jax.tree.leaves(found)[0], ramp(2))
    assert_close(jax.tree.leaves(pm.filter_grad(total)(tree))[0], jnp.ones(2))
    assert_close(pm.filter_jvp(total, (tree,), (tree,))[1], total(tree))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A static value that is compared by its fields."""

    value: object


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.dtype("float64"), "mean"),
        (np.dtype("float64"), None),
        (Setting(1), Setting(1.0)),
        (Setting(0.0), Setting(-0.0)),
        ({(1,): 0}, {(1.0,): 0}),
        ({0.0: 0}, {-0.0: 0}),
    ],
    ids=str,
)
def test_what_python_calls_equal_is_not_one_result(one, other):
    """The branch that was not taken must not decide the result; nor the step of a loop."""
    x = jnp.ones(2)
    for first, second in ((one, other), (other, one)):
        with pytest.raises(StructureError, match=r"filter_cond"):
            pm.filter_cond(
                jnp.asarray(True), lambda x, a=first: (x, a), lambda x, b=second: (x, b), x
            )
        with pytest.raises(StructureError, match=r"filter_scan"):
            pm.filter_scan(lambda c, _, b=second: ((c[0], b), None), (x, first), None, length=2)


test_refusals = refusals(globals())

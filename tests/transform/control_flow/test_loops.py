"""filter_scan, filter_map, filter_associative_scan, filter_while_loop and filter_fori_loop."""

import functools as ft
import gc
import weakref

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, PartitionSpec

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError, StateError, StructureError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.laws import law
from tests.helpers.trees import Affine, Holder, Static, affine, double, ramp


class Cell(pm.Module):
    """A recurrent cell: arrays, a number, a function and a string."""

    weight: jax.Array
    rate: float = 0.5
    act: object = jnp.tanh
    name: str = "cell"

    def __call__(self, carry, x):
        return self.step(carry, x)

    def step(self, carry, x):
        carry = self.act(self.weight @ carry + self.rate * x)
        return carry, carry

    def advance(self, x):
        return self.act(self.weight @ x)

    def is_small(self, x):
        return jnp.sum(jnp.abs(x * self.rate)) < 100.0


def cell(start=0.1):
    """A small `Cell`."""
    return Cell(ramp(2, 2, start=np.float32(start)))


def stacked(count=3):
    """Square layers in one."""
    return pm.filter_vmap(lambda start: affine(2, 2, start))(jnp.arange(float(count)))


# ---- filter_scan is the loop


AXES = st.sampled_from([0, 1, -1, -2])


@settings(law, max_examples=8)
@given(AXES, st.one_of(AXES, st.none()), AXES, st.sampled_from([0, -2]), st.booleans())
def test_scan_is_the_loop(first, second, out, total, reverse):
    """filter_scan(f, init, xs) == for x in xs: init, y = f(init, x), for any axes in and out."""
    shape = [2, 3]
    full = [
        np.insert(shape, axis if axis is None or axis >= 0 else 3 + axis, 4) if axis is not None
        else shape
        for axis in (first, second)
    ]  # fmt: skip
    xs = {"a": ramp(*full[0]), "b": [ramp(*full[1]), "text"]}
    in_axes = {"a": first, "b": [second, None]}

    def step(carry, x):
        carry = carry * 0.5 + jnp.sum(x["b"][0]) + (1 if x["b"][1] == "text" else 0)
        return carry, {"y": carry + x["a"], "total": jnp.sum(x["a"])[None], "name": "y"}

    found = pm.filter_scan(
        step, ramp(2, 3), xs, reverse=reverse, in_axes=in_axes,
        out_axes=pm.by({"total": total, ...: pm.if_array(out)}),
    )  # fmt: skip
    carry, ys = ramp(2, 3), []
    for i in range(4)[:: -1 if reverse else 1]:
        a = jnp.take(xs["a"], i, first)
        b = xs["b"][0] if second is None else jnp.take(xs["b"][0], i, second)
        carry, y = step(carry, {"a": a, "b": [b, "text"]})
        ys.append(y)
    ys = ys[:: -1 if reverse else 1]
    assert found[1].pop("name") == "y"
    expected = {
        "y": jnp.stack([y["y"] for y in ys], out),
        "total": jnp.stack([y["total"] for y in ys], total),
    }
    assert_close(found, (carry, expected))


@pytest.mark.parametrize("init", [0, 0.0, 1j, np.int16(2), jnp.float32(1), ramp(2)])
@pytest.mark.parametrize(
    "step",
    [
        lambda c, x: (c, c),
        lambda c, x: (c + c, (c * 1, x)),
    ],
)
def test_arrays_and_numbers_are_treated_as_by_jax(init, step):
    """Values, dtypes and weak types are those of jax.lax.scan, for numbers in the carry, too."""
    found = pm.filter_scan(step, init, jnp.arange(3), length=3)
    expected = jax.lax.scan(step, init, jnp.arange(3), length=3)

    assert_same(found, expected)
    weak = [jax.typeof(x).weak_type for x in jax.tree.leaves(found)]
    assert weak == [jax.typeof(x).weak_type for x in jax.tree.leaves(expected)]


def test_a_weakly_typed_carry_takes_the_dtype_of_the_step():
    """As in jax.lax.scan, a number to start from becomes what the step makes of it."""
    total, _ = pm.filter_scan(lambda c, x: (c + x, None), 0, jnp.ones(3, jnp.bfloat16))

    assert (total.dtype, total.weak_type) == (jnp.bfloat16, False)


def test_number_in_a_module_that_is_carried_unchanged():
    """A Module may be carried whole: its numbers, functions and strings come out as they were."""
    model, _ = pm.filter_scan(lambda m, x: (m.replace(weight=m.weight + x), None), cell(), ramp(3))

    assert (model.rate, model.act, model.name) == (0.5, jnp.tanh, "cell")
    np.testing.assert_allclose(model.weight, cell().weight + 6.0)


def test_number_in_a_module_that_changes():
    """A number that the step changes becomes an array."""
    step = lambda m, x: (m.replace(rate=m.rate * 2), m.rate)  # noqa: E731
    model, rates = pm.filter_scan(step, cell(), length=3)

    assert float(model.rate) == 4.0
    np.testing.assert_array_equal(rates, [0.5, 1.0, 2.0])


def test_what_is_no_array_in_xs_is_passed_as_it_is():
    """Numbers, strings and functions in xs reach every step unchanged."""
    seen = []

    def step(carry, x):
        seen.append((x["n"], x["f"], x["s"]))
        return carry + x["f"](x["a"]), None

    xs = {"a": ramp(3), "n": 2.5, "f": double, "s": "text"}
    assert float(pm.filter_scan(step, jnp.zeros(()), xs)[0]) == 12.0
    assert seen == [(2.5, double, "text")]


def test_scan_over_layers():
    """A stacked Module is taken apart along its leading axis: each step calls one layer."""
    layers, x = stacked(), ramp(2)

    found, _ = pm.filter_scan(lambda x, layer: (jnp.tanh(layer(x)), None), x, layers)
    for layer in pm.unstack(layers):
        x = jnp.tanh(layer(x))
    assert_close(found, x)


def test_by_and_modules_as_axes():
    """`by` and a Module of axes say what is taken apart and what every step gets whole."""
    layers = Affine(stacked().weight, ramp(2))
    run = ft.partial(pm.filter_scan, lambda x, layer: (layer(x), layer.bias), ramp(2), layers)

    by_rule = run(in_axes=pm.by({"weight": 0, ...: None}))
    assert_same(run(in_axes=Affine(0, None)), by_rule)
    assert by_rule[1].shape == (3, 2)
    x = ramp(2)
    for weight in layers.weight:
        x = weight @ x + layers.bias
    assert_close(by_rule[0], x)


def test_results_may_be_modules():
    """Modules made by the steps come out as one stacked Module: as filter_vmap builds them."""
    _, made = pm.filter_scan(lambda c, start: (c, Static(start * ramp(2), 3)), None, ramp(3))

    assert_same(made, pm.filter_vmap(lambda start: Static(start * ramp(2), 3))(ramp(3)))


def test_state_is_carried(key):
    """A State goes through the steps; the old one may not be used again inside a step."""
    norm, state = pm.make_with_state(nn.BatchNorm)(2)
    xs = jax.random.normal(key, (3, 4, 2))

    def step(state, x):
        out, state = norm(x, state)
        return state, out

    after, outs = pm.filter_scan(step, state, xs)
    _, state = pm.make_with_state(nn.BatchNorm)(2)
    for x, out in zip(xs, outs, strict=True):
        expected, state = norm(x, state)
        assert_close(out, expected, atol=1e-5)
    assert_close(jax.tree.leaves(after), jax.tree.leaves(state))

    with pytest.raises(StateError, match="newest State"):
        pm.filter_scan(lambda s, x: (s, norm(x, s)[0]), pm.make_with_state(nn.BatchNorm)(2)[1], xs)


def test_keys_are_scanned_and_carried(key):
    """Random keys are arrays like others."""

    def step(key, own):
        key, sub = jax.random.split(key)
        return key, jax.random.normal(sub) + jax.random.normal(own)

    found = pm.filter_scan(step, key, jax.random.split(key, 2))
    expected = jax.lax.scan(step, key, jax.random.split(key, 2))
    assert_same(found, expected)


@pytest.mark.parametrize("unroll", [1, 2, True])
def test_unroll_and_length_are_those_of_jax(unroll):
    """`unroll` changes how, `length` says how often."""
    found = pm.filter_scan(lambda c, _: (c * 2, c), jnp.float32(1), length=3, unroll=unroll)

    assert_same(found, (jnp.float32(8), jnp.asarray([1, 2, 4], jnp.float32)))


def test_no_steps_at_all():
    """A scan over nothing gives back the carry, and results of size zero."""
    carry, ys = pm.filter_scan(lambda c, x: (c * 2, {"y": c, "s": "a"}), ramp(2), jnp.zeros((0, 3)))

    assert_same(carry, ramp(2))
    assert_same(ys, {"y": jnp.zeros((0, 2)), "s": "a"})


# ---- what may be a step


def by_key(carry, x):
    """The step of `cell()` as a function of dicts."""
    return cell().step(carry, x)


class Callable:
    """An ordinary object that can be called."""

    def __call__(self, carry, x):
        return by_key(carry, x)

    def method(self, carry, x):
        return by_key(carry, x)


STEPS = {
    "function": lambda: by_key,
    "lambda": lambda: lambda c, x: by_key(c, x),
    "Module": cell,
    "bound method": lambda: cell().step,
    "Partial": lambda: pm.Partial(Cell.step, cell()),
    "jax Partial": lambda: jax.tree_util.Partial(lambda w, c, x: cell()(c, x), ramp(2)),
    "functools.partial": lambda: ft.partial(lambda m, c, x: m(c, x), cell()),
    "object": Callable,
    "its method": lambda: Callable().method,
    "jax.jit": lambda: jax.jit(by_key),
    "filter_jit": lambda: pm.filter_jit(by_key),
    "filter_jit of a Module": lambda: pm.filter_jit(cell()),
    "filter_checkpoint": lambda: pm.filter_checkpoint(cell()),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS.keys())
def test_anything_callable_is_a_step(make):
    """Functions, Modules, methods, partials, transformed functions: the result is the same."""
    init, xs = ramp(2), ramp(3, 2)

    found = pm.filter_scan(make(), init, xs)
    assert_close(found, jax.lax.scan(lambda c, x: cell().step(c, x), init, xs))


def test_a_class_is_a_function():
    """filter_map over a class builds its instances one after the other."""
    assert_same(pm.filter_map(Holder, {"x": ramp(3), "s": "a"}), Holder({"x": ramp(3), "s": "a"}))


# ---- traced once, kept as long as needed


def counted(fn):
    """A function that notes its traces."""
    traces = []

    @ft.wraps(fn)
    def run(*args):
        traces.append(None)
        return fn(*args)

    return run, traces


def test_the_same_function_is_traced_once():
    """Calls outside jit find what the first one compiled; another structure is another program."""
    step, traces = counted(lambda c, x: ({**c, "n": c["n"] + x["a"]}, None))

    for start in (0.0, 1.0):
        pm.filter_scan(step, {"n": jnp.float32(start), "s": "a"}, {"a": ramp(3)})
    assert len(traces) == 1
    pm.filter_scan(step, {"n": jnp.float32(0), "s": "b"}, {"a": ramp(3)})
    pm.filter_scan(step, {"n": jnp.float32(0), "s": "a"}, {"a": ramp(3)}, in_axes=pm.if_array(-1))
    assert len(traces) == 3


def test_a_method_is_traced_once_for_all_instances():
    """The arrays of a Module are inputs, those that each step gets whole as well."""
    traces = []

    class Scaled(pm.Module):
        scale: jax.Array

        def step(self, carry, x):
            traces.append(None)
            return carry * self.scale + x["a"] * x["b"], None

    def run(scale, b):
        xs = {"a": ramp(2), "b": jnp.float32(b)}
        return pm.filter_scan(
            Scaled(jnp.float32(scale)).step, jnp.float32(1), xs, in_axes={"a": 0, "b": None}
        )[0]

    assert [float(run(1, 1)), float(run(2, 1)), float(run(1, 3))] == [4.0, 8.0, 10.0]
    assert len(traces) == 1


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
    """What is kept for a function goes with it, and so does what the function had captured."""

    class Captured:
        value = 2.0

    captured = Captured()
    alive = weakref.ref(captured)
    loop(lambda x, captured=captured: x + captured.value)
    del captured
    gc.collect()
    assert alive() is None


def test_what_cannot_be_hashed_is_carried_all_the_same():
    """Leaves without a hash are compared by `==`; nothing is kept for them."""

    class Unhashable:
        __hash__ = None

        def __eq__(self, other):
            return isinstance(other, Unhashable)

    (_, found), _ = pm.filter_scan(
        lambda c, x: ((c[0] + x, Unhashable()), None), (jnp.float32(0), Unhashable()), ramp(2)
    )
    assert isinstance(found, Unhashable)


def test_clear_caches_forgets_steps(monkeypatch):
    """After clear_caches a step is traced again, even if JAX has its trace still."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    step, traces = counted(lambda c, x: (c + x, None))

    for _ in range(2):
        pm.filter_scan(step, jnp.float32(0), ramp(2))
        pm.clear_caches()
    assert len(traces) == 2


# ---- no operation is added


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
        pytest.param(
            lambda w, x, n: pm.filter_fori_loop(0, n, lambda i, m: (m[0], m[0].advance(m[1])),
                                                (Cell(w), x))[1],
            lambda w, x, n: jax.lax.fori_loop(0, n, lambda i, x: jnp.tanh(w @ x), x),
            (ramp(2, 2), ramp(2), 3),
            id="fori",
        ),
        pytest.param(
            lambda x: pm.filter_associative_scan(
                lambda a, b: a.replace(weight=a.weight * b.weight), Affine(x, x)
            ).weight,
            lambda x: jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1]), (x, x))[0],
            (ramp(4),),
            id="associative scan",
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


# ---- other transforms


def test_scan_inside_and_around_other_transforms():
    """jit of vmap of grad of scan of checkpoint gives what the loop gives."""
    layers, xs = stacked(), ramp(4, 2)

    @pm.filter_checkpoint
    def step(x, layer):
        return jnp.tanh(layer(x) * 0.01), None

    def loss(layers, x):
        return jnp.sum(pm.filter_scan(step, x, layers)[0])

    def loop(layers, x):
        for layer in pm.unstack(layers):
            x = jnp.tanh(layer(x) * 0.01)
        return jnp.sum(x)

    grads = pm.filter_jit(pm.filter_vmap(pm.filter_grad(loss), in_axes=(None, 0)))
    expected = [pm.filter_grad(loop)(layers, x) for x in xs]
    assert_close(grads(layers, xs), pm.stack(expected), rtol=1e-4)


def test_gradient_reaches_the_step_and_what_it_gets_whole():
    """A Module that is the step, and arrays that are not taken apart, are differentiated."""

    def loss(parts):
        cell, shared = parts
        xs = {"x": ramp(3, 2), "shared": shared}
        axes = pm.by({"x": 0, ...: None})
        run = lambda c, x: cell(c, x["x"] * x["shared"])  # noqa: E731
        return jnp.sum(pm.filter_scan(run, ramp(2), xs, in_axes=axes)[0])

    def by_hand(parts):
        cell, shared = parts
        c = ramp(2)
        for x in ramp(3, 2):
            c, _ = cell(c, x * shared)
        return jnp.sum(c)

    parts = (cell(-0.3), jnp.asarray([0.1, -0.2]))
    assert_close(pm.filter_grad(loss)(parts), pm.filter_grad(by_hand)(parts), rtol=1e-4)


def test_without_jit():
    """Under jax.disable_jit the loops run in Python, with the same results."""
    with jax.disable_jit():
        found = pm.filter_scan(
            lambda c, x: ({**c, "n": c["n"] + x}, {"y": x, "s": "a"}), {"n": 0.0, "s": "b"}, ramp(3)
        )
        last = pm.filter_while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, "s"), (0, "s"))
    assert_same(found[1], {"y": ramp(3), "s": "a"})
    assert (float(found[0]["n"]), found[0]["s"], int(last[0])) == (6.0, "b", 3)


# ---- filter_map


@pytest.mark.parametrize("batch_size", [None, 2, 3, 4])
def test_map_is_vmap(batch_size):
    """filter_map(f, xs) == filter_vmap(f)(xs), whatever the size of batches."""
    layers = stacked()
    xs = (layers, ramp(2, 3), "double")

    def apply(x):
        layer, x, how = x
        return {"y": 2 * layer(x) if how == "double" else x, "layer": layer, "how": how}

    axes = (0, 1, None)
    found = pm.filter_map(apply, xs, batch_size=batch_size, in_axes=axes, out_axes=pm.if_array(-1))
    expected = pm.filter_vmap(apply, in_axes=(axes,), out_axes=pm.if_array(-1))(xs)
    assert found["how"] == expected["how"] == "double"
    assert_close(found["y"], expected["y"])
    assert_same(found["layer"], expected["layer"])


# ---- filter_associative_scan


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
def test_associative_scan_is_that_of_jax(axis, reverse):
    """On the arrays it is jax.lax.associative_scan; the rest comes out as it went in."""
    elems = Affine(ramp(2, 2) * 0.5, [ramp(2), "text", 3])

    def combine(a, b):
        return Affine(a.weight * b.weight, [jnp.maximum(a.bias[0], b.bias[0]), *b.bias[1:]])

    found = pm.filter_associative_scan(combine, elems, reverse=reverse, axis=axis)
    # From the end, the axis is another one in each array.
    run = ft.partial(jax.lax.associative_scan, reverse=reverse)
    product = run(jnp.multiply, elems.weight, axis=axis % 2)
    assert_same(found, Affine(product, [run(jnp.maximum, elems.bias[0]), "text", 3]))


# ---- filter_while_loop and filter_fori_loop


def test_while_loop_is_the_loop():
    """filter_while_loop(c, f, x) == while c(x): x = f(x), for a Module with everything in it."""
    model = Holder({"cell": cell(), "n": 0, "s": "text"})

    def cond(m):
        return m.content["n"] < 3

    def body(m):
        inner = m.content["cell"]
        grown = inner.replace(weight=inner.weight * 2)
        return Holder({**m.content, "cell": grown, "n": m.content["n"] + 1})

    found, expected = pm.filter_while_loop(cond, body, model), model
    while cond(expected):
        expected = body(expected)
    assert_same(found.content["cell"], expected.content["cell"])
    assert (int(found.content["n"]), found.content["s"]) == (3, "text")


def test_while_loop_of_methods():
    """Condition and body may be methods of a Module, whose arrays are inputs."""
    model = cell(1.0)

    grow = pm.Partial(lambda m, x: m.weight @ x, model)
    found, expected = pm.filter_while_loop(model.is_small, grow, ramp(2)), ramp(2)
    while model.is_small(expected):
        expected = grow(expected)
    assert_close(found, expected)


@pytest.mark.parametrize("upper", [3, jnp.asarray(3), np.int64(3)])
@pytest.mark.parametrize("jit", [False, True])
def test_fori_loop_is_the_loop(upper, jit):
    """filter_fori_loop(a, b, f, x) == for i in range(a, b): x = f(i, x), bounds traced or not."""

    def run(upper):
        return pm.filter_fori_loop(
            1, upper, lambda i, v: {"x": v["x"] * (i + 1), "m": v["m"]}, {"x": 1, "m": "mode"}
        )

    found = (pm.filter_jit(run) if jit else run)(upper)
    assert (int(found["x"]), found["m"]) == (6, "mode")


def test_fori_loop_with_static_bounds_is_differentiable():
    """As in jax.lax, and so is a loop of methods."""
    loss = lambda m: jnp.sum(pm.filter_fori_loop(0, 3, lambda i, x: m.advance(x), ramp(2)))  # noqa: E731
    by_hand = lambda m: jnp.sum(m.advance(m.advance(m.advance(ramp(2)))))  # noqa: E731

    assert_close(pm.filter_grad(loss)(cell()), pm.filter_grad(by_hand)(cell()))


# ---- mistakes


def scan_once(step, init):
    return pm.filter_scan(step, init, length=2)


CHANGES = {
    "shape": (
        lambda m: m.replace(weight=m.weight[:1]),
        r"VAL\.weight: f32\[2,3\] -> f32\[1,3\]\n  arrays keep their shapes from step to step",
    ),
    "dtype": (
        lambda m: m.replace(weight=m.weight.astype(jnp.float16)),
        r"VAL\.weight: f32\[2,3\] -> f16\[2,3\]\n"
        r"  cast what the step returns, or what the loop starts from:\n"
        r"      VAL\.weight\.astype\(jnp\.float32\)   # in the step\n"
        r"      jnp\.asarray\(VAL\.weight, jnp\.float16\)   # before the loop",
    ),
    "weak type": (
        lambda m: m.replace(weight=m.weight > 0),
        r"VAL\.weight: f32\[2,3\] -> bool\[2,3\]",
    ),
    "None": (lambda m: m.replace(bias=None), r"VAL\.bias: f32\[2\] -> None"),
    "a string": (
        lambda m: m.replace(bias="b"),
        r"VAL\.bias: f32\[2\] -> 'b'\n  what is no array is part of the program",
    ),
    "a container": (lambda m: m.replace(bias=[m.bias]), r"VAL\.bias: f32\[2\] -> list of 1"),
    "another class": (lambda m: Holder(m.weight), r"VAL: Affine -> Holder"),
    "two places": (
        lambda m: Affine(m.bias, m.weight),
        r"VAL\.weight: f32\[2,3\] -> f32\[2\]\n"
        r"  at VAL\.bias: f32\[2\] -> f32\[2,3\]",
    ),
}

LOOPS = {
    "carry": ("filter_scan", lambda f, x: scan_once(lambda c, _: (f(c), None), x)),
    "val": ("filter_while_loop", lambda f, x: pm.filter_while_loop(lambda v: True, f, x)),
    "val ": ("filter_fori_loop", lambda f, x: pm.filter_fori_loop(0, 2, lambda i, v: f(v), x)),
    "elems": ("filter_associative_scan", lambda f, x: pm.filter_associative_scan(
        lambda a, b: f(a), x)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "change"),
    [
        *((loop, change) for loop in ("carry", "val") for change in CHANGES),
        *((loop, change) for loop in ("val ", "elems") for change in ("None", "a string")),
    ],
)
def test_a_carry_that_changes_is_shown_before_and_after(loop, change):
    """Each path at which the carry changes is named, with what was there and what came."""
    name, run = LOOPS[loop]
    alter, text = CHANGES[change]
    text = text.replace("VAL", loop.strip())
    # An associative scan over two members combines one with one.
    text = text.replace(r"f32\[2\]", r"f32\[1\]") if loop == "elems" else text

    with pytest.raises(StructureError, match=rf"{name} of <lambda>: expected the[\s\S]*at {text}"):
        run(alter, affine())


def test_associative_scan_shows_what_changed():
    """Shapes and dtypes that the function changes are named by path."""
    with pytest.raises(
        StructureError,
        match=r"filter_associative_scan of <lambda>: expected the elems to come out of each step "
        r"as it went in, got a change in 1 place\.\n  at elems\['x'\]: f32\[2\] -> i32\[2\]",
    ):
        pm.filter_associative_scan(lambda a, b: {"x": a["x"].astype(int)}, {"x": ramp(4)})


@pytest.mark.parametrize(
    ("step", "init", "text"),
    [
        (
            lambda c: {"n": c["n"] * 0.5},
            {"n": jnp.int32(1)},
            r"carry\['n'\]: i32\[\] -> f32\[\] \(weak\)\n"
            r"  cast what the step returns, or what the loop starts from:\n"
            r"      carry\['n'\]\.astype\(jnp\.int32\)   # in the step\n"
            r"      jnp\.asarray\(carry\['n'\], jnp\.float32\)   # before the loop",
        ),
        (
            lambda c: [0.5],
            [jnp.int32(1)],
            r"carry\[0\]: i32\[\] -> 0\.5\n[\s\S]*"
            r"      jnp\.asarray\(0\.5, jnp\.int32\)   # in the step\n",
        ),
        (
            lambda c: c.astype(jnp.int32),
            0.5,
            r"carry: f32\[\] \(weak\) -> i32\[\]\n[\s\S]*"
            r"      jnp\.asarray\(carry, jnp\.int32\)   # before",
        ),
        (lambda c: c + 1, True, r"carry: bool\[\] -> i32\[\]"),
        (
            lambda c: {"a": c["a"], "c": 1},
            {"a": 1, "b": 2},
            r"carry\['b'\]: i32\[\] \(weak\) -> nothing\n  at carry\['c'\]: nothing -> 1",
        ),
        (lambda c: (c[0], "b"), (1, "a"), r"carry\[1\]: 'a' -> 'b'"),
        (
            lambda c: (c[0], lambda: 0),
            (1, double),
            r"carry\[1\]: the function double -> the function .*<lambda>\n"
            r"  what is no array is part of the program, which is the same for every step",
        ),
        (
            lambda c: c.replace(size=3),
            Static(ramp(2), 2),
            r"carry\.size: 2 -> 3",
        ),
    ],
)
def test_a_carry_that_changes_in_type_or_in_what_is_no_array(step, init, text):
    """Weak types come with the cast that cures them; strings, functions, sizes by path."""
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(StructureError, match=rf"filter_scan of <lambda>[\s\S]*at {text}"),
    ):
        scan_once(lambda c, x: (step(c), None), init)


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda c: c, r"f32\[2\]"),
        (lambda c: (c, c, c), "3 values"),
        (lambda c: None, "None"),
        (lambda c: affine(), r"Affine\(weight=f32\[2,3\], bias=f32\[2\]\)"),
    ],
)
def test_a_step_that_returns_no_pair(result, got):
    """The step returns the carry and something beside it."""
    with pytest.raises(
        StructureError, match=rf"filter_scan of <lambda>: expected a step that returns a pair "
        rf"\(carry, y\), got {got}\.\n[\s\S]*return carry, None"
    ):  # fmt: skip
        scan_once(lambda c, x: result(c), ramp(2))


def scan_xs(xs, **options):
    return pm.filter_scan(lambda c, x: (c, x), None, xs, **options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: pm.filter_scan(3, None, ramp(2)),
            ArgumentError,
            r"filter_scan\(f\): expected something callable, got 3",
        ),
        (lambda: pm.filter_map("f", ramp(2)), ArgumentError, r"filter_map\(f\): expected some"),
        (
            lambda: pm.filter_associative_scan(None, ramp(2)),
            ArgumentError,
            r"filter_associative_scan\(fn\): expected something callable",
        ),
        (
            lambda: pm.filter_while_loop(True, double, 1),
            ArgumentError,
            r"filter_while_loop\(cond_fun\): expected something callable",
        ),
        (
            lambda: pm.filter_while_loop(double, [], 1),
            ArgumentError,
            r"filter_while_loop\(body_fun\): expected something callable",
        ),
        (
            lambda: pm.filter_fori_loop(0, 1, 2, 3),
            ArgumentError,
            r"filter_fori_loop\(body_fun\): expected something callable",
        ),
        (
            lambda: scan_xs({"a": 1.0, "b": "text"}),
            ArgumentError,
            r"filter_scan\(xs\): expected an array to take apart, or a length, got neither\.\n"
            r"  say how many steps there are:\n      length=n$",
        ),
        (
            lambda: pm.filter_map(double, "text"),
            ArgumentError,
            r"filter_map\(xs\): expected an array to take apart, got none\.$",
        ),
        (
            lambda: pm.filter_associative_scan(double, "text"),
            ArgumentError,
            r"filter_associative_scan\(elems\): expected an array to take apart, got none\.$",
        ),
        (
            lambda: scan_xs({"a": ramp(3), "b": [ramp(2, 3), ramp(3)]}, length=2),
            ShapeError,
            r"filter_scan\(xs\): expected one number of steps, got 2 numbers\.\n"
            r"  at 2 steps of length=2 \(and 1 more\)\n"
            r"  at 3 steps of xs\['a'\]: f32\[3\], axis 0 \(and 1 more\)$",
        ),
        (
            lambda: scan_xs({"a": ramp(3), "b": jnp.float32(1)}),
            ShapeError,
            r"filter_scan\(xs\): expected arrays with the axis 0 that they are taken apart along, "
            r"got one without\.\n  at xs\['b'\]: f32\[\]\n"
            r"  what is the same for all steps has the axis None:\n"
            r"""      in_axes=pm\.by\(\{"\['b'\]": None, \.\.\.: 0\}\)$""",
        ),
        (
            lambda: scan_xs(ramp(3), in_axes=1),
            ShapeError,
            r"axis 1 that they are taken apart along, got one without\.\n  at xs: f32\[3\]",
        ),
        (
            lambda: pm.filter_associative_scan(double, {"x": ramp(3)}, axis=1),
            ShapeError,
            r"filter_associative_scan\(elems\): expected arrays with the axis 1 .*\n"
            r"  at elems\['x'\]: f32\[3\]$",
        ),
        (
            lambda: pm.filter_associative_scan(double, ramp(3), axis=None),
            ArgumentError,
            r"filter_associative_scan\(axis\): expected an int, got None",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, in_axes={"b": 0}),
            SpecError,
            r"filter_scan\(in_axes\): expected a prefix of the tree that it is for",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, in_axes="0"),
            SpecError,
            r"filter_scan\(in_axes\): expected an int or None for each leaf, got '0'\.\n"
            r"  at xs\['a'\]|filter_scan\(in_axes\): ",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, in_axes=pm.by({"b": 0, ...: None})),
            SpecError,
            r"select\.path\('b'\): expected a pattern that matches at least one leaf",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, out_axes={"a": None}),
            SpecError,
            r"filter_scan\(out_axes\): expected an axis for each array that a step returns, got "
            r"None\.\n  at result\['a'\]: f32\[\]\n  each step has one of its own",
        ),
        (
            lambda: scan_xs([ramp(3, 2)], out_axes=2),
            SpecError,
            r"filter_scan\(out_axes\): expected an axis from -2 to 1, got 2\.\n"
            r"  at result\[0\]: f32\[2\] in each step",
        ),
        (
            lambda: scan_xs(None, length=2.0),
            ArgumentError,
            r"filter_scan\(length\): expected an int that is known while tracing, got 2\.0",
        ),
        (
            lambda: jax.jit(lambda n: scan_xs(None, length=n))(2),
            ArgumentError,
            r"filter_scan\(length\): expected an int that is known while tracing, got i32\[\]",
        ),
        (
            lambda: pm.filter_while_loop(lambda v: v["n"], lambda v: v, {"n": 1}),
            ArgumentError,
            r"filter_while_loop\(cond_fun\) of <lambda>: expected a scalar bool, got i32\[\]\.\n"
            r"  compare, and join what is an array:\n      return jnp\.any\(error > 1e-3\)",
        ),
        (
            lambda: pm.filter_while_loop(lambda v: v > 0, lambda v: v, ramp(2)),
            ArgumentError,
            r"expected a scalar bool, got bool\[2\]",
        ),
        (
            lambda: pm.filter_while_loop(lambda v: None, lambda v: v, ramp(2)),
            ArgumentError,
            r"expected a scalar bool, got None",
        ),
        (
            lambda: pm.filter_fori_loop(0.0, 2, lambda i, v: v, 1),
            ArgumentError,
            r"filter_fori_loop\(lower\): expected an integer, got 0\.0",
        ),
        (
            lambda: pm.filter_fori_loop(0, ramp(2), lambda i, v: v, 1),
            ArgumentError,
            r"filter_fori_loop\(upper\): expected an integer, got f32\[2\]",
        ),
    ],
)
def test_mistakes_are_explained(call, error, text):
    """What is no function, no axis, no length, no condition: by argument name and path."""
    with pytest.raises(error, match=text):
        call()


def test_a_carry_that_varies_over_the_mesh():
    """Under shard_map, a carry that starts the same everywhere and ends different is explained."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def run(x):
        return pm.filter_scan(lambda c, _: (c + x, None), jnp.zeros(1), length=2)[0]

    with pytest.raises(
        StructureError,
        match=r"carry: f32\[1\] -> f32\[1\] varying over i\n"
        r"  start from an array that varies over the same axes of the mesh:\n"
        r"""      jax\.lax\.pcast\(carry, \('i',\), to="varying"\)""",
    ):
        jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))(
            ramp(2)
        )


def test_the_errors_of_a_step_arrive_undisturbed():
    """What the step itself raises is raised."""

    def step(carry, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pm.filter_scan(step, None, ramp(2))

"""filter_pure_callback and filter_io_callback."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.goldens import refusals
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.trees import Holder, Static, affine, double, ramp


def struct(*shape, dtype=jnp.float32):
    """An array that is still to come."""
    return jax.ShapeDtypeStruct(shape, dtype)


def on_host(model, x, how, *, rate):
    """Python that no trace could go through."""
    assert how == "how"
    assert isinstance(model, type(affine()))
    y = np.asarray(model.weight) @ np.asarray(x) * rate
    return {"y": y, "how": how}, model, (None, double)


def call(model, x, how, rate=2.0):
    """The same through a callback."""
    promised = ({"y": struct(2), "how": how}, model, (None, double))
    return pm.filter_pure_callback(on_host, model, x, how, rate=rate, result_shape_dtypes=promised)


@pytest.mark.parametrize("through", [lambda f: f, pm.filter_jit])
def test_any_trees_go_in_and_out(through):
    """Modules, strings, numbers, functions, None: unchanged, in compiled code and outside."""
    out, model, rest = through(call)(affine(), ramp(3), "how")

    assert_close(out.pop("y"), 2 * affine().weight @ ramp(3))
    assert out == {"how": "how"}
    assert_same(model, affine())
    assert rest == (None, double)


def test_a_module_as_callback():
    """Its arrays go to the host with the arguments, though they are traced."""

    class OnHost(pm.Module):
        weight: jax.Array

        def __call__(self, x):
            return np.asarray(self.weight) * np.asarray(x)

        def method(self, x):
            return self(x)

    @pm.filter_jit
    def fn(model, x):
        return [pm.filter_pure_callback(f, x, result_shape_dtypes=x) for f in (model, model.method)]

    assert_close(fn(OnHost(ramp(2)), ramp(2)), [ramp(2) ** 2] * 2)


def test_arrays_may_stand_for_their_types():
    """`result_shape_dtypes=x`: an array like x."""
    assert_close(
        pm.filter_pure_callback(np.sin, ramp(2), result_shape_dtypes=ramp(2)), np.sin(ramp(2))
    )


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.5, jnp.float32), (1, jnp.float32), (1, jnp.int32), (True, jnp.bool_), (2j, jnp.complex64)],
)
def test_python_numbers_become_arrays(value, dtype):
    """Of the dtype that was promised, where Python would convert, too."""
    out = pm.filter_pure_callback(lambda: value, result_shape_dtypes=struct(dtype=dtype))

    assert_same(out, jnp.asarray(value, dtype))


def test_the_host_computes_in_64_bits():
    """float64 from NumPy becomes float32, as everywhere in JAX."""
    out = pm.filter_pure_callback(lambda: np.ones(2), result_shape_dtypes=struct(2))

    assert_same(out, jnp.ones(2))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_stay_keys(impl):
    """A typed key is one on the host, and comes back as one."""

    def use(key):
        return key, np.asarray(jax.random.key_data(key))

    @pm.filter_jit
    def fn(key):
        data = jax.eval_shape(jax.random.key_data, key)
        return pm.filter_pure_callback(use, key, result_shape_dtypes=(key, data))

    key = jax.random.key(3, impl=impl)
    assert_same(fn(key), (key, jax.random.key_data(key)))


@pytest.mark.parametrize(
    "options",
    [
        {"vmap_method": "sequential"},
        {"vmap_method": "expand_dims"},
        {"vmap_method": "broadcast_all"},
        {"vmap_method": "legacy_vectorized"},
        {"vectorized": True},
        {"vectorized": False},
    ],
)
def test_vmap(options):
    """Each of JAX's ways, with static values in arguments and results."""
    sizes = []

    def add(x, y, name):
        sizes.append(np.shape(x))
        return np.asarray(x) + np.asarray(y), name

    def fn(x, y):
        promised = (struct(), "name")
        return pm.filter_pure_callback(add, x, y, "name", result_shape_dtypes=promised, **options)

    total, name = pm.filter_vmap(fn, in_axes=(0, None))(ramp(3), jnp.float32(1))

    assert_close(total, ramp(3) + 1)
    assert name == "name"
    one_by_one = options in ({"vmap_method": "sequential"}, {"vectorized": False})
    assert sizes == ([()] * 3 if one_by_one else [(3,)])


def test_no_equation_is_added():
    """The program is the one written by hand."""

    def by_hand(weight, bias, x):
        return jax.pure_callback(lambda w, b, x: w @ x, struct(2), weight, bias, x)

    def filtered(weight, bias, x):
        return call(type(affine())(weight, bias), x, "how")[0]["y"]

    arrays = (affine().weight, affine().bias, ramp(3))
    assert equations(filtered, *arrays) == equations(by_hand, *arrays)


# ---- effects


@pytest.mark.parametrize("ordered", [True, False])
def test_effects_happen(ordered):
    """Once for each time that the program comes there; in order, if asked."""
    seen = []

    @pm.filter_jit
    def fn(x, name):
        for i in range(3):
            pm.filter_io_callback(
                lambda x, i, name: seen.append((i, name, float(x))), x * i, i, name, ordered=ordered
            )
        return x

    fn(jnp.float32(2), "x")
    fn(jnp.float32(3), "x")
    jax.effects_barrier()

    expected = [(i, "x", float(i * x)) for x in (2, 3) for i in range(3)]
    assert (seen if ordered else sorted(seen)) == (expected if ordered else sorted(expected))


def test_effects_with_results():
    """A generator on the host, read from compiled code."""
    batches = iter([ramp(2), ramp(2) + 1])

    @pm.filter_jit
    def read(name):
        return pm.filter_io_callback(
            lambda name: {"x": np.asarray(next(batches)), "name": name},
            name,
            result_shape_dtypes={"x": struct(2), "name": name},
            ordered=True,
        )

    assert_same(
        [read("a"), read("a")], [{"name": "a", "x": ramp(2)}, {"name": "a", "x": ramp(2) + 1}]
    )


# ---- bad input


@pytest.mark.parametrize(
    ("result", "promised", "text"),
    [
        ("b", "a", r": 'b' instead of 'a'"),
        ((0, 1), (0, 2), r"\[1\]: 1 instead of 2"),
        (np.ones(3, np.float32), struct(2), r": f32\[3\] instead of f32\[2\]"),
        (np.ones(2, np.int32), struct(2), r": i32\[2\] instead of f32\[2\]"),
        ({"a": 1}, {"a": 1, "b": struct()}, r"\['b'\]: nothing instead of f32\[\]"),
        ({"a": 1, "b": 2}, {"a": 1}, r"\['b'\]: 2 instead of nothing"),
        ([1], (1,), r": list of 1 instead of tuple of 1"),
        (1.5, struct(dtype=jnp.int32), r": 1\.5 instead of i32\[\]"),
        (1, struct(1), r": 1 instead of f32\[1\]"),
        (None, struct(1), r": None instead of f32\[1\]"),
        ("a", struct(1), r": 'a' instead of f32\[1\]"),
        (Static(np.float32(1), 2), Static(struct(), 3), r"\.size: 2 instead of 3"),
    ],
)
@pytest.mark.parametrize("transform", ["filter_pure_callback", "filter_io_callback"])
def test_results_that_were_not_promised(transform, result, promised, text):
    """Every path is named, in the error that JAX passes on."""

    def fail():
        # With an array in its result the callback cannot be left out.
        kinds = (struct(), promised)
        out = getattr(pm, transform)(lambda: (0.0, result), result_shape_dtypes=kinds)
        jax.block_until_ready((out, jax.effects_barrier()))

    grammar = (
        rf"{transform} of <lambda>: expected a result as in result_shape_dtypes, got "
        rf"another result\.\n"
        r"  at result\[1\]"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=grammar + text):
        fail()


def test_a_callback_without_arrays_need_not_be_called():
    """Its result is known in advance, and it is pure: JAX leaves it out."""
    called = []

    @pm.filter_jit
    def fn():
        return pm.filter_pure_callback(lambda: called.append(1), result_shape_dtypes=None)

    assert fn() is None
    assert called == []


def test_io_returns_nothing_by_default():
    """An undeclared result is ignored."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"at result: 3 instead of None"):
        pm.filter_io_callback(lambda: 3)


def test_errors_of_the_callback():
    """JAX reports them with their text."""

    def fail(x):
        raise KeyError("mine")

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"KeyError: 'mine'"):
        jax.block_until_ready(pm.filter_pure_callback(fail, ramp(1), result_shape_dtypes=ramp(1)))


@pytest.mark.parametrize("transform", [pm.filter_pure_callback, pm.filter_io_callback])
def test_no_array_is_kept_for_the_host(transform):
    """The host function lives as long as the program: it had held the arrays of its call."""
    x = ramp(3)
    freed = weakref.ref(x)

    transform(lambda layer: None, Holder(x), result_shape_dtypes=None)
    jax.effects_barrier()
    del x
    gc.collect()

    assert freed() is None


class Noting:
    """A function on the host, equal to others with one list, in which each notes its calls."""

    def __init__(self, called):
        self.called = called

    def __eq__(self, other):
        return isinstance(other, Noting) and other.called is self.called

    def __hash__(self):
        return id(self.called)

    def __call__(self, model, how, x):
        self.called.append(self)
        return np.asarray(x) * model.size * (3 if how == "thrice" else 1)


@pytest.mark.parametrize("transform", [pm.filter_pure_callback, pm.filter_io_callback])
@pytest.mark.parametrize("how", ["how", None, (1, 2.0), np.float32, double])
def test_equal_calls_are_one_program(transform, how):
    """Outside of `jit`, too, where each call had compiled another, and JAX had cached them all."""
    called = []

    def run(how=how, size=2):
        model, x = Static(ramp(2), size), ramp(3)
        return transform(Noting(called), model, how, x, result_shape_dtypes=struct(3))

    assert_same(run(), 2 * ramp(3))
    assert_same(run(), 2 * ramp(3))
    # JAX has called the known function, not an equal one.
    assert len({id(function) for function in called}) == 1
    # Other arguments are another call.
    assert_same(run(size=3), 3 * ramp(3))
    assert_same(run(how="thrice"), 6 * ramp(3))


@pytest.mark.parametrize("transform", [pm.filter_pure_callback, pm.filter_io_callback])
def test_calls_of_the_same_arrays_are_told_apart(transform):
    """By the declared result, and by the kind of keys."""

    kinds, name = ["rbg", "unsafe_rbg"], "rbg"

    def kind_of(key):
        return {name: np.int32(kinds.index(str(jax.random.key_impl(key))))}

    for i, kind in enumerate(kinds):
        key = jax.random.key(0, impl=kind)
        for name in kinds:
            promised = {name: struct(dtype=jnp.int32)}
            assert transform(kind_of, key, result_shape_dtypes=promised) == {name: i}


@pytest.mark.parametrize("transform", [pm.filter_pure_callback, pm.filter_io_callback])
def test_what_cannot_be_hashed_goes_to_the_host(transform):
    """Each call is a new one."""
    for value in (2, 3):
        found = transform(
            lambda how, x: np.asarray(x) * how.value,
            Unhashable(value),
            ramp(3),
            result_shape_dtypes=struct(3),
        )
        assert_same(found, value * ramp(3))


class Unhashable:
    """Is equal to all of its kind."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Unhashable)

    __hash__ = None


test_refusals = refusals(globals())

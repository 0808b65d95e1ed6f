"""filter_pure_callback and filter_io_callback."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
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
        {"vectorized": True},
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


@pytest.mark.parametrize(
    ("result", "promised"),
    [
        ("b", "a"),
        (np.ones(3, np.float32), struct(2)),
        ({"a": 1}, {"a": 1, "b": struct()}),
        (1.5, struct(dtype=jnp.int32)),
    ],
    ids=["static value", "shape", "structure", "dtype"],
)
def test_results_that_were_not_promised(result, promised):
    """A static value would be the promised one, whatever the host says."""
    kinds = (struct(), promised)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"result\[1\]"):
        jax.block_until_ready(
            pm.filter_pure_callback(lambda: (0.0, result), result_shape_dtypes=kinds)
        )


def test_calls_of_equal_arrays_are_told_apart_by_what_is_static():
    """Outside of `jit` JAX knows the program of an equal call, and must not take it for another."""

    def run(how, size):
        return pm.filter_pure_callback(
            lambda model, how, x: np.asarray(x) * model.size * (3 if how == "thrice" else 1),
            Static(ramp(2), size),
            how,
            ramp(3),
            result_shape_dtypes=struct(3),
        )

    for _ in range(2):
        assert_same(run("once", 2), 2 * ramp(3))
        assert_same(run("once", 3), 3 * ramp(3))
        assert_same(run("thrice", 2), 6 * ramp(3))

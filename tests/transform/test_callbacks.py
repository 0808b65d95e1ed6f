"""`filter_pure_callback` and `filter_io_callback`."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Holder, Static, affine, ramp


def struct(*shape, dtype=jnp.float32):
    """An array that is still to come."""
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_module_as_callback():
    """Its arrays go to the host with the arguments, though they are traced."""

    @pm.filter_jit
    def fn(model, x):
        callbacks = [model, model.scaled, pm.Partial(lambda m, x: np.asarray(m(x)), model)]
        return [pm.filter_pure_callback(f, x, result_shape_dtypes=struct(2)) for f in callbacks]

    assert_close(fn(affine(), ramp(3)), [affine()(ramp(3))] * 3)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_arrive_as_their_numbers(impl):
    """As in jax.pure_callback, also in a tree."""
    key = jax.random.key(3, impl=impl)
    data = jax.random.key_data(key)

    def read(tree):
        on_host = lambda tree: np.asarray(tree.content)  # noqa: E731
        return pm.filter_pure_callback(on_host, tree, result_shape_dtypes=data)

    assert_same(pm.filter_jit(read)(Holder(key)), data)


WAYS = {
    "sequential": ({"vmap_method": "sequential"}, [()] * 3),
    "expand_dims": ({"vmap_method": "expand_dims"}, [(3,)]),
    "vectorized": ({"vectorized": True}, [(3,)]),
}


@pytest.mark.parametrize(("options", "expected"), WAYS.values(), ids=WAYS)
def test_vmap(options, expected):
    """Each of JAX's ways, with static values in arguments and results."""
    shapes = []

    def add(x, y, name):
        shapes.append(np.shape(x))
        return np.asarray(x) + np.asarray(y), name

    def fn(x, y):
        promised = (struct(), "name")
        return pm.filter_pure_callback(add, x, y, "name", result_shape_dtypes=promised, **options)

    total, name = pm.filter_vmap(fn, in_axes=(0, None))(ramp(3), jnp.float32(1))
    assert_close(total, ramp(3) + 1)
    assert (name, shapes) == ("name", expected)


@pytest.mark.parametrize("ordered", [True, False])
def test_effects_happen(ordered):
    """Once for each time that the program comes there; in order, if asked; results come back."""
    seen = []

    def note(x, i, name):
        seen.append((i, name, float(x)))
        return np.float32(len(seen)), name

    @pm.filter_jit
    def fn(x, name):
        kinds = {"result_shape_dtypes": (struct(), name), "ordered": ordered}
        for i in range(3):
            out = pm.filter_io_callback(note, x * i, i, name, **kinds)
        return out

    found = [fn(jnp.float32(2), "x"), fn(jnp.float32(3), "x")]
    jax.effects_barrier()
    expected = [(i, "x", float(i * x)) for x in (2, 3) for i in range(3)]
    assert (seen if ordered else sorted(seen)) == (expected if ordered else sorted(expected))
    assert not ordered or found == [(3, "x"), (6, "x")]


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


NOT_PROMISED = {
    "static value": ("b", "a"),
    "structure": ({"a": 1}, {"a": 1, "b": struct()}),
    "dtype": (1.5, struct(dtype=jnp.int32)),
}


@pytest.mark.parametrize(("result", "promised"), NOT_PROMISED.values(), ids=NOT_PROMISED)
def test_results_that_were_not_promised(result, promised):
    """A static value would be the promised one, whatever the host says."""
    kinds = (struct(), promised)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"StructureError: .*\n.*result\[1\]"):
        jax.block_until_ready(
            pm.filter_pure_callback(lambda: (0.0, result), result_shape_dtypes=kinds)
        )


def test_calls_of_equal_arrays_are_told_apart_by_what_is_static():
    """Outside of `jit` JAX knows the program of an equal call, and must not take it for another."""

    def scale(model, how, x):
        return np.asarray(x) * model.size * (3 if how == "thrice" else 1)

    def run(how, size):
        model = Static(ramp(2), size)
        return pm.filter_pure_callback(scale, model, how, ramp(3), result_shape_dtypes=struct(3))

    for some in ({1, 2}, {3}):  # They have no hash.
        out = pm.filter_pure_callback(
            lambda x, s: x * len(s), ramp(3), some, result_shape_dtypes=struct(3)
        )
        assert_same(out, len(some) * ramp(3))
    for _ in range(2):
        found = [run("once", 2), run("once", 3), run("thrice", 2)]
        assert_same(found, [2 * ramp(3), 3 * ramp(3), 6 * ramp(3)])

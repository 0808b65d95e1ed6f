"""filter_jit(static=...): arguments whose arrays are part of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.transform.compilation.static_arguments import Constant
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Holder, Static, ramp


@pytest.mark.parametrize("static", ["n", ("n",), ["n"]])
def test_numpy_numbers_can_be_sizes(static):
    """A NumPy number is traced elsewhere; in a static argument it is a number."""
    fn = pm.filter_jit(lambda x, n: x[:n], static=static)

    for size in np.arange(1, 4):
        assert fn(ramp(4), size).shape == (size,)
        assert fn(ramp(4), n=size).shape == (size,)


def test_compared_by_value():
    """Equal bytes, shape and dtype: the same program; anything else is another one."""
    traces = []

    @pm.filter_jit(static="index")
    def fn(x, index):
        traces.append(index)
        return x[index]

    for index in ([0, 2], [0, 2], [2, 0]):
        assert_same(fn(ramp(3), np.array(index)), ramp(3)[np.array(index)])
    assert len(traces) == 2
    fn(ramp(3), np.array([[0, 2]]))
    fn(ramp(3), np.array([0, 2], np.int8))
    fn(ramp(3), np.int64(1))
    fn(ramp(3), 1)
    fn(ramp(3), np.int64(1))
    assert len(traces) == 6
    assert [type(index) for index in traces[-2:]] == [np.int64, int]


def test_arrays_arrive_as_they_were_passed():
    """Inside lists and Modules, too, and as NumPy's."""
    seen = []

    @pm.filter_jit(static=("a", "b"))
    def fn(x, a, *, b):
        seen.append((a, b))
        return x

    a = [np.arange(2), {"k": np.float32(3)}, "s", None, 1.5]
    b = Holder([np.ones(1, np.float32), Static(np.zeros(2), size=(1, 2))])
    fn(ramp(1), a, b=b)

    assert_same(seen[0], (a, b))
    assert isinstance(seen[0][1].content[0], np.ndarray)


def test_writing_to_the_array_afterwards():
    """The trace has the old content of the array, and the next call sees the new content."""
    index = np.array([0, 1])
    fn = pm.filter_jit(lambda x, index: x[index] + index.sum(dtype=np.float32), static="index")
    first = fn(ramp(3), index)
    index[:] = 2

    assert_same(fn(ramp(3), index), ramp(3)[jnp.asarray([2, 2])] + jnp.float32(4))
    assert_same(fn(ramp(4), np.array([0, 1])), first)


def test_negative_zero_and_nan():
    """Programs distinguish -0.0 from 0.0; NaN equals itself."""
    traces = []

    @pm.filter_jit(static="v")
    def fn(x, v):
        traces.append(v)
        return x

    for value in (0.0, -0.0, np.nan, 0.0, -0.0, np.nan):
        fn(ramp(1), np.float32(value))

    assert len(traces) == 3


def test_arrays_that_are_not_named_are_traced():
    """`static` concerns the arguments that it names."""
    traces = []

    @pm.filter_jit(static="n")
    def fn(x, n, y):
        traces.append(y)
        return x + y

    for value in (1.0, 2.0):
        fn(ramp(2), np.int64(1), np.float32(value))

    assert len(traces) == 1


def test_methods_modules_and_stages():
    """The name is that of the parameter, however the function is called."""

    class Layer(pm.Module):
        weight: jax.Array

        @pm.filter_jit(static="n")
        def head(self, n):
            return self.weight[:n]

        def plain(self, n):
            return self.weight[:n]

    layer = Layer(ramp(3))
    assert layer.head(np.int32(2)).shape == (2,)
    assert pm.filter_jit(layer.plain, static="n")(np.int32(2)).shape == (2,)
    assert layer.head.lower(np.int32(2)).compile()(np.int32(2)).shape == (2,)
    with pytest.raises(ArgumentError, match="compiled head: expected arguments with the structure"):
        layer.head.lower(np.int32(2)).compile()(np.int32(1))


def test_constants_print_as_what_they_hold():
    """For errors and for those who look."""
    assert repr(Constant(np.array([1, 2]))) == "array([1, 2])"
    assert Constant(np.array([1, 2])) != [1, 2]


# ---- bad input


@pytest.mark.parametrize("array", [jnp.ones(()), jax.ShapeDtypeStruct((), jnp.float32)])
def test_arrays_of_jax_are_refused(array):
    """Reading them would wait for the device; the error names the path and has a hint."""
    fn = pm.filter_jit(lambda x, config: x, static="config")

    with pytest.raises(
        ArgumentError,
        match=r"^filter_jit\(static\) for config: expected NumPy arrays and non-array "
        r"values, got a JAX array\.\n  at config\['n'\]: f32\[\]\n"
        r"  reading it waits for the device; to do so, write:\n"
        r"      config = jax\.device_get\(config\)$",
    ):
        fn(ramp(1), {"n": array})
    assert fn(ramp(1), jax.device_get({"n": jnp.ones(())})).shape == (1,)


test_refusals = refusals(globals())

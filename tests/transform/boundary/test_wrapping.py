"""Behavior that all transformed functions share."""

import contextlib
import copy
import functools as ft
import gc
import inspect
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Holder, affine, double, ramp


def documented(x: float, *, factor: float = 2.0) -> float:
    """Multiplies."""
    return jnp.sum(x * factor)


TRANSFORMS = {
    "filter_jit": pm.filter_jit,
    "filter_grad": pm.filter_grad,
    "filter_value_and_grad": pm.filter_value_and_grad,
    "filter_vmap": pm.filter_vmap,
    "filter_checkpoint": pm.filter_checkpoint,
    "filter_make_jaxpr": pm.filter_make_jaxpr,
    "filter_jacfwd": pm.filter_jacfwd,
    "filter_jacrev": pm.filter_jacrev,
    "filter_hessian": pm.filter_hessian,
    "filter_jvp": pm.filter_jvp,
    "filter_vjp": pm.filter_vjp,
    "filter_linearize": pm.filter_linearize,
    "filter_custom_jvp": pm.filter_custom_jvp,
    "filter_custom_vjp": pm.filter_custom_vjp,
    "filter_pmap": pm.filter_pmap,
    "filter_shard_map": ft.partial(pm.filter_shard_map, in_specs=None, out_specs=None),
    "filter_checkify": pm.filter_checkify,
}
STRUCT = jax.ShapeDtypeStruct((), jnp.float32)
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


@every_transform
def test_looks_like_the_function(name):
    """Name, docstring, module, annotations, signature and source are the function's."""
    made = TRANSFORMS[name](documented)

    assert made.__wrapped__ is documented
    assert (made.__name__, made.__qualname__) == ("documented", "documented")
    assert made.__doc__ == "Multiplies."
    assert made.__module__ == __name__
    assert made.__annotations__ == documented.__annotations__
    assert list(inspect.signature(made).parameters) == ["x", "factor"]
    assert repr(made) == f"<{name} of documented>"
    assert "Multiplies" in inspect.getsource(inspect.unwrap(made))


@every_transform
def test_of_a_function_it_comes_back_as_it_is(name):
    """A rebuilt tree has the same function, with the user's attributes on it."""
    made = TRANSFORMS[name](double)
    made.note = "mine"
    again = jax.tree.map(lambda x: x, Holder([made])).content[0]

    assert again is made
    assert jax.tree.structure(made) == jax.tree.structure(TRANSFORMS[name](double))
    assert jax.tree.structure(made) != jax.tree.structure(TRANSFORMS[name](documented))


@every_transform
def test_equality(name):
    """The same transform of the same function with the same options is the same value."""
    make = TRANSFORMS[name]

    assert make(double) == make(double)
    assert hash(make(double)) == hash(make(double))
    assert make(double) != make(documented)
    assert make(double) != double
    assert all(make(double) != other(double) for n, other in TRANSFORMS.items() if n != name)
    assert make(affine()) == make(affine())


def test_options_count_in_equality():
    """Another option makes another function."""
    pairs = [
        (pm.filter_jit(double), pm.filter_jit(double, donate="all")),
        (pm.filter_jit(double), pm.filter_jit(double, inline=True)),
        (pm.filter_vmap(double), pm.filter_vmap(double, in_axes=1)),
        (pm.filter_grad(double), pm.filter_grad(double, argnums=1)),
        (pm.filter_grad(double), pm.filter_grad(double, wrt=pm.select.path("a"))),
        (pm.filter_checkpoint(double), pm.filter_checkpoint(double, prevent_cse=False)),
    ]
    assert not any(a == b for a, b in pairs)


@every_transform
def test_copies(name):
    """Transformed functions are copied and pickled with their wrapped functions."""
    for fn in (documented, affine()):
        made = TRANSFORMS[name](fn)
        for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(again) is type(made)
            assert again.__name__ == made.__name__
            assert_same(again.__wrapped__, fn)


@every_transform
@pytest.mark.parametrize("fn", [3, "double", [double]])
def test_what_cannot_be_called_is_refused(name, fn):
    """A transform of a non-callable value is refused at once."""
    with pytest.raises(ArgumentError, match=name):
        TRANSFORMS[name](fn)


@pytest.mark.parametrize(
    "fn",
    [
        lambda model, x: x if model.weight[0, 0] > 0 else -x,
        lambda model, x: float(x["a"][1]),
        lambda model, x: np.asarray(model.bias),
    ],
    ids=["bool", "float", "NumPy"],
)
@pytest.mark.parametrize("donate", ["none", "all"])
def test_an_error_of_jax_names_the_argument_of_the_user(fn, donate):
    """A value that is known only when the program runs comes from an argument with a name."""
    model = jax.tree.map(jnp.copy, affine())

    with pytest.raises((jax.errors.TracerArrayConversionError, TypeError), match=r"model|\bx\b"):
        pm.filter_jit(fn, donate=donate)(model, {"a": [ramp(3), jnp.ones(())]})


def test_ten_thousand_functions_in_four_threads_are_let_go():
    """Each is wrapped, and each twentieth traced; a third of these raises an exception."""
    gc.collect()

    class Captured:
        pass

    def make(captured, fails):
        def fn(x):
            if fails:
                raise ValueError("while it is traced")
            return captured and x

        return fn

    def work(thread):
        alive = []
        for i in range(2500):
            captured = Captured()
            alive.append(weakref.ref(captured))
            jitted = pm.filter_jit(make(captured, i % 3 == 0))
            if i % 20 == 0:
                with contextlib.suppress(ValueError):
                    jitted.eval_shape(STRUCT)
        return alive

    with ThreadPoolExecutor(4) as pool:
        refs = [ref for found in pool.map(work, range(4)) for ref in found]
    gc.collect()

    assert len(refs) == 10_000
    assert [ref for ref in refs if ref() is not None] == []

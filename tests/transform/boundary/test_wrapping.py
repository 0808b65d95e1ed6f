"""Behavior that all transformed functions share."""

import copy
import functools as ft
import gc
import inspect
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.transform.boundary.wrapping import Transformed, in_words_of
from pytreemod.tree.snapshots import divide
from tests.goldens import refusals
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.racing import race
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
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


@every_transform
def test_looks_like_the_function(name):
    """Name, docstring, module, annotations, signature and source are the function's."""
    made = TRANSFORMS[name](documented)

    assert isinstance(made, Transformed)
    assert made.__wrapped__ is documented
    assert (made.__name__, made.__qualname__) == ("documented", "documented")
    assert made.__doc__ == "Multiplies."
    assert made.__module__ == __name__
    assert made.__annotations__ == documented.__annotations__
    assert list(inspect.signature(made).parameters) == ["x", "factor"]
    assert repr(made) == f"<{name} of documented>"
    assert "Multiplies" in inspect.getsource(inspect.unwrap(made))


@every_transform
def test_of_a_module(name):
    """A transformed Module is named by its class and is a tree with the Module's leaves."""
    made = TRANSFORMS[name](affine())

    assert made.__name__ == "Affine"
    assert len(jax.tree.leaves(made)) == 2
    moved = jax.tree.map(lambda x: x + 1, made)
    assert type(moved) is type(made)
    assert_close(moved.__wrapped__.bias, affine().bias + 1)


@every_transform
def test_of_a_function_it_is_a_node_without_leaves(name):
    """A transformed function goes through transforms as part of the structure."""
    made = TRANSFORMS[name](double)

    assert jax.tree.leaves(made) == []
    assert jax.tree.map(lambda x: 1 / 0, made) == made
    assert jax.tree.leaves(Holder(made)) == []


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


def test_decorated_methods_of_plain_classes_bind():
    """The same for classes that are not Modules, whose instances are static."""

    class Plain:
        @pm.filter_jit
        def add(self, x):
            return x + self.amount

        amount = 3.0

    assert_close(Plain().add(ramp(2)), ramp(2) + 3)


@every_transform
@pytest.mark.parametrize("fn", [3, "double", [double]])
def test_what_cannot_be_called_is_refused(name, fn):
    """A transform of a non-callable value is refused at once."""
    with pytest.raises(
        ArgumentError, match=rf"{name}(\((fun|fn|f)\))?: expected something callable, got"
    ):
        TRANSFORMS[name](fn)


def test_transforms_compose():
    """Any transform of any other is a function that can be transformed."""
    layered = pm.filter_jit(pm.filter_vmap(pm.filter_grad(pm.filter_checkpoint(documented))))

    assert_close(layered(ramp(3)), jnp.full(3, 2.0))
    assert_close(layered(ramp(3), factor=jnp.full(3, 5.0)), jnp.full(3, 5.0))
    assert layered.__name__ == "documented"


def _bool(model, x):
    return x if model.weight[0, 0] > 0 else -x


def _number(model, x):
    return float(x["a"][1])


def _length(model, x):
    return jnp.zeros(x["n"])


def _copied(model, x):
    return np.asarray(model.bias)


class _Caller(pm.Module):
    weight: jax.Array

    def __call__(self, x):
        return float(self.weight)

    def method(self, x):
        return float(x)


_AFFINE = affine()
_CALLER = _Caller(jnp.ones(()))


@jax.tree_util.register_pytree_node_class
class _Strict:
    """A node that takes no number."""

    def __init__(self, x):
        if isinstance(x, int):
            raise RuntimeError("a number")
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def named_run(fn):
    """The function that JAX traces for a call of `fn` with one array."""

    def run(values):
        return fn(*values)

    structure = divide(((), (jnp.ones(()),), {}))[1]
    return in_words_of(fn, run, ["values[0]"], ("x",), structure)


def test_what_speaks_of_functions_keeps_none_of_them():
    """Of ten thousand functions with captured values, only the running one is referenced."""

    class Captured:
        pass

    def scaled_by(captured):
        return lambda x: (captured, x)[1]

    # Stand-ins hold the code of a function, which all functions of one line share.
    refs = []
    for _ in range(10_000):
        fn = scaled_by(captured := Captured())
        stand_in = named_run(fn).__wrapped__
        refs.append((weakref.ref(captured), stand_in))
    del fn, captured
    gc.collect()

    assert {stand_in.__code__.co_filename for _, stand_in in refs} == {__file__}
    assert [ref for ref, _ in refs if ref() is not None] == []


def test_threads_are_told_of_their_own_functions():
    """Errors that arise at once name each the function and the argument that it is about."""

    def failing(name):
        scope = {}
        exec(f"def {name}({name}_x): return float({name}_x)", scope)
        return pm.filter_jit(scope[name])

    functions = [failing(f"f{i}") for i in range(8)]

    def work(i):
        with pytest.raises(jax.errors.ConcretizationTypeError, match=rf"f{i}_x") as caught:
            functions[i](jnp.ones(()))
        return str(caught.value)

    told = race(work)

    assert all(f"function f{i} at" in text for i, text in enumerate(told))


test_refusals = refusals(globals())

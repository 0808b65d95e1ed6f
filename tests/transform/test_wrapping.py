"""Behavior that all transformed functions share."""

import copy
import functools as ft
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Holder, affine, double


def documented(x: float, *, factor: float = 2.0) -> float:
    """Multiplies."""
    return jnp.sum(x * factor)


NAMES = ["jit", "grad", "value_and_grad", "vmap", "pmap", "checkpoint", "make_jaxpr", "jacfwd"]
NAMES += ["jacrev", "hessian", "jvp", "vjp", "linearize", "custom_jvp", "custom_vjp", "checkify"]
TRANSFORMS = {f"filter_{name}": getattr(pm, f"filter_{name}") for name in NAMES}
TRANSFORMS["filter_shard_map"] = ft.partial(pm.filter_shard_map, in_specs=None, out_specs=None)
COMPOSED = ("filter_pmap", "filter_hessian")  # two of the others, one inside the other
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


@every_transform
def test_looks_like_the_function(name):
    """Name, docstring, module, annotations, signature and source are the function's."""
    made = TRANSFORMS[name](documented)

    assert inspect.unwrap(made) is documented
    for each in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(made, each) == getattr(documented, each)
    assert list(inspect.signature(made).parameters) == ["x", "factor"]
    assert repr(made) == f"<{name} of documented>" or name in COMPOSED


@every_transform
def test_it_is_a_value(name):
    """The same transform of the same function is the same value; a tree gives it back as it is."""
    make = TRANSFORMS[name]
    made = make(double)
    made.note = "mine"

    assert make(double) == made
    assert hash(make(double)) == hash(made)
    assert make(affine()) == make(affine())
    assert all(made != other for other in (make(documented), double))
    assert all(made != other(double) for n, other in TRANSFORMS.items() if n != name)
    assert jax.tree.map(lambda x: x, Holder([made])).content[0] is made or name in COMPOSED
    assert jax.tree.structure(made) == jax.tree.structure(make(double))
    assert jax.tree.structure(made) != jax.tree.structure(make(documented))


@every_transform
def test_copies(name):
    """Transformed functions are copied and pickled with their wrapped functions."""
    for fn in (documented, affine()):
        made = TRANSFORMS[name](fn)
        for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert (type(again), again.__name__) == (type(made), made.__name__)
            assert_same(again.__wrapped__, made.__wrapped__)


def test_options_count_in_equality():
    """Another option makes another function; equal options make the same one."""
    for make, options in [
        (pm.filter_jit, {"donate": "all"}),
        (pm.filter_vmap, {"in_axes": 1}),
        (pm.filter_vmap, {"in_axes": {"x": 1}}),
        (pm.filter_grad, {"wrt": pm.select.path("a")}),
        (pm.filter_checkpoint, {"prevent_cse": False}),
    ]:
        assert make(double) != make(double, **options) == make(double, **options)
        assert hash(make(double, **options)) == hash(make(double, **options))


@every_transform
def test_what_cannot_be_called_is_refused(name):
    """A transform of a non-callable value is refused at once."""
    for fn in (3, "double", [double]):
        with pytest.raises(ArgumentError, match=f"{name}.*is not callable"):
            TRANSFORMS[name](fn)

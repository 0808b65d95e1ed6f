"""What every transformed function has in common."""

import copy
import functools as ft
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.transform.wrapping import (
    Transformed,
    argument_name,
    parameters_of,
    place_keywords,
    positional_names,
)
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, Holder, affine, double, ramp


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
    """Transformed functions are copied and pickled with what they wrap."""
    for fn in (documented, affine()):
        made = TRANSFORMS[name](fn)
        for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(again) is type(made)
            assert again.__name__ == made.__name__
            assert_same(again.__wrapped__, fn)


@pytest.mark.parametrize(
    "make",
    [
        lambda f: pm.filter_jit(f),
        lambda f: pm.filter_jit(donate="none")(f),
        lambda f: pm.filter_jit(f, inline=True),
    ],
)
def test_decorated_methods_bind(make):
    """A transform in a class body binds to instances as a function does."""

    class Layer(pm.Module):
        x: jax.Array

        @make
        def add(self, y):
            """Adds."""
            return self.x + y

    layer = Layer(ramp(2))
    assert_close(layer.add(1.0), ramp(2) + 1)
    assert_close(Layer.add(layer, 1.0), ramp(2) + 1)
    assert type(layer.add) is pm.BoundMethod
    assert (layer.add.__name__, layer.add.__doc__) == ("add", "Adds.")


def test_decorated_methods_of_plain_classes_bind():
    """The same for classes that are no Modules, whose instances are static."""

    class Plain:
        @pm.filter_jit
        def add(self, x):
            return x + self.amount

        amount = 3.0

    assert_close(Plain().add(ramp(2)), ramp(2) + 3)


@pytest.mark.parametrize(
    "decorate",
    [
        lambda t: t(lambda x: jnp.sum(x)),
        lambda t: t()(lambda x: jnp.sum(x)),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["filter_jit", "filter_grad", "filter_value_and_grad", "filter_vmap", "filter_checkpoint"],
)
def test_with_and_without_parentheses(decorate, name):
    """Every transform is a decorator, with options or without."""
    assert decorate(TRANSFORMS[name])(ramp(2)) is not None


@every_transform
@pytest.mark.parametrize("fn", [3, "double", [double]])
def test_what_cannot_be_called_is_refused(name, fn):
    """Transforming something that is no function is refused at once."""
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


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda a, b=1, *c, d, **e: 0, ("a", "b")),
        (lambda a, /, b: 0, ("a", "b")),
        (Affine, ("weight", "bias")),
        (affine(), ("x",)),
        (affine().scaled, ("x",)),
        (pm.filter_jit(affine().scaled), ("x",)),
        (pm.Partial(double), ()),
        (max, ()),
    ],
)
def test_positional_names(fn, names):
    """The parameters that may be given by position, without the instance of a method."""
    assert positional_names(fn) == names


def test_arguments_by_keyword_are_placed():
    """Keywords move to their positions, as far as there is no gap."""
    assert place_keywords(("a", "b", "c"), (1,), {"c": 3, "b": 2}) == ((1, 2, 3), {})
    assert place_keywords(("a", "b", "c"), (1,), {"c": 3}) == ((1,), {"c": 3})
    assert place_keywords((), (1,), {"c": 3}) == ((1,), {"c": 3})
    assert argument_name(("a",), 0) == "a"
    assert argument_name(("a",), 1) == "args[1]"
    assert parameters_of(print) is None or "sep" in [p.name for p in parameters_of(print)]


def test_positional_only_parameters_and_catch_all_keywords():
    """A keyword that bears the name of a positional-only parameter goes where Python sends it."""

    def catch(x, /, **kwargs):
        return x, kwargs

    for transform in (pm.filter_jit, pm.filter_vmap):
        found = transform(catch)(ramp(2), x=ramp(2))
        assert_same(found, (ramp(2), {"x": ramp(2)}))


def test_transformed_functions_in_fields():
    """A transformed Module in a field is trained; a transformed function is structure."""
    model = Holder([pm.filter_jit(affine()), pm.filter_vmap(double)])
    gradient = pm.filter_grad(lambda m: jnp.sum(m.content[0](ramp(3))))(model)

    assert_close(gradient.content[0].__wrapped__.bias, jnp.ones(2))
    assert_close(pm.filter_jit(lambda m: m.content[1](ramp(2)))(model), ramp(2) * 2)

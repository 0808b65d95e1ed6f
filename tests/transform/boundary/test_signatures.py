"""Parameters of callables; arguments reach the parameters that Python chooses."""

import collections
import contextlib
import functools as ft
import inspect
import itertools

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import pytreemod as pm
from pytreemod.transform.boundary.signatures import (
    parameters_of,
    passing_on,
    place_keywords,
    positional_names,
    positions_of,
)
from pytreemod.transform.boundary.wrapping import argument_name
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, affine, double, ramp


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
    """Keywords move to their positions, up to the first gap."""
    assert place_keywords(("a", "b", "c"), (1,), {"c": 3, "b": 2}) == ((1, 2, 3), {})
    assert place_keywords(("a", "b", "c"), (1,), {"c": 3}) == ((1,), {"c": 3})
    assert place_keywords((), (1,), {"c": 3}) == ((1,), {"c": 3})
    assert place_keywords((None, "b"), (), {"b": 3}) == ((), {"b": 3})
    assert place_keywords((None, "b"), (1,), {"b": 3}) == ((1, 3), {})
    assert argument_name(("a",), 0) == "a"
    assert argument_name(("a",), 1) == "args[1]"
    assert parameters_of(print) is None or "sep" in [p.name for p in parameters_of(print)]


# ---- arguments go where Python sends them


def subtract(x, y=2.0):
    return x - y


@ft.wraps(subtract)
def turned(y, x=2.0):
    return {"turned": subtract(x, y)}


@ft.wraps(subtract)
def scaled(scale, *args, **kwargs):
    return scale * subtract(*args, **kwargs)


@ft.wraps(subtract)
def by_name(**kwargs):
    return subtract(**kwargs)


@ft.wraps(subtract)
def telling(*args, **kwargs):
    """A wrapper to which a name makes a difference."""
    return args, kwargs


def claiming(x, /, **kwargs):
    return x, kwargs


claiming.__signature__ = inspect.signature(subtract)


def defaulting(x=1.0, /, **kwargs):
    return x, kwargs


def only_by_position(x, y, /):
    return x - y


def half_by_position(x, /, y, *, z=0.0):
    return x, y, z


def greedy(x, *more, y=0.0, **kwargs):
    return x, more, y, kwargs


@jax.custom_jvp
def customized(x, y):
    return x - y


customized.defjvp(lambda primals, tangents: (customized(*primals), tangents[0]))


class Subtraction:
    """A plain object with methods of all kinds."""

    def __call__(self, x, y=3.0, *, z=0.0):
        return x, y, z

    def method(self, y, x=1.0):
        return y, x

    @classmethod
    def of_class(cls, x, /, y=1.0):
        return x, y

    @staticmethod
    def static(x, y=1.0):
        return x, y


class Static:
    @staticmethod
    def __call__(x, y=3.0):
        return x - y


class Called(pm.Module):
    w: jax.Array

    def __call__(self, x, /, y=2.0):
        return self.w * x, y

    @pm.filter_jit
    def jitted(self, x, y=1.0):
        return self.w * x, y


class Scoped(pm.Module):
    w: jax.Array

    @jax.named_scope("scoped")
    def __call__(self, x, y=2.0):
        return self.w * x, y


class Meta(type):
    def __call__(cls, **kwargs):
        return dict(super().__call__(**kwargs).__dict__)


class FromMeta(metaclass=Meta):
    def __init__(self, y, x=1.0):
        self.y, self.x = y, x


class Twice:
    """Both methods see the call, and one of them the names."""

    def __new__(cls, *args, **kwargs):
        return {"args": args, **kwargs}

    def __init__(self, x, y):
        raise AssertionError("not reached: __new__ gives something else")


Named = collections.namedtuple("Named", ["y", "x"], defaults=[1.0])


@contextlib.contextmanager
def managed():
    yield


CALLABLES = {
    "function": subtract,
    "turned": turned,
    "scaled": scaled,
    "by name": by_name,
    "telling": telling,
    "claiming": claiming,
    "defaulting": defaulting,
    "only by position": only_by_position,
    "half by position": half_by_position,
    "greedy": greedy,
    "jax.jit": jax.jit(turned),
    "jax.jit of a wrapper": jax.jit(telling),
    "jax.custom_jvp": customized,
    "filter_jit": pm.filter_jit(turned),
    "filter_checkpoint": pm.filter_checkpoint(half_by_position),
    "filter_jvp": lambda **kwargs: pm.filter_jvp(subtract)((1.0,), (1.0,), **kwargs),
    "partial": ft.partial(half_by_position, z=5.0),
    "partial by name": ft.partial(subtract, y=5.0),
    "partial of the first": ft.partial(subtract, x=5.0),
    "partial in place": ft.partial(greedy, 1.0, 2.0),
    "partial of partial": ft.partial(ft.partial(turned, 1.0), x=5.0),
    "Partial": pm.Partial(turned, 1.0),
    "object": Subtraction(),
    "method": Subtraction().method,
    "class method": Subtraction().of_class,
    "static method": Subtraction().static,
    "static call": Static(),
    "module": Called(jnp.float32(3)),
    "module's method": Called(jnp.float32(3)).jitted,
    "module with a scope": Scoped(jnp.float32(3)),
    "module class": lambda **kwargs: jax.tree.leaves(Affine(**kwargs)),
    "metaclass": FromMeta,
    "__new__ and __init__": Twice,
    "namedtuple": Named,
    "context": managed()(turned),
    "jaxtyped": jaxtyping.jaxtyped(typechecker=beartype.beartype)(subtract),
    "jaxtyped alone": jaxtyping.jaxtyped(typechecker=None)(half_by_position),
}
STYLES = list(itertools.product(range(3), ["", "x", "y", "yx", "xz", "xyz"]))
WITH_KEYWORDS = {
    "filter_jit": pm.filter_jit,
    "filter_vmap": pm.filter_vmap,
    "filter_checkpoint": pm.filter_checkpoint,
    "filter_shard_map": ft.partial(
        pm.filter_shard_map,
        mesh=jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.P(),
        out_specs=jax.P(),
    ),
}


# Transforms that compile are tested with fewer signatures.
STRIDES = {"filter_jit": 5, "filter_checkpoint": 7, "filter_shard_map": 11}


def outcome(fn, count, names):
    """The result of a call with this number of positional arguments, and these keywords."""
    arrays = iter([ramp(2, start=jnp.float32(10 * i)) for i in range(1, 8)])
    args = [next(arrays) for _ in range(count)]
    try:
        return fn(*args, **{name: next(arrays) for name in names})
    except TypeError:
        return TypeError


@pytest.mark.parametrize("transform", WITH_KEYWORDS)
@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.sampled
def test_arguments_go_where_python_sends_them(name, transform):
    """However you write a call, the function gets the arguments of plain Python, or both refuse."""
    fn = CALLABLES[name]
    made = WITH_KEYWORDS[transform](fn)
    for style in STYLES if transform == "filter_vmap" else STYLES[:: STRIDES[transform]]:
        expected = outcome(fn, *style)
        if transform == "filter_vmap" and style == (0, ""):
            continue  # There is nothing to map.
        found = outcome(made, *style)
        assert (found is TypeError) == (expected is TypeError), style
        if expected is not TypeError:
            assert jax.tree.structure(found) == jax.tree.structure(expected), style
            assert_close(found, expected)


@pytest.mark.parametrize("style", [(1, ""), (1, "y"), (2, ""), (1, "yz"), (2, "z"), (1, "zy")])
@pytest.mark.parametrize("name", ["half by position", "object", "scaled", "claiming", "partial"])
@pytest.mark.sampled
def test_derivatives_of_arguments_that_are_given_in_any_way(name, style):
    """filter_grad accepts the arguments of its function, compiled or mapped or neither."""

    def total(*args, **kwargs):
        return sum(map(jnp.sum, jax.tree.leaves(CALLABLES[name](*args, **kwargs))))

    found = outcome(jax.grad(total), *style)
    fn = ft.wraps(CALLABLES[name])(total)
    gradient = pm.filter_grad(fn)
    for made in (gradient, pm.filter_jit(gradient), pm.filter_vmap(gradient)):
        again = outcome(made, *style)
        assert (again is TypeError) == (found is TypeError)
        if found is not TypeError:
            assert_close(again, found)


@pytest.mark.parametrize(
    ("fn", "places"),
    [
        (subtract, ("x", "y")),
        (turned, ("y", "x")),
        (scaled, ("scale",)),
        (by_name, ()),
        (telling, ()),
        (claiming, (None,)),
        (half_by_position, (None, "y")),
        (greedy, ("x",)),
        (jax.jit(turned), ("y", "x")),
        (pm.filter_jit(pm.filter_vmap(turned)), ("y", "x")),
        (pm.filter_jvp(subtract), (None, None)),
        (ft.partial(subtract, y=1.0), ("x",)),
        (ft.partial(subtract, x=1.0), ()),
        (ft.partial(greedy, x=1.0), ()),
        (ft.partial(greedy, 1.0, 2.0), ()),
        (ft.partial(max, 1.0), ()),
        (Subtraction(), ("x", "y")),
        (Subtraction().of_class, (None, "y")),
        (Static(), ("x", "y")),
        (Scoped(jnp.float32(3)), ("x", "y")),
        (Scoped, ("w",)),
        (FromMeta, ()),
        (Twice, ()),
        (Named, ("y", "x")),
        (managed()(turned), ("y", "x")),
        (CALLABLES["jaxtyped"], ("x", "y")),
        (max, ()),
        (int, ()),
    ],
)
def test_places(fn, places):
    """Through wrappers that pass on their arguments; other wrappers have their own signature."""
    assert positions_of(fn)[1] == places


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (turned, ("y", "x")),
        (scaled, ("scale",)),
        (by_name, ()),
        (telling, ("x", "y")),
        (claiming, ("x",)),
        (ft.partial(subtract, x=1.0), ()),
        (FromMeta, ()),
    ],
)
def test_what_a_wrapper_claims_names_what_has_no_name(fn, names):
    """Its own names come first; `*args` alone are called as the wrapped function calls them."""
    assert positional_names(fn) == names


def test_a_mark_does_not_spread():
    """A wrapper of a wrapper that passes on its arguments is not taken for one."""

    @passing_on
    @ft.wraps(subtract)
    def handing_on(*args, **kwargs):
        return subtract(*args, **kwargs)

    @ft.wraps(handing_on)
    def turning(*args, **kwargs):
        return subtract(*args[::-1], **kwargs)

    assert positions_of(handing_on)[1] == ("x", "y")
    assert positions_of(turning)[1] == ()


def test_options_by_name_mean_the_argument_that_is_there():
    """The names that options use are those of the function itself, wherever it has them."""
    x, y = ramp(2), ramp(2) * 10

    made = pm.filter_vmap(turned, in_axes={"x": None})
    assert_close(made(y, x)["turned"], x[None] - y[:, None])
    made = pm.filter_vmap(turned, in_axes=(0, None))
    assert_close(made(x=x, y=y)["turned"], x[None] - y[:, None])
    # Two things of one name have each their own axes.
    found = pm.filter_vmap(defaulting)((x, 1.0), x=(x, x, x))
    assert_same(found, ((x, 1.0), {"x": (x, x, x)}))

    for donate in ("y", pm.select.path("y")):
        given, kept = jnp.copy(y), jnp.copy(x)
        pm.filter_jit(turned, donate=donate)(given, kept)
        assert given.is_deleted()
        assert not kept.is_deleted()
    shapes = pm.filter_jit(lambda y, x: jnp.ones(x), static="x")
    sizes = pm.filter_jit(ft.wraps(lambda x, y: 0)(shapes.__wrapped__), static="x")
    assert sizes(y, 3).shape == shapes(x=3, y=y).shape == (3,)


def test_the_first_argument_is_kept_however_it_is_given():
    """`all-except-first` counts positions; by keyword, the first is the first of the signature."""
    for fn in (lambda x, y: (x, y), ft.wraps(subtract)(lambda *args, **kwargs: (args, kwargs))):
        for call in (lambda f, a, b: f(a, b), lambda f, a, b: f(y=b, x=a)):
            first, second = ramp(2), ramp(2)
            call(pm.filter_jit(fn, donate="all-except-first"), first, second)
            assert not first.is_deleted()
            assert second.is_deleted()


def test_positional_only_parameters_and_catch_all_keywords():
    """A keyword that bears the name of a positional-only parameter goes where Python sends it."""

    def catch(x, /, **kwargs):
        return x, kwargs

    for transform in (pm.filter_jit, pm.filter_vmap):
        found = transform(catch)(ramp(2), x=ramp(2))
        assert_same(found, (ramp(2), {"x": ramp(2)}))

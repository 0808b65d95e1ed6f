"""Records that are returned before they are built, and look like built ones.

`pending(m)` is the result of a jitted identity, or of JAX's unflatten: nothing of it is built yet.
Each test compares it with the Module that was built in the usual way.
"""

import copy
import dataclasses
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import jax
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FrozenError
from pytreemod.tree.pending import fill_in, source_of
from tests.helpers.comparing import assert_identical, assert_same, field_names
from tests.helpers.trees import (
    MODULES,
    Affine,
    Checked,
    Child,
    Defaults,
    Holder,
    OwnGetattr,
    OwnGetattribute,
    OwnInit,
    Parent,
    Static,
    WithProperty,
    affine,
    double,
    ramp,
)

jitted = pm.filter_jit(lambda module: module)


def unflattened(module):
    """A copy that JAX has made."""
    return jax.tree.map(lambda leaf: leaf, module)


@pytest.fixture(params=[jitted, unflattened], ids=["jitted", "unflattened"])
def pending(request):
    """A function that makes a pending copy."""
    return request.param


# NumPy arrays come back as JAX arrays, as from every jitted function.
_WITH_NUMPY = {"holds a NumPy array", "holds an enum", "factories kept"}
SAME_AFTER_JIT = {name: make for name, make in MODULES.items() if name not in _WITH_NUMPY}
every_module = pytest.mark.parametrize("make", SAME_AFTER_JIT.values(), ids=SAME_AFTER_JIT.keys())


def is_pending(module):
    """Whether a Module still waits to be filled in."""
    return source_of(module.__stored__) is not None


def test_what_a_jitted_function_returns_waits(pending):
    """The purpose: nothing is built before it is read."""
    model = pending(Holder([affine(), OwnInit(2)]))
    assert is_pending(model)

    assert is_pending(pending(model))
    assert is_pending(model)
    model.content
    assert not is_pending(model)


@every_module
@pytest.mark.sampled
def test_fields_are_those_of_the_original(make, pending):
    """Every field reads as in the original, in whatever order it is asked for."""
    module = make()
    names = field_names(module)
    for first in names or [None]:
        waiting = pending(module)
        for name in ([first] if first else []) + names:
            assert_same(getattr(waiting, name), getattr(module, name))


@runtime_checkable
class HasWeight(Protocol):
    """From Python 3.12 on, `isinstance` looks for its members without asking `__getattr__`."""

    weight: jax.Array


@runtime_checkable
class HasScale(Protocol):
    """Of a field that many classes have a default for."""

    scale: float


LOOKS = {
    "type": type,
    "class": lambda m: m.__class__,
    "isinstance": lambda m: isinstance(m, pm.Module),
    "repr": repr,
    "str": str,
    "structure": jax.tree.structure,
    "paths": lambda m: [path for path, _ in jax.tree_util.tree_leaves_with_path(m)],
    "names of fields": field_names,
    "dataclass fields": dataclasses.fields,
    "is a dataclass": dataclasses.is_dataclass,
    "pretty": lambda m: pm.tree_pformat(m, width=20),
    "callable": callable,
    "of a protocol": lambda m: [isinstance(m, kind) for kind in (HasWeight, HasScale)],
    "attributes": lambda m: [(n, hasattr(m, n)) for n in (*dir(m), "scale")],
    "attributes of the class": lambda m: [(n, hasattr(type(m), n)) for n in field_names(m)],
    "has an attribute": lambda m: [
        hasattr(m, n) for n in ("weight", "nothing", "__call__", "replace")
    ],
}


@every_module
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_first_look(make, look, pending):
    """Whatever is asked first of a waiting Module, the answer is that of a built one."""
    module = make()
    # Once through the tree functions: unflattening sorts the keys of dicts.
    rebuilt = unflattened(module)
    fill_in(rebuilt)

    assert look(pending(module)) == look(rebuilt)


MAKES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": lambda m: pm.Module.replace(m),
    "tree_map": lambda m: jax.tree.map(lambda x: x, m),
    "flatten and unflatten": lambda m: jax.tree.unflatten(*jax.tree.flatten(m)[::-1]),
    "partition": lambda m: pm.combine(*pm.partition(m, pm.is_array)),
    "tree_at": lambda m: pm.tree_at(lambda t: [], m, []),
    "tree_at everywhere": lambda m: pm.tree_at("**", Holder(m), replace_fn=lambda x: x).content,
    "filter_jit": jitted,
    "filter_jit again": lambda m: jitted(jitted(m)),
    "in a list": lambda m: jitted([m])[0],
    "in a Module": lambda m: jitted(Holder(m)).content,
}


@every_module
@pytest.mark.parametrize("make_from", MAKES.values(), ids=MAKES.keys())
@pytest.mark.sampled
def test_first_use(make, make_from, pending):
    """Results of a pending Module's first use equal those of a built one."""
    module = make()

    assert_same(make_from(pending(module)), make_from(module))


# Python cannot pickle jitted functions.
@pytest.mark.parametrize("name", sorted(SAME_AFTER_JIT.keys() - {"automatic configuration"}))
def test_pickling_first(name, pending):
    """A waiting Module is pickled as a built one."""
    module = SAME_AFTER_JIT[name]()

    assert_same(pickle.loads(pickle.dumps(pending(module))), module)


@pytest.mark.parametrize("make", [affine, lambda: Static(ramp(2), 3), lambda: Child("a", 2)])
def test_equality(make, pending):
    """A waiting Module equals the original, from either side, and differs from others."""
    assert pending(make()) == make()
    assert make() == pending(make())
    assert pending(make()) == pending(make())
    assert pending(make()) != jax.tree.map(lambda x: x + 1, make())
    assert pending(make()) != 3


@every_module
def test_vars(make, pending):
    """The `vars` of a Module do not depend on whether a field was read before.

    A user's `to_dict` would leave the weights out, without a word.
    """
    waiting, same = pending(make()), make()

    shown = vars(waiting)

    assert shown.keys() == vars(same).keys()
    assert [*shown][: len(field_names(same))] == [*field_names(same)]
    assert all(map(str.isidentifier, shown))
    for name, value in shown.items():
        assert value is vars(waiting)[name]
    assert_same(jax.tree.leaves(dict(shown)), jax.tree.leaves(dict(vars(same))))


def test_methods_and_calls(pending):
    """Methods, calls and inherited methods work on a Module that was not read before."""
    np.testing.assert_array_equal(pending(affine())(ramp(3)), affine()(ramp(3)))
    np.testing.assert_array_equal(pending(affine()).scaled(ramp(3), by=2.0), 2 * affine()(ramp(3)))
    assert pending(Parent(2)).hot() == 0.5
    np.testing.assert_array_equal(pending(Child("a", 2))(ramp(2)), Child("a", 2)(ramp(2)))
    assert pending(WithProperty(ramp(2))).doubled.tolist() == [2.0, 4.0]


def test_bound_methods_hold_the_waiting_module(pending):
    """A bound method of a waiting Module is a tree with the Module's leaves."""
    method = pending(affine()).scaled

    assert len(jax.tree.leaves(method)) == 2
    np.testing.assert_array_equal(pm.filter_jit(method)(ramp(3)), affine()(ramp(3)))


def test_surgery_first(pending):
    """tree_at and replace make changed copies of a pending Module and leave it unchanged."""
    model = pending(affine())
    changed = pm.tree_at(lambda m: m.bias, model, 0.0)
    assert changed.bias == 0.0
    assert_same(changed.weight, affine().weight)

    assert pending(affine()).replace(bias=1.0).bias == 1.0
    assert_same(model, affine())


class OwnWeight(pm.Module):
    """Its `__init__` is its own."""

    weight: jax.Array

    def __init__(self, weight):
        self.weight = weight


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda m: setattr(m, "weight", 1), "no assignment, because a Module is immutable"),
        (lambda m: setattr(m, "weight", ramp(2)), "no assignment, because a Module is immutable"),
        (lambda m: setattr(m, "other", 1), "no assignment, because a Module is immutable"),
        (lambda m: delattr(m, "weight"), "no deletion, because a Module is immutable"),
        (lambda m: vars(m).update(weight=1), "no assignment, because a Module is immutable"),
        (lambda m: setattr(m, "__dict__", {}), "no assignment, because a Module is immutable"),
        (lambda m: m.__init__(*[1] * len(field_names(m))), "which is immutable"),
    ],
)
@pytest.mark.parametrize("make", [affine, lambda: OwnWeight(ramp(2))])
def test_frozen_before_it_is_filled_in(act, text, pending, make):
    """A pending Module is as immutable as a built one, with any `__init__`."""
    model = pending(make())
    with pytest.raises(FrozenError, match=text):
        act(model)

    assert_same(model, make())


def test_hash_of_arrays_is_an_error(pending):
    """hash fails where a leaf cannot be hashed, and works where all can."""
    for model in (affine(), pending(affine())):
        with pytest.raises(TypeError, match="leaves that have a hash"):
            hash(model)
    assert hash(pending(Checked(1.0, 2.0))) == hash(Checked(1.0, 2.0))


def test_unknown_names_are_attribute_errors(pending):
    """The text is Python's own, before the record is filled in, after, and for eager ones."""
    for make in (
        affine,
        lambda: Defaults(ramp(1)),
        lambda: Parent(2),
        lambda: WithProperty(ramp(2)),
    ):
        name = type(make()).__name__
        for module in (pending(make()), make()):
            for _ in range(2):
                with pytest.raises(
                    AttributeError, match=rf"^'{name}' object has no attribute 'wieght'"
                ) as caught:
                    module.wieght
                assert caught.value.name == "wieght"
                assert caught.value.obj is module


def test_errors_inside_properties_keep_their_text(pending):
    """An attribute that a property misses is named, not the property."""
    for module in (pending(WithProperty(ramp(2))), WithProperty(ramp(2))):
        with pytest.raises(AttributeError, match="has no attribute 'missing_thing'"):
            module.broken


def test_class_level_defaults_do_not_shine_through(pending):
    """A field whose class has a default reads as the instance's own value."""
    model = pending(Defaults(ramp(2), 3.0, "other", abs, None))

    assert (model.scale, model.name, model.act, model.bias) == (3.0, "other", abs, None)
    model = pending(Defaults(ramp(2), ramp(1), act=affine(), bias=ramp(2)))
    assert_same((model.scale, model.act, model.bias), (ramp(1), affine(), ramp(2)))


def test_own_getattr_and_getattribute(pending):
    """A class that answers for itself keeps doing so."""
    with_getattr = pending(OwnGetattr(ramp(2), 5.0))
    assert (with_getattr.magic, with_getattr.scale) == (42, 5.0)
    assert_same(with_getattr.weight, ramp(2))
    with pytest.raises(AttributeError, match="no nothing here"):
        with_getattr.nothing

    with_getattribute = pending(OwnGetattribute(ramp(2)))
    assert with_getattribute.magic == 42
    assert_same(with_getattribute.weight, ramp(2))


@pytest.mark.parametrize("order", ["class first", "jit first"])
def test_a_getattr_elsewhere_in_the_bases_is_asked(order, pending):
    """Another base's __getattr__ still answers once instances of the class have waited."""

    class Mixin:
        def __getattr__(self, name):
            if name == "magic":
                return 42
            raise AttributeError(f"no {name} in the mixin")

    class Base(pm.Module):
        weight: jax.Array

    if order == "jit first":
        pending(Base(ramp(1)))

    class Both(Base, Mixin):
        other: float = 1.0

    pending(Base(ramp(1)))
    for module in (Both(ramp(1)), pending(Both(ramp(1))), pending(pending(Both(ramp(1))))):
        assert module.magic == 42
        assert_same(module.weight, ramp(1))
        with pytest.raises(AttributeError, match="no nothing in the mixin"):
            module.nothing


def test_subclasses_of_a_class_that_waited(pending):
    """A subclass made later, with its own __getattr__ or without, works as if nothing had been."""

    class Base(pm.Module):
        weight: jax.Array

    pending(Base(ramp(1)))

    class Plain(Base):
        scale: float = 2.0

    class Own(Base):
        def __getattr__(self, name):
            if name == "magic":
                return 42
            raise AttributeError(f"no {name!r}")

    assert_same(pending(Plain(ramp(1), 3.0)).scale, 3.0)
    assert Own(ramp(1)).magic == 42
    assert_same(pending(Own(ramp(1))).weight, ramp(1))
    with pytest.raises(AttributeError, match="'nothing'"):
        Own(ramp(1)).nothing


def test_the_class_is_asked_as_if_nothing_stood_in_it(pending):
    """A descriptor of a pending field is not an attribute of the class, unless it has a default."""

    class Base(pm.Module):
        weight: jax.Array

    class Behind:
        weight = 5.0

    class Both(Base, Behind):
        pass

    class Unset(Base):
        def __init__(self):
            pass

    pending(Base(ramp(1)))
    with pytest.raises(AttributeError, match=r"^type object 'Base' has no attribute 'weight'"):
        Base.weight
    assert Both.weight == 5.0
    assert_same(pending(Both(ramp(1))).weight, ramp(1))
    with pytest.raises(TypeError, match="Field 'weight' was not initialized"):
        Unset()

    class Later(Base):
        weight: float = 3.0

    assert Later().weight == 3.0
    assert_same(pending(Later(ramp(2))).weight, ramp(2))
    Base.weight = 7.0
    assert Base.weight == 7.0
    assert_same(pending(Base(ramp(1))).weight, ramp(1))
    assert dataclasses.fields(Base)[0].default is dataclasses.MISSING


def test_subclasses_of_a_class_that_waits_for_inherited_fields(pending):
    """A descriptor of an inherited field is not taken for a property there."""

    class Base(pm.Module):
        weight: jax.Array

    class Middle(Base):
        scale: jax.Array

    pending(Middle(ramp(1), ramp(2)))

    class Last(Middle):
        bias: jax.Array

    for model in (Last(ramp(1), ramp(2), ramp(3)), pending(Last(ramp(1), ramp(2), ramp(3)))):
        assert_same((model.weight, model.scale, model.bias), (ramp(1), ramp(2), ramp(3)))
        assert field_names(model) == ["weight", "scale", "bias"]


def test_threads_that_read_one_waiting_module(pending):
    """Eight threads that read one waiting Module all see one and the same object in each field."""
    tree = Holder([Holder(affine(start=np.float32(i))) for i in range(6)])
    for _ in range(30):
        model = pending(tree)
        barrier = threading.Barrier(8)

        def read(i, model=model, barrier=barrier):
            barrier.wait()
            if i % 4 == 1:
                jax.tree.leaves(model)
            if i % 4 == 2:
                copy.copy(model)
            if i % 4 == 3:
                pm.tree_at(lambda m: m.content[0], model, 1)
            return id(model.content), id(model.content[3].content)

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(read, range(8)))) == 1
        assert_same(model, tree)


def test_containers_are_each_instances_own(pending):
    """Lists and dicts inside two results are different objects; so are those of later reads."""
    model = Holder([ramp(1), {"a": 1}])
    first, second = pending(model), pending(model)

    assert first.content is not second.content
    assert first.content is first.content
    first.content.append(5)
    first.content[1]["a"] = 2
    assert_same(second, model)
    assert_same(pending(model), model)


def test_mutation_of_a_waiting_modules_list_is_seen(pending):
    """A list inside a result that is changed after it was read is passed on as changed."""
    model = pending(Holder([ramp(1)]))
    model.content.append(2.0)

    assert_same(pending(model), Holder([ramp(1), 2.0]))
    model.content[0] = ramp(2)
    assert_same(pending(model), Holder([ramp(2), 2.0]))


def test_identity_of_what_is_not_traced(pending):
    """Functions and other values that are not arrays are returned as the same objects."""
    thing = object()
    model = pending(Holder([double, thing, Affine]))

    assert_identical(model.content, [double, thing, Affine])


def test_waiting_modules_do_not_keep_their_origin_alive():
    """A result holds its own arrays, not the arguments'."""
    source = affine()
    watched = weakref.ref(source.weight)
    result = pm.filter_jit(lambda m: jax.tree.map(lambda x: x + 1, m))(source)
    del source
    gc.collect()

    assert watched() is None
    assert result.weight.shape == (2, 3)


def test_donated_arrays_of_a_waiting_module_are_gone():
    """Reading a waiting Module whose arrays were given away gives deleted arrays, not others."""
    step = pm.filter_jit(lambda m: jax.tree.map(lambda x: x + 1, m), donate="all")
    first = step(affine())
    second = step(first)

    assert first.weight.is_deleted()
    assert_same(second.weight, affine().weight + 2)


def test_nan_and_odd_values_survive(pending):
    """Fields with NaN, -0.0, bytes and big ints are returned unchanged."""
    model = pending(Holder([float("nan"), -0.0, b"x", 2**70, 1j]))

    assert repr(model.content) == repr([float("nan"), -0.0, b"x", 2**70, 1j])

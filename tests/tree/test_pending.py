"""A Module that a jitted call returned, and that nobody has read, behaves as any other.

It waits: nothing of it is built before it is read. Each test compares it with a Module that was
built in the usual way.
"""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_identical, assert_same, field_names
from tests.helpers.trees import (
    MODULES,
    Affine,
    Holder,
    OwnGetattr,
    WithProperty,
    affine,
    double,
    ramp,
)

jitted = pm.filter_jit(lambda module: module)


def unflattened(module):
    """A copy that JAX has made."""
    return jax.tree.map(lambda leaf: leaf, module)


both = pytest.mark.parametrize("pending", [jitted, unflattened], ids=["jitted", "unflattened"])

# NumPy arrays come back as JAX arrays, as from every jitted function.
_WITH_NUMPY = {"holds a NumPy array", "holds an enum", "factories kept"}
SAME_AFTER_JIT = {name: make for name, make in MODULES.items() if name not in _WITH_NUMPY}


LOOKS = {
    "repr": repr,
    "structure": jax.tree.structure,
    "paths": lambda m: [path for path, _ in jax.tree_util.tree_leaves_with_path(m)],
    "names of fields": field_names,
    "names in vars": lambda m: list(vars(m)),
    "pretty": lambda m: pm.tree_pformat(m, width=20),
    "attributes": lambda m: [
        (n, hasattr(m, n))
        for n in (*filter(str.isidentifier, dir(m)), "scale", "nothing")
        if n[:2] != "__"
    ],
    "attributes of the class": lambda m: [(n, hasattr(type(m), n)) for n in field_names(m)],
}


@both
def test_every_look_is_that_of_a_built_module(pending):
    """Whatever is asked first of a waiting Module, the answer is that of a built one."""
    for name, make in SAME_AFTER_JIT.items():
        module = make()
        # Once through the tree functions: unflattening sorts the keys of dicts.
        built = unflattened(module)
        vars(built)
        for kind, look in LOOKS.items():
            assert (name, kind, look(pending(module))) == (name, kind, look(built))


@both
def test_fields_are_those_of_the_original(pending):
    """Every field reads as in the original, whichever is asked for first, also through `vars`."""
    for make in SAME_AFTER_JIT.values():
        module = make()
        names = field_names(module)
        for first in names:
            waiting = pending(module)
            for name in (first, *names):
                assert_same(getattr(waiting, name), getattr(module, name))
        for name, value in vars(pending(module)).items():
            assert_same(jax.tree.leaves(value), jax.tree.leaves(vars(module)[name]))


USES = {
    "deepcopy": copy.deepcopy,
    "replace": lambda m: pm.Module.replace(m),
    "partition": lambda m: pm.combine(*pm.partition(m, pm.is_array)),
    "filter_jit again": lambda m: jitted(jitted(m)),
    "in a list": lambda m: jitted([m])[0],
    "in a Module": lambda m: jitted(Holder(m)).content,
}


@both
def test_its_first_use_gives_what_a_built_one_gives(pending):
    """Copies, surgery, transforms and pickles of a waiting Module equal those of a built one."""
    for name, make in SAME_AFTER_JIT.items():
        module = make()
        for use in USES.values():
            assert_same(use(pending(module)), use(module))
        # Python cannot pickle jitted functions.
        if name != "automatic configuration":
            assert_same(pickle.loads(pickle.dumps(pending(module))), module)


def test_threads_that_read_one_waiting_module():
    """Eight threads that read one waiting Module all see one and the same object in each field."""
    tree = Holder([Holder(affine(start=np.float32(i))) for i in range(6)])
    for n in range(30):
        model = (jitted, unflattened)[n % 2](tree)
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


def test_values_that_are_not_traced_come_back_as_they_were():
    thing, odd = object(), [float("nan"), -0.0, b"x", 2**70, 1j]
    assert_identical(jitted(Holder([double, thing, Affine])).content, [double, thing, Affine])
    assert repr(jitted(Holder(odd)).content) == repr(odd)


def test_a_missing_attribute_has_pythons_own_error():
    assert jitted(OwnGetattr(ramp(2), 5.0)).magic == 42
    with pytest.raises(AttributeError, match=r"^'Affine' object has no attribute 'wieght'"):
        jitted(affine()).wieght
    with pytest.raises(AttributeError, match="has no attribute 'missing_thing'"):
        jitted(WithProperty(ramp(2))).broken


def test_the_class_is_asked_as_if_nothing_waited():
    """A field is no attribute of its class unless it has a default, also in later subclasses."""

    class Base(pm.Module):
        weight: jax.Array

    jitted(Base(ramp(1)))
    with pytest.raises(AttributeError, match=r"^type object 'Base' has no attribute 'weight'"):
        Base.weight

    class Later(Base):
        weight: float = 3.0

    class Last(Base):
        bias: jax.Array

    assert Later().weight == 3.0
    assert_same(jitted(Later(ramp(2))).weight, ramp(2))
    # A field of the base is not taken for a property there.
    assert field_names(jitted(Last(ramp(1), ramp(2)))) == ["weight", "bias"]


def test_a_waiting_module_holds_its_own_arrays_alone():
    """Not those of the arguments; donated ones are not replaced by others."""
    source = affine()
    watched = weakref.ref(source.weight)
    result = pm.filter_jit(lambda m: jax.tree.map(lambda x: x + 1, m))(source)
    del source
    gc.collect()
    assert watched() is None
    assert result.weight.shape == (2, 3)
    step = pm.filter_jit(lambda m: jax.tree.map(lambda x: x + 1, m), donate="all")
    first = step(affine())
    assert_same(step(first).weight, affine().weight + 2)
    assert first.weight.is_deleted()

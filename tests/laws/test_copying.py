"""Laws of copies: pickled, copied, deep-copied and replaced Modules equal the original."""

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import pytreemod as pm
from pytreemod.tree.renewing import with_new_containers
from tests.helpers.comparing import assert_identical, assert_same
from tests.helpers.trees import MODULES, affine, every_module

# Not picklable in Python: jitted functions that are not in a module.
UNPICKLABLE = {"automatic configuration"}


@every_module
def test_replace_of_nothing_is_the_same(make):
    """m.replace() == m, with the same objects in its fields."""
    module = make()

    assert_identical(pm.Module.replace(module), module)


@every_module
def test_copy_shares_the_leaves(make):
    """copy.copy(m) == m: another object with the same leaves."""
    module = make()
    copied = copy.copy(module)

    assert copied is not module
    assert_identical(copied, module)


@every_module
def test_deepcopy_is_equal(make):
    """copy.deepcopy(m) == m: the same class, structure and values."""
    module = make()
    copied = copy.deepcopy(module)

    assert copied is not module
    assert_same(copied, module)


@pytest.mark.parametrize(
    "make",
    [m for n, m in MODULES.items() if n not in UNPICKLABLE],
    ids=[n for n in MODULES if n not in UNPICKLABLE],
)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickled_and_unpickled_is_equal(make, protocol):
    """pickle.loads(pickle.dumps(m)) == m, and it divides in the same way."""
    module = make()
    restored = pickle.loads(pickle.dumps(module, protocol))

    assert_same(restored, module)
    assert len(jax.tree.leaves(restored)) == len(jax.tree.leaves(module))


@every_module
def test_replace_of_one_field_leaves_the_others(make):
    """m.replace(x=v).x == v, and every other field is the same, or equal if it can be edited."""
    module = make()
    for field in dataclasses.fields(module):
        if field.metadata.get("converter") or not hasattr(module, field.name):
            continue
        if isinstance(module, MODULES["checked"]().__class__):
            continue
        new = pm.Module.replace(module, **{field.name: None})
        assert getattr(new, field.name) is None
        for other in dataclasses.fields(module):
            if other.name != field.name and hasattr(module, other.name):
                found, old = getattr(new, other.name), getattr(module, other.name)
                if with_new_containers(old) is old:
                    assert found is old
                else:
                    assert found is not old
                    assert_same(found, old)


def test_copies_of_a_module_in_which_a_string_stands_for_data():
    """A tree of labels, whose strings are leaves, is copied as such."""
    labels = jax.tree.map(lambda _: "label", affine())

    for copied in (copy.copy(labels), copy.deepcopy(labels), pickle.loads(pickle.dumps(labels))):
        assert jax.tree.leaves(copied) == ["label", "label"]


def test_threads_construct_and_copy_at_once():
    """Sixteen threads that build, flatten and copy instances of new classes do not interfere."""

    def work(i):
        class Local(pm.Module):
            weight: jax.Array
            size: int = pm.field(static=True)

        module = Local(affine(), i)
        for _ in range(20):
            module = copy.copy(jax.tree.map(lambda x: x, module)).replace(size=i)
        return module.size, len(jax.tree.leaves(module))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(32))) == [(i, 2) for i in range(32)]

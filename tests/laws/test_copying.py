"""Laws of copies: pickled, copied, deep-copied and replaced Modules equal the original."""

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_identical, assert_same
from tests.helpers.trees import MODULES, Checked, Child, Converted, affine, every_module

# Not picklable in Python: jitted functions that are not in a module.
UNPICKLABLE = {"automatic configuration"}


@every_module
def test_copies_share_the_leaves(make):
    """m.replace() == m == copy.copy(m): another object with the same leaves."""
    module = make()
    copied = copy.copy(module)

    assert_identical(pm.Module.replace(module), module)
    assert copied is not module
    assert_identical(copied, module)


@pytest.mark.parametrize("name", MODULES)
def test_deep_copies_and_pickles_are_equal(name):
    """deepcopy(m) == m == loads(dumps(m)): the same class, structure and values."""
    module = MODULES[name]()
    copied = [copy.deepcopy(module)]
    if name not in UNPICKLABLE:
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            copied.append(pickle.loads(pickle.dumps(module, protocol)))

    for other in copied:
        assert other is not module
        assert_same(other, module)
        assert len(jax.tree.leaves(other)) == len(jax.tree.leaves(module))


@every_module
def test_replace_of_one_field_leaves_the_others(make):
    """m.replace(x=v).x == v, and every other field is as it was."""
    module = pm.resolve(make())
    names = [field.name for field in dataclasses.fields(module) if hasattr(module, field.name)]
    for name in names:
        if not isinstance(module, (Checked, Converted, Child)):  # These refuse None.
            new = pm.Module.replace(module, **{name: None})
            assert getattr(new, name) is None
            for other in {*names} - {name}:
                assert_same(getattr(new, other), getattr(module, other))


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

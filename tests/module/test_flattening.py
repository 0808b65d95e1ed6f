"""The interface to JAX: flattening, unflattening and paths."""

import copy
import dataclasses
import pickle

import jax
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.trees import MODULES, Affine, Defaults, Holder, Static, affine, double, ramp


class Given(pm.Module):
    """Without defaults in the class: all of its fields wait."""

    weight: object
    size: int = pm.field(static=True)


def test_unflatten_runs_nothing_of_the_class():
    """Neither __init__ nor __new__, __post_init__, converters, checks or __setattr__."""
    calls = []

    class Loud(pm.Module):
        x: int = pm.field(converter=lambda v: calls.append("converter") or v)

        def __new__(cls, *args):
            calls.append("new")
            return super().__new__(cls)

        def __init__(self, x):
            calls.append("init")
            self.x = x

        def __check_init__(self):
            calls.append("check")

    loud = Loud(1)
    calls.clear()
    jax.tree.map(lambda x: x, loud)
    pm.filter_jit(lambda m: m)(loud).x
    pm.tree_at(lambda m: m.x, loud, 3)
    assert calls == []


def test_tree_map_over_several_trees():
    """Modules of one structure are mapped together; configuration must agree."""
    added = jax.tree.map(lambda x, y: x + y, affine(), affine())
    np.testing.assert_array_equal(added.weight, 2 * affine().weight)
    with pytest.raises(ValueError, match=r"[Mm]ismatch|structure"):
        jax.tree.map(lambda x, y: x, Static(1, 2), Static(1, 3))


def test_paths_are_attributes():
    """Paths print as accesses, and lead to configuration's neighbours only."""
    texts = [
        jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(Defaults(affine(), [1, 2.0]))
    ]

    assert texts == [".weight.weight", ".weight.bias", ".scale[0]", ".scale[1]"]


def test_is_leaf_sees_modules():
    """is_leaf may stop at a Module, as at any node."""
    model = Holder([affine(), 1])
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, Affine))

    assert leaves[0] is model.content[0]
    assert leaves[1] == 1


def test_a_subclass_is_a_node_of_its_own():
    """Subclasses are registered when they are made."""

    class Sub(Affine):
        extra: int = 3

    assert len(jax.tree.leaves(Sub(1, 2))) == 3
    assert jax.tree.structure(Sub(1, 2)) != jax.tree.structure(Affine(1, 2))
    assert jax.tree.map(lambda x: x + 1, Sub(1, 2)) == Sub(2, 3, 4)


def test_many_fields():
    """A class may have hundreds of fields."""
    names = [f"field_{i}" for i in range(300)]
    Wide = type(pm.Module)("Wide", (pm.Module,), {"__annotations__": dict.fromkeys(names, int)})
    wide = Wide(*range(300))

    assert jax.tree.leaves(wide) == list(range(300))
    assert jax.tree.map(lambda x: x, wide) == wide
    assert wide.field_299 == 299


def test_flatten_gives_the_fields_in_order():
    """The children are the data fields in the order of declaration, by attribute."""
    for make in MODULES.values():
        module = make()
        pairs, _ = jtu.tree_flatten_with_path(module, is_leaf=lambda x, m=module: x is not m)
        names = [path[0].name for path, _ in pairs]

        assert names == [f.name for f in dataclasses.fields(module) if f.name in names]
        assert all(child is getattr(module, path[0].name) for path, child in pairs)


def test_structures_tell_classes_and_configuration_apart():
    """Two classes with the same fields differ; so do two configurations, by type and value."""

    class Twin(pm.Module):
        weight: jax.Array
        bias: jax.Array

    structures = [
        jax.tree.structure(tree)
        for tree in (
            Affine(1, 2), Twin(1, 2), Static(1, 1), Static(1, 2), Static(1, "1"), Static(1, (1,)),
            Static(1, True), Static(1, 1.0), Static(1, (True,)),
            Holder(double), Holder(max), Holder(1), Holder([1]),
        )
    ]  # fmt: skip
    assert all(
        (a == b) == (i == j) for i, a in enumerate(structures) for j, b in enumerate(structures)
    )


@pytest.mark.parametrize(
    "name", ["layout", "node", "cls", "self", "aux", "children", "_", "schema"]
)
def test_fields_may_bear_any_name(name):
    """Our own code does not collide with the names of fields."""
    Odd = type(pm.Module)("Odd", (pm.Module,), {
        "__annotations__": {name: int, "size": int}, "size": pm.field(static=True, default=5)
    })  # fmt: skip
    odd = Odd(1)
    assert getattr(jax.tree.map(lambda x: x + 1, odd), name) == 2
    assert getattr(pm.filter_jit(lambda m: m)(Odd(ramp(1))), name).shape == (1,)
    assert getattr(odd.replace(**{name: 7}), name) == 7


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.replace(weight=5.0),
        lambda m: pm.tree_at(lambda m: m.weight, m, 5.0),
        lambda m: pm.with_role(m.replace(weight=5.0), "weight", "lora"),
        lambda m: pickle.loads(pickle.dumps(m.replace(weight=5.0))),
        lambda m: copy.deepcopy(m.replace(weight=5.0)),
        lambda m: jax.tree.map(lambda x: 5.0, m),
    ],
)
def test_a_changed_copy_is_flattened_anew(change):
    """The cache of an instance belongs to it alone, whether it was read before or not."""
    for read in (False, True):
        module = jax.tree.map(lambda x: x, Given(ramp(1), 3))
        if read:
            module.weight
        jax.tree.leaves(module)

        changed = change(module)
        assert jax.tree.leaves(changed) == [5.0]
        assert (changed.weight, changed.size) == (5.0, 3)
        np.testing.assert_array_equal(jax.tree.leaves(module)[0], ramp(1))


def test_a_later_attribute_of_the_class_hides_no_field():
    """Neither of old nor of new instances."""

    class Base(pm.Module):
        act: object
        weight: float = 1.0

    before = Base(double)
    waiting = pm.filter_jit(lambda m: m)(before)
    Base.act = lambda self, x: x
    for module in (before, waiting, jax.tree.map(lambda x: x, before), Base(double)):
        assert module.act is double
    assert Base.act(None, 3) == 3

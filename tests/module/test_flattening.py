"""The interface to JAX: flattening, unflattening and paths."""

import copy
import pickle

import jax
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError
from pytreemod.tree.pending import FLAT, source_of
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.trees import (
    Affine,
    Checked,
    Defaults,
    Empty,
    Holder,
    Pair,
    Static,
    affine,
    double,
    every_module,
    ramp,
)


class Given(pm.Module):
    """Without defaults in the class: all of its fields wait."""

    weight: object
    size: int = pm.field(static=True)


@every_module
def test_flatten_gives_the_fields_in_order(make):
    """The children are the data fields in the order of declaration, by attribute."""
    module = make()
    pairs, _ = jtu.tree_flatten_with_path(module, is_leaf=lambda x: x is not module)
    names = [path[0].name for path, _ in pairs]

    assert names == [n for n in type(module).__record__.fields if n in names]
    assert all(child is getattr(module, path[0].name) for path, child in pairs)


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


def test_structures_tell_classes_and_configuration_apart():
    """Two classes with the same fields differ; so do two configurations, by type and value."""

    class Twin(pm.Module):
        weight: jax.Array
        bias: jax.Array

    structures = [
        jax.tree.structure(tree)
        for tree in (
            Affine(1, 2), Twin(1, 2), Static(1, 1), Static(1, 2), Static(1, "1"), Static(1, (1,)),
            Static(1, True), Static(1, 1.0), Static(1, 0.0), Static(1, -0.0), Static(1, (True,)),
            Holder(double), Holder(max), Holder(1), Holder([1]),
        )
    ]  # fmt: skip
    assert len(set(structures)) == len(structures)
    assert all(
        (a == b) == (i == j) for i, a in enumerate(structures) for j, b in enumerate(structures)
    )


def test_structures_tell_types_apart_inside_containers():
    """The same inside lists, dicts and named tuples, as far as Python's containers go."""
    for wrap in (lambda x: [x], lambda x: {"a": x}, lambda x: Pair(x, 0), lambda x: [(x, [x])]):
        structures = [jax.tree.structure(Static(1, wrap(x))) for x in (1, True, 1.0, 0.0, -0.0)]
        assert len(set(structures)) == 5
        for value in (1, True, 1.0, 0.0, -0.0):
            found = pm.filter_jit(lambda m: m)(Static(1, wrap(value))).size
            assert repr(found) == repr(wrap(value))


@pytest.mark.parametrize("thing", [object(), jax.nn.relu, jax.jit(double), double, Empty()])
def test_static_containers_share_what_they_hold(thing):
    """A list in a static field is copied for the structure; its items are not."""
    for value in ([thing], {"a": thing}, [(1, [thing])]):
        module = Static(ramp(1), value)
        assert jax.tree.structure(module) == jax.tree.structure(module)
        assert jax.tree.map(lambda x, y: y, module, module).size == value
        final, _ = jax.lax.scan(
            lambda m, _: (jax.tree.map(lambda x: x + 1, m), None), module, length=2
        )
        assert final.size == value


def test_structures_of_equal_nans_are_equal():
    """A NaN in configuration is itself, so that it does not trace again."""
    first, second = (jax.tree.structure(Static(1, float("nan"))) for _ in range(2))

    assert first == second
    assert hash(first) == hash(second)


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


@pytest.mark.parametrize(
    "name",
    [
        "layout",
        "d",
        "node",
        "made",
        "x0",
        "c0",
        "cls",
        "new",
        "aux",
        "children",
        "self",
        "check",
        "_",
        "hold",
        "set_fields",
        "schema",
    ],
)
def test_fields_may_bear_any_name(name):
    """The generated code does not collide with the names of fields."""
    Odd = type(pm.Module)("Odd", (pm.Module,), {
        "__annotations__": {name: int, "size": int}, "size": pm.field(static=True, default=5)
    })  # fmt: skip
    odd = Odd(1)
    assert getattr(jax.tree.map(lambda x: x + 1, odd), name) == 2
    assert getattr(pm.filter_jit(lambda m: m)(Odd(ramp(1))), name).shape == (1,)
    assert getattr(odd.replace(**{name: 7}), name) == 7


def test_what_flattening_gives_is_kept():
    """No Python runs the second time; nor the first, for a tree that JAX has unflattened."""
    module = Static(affine(), 3)
    assert FLAT not in module.__stored__
    leaves, structure = jax.tree.flatten(module)

    kept = module.__stored__[FLAT]
    assert kept[0] == (module.weight,)
    again = jax.tree.unflatten(structure, leaves)
    assert again.__stored__.keys() >= {FLAT}
    assert again.__flat__[1] is kept[1]
    assert module.__flat__ is kept


@pytest.mark.parametrize(
    "module",
    [
        Defaults(ramp(2)),
        Defaults(ramp(2), 3.0, "other", abs, ramp(2)),
        Defaults(ramp(2), act=Empty()),
    ],
)
def test_fields_with_a_default_in_the_class_are_there_and_the_others_wait(module):
    """Python would find the default before it asks for pending fields."""
    made = jax.tree.map(lambda leaf: leaf, module)
    for name in ("scale", "name", "act", "bias", "inner"):
        assert_same(getattr(made, name), getattr(module, name))
    assert source_of(made.__stored__) is not None
    assert made.weight is module.weight
    assert source_of(made.__stored__) is None
    assert made == module
    assert vars(made).keys() == vars(module).keys()


def test_what_is_kept_shows_nowhere():
    """Flattening changes nothing that can be seen of an instance."""

    def seen(module):
        return vars(module), dir(module), repr(module), hash(module), module.__reduce__()[1:]

    module = Checked(1.0, 2.0)
    before = seen(Checked(1.0, 2.0))
    jax.tree.leaves(module)

    assert seen(module) == before
    assert seen(jax.tree.map(lambda x: x, module)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.replace(weight=5.0),
        lambda m: pm.tree_at(lambda m: m.weight, m, 5.0),
        lambda m: pm.tree_at(lambda m: m.weight, m, 5.0).replace(size=3),
        lambda m: pm.with_role(m.replace(weight=5.0), "weight", "lora"),
        lambda m: pickle.loads(pickle.dumps(m.replace(weight=5.0))),
        lambda m: copy.copy(m.replace(weight=5.0)),
        lambda m: copy.deepcopy(m.replace(weight=5.0)),
        lambda m: jax.tree.map(lambda x: 5.0, m),
    ],
)
@pytest.mark.parametrize("read", [False, True])
def test_a_changed_copy_is_flattened_anew(change, read):
    """The cache of an instance belongs to it alone, whether it was read before or not."""
    module = jax.tree.map(lambda x: x, Given(ramp(1), 3))
    if read:
        module.weight
    jax.tree.leaves(module)

    changed = change(module)

    assert jax.tree.leaves(changed) == [5.0]
    assert (changed.weight, changed.size) == (5.0, 3)
    np.testing.assert_array_equal(jax.tree.leaves(module)[0], ramp(1))


def test_nothing_is_kept_of_what_can_be_changed():
    """A list in a static field is the user's; it is read each time."""
    for module in (Given(1, [1]), Static(1, [1])):
        for one in (module, jax.tree.map(lambda x: x, module)):
            first = jax.tree.structure(one)
            one.size.append(2)

            assert jax.tree.structure(one) != first
            assert jax.tree.map(lambda x: x, one).size == [1, 2]
    assert module.size == [1, 2]


def test_a_new_may_give_what_jax_has_made():
    """It is finished, although nothing of it was filled in; it is not finished again."""
    made = []

    class Kept(pm.Module):
        weight: float

        def __new__(cls, *args):
            return made[0] if made else super().__new__(cls)

        def __init__(self, weight):
            if not made:
                self.weight = weight

    made.append(jax.tree.map(lambda x: x + 1, Kept(1.0)))
    assert Kept(7.0) is made[0]
    assert Kept(7.0).weight == 2.0


def test_functions_that_a_class_gets_later_hide_no_field():
    """A later attribute of the class hides no field of old or new instances."""

    class Base(pm.Module):
        act: object
        weight: float = 1.0

    before = Base(double)
    waiting = pm.filter_jit(lambda m: m)(before)
    Base.act = lambda self, x: x
    for module in (before, waiting, jax.tree.map(lambda x: x, before), Base(double)):
        assert module.act is double
    assert Base.act(None, 3) == 3

    class Unset(Base):
        def __init__(self):
            pass

    with pytest.raises(FieldError, match="Field 'act' was not initialized"):
        Unset()


test_refusals = refusals(globals())

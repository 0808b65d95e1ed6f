"""The schema of a Module class."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.tree.pending import AbstractSource
from tests.helpers.trees import (
    Affine,
    Buffered,
    Converted,
    Defaults,
    Holder,
    OwnInit,
    Static,
    affine,
    by_hand,
    double,
    every_module,
)
from tests.labels import label


@every_module
def test_names_are_data_and_configuration(make):
    """The fields that are set are data or configuration, each one of the two, in order."""
    module = make()
    record = type(module).__record__
    names, data = record.names(module), record.data_names(module)

    assert names == tuple(n for n in record.fields if n in names)
    assert set(data) <= set(names)
    assert not set(data) & record.static
    assert jax.tree.structure([getattr(module, n) for n in data]).num_leaves == len(
        jax.tree.leaves(module)
    )


def test_roles():
    """The default role is "param"; others are as declared."""
    record = Buffered.__record__

    assert [record.role(n) for n in record.fields] == ["param", "buffer", "lora", "lora"]


def test_rebuild_keeps_the_division_unless_values_ask_for_another():
    """A function instead of data moves to configuration; a string, as a label, does not."""
    record = Holder.__record__
    assert record.data_names(record.rebuild(Holder(1), {"content": double})) == ()
    assert record.data_names(record.rebuild(Holder(1), {"content": "label"})) == ("content",)
    assert record.data_names(record.rebuild(Holder(double), {"content": affine()})) == ("content",)
    assert record.data_names(record.rebuild(Holder(double), {"content": "name"})) == ()


def test_rebuild_shares_what_it_does_not_change():
    """A copy with some fields replaced; the original is unchanged."""
    layer = affine()
    changed = Affine.__record__.rebuild(layer, {"bias": 1})

    assert changed.weight is layer.weight
    assert layer.bias.shape == (2,)
    assert type(changed) is Affine


VALUES = (1.0, jnp.ones(2), "label", double, affine())


@pytest.mark.parametrize("decide", [False, True])
@pytest.mark.parametrize("weight", VALUES, ids=label)
@pytest.mark.parametrize("bias", VALUES, ids=label)
def test_rebuild_judges_several_values_as_one_after_another(weight, bias, decide):
    """Each new value is data or configuration by itself, whatever the others are."""
    record = Affine.__record__

    for old in (affine(), Affine(double, 1.0)):
        both = record.rebuild(old, {"weight": weight, "bias": bias}, decide=decide)
        first = record.rebuild(old, {"weight": weight}, decide=decide)
        second = record.rebuild(first, {"bias": bias}, decide=decide)
        assert record.data_names(both) == record.data_names(second)
        assert type(both) is type(second)


def test_rebuild_leaves_behind_what_tells_of_one_instance():
    """Neither the mark of derivatives nor `__orig_class__` is copied; roles are."""
    model = pm.with_role(affine(), "weight", "lora")
    model.__orig_class__ = list[int]
    changed = Affine.__record__.rebuild(model, {"bias": 1})

    assert vars(changed).keys() == vars(model).keys() - {"__orig_class__"}
    assert Affine.__record__.given_roles(changed) == Affine.__record__.given_roles(model) != ()


def test_attributes_and_notes_of_a_pickle_are_taken_apart():
    """An attribute that is not a field, as `module_update_wrapper` adds, is no note."""
    values = {"weight": 1, "__wrapped__": 2, "<roles>": 3, "<other>": 4}

    attributes, notes = Affine.__record__.apart(values)
    assert attributes == {"weight": 1, "__wrapped__": 2}
    assert notes == {"<roles>": 3, "<other>": 4}


def test_a_hand_made_instance_is_not_finished():
    """Only a finished instance is immutable, and may be cached."""
    record = Affine.__record__

    assert record.is_finished(affine())
    assert not record.is_finished(by_hand())


@pytest.mark.parametrize(
    ("make", "waits"),
    [
        (affine, True),
        (lambda: OwnInit(2), True),
        (lambda: Defaults(1.0), False),
        (lambda: Static(1.0, 2), True),
        (lambda: Converted([1.0]), True),
    ],
)
def test_which_instances_may_wait(make, waits):
    """A class whose defaults are data in containers is filled in at once; others may wait."""
    module = make()
    early = type(module).__record__.early(module)

    assert (early is not None) is waits
    assert pm.filter_jit(lambda m: m)(module) == module


class Recording(AbstractSource):
    """Fills fields in with their names, and records which."""

    def __init__(self):
        self.read_names = []

    def read(self, node, name):
        self.read_names.append(name)
        node.__stored__[name] = name

    def fill_in(self, node):
        for name in type(node).__record__.fields:
            self.read(node, name)


@pytest.mark.parametrize(
    ("make", "at_once"),
    [(affine, []), (lambda: Static(1.0, 2), ["mode"])],
)
def test_a_proxy_reads_its_fields_from_its_source(make, at_once):
    """When they are requested; at once, where the class has an attribute of that name."""
    module, source = make(), Recording()
    record = type(module).__record__
    proxy = record.proxy(module, source)

    assert source.read_names == at_once
    assert [getattr(proxy, name) for name in record.fields] == list(record.fields)
    assert source.read_names == [*at_once, *(n for n in record.fields if n not in at_once)]


def test_classes_of_static_values_go_with_the_instances():
    """Except those of the last few: a class made in a function can be freed."""

    class Configured(pm.Module):
        weight: object
        config: object = pm.field(static=True)

    def made(wrap):
        class Local:
            pass

        return jax.tree.structure(Configured(1, wrap(Local()))), weakref.ref(Local)

    wraps = [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x],
        lambda x: {"a": x},
        lambda x: frozenset({x}),
    ]
    watched = [made(wraps[i % 5])[1] for i in range(100)]
    gc.collect()
    assert sum(ref() is not None for ref in watched) <= 4
    structure, ref = made(wraps[0])
    for i in range(10):
        made(wraps[i % 5])
    gc.collect()
    kept = jax.tree.unflatten(structure, [2])
    assert jax.tree.structure(Configured(1, kept.config)) == structure
    assert type(kept.config) is ref()


def test_threads_that_meet_new_divisions_at_once():
    """Instances that divide in new ways, built by many threads, agree on their structure."""

    class Fresh(pm.Module):
        a: object
        b: object
        c: object = pm.field(static=True)

    values = [1, double, "text", affine(), None, max]

    def build(i):
        made = Fresh(values[i % 6], values[i % 5], i % 4)
        return jax.tree.structure(made)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(build, range(120)))
    assert found == [build(i) for i in range(120)]

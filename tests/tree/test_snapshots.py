"""The cached arrays of a record: never stale, never mixed up, never cached too long."""

import dataclasses
import enum
import functools as ft
import gc
import operator
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict, deque

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.tree.pending import PRIVATE
from pytreemod.tree.snapshots import (
    divide,
    exact,
    snapshot_of,
    static_kind,
    structure_of,
)
from tests.helpers.comparing import assert_identical, assert_same
from tests.helpers.racing import race
from tests.helpers.trees import (
    Affine,
    Containers,
    Holder,
    Pair,
    Registered,
    affine,
    double,
    every_module,
    every_tree,
    ramp,
)
from tests.helpers.trees import Static as WithStatic

identity = pm.filter_jit(lambda tree: tree)


class StaticList(pm.Module):
    """Configuration that can be changed in place."""

    weight: jax.Array
    sizes: list = pm.field(static=True)


def remembered(module):
    """Whether a Module keeps a snapshot."""
    own = module.__stored__.get(PRIVATE)
    return own is not None and own.snapshot is not None


# ---- snapshots that are cached


@every_module
def test_a_snapshot_gives_back_the_module(make):
    """assemble(arrays) of a snapshot is the Module, leaf for leaf, twice in a row."""
    module = make()
    for _ in range(2):
        snapshot = snapshot_of(module)
        assert_same(snapshot.structure.assemble(snapshot.arrays), module)


def test_the_second_call_finds_the_first_ones_snapshot():
    """A Module is flattened once, however often it is passed."""
    model = Holder([affine(), {"a": 1}])

    assert snapshot_of(model) is snapshot_of(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Holder(Registered(1, "")),
        lambda: Holder(OrderedDict(a=1)),
        lambda: Holder(jtu.Partial(max, 1)),
        lambda: Holder([affine().scaled]),
        lambda: Holder(pm.filter_jit(affine())),
    ],
)
def test_nodes_of_unknown_kinds_are_never_remembered(make):
    """A node that may change without notice is flattened every time."""
    model = make()
    snapshot_of(model)

    assert not remembered(model)


@pytest.mark.parametrize("items", [(), (1, 2)])
@pytest.mark.parametrize("returned", [False, True])
def test_attributes_of_tuples_are_seen(items, returned):
    """A subclass of tuple may be registered with its attributes as children."""

    class Held(Pair if items else tuple):
        pass

    def build(_, children):
        made = tuple.__new__(Held, children[:-1])
        made.inside = children[-1]
        return made

    jtu.register_pytree_node(Held, lambda t: ((*t, t.inside), None), build)
    tree = build(None, (*items, ramp(2)))
    model = identity(Holder(tree)) if returned else Holder(tree)
    identity(model)
    model.content.inside = ramp(3)
    assert_same(identity(model).content.inside, ramp(3))
    for x in (ramp(3), ramp(2), ramp(3)):
        model.content.inside = x
        assert_same(identity(model.content).inside, x)
    assert not remembered(model)


def test_named_tuples_are_remembered():
    """Also those whose class could have attributes, but has none."""

    class Below(Pair):
        pass

    for tree in (Pair(1, ramp(1)), Below(ramp(1), 2), (ramp(1), Pair(1, 2))):
        model = Holder(tree)
        snapshot_of(model)
        assert remembered(model)


def test_a_module_under_construction_is_not_remembered():
    """The snapshot of a half-built self in a jitted method is dropped at once."""
    seen = []

    class Growing(pm.Module):
        first: jax.Array
        second: jax.Array

        def __init__(self):
            self.first = ramp(1)
            seen.append(identity(Holder(self)).content)
            self.first = ramp(2)
            self.second = ramp(3)

    model = Growing()
    assert_same(seen[0].first, ramp(1))
    assert_same(identity(model).first, ramp(2))
    assert_same(identity(model).second, ramp(3))


# ---- changes in place


def change_list(m):
    """Appends to a list."""
    m.items.append(3.0)


CHANGES = {
    "append to a list": change_list,
    "exchange an array in a list": lambda m: operator.setitem(m.items, 0, ramp(3)),
    "change a list in a list": lambda m: m.items[1].append("more"),
    "add a key": lambda m: operator.setitem(m.table, "new", 1),
    "exchange a value in a dict": lambda m: operator.setitem(m.table, "a", {"deep": ramp(2)}),
    "in a Module in a dict": lambda m: operator.setitem(m.table["m"].content, "x", -1.0),
    "another key": lambda m: operator.setitem(m.table, "z", m.table.pop("a")),
    "in a tuple": lambda m: m.pair[1].clear(),
    "reverse": lambda m: m.items.reverse(),
}


def containers():
    """Lists and dicts at many depths."""
    return Containers(
        [ramp(2), [1, ramp(1)]], {"a": 2.0, "m": Holder({"x": 1.0})}, (ramp(1), [ramp(2)], double)
    )


@pytest.mark.parametrize("how", ["built", "returned", "returned and passed on", "inside another"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled
def test_mutation_after_a_call_is_seen(change, how):
    """A list or dict inside a Module that is changed after a call is passed on as changed."""
    model, expected = containers(), containers()
    identity(model)
    if how.startswith("returned"):
        model = identity(model)
    if how == "returned and passed on":
        identity(model)
    outer = Holder([model]) if how == "inside another" else model
    identity(outer)
    change(model)
    change(expected)

    found = identity(outer)
    assert_same(found.content[0] if how == "inside another" else found, expected)
    change_list(model)
    change_list(expected)
    found = identity(outer)
    assert_same(found.content[0] if how == "inside another" else found, expected)


def test_numpy_arrays_changed_in_place_are_seen():
    """A NumPy array inside a Module is read at each call."""
    array = np.zeros(3, np.float32)
    model = Holder([array])
    total = pm.filter_jit(lambda m: jnp.sum(m.content[0]))
    assert total(model) == 0.0
    array[:] = 2.0

    assert total(model) == 6.0


@pytest.mark.parametrize("returned", [False, True])
def test_static_containers_changed_in_place_are_seen(returned):
    """A list in a static field that is changed after a call makes a new trace."""
    count = pm.filter_jit(lambda m: len(m.sizes) * m.weight)
    model = StaticList(jnp.ones(()), [1])
    assert count(model) == 1.0
    if returned:
        model = identity(model)
    assert count(model) == 1.0
    model.sizes.append(2)

    assert count(model) == 2.0
    assert identity(model).sizes == [1, 2]
    model.sizes.append(3)
    assert count(model) == 3.0


def test_deques_are_leaves_and_refused():
    """A deque is not a node for JAX and has no hash: an error, not a stale result."""
    with pytest.raises(pm.PytreemodError, match=r"expected a hashable value, got deque"):
        identity(Holder(deque([1])))


# ---- differences between structures


SCALARS = [0, False, 0.0, -0.0, 1, True, 1.0, 1 + 0j, float("nan"), complex("nan"), None, "1", b"1"]
DIFFERENT = [*SCALARS, (1,), (True,), (1.0,), (0.0,), (-0.0,), ((1,),), ((True,),)]


def test_exact_values_tell_apart_what_python_calls_equal():
    """Tokens with types are equal for a value and itself, and for nothing else in the list."""
    keys = [(type(x), exact(x)) for x in SCALARS]

    assert len(set(keys)) == len(keys)
    assert keys == [(type(x), exact(x)) for x in SCALARS]


def test_the_kind_of_a_static_value_is_its_class():
    """The spellings of a dtype have one kind."""
    assert [static_kind(x) for x in (1, True, 1.0, "1", int)] == [int, bool, float, str, type]
    assert {static_kind(x) for x in (np.float32, jnp.float32, np.dtype("float32"))} == {np.dtype}


@pytest.mark.parametrize("value", DIFFERENT, ids=repr)
def test_configuration_comes_back_as_it_was(value):
    """The same for static fields, alone and inside tuples."""
    for other in DIFFERENT:
        identity(WithStatic(1.0, other))

    assert repr(identity(WithStatic(1.0, value)).size) == repr(value)


# ---- structures


def test_equal_trees_share_one_structure():
    """Equal structures are one object, so that comparing and hashing them costs nothing."""
    _, first = structure_of(*jax.tree.flatten([affine(), "text", 1.0]))
    _, second = structure_of(*jax.tree.flatten([affine(start=np.float32(9)), "text", 1.0]))
    _, other = structure_of(*jax.tree.flatten([affine(), "text", 2.0]))

    assert first is second
    assert first is not other


def test_structures_go_when_nobody_needs_them():
    """Nothing keeps a structure but those who use it."""
    _, structure = structure_of(*jax.tree.flatten([ramp(1), "a structure for this test alone"]))
    watched = weakref.ref(structure)
    del structure
    gc.collect()

    assert watched() is None


@every_tree
def test_divide_separates_arrays_and_puts_them_back(make):
    """divide(t) gives the arrays alone, and assemble gives t back, hashable or not."""
    tree = [make(), {1, 2}]
    arrays, structure = divide(tree)

    assert all(map(pm.is_array, arrays))
    assert structure.count == len(arrays)
    assert_identical(structure.assemble(arrays), tree)


def test_divide_takes_a_mask():
    """A bool for each leaf decides whether it is a value, whatever the leaf is."""
    values, structure = divide({"a": 1, "b": jnp.ones(2), "c": "x"}, [True, False, True])

    assert values == [1, "x"]
    assert structure.place([10, 20]) == {"a": 10, "b": None, "c": 20}
    np.testing.assert_array_equal(structure.assemble([10, 20])["b"], jnp.ones(2))
    with pytest.raises(ValueError, match="zip"):
        divide([1, 2], [True])


@pytest.mark.slow
def test_threads_agree_on_a_structure():
    """Threads that meet a structure at once get one object."""
    for n in range(200):
        leaves = jax.tree.flatten([ramp(1), f"threads {n}"])
        found = race(lambda _, leaves=leaves: structure_of(*leaves)[1])
        assert len(set(map(id, found))) == 1


# ---- lifetime


def test_arrays_go_with_the_model():
    """Only the model holds its arrays: neither the snapshot nor a compiled function does."""
    model = Affine(ramp(5), ramp(7))
    watched = [weakref.ref(model.weight), weakref.ref(model.bias), weakref.ref(model.weight)]
    identity(model)
    del model
    gc.collect()

    assert [ref() for ref in watched] == [None] * 3


def test_live_arrays_do_not_grow():
    """Twenty steps leave as many arrays alive as one."""
    step = pm.filter_jit(lambda m: jax.tree.map(lambda x: x + 1, m))
    model = step(Affine(ramp(13), ramp(13)))
    gc.collect()
    before = len(jax.live_arrays())
    for i in range(20):
        model = step(model)
        if i % 3 == 0:
            model.weight
    gc.collect()

    assert len(jax.live_arrays()) == before
    del model
    gc.collect()
    assert len(jax.live_arrays()) == before - 2


def test_replaced_arrays_in_a_list_go_at_the_next_call():
    """A snapshot that no longer holds is dropped with its arrays."""
    model = Holder([ramp(17)])
    watched = weakref.ref(model.content[0])
    identity(model)
    model.content[0] = ramp(1)
    identity(model)
    gc.collect()

    assert watched() is None


def test_snapshots_are_no_part_of_the_module():
    """Equality, hash, repr, copies and structure of a Module that was passed are unchanged."""
    fresh, used = Pair(affine(), WithStatic(1.0, 2)), Pair(affine(), WithStatic(1.0, 2))
    for module in used:
        identity(module)

    assert fresh == used
    assert repr(fresh) == repr(used)
    assert hash(fresh.second) == hash(used.second)
    assert jax.tree.structure(fresh) == jax.tree.structure(used)
    assert remembered(used.second)
    assert not remembered(used.second.replace(size=3))


@ft.partial(jtu.register_dataclass, data_fields=["w"], meta_fields=["scale"])
@dataclasses.dataclass
class Foreign:
    """A node of another library, with configuration beside its children."""

    w: jax.Array
    scale: object


class Task(enum.StrEnum):
    """Members equal their texts."""

    DEPTH = "depth"


ONLY_EQUAL = {
    "a node's own": (lambda: Foreign(ramp(2), 2), lambda: Foreign(ramp(2), 2.0)),
    "a zero's sign": (lambda: Foreign(ramp(2), 0.0), lambda: Foreign(ramp(2), -0.0)),
    "inside of it": (lambda: Foreign(ramp(2), (1, "a")), lambda: Foreign(ramp(2), (True, "a"))),
    "keys": (lambda: {1: ramp(2)}, lambda: {True: ramp(2)}),
    "keys that are texts": (lambda: {"depth": ramp(2)}, lambda: {Task.DEPTH: ramp(2)}),
    "ordered keys": (lambda: OrderedDict({2: ramp(2)}), lambda: OrderedDict({2.0: ramp(2)})),
    "default": (lambda: defaultdict(int, {2: ramp(2)}), lambda: defaultdict(int, {2.0: ramp(2)})),
}
PASSING = {
    "jit": lambda tree: pm.filter_jit(lambda x: x)(tree),
    "kept jit": identity,
    "vmap": lambda tree: pm.filter_vmap(lambda x, tree: tree, in_axes=(0, None), out_axes=None)(
        ramp(2), tree
    ),
    "scan": lambda tree: pm.filter_scan(keeping, tree, ramp(2))[0],
    "cond": lambda tree: pm.filter_cond(True, itself, itself, tree),
    "checkpoint": lambda tree: pm.filter_checkpoint(itself)(tree),
    "grad": lambda tree: pm.filter_grad(with_tree, has_aux=True)(jnp.ones(()), tree)[1],
}


def itself(x):
    return x


def keeping(carry, x):
    return carry, x


def with_tree(x, tree):
    return x, tree


def told(tree):
    """Differences in a tree that `==` does not see."""
    tree = tree.content if isinstance(tree, Holder) else tree
    return repr(tree.scale) if isinstance(tree, Foreign) else repr([*tree])


@pytest.mark.parametrize("wrap", [itself, Holder], ids=["bare", "in a Module"])
@pytest.mark.parametrize("name", ONLY_EQUAL)
def test_trees_that_jax_calls_equal_stay_what_they_are(name, wrap):
    """A model got the configuration of another one that JAX calls equal: the first in the cache."""
    one, other = (wrap(make()) for make in ONLY_EQUAL[name])
    assert jtu.tree_structure(one) == jtu.tree_structure(other)
    assert told(one) != told(other)

    for passed in PASSING.values():
        found = [passed(tree) for tree in (one, other, one)]
        assert [told(tree) for tree in found] == [told(one), told(other), told(one)]


AT_THE_END = """
import jax
import pytreemod as pm
from pytreemod.tree.snapshots import structure_of

mlp = pm.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
adapted = pm.lora(mlp, "**.weight", 1, key=jax.random.key(1))
kept = [structure_of(*jax.tree.flatten(layer)) for layer in adapted.layers]
"""


def test_nothing_is_printed_when_python_ends():
    """Structures that live as long as the program are not compared when its modules are gone."""
    command = [sys.executable, "-c", AT_THE_END]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stderr == ""

"""The one boundary between a call and JAX."""

import gc
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from pytreemod.transform.boundary.packing import pack, split_call, unpack
from pytreemod.tree.snapshots import divide
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.trees import (
    ALL_TREES,
    Affine,
    Color,
    Holder,
    Pair,
    Registered,
    Static,
    affine,
    double,
    every_tree,
    ramp,
)


def key_of(*args, **kwargs):
    """The key of a call."""
    return split_call((), args, kwargs)[1]


def is_same_key(a, b):
    """Whether two keys are equal, both ways, with equal hashes."""
    return a == b and b == a and hash(a) == hash(b)


@every_tree
def test_arrays_come_in_jaxs_order(make):
    """Splitting a call gives the arrays that flattening gives, in the same order."""
    args, kwargs = (make(), 1, make()), {"b": make(), "a": make()}
    arrays, _ = split_call((), args, kwargs)
    expected = [x for x in jax.tree.leaves((args, kwargs)) if pm.is_array(x)]
    again, structure = divide(((), args, kwargs))

    assert [id(x) for x in arrays] == [id(x) for x in again]
    assert len(arrays) == len(expected) == structure.count
    assert_same(structure.assemble(arrays), ((), args, kwargs))


# Tokens are distinguished by identity until they have names.
@pytest.mark.parametrize("name", [name for name in ALL_TREES if name != "token"])
def test_equal_calls_have_equal_keys(name):
    """Two calls with equal arguments, built anew, have one key."""
    make = ALL_TREES[name]

    assert is_same_key(key_of(make(), x=make()), key_of(make(), x=make()))


DIFFERENT = [
    ((1,), {}), ((True,), {}), ((1.0,), {}), ((0.0,), {}), ((-0.0,), {}), (("1",), {}),
    ((b"1",), {}),
    (({0.0: 1},), {}), (({-0.0: 1},), {}), (({(1,): 1},), {}), (({(1.0,): 1},), {}),
    ((None,), {}), (((),), {}), (([],), {}), (({},), {}), (([None],), {}), (((None,),), {}),
    (([1, 2],), {}), (([[1], 2],), {}), (([[1, 2]],), {}), ((1, 2), {}), ((), {"x": 1}),
    ((), {"y": 1}),
    (({"a": 1},), {}), (({"b": 1},), {}), (({1: 1},), {}), (({"a": None},), {}),
    ((OrderedDict(a=1),), {}), ((Pair(1, 2),), {}), (((1, 2),), {}),
    ((ramp(1),), {}), ((ramp(1), ramp(1)), {}), (([ramp(1)],), {}), ((ramp(1), None), {}),
    ((affine(),), {}), ((Affine(1, 2),), {}), ((Static(ramp(1), 1),), {}),
    ((Static(ramp(1), True),), {}),
    ((Static(ramp(1), 1.0),), {}), ((Static(ramp(1), 0.0),), {}), ((Static(ramp(1), -0.0),), {}),
    ((Static(ramp(1), (1,)),), {}), ((Static(ramp(1), (True,)),), {}), ((Holder(double),), {}),
    ((Holder(max),), {}), ((double,), {}), ((max,), {}), ((Affine,), {}), ((Color.RED,), {}),
    ((Color.BLUE,), {}), ((Registered(1, "a"),), {}), ((Registered(1, "b"),), {}),
    ((Registered(ramp(1), "a"),), {}), ((ramp(1), "x", ramp(1)), {}), ((ramp(1),), {"x": ramp(1)}),
]  # fmt: skip


def test_different_calls_have_different_keys():
    """Types, nesting, names, configuration and static values all count."""
    keys = [key_of(*args, **kwargs) for args, kwargs in DIFFERENT]

    # As in the look-up of a compiled function: compared only where the hashes are equal.
    seen = {}
    clashes = [
        (seen.setdefault(key, call), call) for key, call in zip(keys, DIFFERENT, strict=True)
    ]
    assert [pair for pair in clashes if pair[0] is not pair[1]] == []


def test_values_of_arrays_do_not_count():
    """Arrays are traced: neither value, shape nor kind is in the key."""
    assert is_same_key(key_of(ramp(1)), key_of(ramp(2, 2)))
    assert is_same_key(key_of(ramp(1)), key_of(np.ones(3)))
    assert is_same_key(key_of(affine()), key_of(Affine(np.float32(1), np.ones(2))))


def test_order_of_keywords_and_dict_keys_does_not_count():
    """Keywords and dicts are sorted, as JAX sorts them."""
    assert is_same_key(key_of(a=1, b=2), key_of(b=2, a=1))
    assert is_same_key(key_of({"a": 1, "b": 2}), key_of({"b": 2, "a": 1}))


def test_dict_keys_come_back_as_they_were():
    """Keys that Python calls equal are distinguished, because the program may read them."""
    identity = pm.filter_jit(lambda tree: tree)
    for key in (1, True, 1.0, 0, False, 0.0, -0.0, (1,), (1.0,), (True,), ((0.0,),), ((-0.0,),)):
        assert repr(identity({key: 2})) == repr({key: 2})
        assert repr(identity([{key: (2,)}])) == repr([{key: (2,)}])


def test_attributes_of_named_tuples_belong_to_the_key():
    """Of those that were registered with them; also if the first one met had none."""

    class Tagged(Pair):
        pass

    jtu.register_pytree_node(
        Tagged, lambda t: (tuple(t), getattr(t, "tag", None)), lambda _, children: Tagged(*children)
    )
    plain, one, other = (Tagged(1, 2) for _ in range(3))
    one.tag, other.tag = "one", "other"

    assert is_same_key(key_of(plain), key_of(Tagged(1, 2)))
    assert not is_same_key(key_of(plain), key_of(one))
    assert not is_same_key(key_of(one), key_of(other))


def test_nan_is_one_key():
    """NaN is not equal to itself in Python; the programs are equal."""
    assert is_same_key(key_of(float("nan")), key_of(float("nan")))
    assert is_same_key(key_of(complex("nan")), key_of(complex("nan")))
    assert is_same_key(key_of(Holder([float("nan")])), key_of(Holder([float("nan")])))
    assert is_same_key(key_of(Static(1, float("nan"))), key_of(Static(1, float("nan"))))


@every_tree
def test_unpack_undoes_pack(make):
    """unpack(pack(t)) == t, time and again, and the arrays are the very same."""
    tree = make()
    packed = pack(tree)
    for _ in range(2):
        assert_same(unpack(packed), tree)
    found = [id(x) for x in jax.tree.leaves(unpack(packed)) if pm.is_array(x)]
    assert found == [id(x) for x in jax.tree.leaves(tree) if pm.is_array(x)]


@pytest.mark.parametrize("depth", [100, 900])
@pytest.mark.parametrize("kind", ["dict", "list", "tuple", "Module", "Registered", "by turns"])
def test_deep_results(kind, depth):
    """A result may be nested as deep as JAX takes trees, nearly Python's limit; it can be read."""
    wraps = {
        "dict": lambda x: {"a": x},
        "list": lambda x: [x],
        "tuple": lambda x: (x, None),
        "Module": Holder,
        "Registered": lambda x: Registered(x, "note"),
    }
    turns = list(wraps.values()) if kind == "by turns" else [wraps[kind]]
    tree = x = ramp(1)
    for i in range(depth):
        tree = turns[i % len(turns)](tree)

    def call():
        made = pm.filter_jit(lambda t: t)(tree)
        return jax.tree.leaves(made), jax.tree.structure(made) == jax.tree.structure(tree)

    with ThreadPoolExecutor(1) as pool:  # A thread's stack is empty; pytest's own is half full.
        leaves, same = pool.submit(call).result()
    assert (leaves, same) == ([x], True)


def test_wide_results():
    """A result may have thousands of leaves."""
    tree = {f"k{i}": [i, jnp.zeros(())] for i in range(1500)}

    assert_same(unpack(pack(tree)), tree)


class Unhashable:
    """Has no hash, and no part in JAX's trees."""

    __hash__ = None

    def __repr__(self):
        return "Unhashable()"


def test_sets_are_refused():
    """A set is not a tree and has no hash; a frozenset has."""
    identity = pm.filter_jit(lambda x: x)
    with pytest.raises(ArgumentError, match=r"expected a hashable value, got \{1, 2\}"):
        identity({1, 2})

    assert identity(frozenset({1, 2})) == frozenset({1, 2})


def test_results_that_cannot_be_hashed_are_returned():
    """A result need not be hashable: a non-array leaf is returned unchanged."""
    thing = Unhashable()
    found = pm.filter_jit(lambda x: (x, thing, Holder([thing, {1}])))(ramp(1))

    assert found[1] is thing
    assert found[2].content[0] is thing


# ---- plans, compared and cached


def test_plans_of_other_results_are_others():
    """Structure, static values, and where arrays are moved all count."""
    ((plan, _),) = pack(ramp(1)).items()
    ((moved, _),) = pack(ramp(1)).items()
    ((other, _),) = pack([ramp(1), "a"]).items()
    assert plan == moved != other

    moved.gather = list
    assert plan != moved


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: [f, ramp(1)], lambda f: Holder([f])])
def test_what_is_lent_is_not_kept(wrap):
    """A plan returns it as long as it exists, and keeps nothing alive."""

    def own():
        return 1

    packed = pack(wrap(own), {id(own)})
    other = pack(wrap(own), {id(own)})
    assert_same(unpack(packed), wrap(own))
    assert list(packed) == list(other)
    alive = weakref.ref(own)
    del own
    gc.collect()
    assert alive() is None


# ---- traced values that are not arrays

ways_to_hold = pytest.mark.parametrize(
    "hold",
    [lambda x: x, lambda x: [x, 2], lambda x: Affine(x, None)],
    ids=["bare", "list", "Module"],
)


@ways_to_hold
@pytest.mark.parametrize(
    "transform",
    [pm.filter_jit, pm.filter_checkpoint, pm.filter_make_jaxpr],
    ids=lambda transform: transform.__name__,
)
def test_a_reference_does_not_leave_its_trace(transform, hold):
    """A `Ref` that a traced function makes cannot be returned: JAX says so, and no tracer is."""
    program = transform(lambda x: hold(jax.new_ref(x)))

    with pytest.raises(ValueError, match="mutable array reference"):
        program(ramp(2))


@ways_to_hold
def test_a_reference_that_is_mapped_comes_out(hold):
    """Where JAX returns a `Ref`, as from `vmap`, the result is a `Ref`, not a tracer."""
    result = pm.filter_vmap(lambda x: hold(jax.new_ref(x)))(ramp(2))
    (reference,) = (x for x in jax.tree.leaves(result) if not isinstance(x, int))

    assert not isinstance(reference, jax.core.Tracer)
    assert_same(reference[...], ramp(2))


@ways_to_hold
def test_a_reference_of_a_trace_is_an_argument(hold):
    """A `Ref` that was made in a trace is passed on to a compiled function, which writes to it."""
    traced = []

    @pm.filter_jit
    def add(held, x):
        traced.append(None)
        (reference,) = (r for r in jax.tree.leaves(held) if not isinstance(r, int))
        reference[...] = reference[...] + x

    @jax.jit
    def program(x):
        reference = jax.new_ref(x)
        for _ in range(2):
            add(hold(reference), x)
        return reference[...]

    assert_same(program(ramp(2)), 3 * ramp(2))
    assert len(traced) == 1


test_refusals = refusals(globals())

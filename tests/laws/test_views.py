"""All views of an instance agree, in every style of class, order of bases and state.

**Law.** Attributes, `vars`, fields, `asdict`, `replace`, copies, pickles, files, tree and jit
show the same values, before and after each operation.
"""

import abc
import collections.abc
import copy
import dataclasses
import pickle
from typing import Any, Generic, TypeVar

import jax
import jax.tree_util as jtu
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_same
from tests.helpers.computing import scaled
from tests.helpers.trees import ramp

T = TypeVar("T")


class Slotted:
    """A mixin without a dict."""

    __slots__ = ()


class Generated(pm.Module):
    """The `__init__` is written."""

    weight: Any
    other: Any
    items: list[Any]
    n: int = pm.field(static=True, default=3)

    def __call__(self, x):
        return self.weight * x


class Own(pm.Module):
    """The `__init__` assigns."""

    weight: Any
    other: Any
    items: list[Any]
    n: int = pm.field(static=True)

    def __init__(self, weight, other, items):
        self.weight, self.other, self.items, self.n = weight, other, items, 3

    def __call__(self, x):
        return self.weight * x


class SlotsFirst(Slotted, Generated): ...


class GenericFirst(Generic[T], Generated): ...


class AbstractFirst(abc.ABC, Own): ...


class CallableFirst(collections.abc.Callable, Generated):
    """An abstract class of Python, with slots and without a dict."""

    def __call__(self):
        """Give a field."""
        return self.n


STYLES = [Generated, SlotsFirst, GenericFirst, AbstractFirst, CallableFirst]
through_jit = pm.filter_jit(lambda m: m)
double = pm.filter_jit(lambda m: jax.tree.map(lambda x: 2 * x, m))

STATES = {
    "built": lambda m: m,
    "lazy": lambda m: jax.tree.map(lambda x: x, m),
    "from jit": through_jit,
    "copied": copy.copy,
    "deep-copied": copy.deepcopy,
    "tied": lambda m: pm.tie(m, "other", to="weight"),
    "computed": lambda m: m.replace(weight=scaled()),
    "unpickled": lambda m: pickle.loads(pickle.dumps(m)),
}
OPERATIONS = {
    **STATES,
    "doubled": double,
    "replaced": lambda m: m.replace(items=[ramp(3), 1.0]),
    "edited": lambda m: pm.tree_at(lambda m: m.items[0], m, ramp(3)),
    "configured": lambda m: pm.tree_at(lambda m: m.n, m, 4),
    "with a role": lambda m: pm.with_role(m, "items.0", "buffer"),
    "resolved": pm.resolve,
    "untied": pm.untie,
    "with a precision": lambda m: pm.with_precision(m, "float32"),
    "mode": lambda m: pm.nn.with_mode(m, n=5),
    "combined": lambda m: pm.combine(*pm.partition(m, pm.is_array)),
    "named": lambda m: pm.from_named(m, pm.named_leaves(m)),
    "updated": lambda m: pm.apply_updates(m, jax.tree.map(lambda x: x, m)),
    "scanned": lambda m: jax.lax.scan(lambda m, _: (m, None), m, None, length=1)[0],
    "chosen": lambda m: pm.filter_cond(True, lambda m: m, lambda m: m, m),
    "recomputed": lambda m: pm.filter_checkpoint(lambda m: m)(m),
}
DOES_NOT_APPLY = {("tied", "tied"), ("tied", "computed"), ("computed", "tied")}


def assert_views_agree(made, file):
    """Each view shows the values of the attributes, and the tree has the stored ones."""
    names = ["weight", "other", "items", "n"]
    read = {name: getattr(made, name) for name in names}

    assert [field.name for field in dataclasses.fields(made)] == names
    # In order; but computed and tied fields, and with the rules around its calls.
    shown = {name: value for name, value in vars(made).items() if name != "__rules__"}
    assert [*shown] == [name for name in names if name in shown]
    assert_same(shown, {name: read[name] for name in shown})
    assert [*dataclasses.asdict(made)] == names
    assert_same(dataclasses.asdict(made), read)
    leaves, structure = jtu.tree_flatten(made)
    pm.save(file, made)
    for view in (
        made.replace(),
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        pm.load(file, made),
        structure.unflatten(leaves),
        through_jit(made),
        pm.tree_at(lambda m: m.items, made, made.items),
    ):
        assert type(view) is type(made)
        assert jtu.tree_structure(view) == structure
        assert_same(jtu.tree_leaves(view), leaves)
        assert_same({name: getattr(view, name) for name in names}, read)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.sampled
def test_all_views_agree_after_every_operation(style, state, tmp_path):
    """Also on the argument of the operation, which is unchanged."""
    made = STATES[state](style(ramp(2), 2 * ramp(2), [ramp(3), {"a": 1.0}]))
    before = [*jtu.tree_leaves(made)]
    assert_views_agree(made, tmp_path / "file")
    for name, operation in OPERATIONS.items():
        if (state, name) not in DOES_NOT_APPLY:
            found = operation(made)
            assert_views_agree(found, tmp_path / "file")
            if name not in {"built", "copied"}:
                assert found.items is not made.items
    assert_same(jtu.tree_leaves(made), before)
    assert_views_agree(made, tmp_path / "file")

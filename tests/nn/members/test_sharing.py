"""Shared leaves of an `Ensemble`: found by a selector, and stored once."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, SpecError, StateError, UnfinishedError
from pytreemod.nn.members.sharing import check_shared, refuse_own_state, shared_paths
from pytreemod.nn.members.stacking import stack_members
from tests.labels import label

KEY = jax.random.key(0)


class Net(pm.Module):
    """Two layers, a token, a number and a function."""

    first: nn.Linear
    norm: nn.BatchNorm
    noise: pm.RngStream
    last: nn.Linear
    scale: float

    def __init__(self):
        self.first = nn.Linear(2, 2, key=KEY)
        self.norm = nn.BatchNorm(2)
        self.noise = pm.RngStream()
        self.last = nn.Linear(2, 2, key=KEY)
        self.scale = 2.0


NET = Net()


@pytest.mark.parametrize(
    ("selector", "paths"),
    [
        (None, ()),
        ("first", ("first",)),
        ("first.weight", ("first.weight",)),
        (nn.Linear, ("first", "last")),
        (pm.select.path("*.bias"), ("first.bias", "norm.bias", "last.bias")),
        (pm.select.at(lambda net: net.last), ("last",)),
        # A token is not an array: each member has its own values in the State.
        (pm.is_array, ("first", "norm.weight", "norm.bias", "last")),
        (
            pm.select.type(nn.BatchNorm) & ~pm.select.type(pm.StateIndex),
            ("norm.weight", "norm.bias"),
        ),
    ],
    ids=label,
)
@pytest.mark.parametrize("named", [True, False], ids=["named", "new"])
def test_the_highest_nodes_are_kept(selector, paths, named):
    """Whether the tokens hold their values or a State does."""
    net = pm.make_with_state(Net)()[0] if named else NET

    assert shared_paths(net, selector) == paths


@pytest.mark.parametrize(
    ("selector", "error", "text"),
    [
        ("frist", SpecError, r"select\.path\('frist'\)"),
        (3, SpecError, r"^Ensemble\(shared\): expected a selector on a member, got 3"),
        (
            False,
            SpecError,
            r"Ensemble\(shared\): expected a selector that picks some arrays",
        ),
        ("scale", SpecError, r"got scale, which picks none"),
        (
            "norm",
            StateError,
            r"(?s)a part with State\.\n  at norm\.state_index\n.*~pm\.select\.type\(pm\.S",
        ),
        ("noise", StateError, r"at noise"),
        (..., StateError, r"at norm\.state_index\n  at noise"),
    ],
    ids=label,
)
@pytest.mark.parametrize("named", [True, False], ids=["named", "new"])
def test_a_selector_of_nothing_or_of_state_is_refused(selector, error, text, named):
    """A stream without a key has no leaf, but is State."""
    net = pm.make_with_state(Net)()[0] if named else NET
    with pytest.raises(error, match=text):
        shared_paths(net, selector)


@pytest.mark.parametrize("selector", [..., pm.is_array, "*"], ids=label)
def test_a_selector_of_everything_is_refused(selector):
    """No member would differ from another."""
    with pytest.raises(SpecError, match=r"(?s)picks all of them.*~pm\.select\.path\('bias'\)"):
        shared_paths(NET.first, selector)


def test_a_net_that_keeps_its_state_is_not_shared():
    """Its State is a part like any other, and each member would write to it."""
    with pytest.raises(StateError, match=r"(?s)a part with State\..*\n  at \[0\]\.state\["):
        shared_paths((pm.stateful(nn.BatchNorm(2)), NET.first), "[0]")
    with pytest.raises(StateError, match=r"expected members that take their State as an argument"):
        refuse_own_state(pm.stateful(nn.BatchNorm(2)))
    refuse_own_state(NET)


def test_members_that_share_hold_the_same():
    """Equal numbers are enough; other ones, and other dtypes, are refused with their paths."""
    copy = jax.tree.map(jnp.copy, NET.first)
    one = stack_members([NET.first, copy], ("weight",))
    assert one.weight is NET.first.weight
    assert one.bias.shape == (2, 2)

    for other in (copy.weight + 1, copy.weight.astype(jnp.float16)):
        with pytest.raises(ArgumentError, match=r"value in members\[1\](.|\n)*at weight"):
            stack_members([NET.first, copy.replace(weight=other)], ("weight",))


def test_paths_are_paths():
    """Paths that `replace` may return."""
    check_shared("where", ("first",))
    for wrong in ("first", ["first"], (3,), nn.Linear):
        with pytest.raises(ArgumentError, match=r"where: expected a tuple of paths"):
            check_shared("where", wrong)


def lacking(key, size=None):
    """A member of which a layer lacks a size, unless it is given."""
    keys = jax.random.split(key)
    return nn.Sequential([nn.Linear(size, 2, key=keys[0]), nn.LayerNorm(2), nn.Lambda(jnp.tanh)])


@pytest.mark.parametrize(
    "selector",
    ["layers[0]", "layers[1]", nn.Linear, pm.select.type(nn.LayerNorm), pm.select.path("*.0.**")],
)
@pytest.mark.sampled
def test_what_lacks_a_size_is_shared_as_a_whole(selector):
    """Or is each member's own: as where the sizes are written out."""
    x = jnp.ones(3)
    made = nn.Ensemble(lacking, 2, key=KEY, shared=selector)
    written = nn.Ensemble(lambda key: lacking(key, 3), 2, key=KEY, shared=selector)

    assert made.shared == written.shared == pm.materialize(made, x).shared
    pairs = zip(*map(jax.tree.leaves, (pm.materialize(made, x), written)), strict=True)
    for found, expected in pairs:
        assert jnp.array_equal(found, expected)


@pytest.mark.parametrize("selector", ["layers[0].weight", "**.bias"])
def test_a_part_of_what_lacks_a_size_is_not_shared(selector):
    """It does not exist yet, and would be forgotten."""
    with pytest.raises(UnfinishedError, match=r"Ensemble\(shared\): (.|\n)*layers\[0\]: Linear"):
        nn.Ensemble(lacking, 2, key=KEY, shared=selector)

"""`by`, and prefix trees in general."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from pytreemod.tree.prefixes import By, mask_of
from tests.helpers.trees import Affine, Buffered, OwnInit, Pair, affine

TREE = {"a": [Affine(1, 2.0), Buffered(3, 4, 5)], "b": 6}
"""Six leaves: a[0].weight, a[0].bias, a[1].weight, a[1].mean, a[1].low_rank, b."""


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({...: 0}, [0, 0, 0, 0, 0, 0]),
        ({Affine: 1, ...: 0}, [1, 1, 0, 0, 0, 0]),
        ({...: 0, Affine: 1}, [1, 1, 0, 0, 0, 0]),
        ({"a.*.weight": "w", Affine: "A", ...: "-"}, ["w", "A", "w", "-", "-", "-"]),
        ({Affine: "A", "a.*.weight": "w", ...: "-"}, ["A", "A", "w", "-", "-", "-"]),
        ({pm.select.role("buffer"): None, int: 0, float: 1}, [0, 1, 0, None, 0, 0]),
        ({~pm.select.type(list): 1, list: 2}, [2, 2, 2, 2, 2, 1]),
        ({(lambda x: x > 3): "big", (lambda x: True): "small"}, ["small"] * 3 + ["big"] * 3),
        ({pm.select.at(lambda t: t["b"]): 1, True: 0}, [0, 0, 0, 0, 0, 1]),
    ],
)
def test_first_selector_that_matches_gives_the_value(rules, expected):
    """First match wins, in the order written; `...` is the default wherever it stands."""
    assert pm.by(rules).values(TREE) == expected


def test_a_leaf_that_nothing_picks_is_refused():
    """Every leaf must get a value: those that do not are named, with the hint."""
    with pytest.raises(
        SpecError,
        match=r"by\(\{select\.type\(Affine\): 0\}\): expected a value for every leaf, got none "
        r"for 4 "
        r"of 6\.\n  at a\[1\]\.weight\n  at a\[1\]\.mean\n  at a\[1\]\.low_rank\n"
        r"  at b\n  give the rest a default:\n      pm\.by\(\{\.\.\., \.\.\.: default\}\)",
    ):
        pm.by({Affine: 0}).values(TREE)


def test_more_than_five_places_are_counted():
    """An error names five places and counts the rest."""
    with pytest.raises(SpecError, match=r"  at \[4\]\n  and 3 more\n"):
        pm.by({str: 0}).values(list(range(8)))


def test_a_path_that_matches_nothing_is_refused():
    """A misspelt path in a rule is an error even if a default catches everything."""
    with pytest.raises(
        SpecError,
        match=r"select\.path\('a\.\*\.wieght'\): expected a pattern that matches at least one "
        r"leaf, got "
        r"none\.\n  the tree has: a\[0\]\.weight",
    ):
        pm.by({"a.*.wieght": 0, ...: 1}).values(TREE)


SHADOWED = [
    {Affine: 0, "a.0": 1, ...: 2},
    {"**": 0, "b": 1, Affine: 2},
    {True: 0, "a": 1, ...: 2},
    {"a": 0, pm.select.role("param") & Affine: 1, ...: 2},
    {"a.1.weight": 0, "a.1.*": 1, "a.1": 2, ...: 3},
]


@pytest.mark.parametrize("rules", SHADOWED)
@pytest.mark.parametrize(
    "ask",
    [
        lambda rule: rule(TREE),
        lambda rule: rule.check([TREE, TREE]),
        lambda rule: mask_of(rule, TREE, where="spec"),
    ],
)
def test_an_entry_that_decides_nothing_is_refused(ask, rules):
    """What it says would be ignored in silence; which entry has its leaves is said."""
    with pytest.raises(
        SpecError, match=r"(?s)whose leaves are all decided.* at .*: by select\.|by T"
    ):
        ask(pm.by(rules))
    with pytest.raises(
        SpecError, match=r"what is special stands first,\n      pm\.by\(\{\(?select\."
    ):
        ask(pm.by(rules))


@pytest.mark.parametrize(
    "rules",
    [
        # A model need not have all that a rule for many models names.
        {Affine: 0, Pair: 1, ...: 2},
        # The default, however it is written.
        {"a": 0, "b": 1, ...: 2},
        {"a": 0, "b": 1, "**": 2},
        # It makes no difference.
        {Affine: None, "a.1": None, ...: 2},
        # Arrays may be others.
        {pm.is_array: 0, (lambda x: False): 2, (lambda x: x is TREE["b"]): 1, ...: 2},
        {"**.weight": 0, Affine: 1, "a": 2, ...: 3},
    ],
)
def test_entries_that_may_be_idle(rules):
    """Those that would decide something in another tree, or decide it as it is decided."""
    rule = pm.by(rules)

    rule(TREE)
    rule.check([TREE])


def test_an_entry_need_not_decide_in_each_of_several_trees():
    """One rule for several arguments: all of them together are what it is for."""
    rule = pm.by({Affine: 0, "weight": None, ...: None})
    one, other = affine(), {"weight": jnp.ones(3)}

    apply = pm.filter_vmap(lambda a, b: b["weight"], in_axes=rule)
    np.testing.assert_array_equal(apply(one, other), [[1.0] * 3] * 2)
    with pytest.raises(SpecError, match=r"select\.path\('weight'\), whose leaves"):
        apply(one, {"other": jnp.ones(3)})


@pytest.mark.parametrize("rules", [{}, None, [(Affine, 0)], 3, Affine])
def test_rules_must_be_a_dict(rules):
    """by(...) of anything but a dict with something in it is refused, with an example."""
    with pytest.raises(
        SpecError,
        match=r"by\(rules\): expected a dict from selectors to values, got [^\n]*\n  write, for "
        r"instance"
        r"\n      pm\.by\(",
    ):
        pm.by(rules)


def test_keys_that_are_no_selectors_are_refused():
    """A number as a key is no selector."""
    with pytest.raises(SpecError, match=r"selector: expected a selector, a class, a path"):
        pm.by({3: 0})


def test_rules_are_values():
    """Equal rules are equal, hash alike, and print as they were written."""
    first, second = (pm.by({"a.*": 0, Affine: None, ...: 1}) for _ in range(2))

    assert first == second
    assert hash(first) == hash(second)
    assert first != pm.by({"a.*": 0, ...: 1})
    assert repr(first) == "by({select.path('a.*'): 0, select.type(Affine): None, True: 1})"
    assert isinstance(first, By)


def test_by_anywhere_inside_a_prefix():
    """A rule inside a prefix tree is resolved against the subtree that it stands for."""
    prefix = {"a": [False, pm.by({"weight": True, ...: False})], "b": True}

    assert mask_of(prefix, TREE, where="spec") == [False, False, True, False, False, True]


def test_by_in_vmap_axes():
    """The same rules give axes: one language for every transform."""
    tree = {"x": jnp.arange(6.0).reshape(2, 3), "shift": jnp.asarray(1.0), "net": affine()}
    axes = pm.by({"x": 1, pm.is_array: None})
    found = pm.filter_vmap(lambda t: jnp.sum(t["x"]) + t["shift"], in_axes=(axes,))(tree)

    np.testing.assert_array_equal(found, [4.0, 6.0, 8.0])


def test_a_module_as_prefix_may_have_been_built_without_its_init():
    """What an own __init__ would not make is made by tree_map or surgery, and is a prefix, too."""
    layer = OwnInit(2)
    prefix = pm.tree_at(lambda m: m.weight, jax.tree.map(lambda _: False, layer), True)
    assert mask_of(prefix, layer, where="spec") == [True, False]


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ({"a": True}, r"at <root>: dict of 1 where the tree has dict of 2"),
        ({"a": True, "c": True}, r"at <root>: dict of 2 where the tree has dict of 2"),
        ({"a": [True], "b": True}, r"at \['a'\]: list of 1 where the tree has list of 2"),
        ({"a": (True, True), "b": True}, r"at \['a'\]: tuple of 2 where the tree has list of 2"),
        ({"a": Pair(1, 2), "b": True}, r"at \['a'\]: Pair of 2 where the tree has list of 2"),
        (
            {"a": [Buffered(True, True, True), True], "b": True},
            r"at \['a'\]\[0\]: Buffered where the tree has Affine",
        ),
        ({"a": True, "b": {"c": True}}, r"at \['b'\]: dict of 1 where the tree has 6"),
    ],
)
def test_where_a_prefix_parts_from_the_tree_is_named(spec, place):
    """Structure by structure: kind, length and keys must agree as far as the prefix goes."""
    with pytest.raises(
        SpecError,
        match=rf"spec: expected a prefix of the tree that it is for, got another structure\.\n  "
        rf"{place}",
    ):
        mask_of(spec, TREE, where="spec")

"""Laws of surgery: `tree_at` changes exactly the named nodes."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.tree_util as jtu
import pytest
from hypothesis import assume, given

import pytreemod as pm
from tests.helpers.comparing import assert_identical
from tests.helpers.laws import law, trees
from tests.helpers.trees import Bounded, every_module


def at_path(tree, path):
    """The node of a tree at a key path, by plain access."""
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            tree = getattr(tree, key.name)
        else:
            tree = tree[getattr(key, "idx", getattr(key, "key", None))]
    return tree


def paths_of(tree):
    """The paths of all leaves and of all nodes above them."""
    found = []
    for path, _ in jtu.tree_leaves_with_path(tree):
        found += [path[:i] for i in range(1, len(path) + 1) if path[:i] not in found]
    return found


def leaves_by_path(tree, is_leaf=None):
    """A dict from paths as text to leaves."""
    pairs = jtu.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jtu.keystr(path): leaf for path, leaf in pairs}


class New:
    """The replacement of a node."""


@law
@given(trees, st.data())
def test_one_node_is_replaced_and_nothing_else(tree, data):
    """w(tree_at(w, t, x)) is x, and every leaf elsewhere is the same object at the same path."""
    paths = paths_of(tree)
    assume(paths)
    path = data.draw(st.sampled_from(paths))
    new = New()

    changed = pm.tree_at(lambda t: at_path(t, path), tree, new)

    assert at_path(changed, path) is new
    before, after = leaves_by_path(tree), leaves_by_path(changed)
    prefix = jtu.keystr(path)
    below = [p for p in before if p == prefix or p.startswith((prefix + ".", prefix + "["))]
    assert {p for p in before if p not in below} == {p for p in after if p != prefix}
    assert all(before[p] is after[p] for p in before if p not in below)


@law
@given(trees, st.data())
def test_several_leaves_at_once(tree, data):
    """tree_at with several leaves is tree_at for each, in any order."""
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    assume(paths)
    chosen = data.draw(st.lists(st.sampled_from(paths), unique=True, min_size=1, max_size=3))
    news = [New() for _ in chosen]

    together = pm.tree_at(lambda t: [at_path(t, p) for p in chosen], tree, news)
    one_by_one = tree
    for path, new in zip(chosen, news, strict=True):
        one_by_one = pm.tree_at(lambda t, p=path: at_path(t, p), one_by_one, new)
    assert_identical(together, one_by_one)


@law
@given(trees, st.data())
def test_putting_back_what_was_there_changes_nothing(tree, data):
    """tree_at(w, t, w(t)) == t, and tree_at(w, t, replace_fn=identity) == t."""
    paths = paths_of(tree)
    assume(paths)
    path = data.draw(st.sampled_from(paths))

    def where(t):
        return at_path(t, path)

    assert_identical(pm.tree_at(where, tree, where(tree)), tree)
    assert_identical(pm.tree_at(where, tree, replace_fn=lambda old: old), tree)


@every_module
def test_selector_at_picks_what_tree_at_replaces(make):
    """filter(t, select.at(w)) keeps the leaves that tree_at(w, t, ...) would replace."""
    module = make()
    for path, leaf in jtu.tree_leaves_with_path(module):
        if any(not hasattr(key, "name") and not hasattr(key, "idx") for key in path):
            continue
        kept = pm.filter(module, pm.select.at(lambda m, p=path: at_path(m, p)))
        assert len(jax.tree.leaves(kept)) == 1
        assert jax.tree.leaves(kept)[0] is leaf


@every_module
def test_a_pattern_is_a_where(make):
    """tree_at("*", m, replace_fn=f) applies f to every field, configuration included."""
    module = pm.resolve(make())
    names = [field.name for field in dataclasses.fields(module) if hasattr(module, field.name)]
    if isinstance(module, Bounded):
        return  # A new value of its field is converted to what is stored.
    if not names:
        with pytest.raises(pm.PytreemodError, match="matches no node"):
            pm.tree_at("*", module, replace_fn=lambda old: old)
        return

    for pattern in ("*", "**"):
        seen = []
        same = pm.tree_at(pattern, module, replace_fn=lambda old, s=seen: s.append(old) or old)
        assert_identical(same, module)
        assert [id(x) for x in seen] == [id(getattr(module, name)) for name in names]

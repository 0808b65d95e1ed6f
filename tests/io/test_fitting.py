"""The plan of a load: by names, for random trees, before anything is read; and renaming."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp

names = st.sampled_from(["a", "b", "a.b", "0", "c'd", "x/y", ""])
arrays = st.sampled_from([ramp(2), ramp(3), np.ones(2, np.float32), jnp.arange(2), 1.5, None])
trees = st.dictionaries(
    names,
    st.recursive(arrays, lambda x: st.lists(x, max_size=2) | st.dictionaries(names, x)),
    max_size=4,
)


@settings(max_examples=60)
@given(trees, trees)
def test_what_both_have_is_loaded_and_the_rest_is_kept(tmp_path_factory, saved, like):
    """For any two trees: each leaf is the file's if it has one that fits, else its own."""
    path = tmp_path_factory.mktemp("fit") / "file"
    pm.save(path, saved, durable=False)
    theirs, ours = pm.named_leaves(saved), pm.named_leaves(like)
    keep = pm.by({...: "keep"})
    made, report = pm.load(path, like, strict=False, missing=keep)

    loaded = {*report.loaded}
    assert loaded | {*report.missing} == {*ours}
    assert {*report.unexpected} == {*theirs} - {*ours}
    for name, leaf in pm.named_leaves(made).items():
        source = theirs[name] if name in loaded else ours[name]
        np.testing.assert_array_equal(leaf, source)
        assert isinstance(leaf, np.ndarray) == isinstance(ours[name], np.ndarray)
    is_same = [*theirs] == [*ours] and not report.missing
    if is_same and report.loaded == (*ours,):
        assert_same(jax.tree.structure(made), jax.tree.structure(like))


def test_what_the_file_does_not_tell_is_likes(tmp_path):
    """A class that has got an option since reads its old files."""

    class Old(pm.Module):
        weight: jax.Array

    class New(pm.Module):
        weight: jax.Array
        mode: str = "fast"

    New.__qualname__ = Old.__qualname__
    pm.save(tmp_path / "file", [Old(ramp(2))])

    assert pm.load(tmp_path / "file", [New(ramp(2, start=ramp(1)[0]), "slow")])[0].mode == "slow"
    pm.save(tmp_path / "new", [New(ramp(2))])
    with pytest.raises(FileError, match=r"0.mode: only the file has it, 'fast'"):
        pm.load(tmp_path / "new", [Old(ramp(2))])


def test_a_text_in_a_leafs_place_is_configuration(tmp_path):
    """A text or a function is compared, and that of `like` is kept."""
    pm.save(tmp_path / "file", {"name": "a", "fn": jnp.sin})
    with pytest.raises(FileError, match="name: like has 'b', the file 'a'"):
        pm.load(tmp_path / "file", {"name": "b", "fn": jnp.sin})
    with pytest.raises(FileError, match=r"fn: like has .*, the file jax.numpy.sin"):
        pm.load(tmp_path / "file", {"name": "a", "fn": jnp.cos})
    loaded, report = pm.load(tmp_path / "file", {"name": "b", "fn": jnp.sin}, strict=False)
    assert loaded == {"name": "b", "fn": jnp.sin}
    # It was once said to have been loaded.
    assert report.loaded == ("fn",)
    assert report.configuration == ("name: like has 'b', the file 'a'",)


def test_keys_with_dots_are_single_steps(tmp_path):
    """The parent of a leaf is found by the components of its name, including quotes."""
    one, two = nn.Linear(2, 2, key=jax.random.key(0)), nn.Dropout(0.5)
    pm.save(tmp_path / "file", {"v1.5": {"a": one, "b.c": two}})
    like = {"v1.5": {"a": one, "b.c": nn.Dropout(0.1)}}
    with pytest.raises(FileError, match=r"'v1.5'.'b.c'.p: like has 0.1, the file 0.5"):
        pm.load(tmp_path / "file", like)
    # The flag is that of another node than the chosen one.
    assert pm.load(tmp_path / "file", like, only="['v1.5'].a") == like


CONV1, CONV10, HEAD = {"weight": 1}, {"weight": 2}, {"w": 3}


@pytest.mark.parametrize(
    ("rename", "like"),
    [
        ({"conv1": "input"}, {"input": CONV1, "conv10": CONV10, "head": HEAD}),
        ({"": "net"}, {"net": {"conv1": CONV1, "conv10": CONV10, "head": HEAD}}),
        ({"head": "top", "": "net"}, {"net": {"conv1": CONV1, "conv10": CONV10}, "top": HEAD}),
        ({"head": ""}, {"conv1": CONV1, "conv10": CONV10, "w": 3}),
        (
            {"conv1": "conv10", "conv10": "conv1"},
            {"conv1": CONV10, "conv10": CONV1, "head": HEAD},
        ),
    ],
)
def test_rename_takes_whole_steps_and_the_first_name(tmp_path, rename, like):
    """`conv1` is not the beginning of `conv10`."""
    pm.save(tmp_path / "file", {"conv1": CONV1, "conv10": CONV10, "head": HEAD})
    zeros = jax.tree.map(lambda _: 0, like)
    found, report = pm.load(tmp_path / "file", zeros, strict=False, rename=rename)

    assert found == like
    assert report.missing == report.unexpected == ()
    assert all(new != old for new, old in report.renamed)


def test_rename_takes_configuration_classes_and_states_along(tmp_path):
    """Or the new name would have none, and the old one would be of nothing."""
    model, state = pm.make_with_state(nn.BatchNorm)(3)
    pm.save(tmp_path / "file", {"net": model, "state": state})
    rename = {"net": "model", "state": "stats"}
    like = {"model": model, "stats": state}

    assert_same(pm.load(tmp_path / "file", like, rename=rename), like)
    other = {"model": model.replace(eps=0.5), "stats": state}
    with pytest.raises(FileError, match=r"model\.eps: like has 0\.5"):
        pm.load(tmp_path / "file", other, rename=rename)

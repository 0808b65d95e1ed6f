"""Ties in files: an array that is at two places of a tree has one name that counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.helpers.comparing import assert_same


class Tied(pm.Module):
    """An embedding, and the layer that decodes it."""

    embed: nn.Embedding
    head: nn.Linear

    def __call__(self, x):
        return x


def free(seed):
    """Without a tie; all numbers differ."""
    one, two = jax.random.split(jax.random.key(seed))
    return Tied(nn.Embedding(4, 2, key=one), nn.Linear(2, 4, use_bias=False, key=two))


def tied(seed, **options):
    """The head has the numbers of the embedding."""
    return pm.tie(free(seed), "head.weight", to="embed.weight", **options)


def test_a_tied_array_is_once_in_the_file(tmp_path):
    """At its source; and is loaded into a tied tree, and into an untied one at both places."""
    pm.save(tmp_path / "tied", tied(0))
    pm.save(tmp_path / "below", {"net": tied(0)})

    assert [*pm.load(tmp_path / "tied")] == ["embed.weight"]
    assert pm.tree_equal(pm.load(tmp_path / "tied", tied(1)), tied(0))
    for name, options in (("tied", {}), ("below", {"rename": {"net": ""}})):
        loaded, report = pm.load(tmp_path / name, free(1), strict=False, **options)
        assert report.loaded == ["embed.weight", "head.weight"]
        assert_same(loaded, pm.untie(tied(0)))
        assert_same(pm.load(tmp_path / name, free(1), **options), pm.untie(tied(0)))


@pytest.mark.parametrize("places", [["embed"], ["head"], ["embed", "head"]], ids="+".join)
def test_a_tied_array_needs_one_of_its_names(places, tmp_path):
    """Files of other tools have the source, the place, or both with the same numbers."""
    numbers = np.asarray(tied(0).embed.weight)
    safetensors.numpy.save_file({f"{n}.weight": numbers for n in places}, tmp_path / "file")

    assert pm.tree_equal(pm.load(tmp_path / "file", tied(1)), tied(0))


def test_other_numbers_than_the_source_are_an_error(tmp_path):
    """One of the two would be lost."""
    pm.save(tmp_path / "file", free(0))
    for strict in (True, False):
        with pytest.raises(FileError, match=r"at head\.weight: .*embed\.weight"):
            pm.load(tmp_path / "file", tied(1), strict=strict)


def test_a_tie_through_a_function(tmp_path):
    """A file of the untied model must have what the function gives."""

    def free(seed):
        return Tied(tied(seed).embed, nn.Linear(4, 2, use_bias=False, key=jax.random.key(seed)))

    def reversed_(x):
        return x.T[::-1]

    def through(seed, fn=jnp.transpose):
        return pm.tie(free(seed), "head.weight", to="embed.weight", through=fn)

    pm.save(tmp_path / "tied", through(0))
    assert pm.tree_equal(pm.load(tmp_path / "tied", through(1)), through(0))
    pm.save(tmp_path / "free", pm.untie(through(0)))
    assert pm.tree_equal(pm.load(tmp_path / "free", through(1)), through(0))
    pm.save(tmp_path / "other", free(0))
    with pytest.raises(FileError, match=r"at head\.weight: "):
        pm.load(tmp_path / "other", through(1))
    with pytest.raises(FileError, match=r"at head\.weight: .*reversed.*transpose"):
        pm.load(tmp_path / "tied", through(1, reversed_))


def test_a_tie_through_a_function_is_no_plain_tie(tmp_path):
    """The arrays of the file are the same, and the model is another one."""
    pm.save(tmp_path / "plain", tied(0))
    pm.save(tmp_path / "through", tied(0, through=jnp.negative))
    for name, like in (("plain", tied(1, through=jnp.negative)), ("through", tied(1))):
        with pytest.raises(FileError, match=r"at head\.weight: .*negative"):
            pm.load(tmp_path / name, like)


@pytest.mark.parametrize("as_list", [False, True], ids=["Stack", "list"])
def test_ties_in_the_layers_of_a_stack(as_list, tmp_path):
    layers = [tied(i) for i in range(3)]
    stack = nn.Stack.from_layers(layers)
    untied = [pm.untie(layer) for layer in layers]
    like = [tied(9)] * 3 if as_list else nn.Stack.from_layers([tied(9)] * 3)
    expected = layers if as_list else stack

    for i, tree in enumerate((stack, layers, untied)):
        pm.save(tmp_path / f"{i}", tree)
        assert pm.tree_equal(pm.load(tmp_path / f"{i}", like), expected)
    assert_same(pm.load(tmp_path / "0", [free(9)] * 3), untied)
    untied[2] = free(7)
    pm.save(tmp_path / "odd", untied)
    with pytest.raises(FileError, match=r"at 2\.head\.weight: "):
        pm.load(tmp_path / "odd", like)

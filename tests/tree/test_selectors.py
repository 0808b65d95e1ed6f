"""The selectors that users write, each on the same tree."""

import jax
import pytest

import pytreemod as pm
from pytreemod import select
from pytreemod.errors import SpecError
from tests.helpers.trees import Affine, Buffered, Pair, ramp
from tests.labels import label

NAMES = ["b0w", "b0b", "b0c", "b1w", "b1b", "w", "mean", "low", "iw", "im", "il", "x", "y"]


def model():
    """Thirteen leaves, numbered in order."""
    tree = {
        "blocks": [Affine(0, [0, 0]), Affine(0, 0)],
        "head": Buffered(0, 0, 0, Buffered(0, 0, 0)),
        "pair": Pair(0.0, 0),
    }
    numbers = iter(range(len(NAMES)))
    return jax.tree.map(lambda leaf: type(leaf)(next(numbers)), tree)


def picked(selector):
    mask = pm.filter(model(), selector, replace=-1)
    leaves = zip(NAMES, jax.tree.leaves(mask), strict=True)
    return [name for name, leaf in leaves if leaf != -1]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (select.path("blocks"), "b0w b0b b0c b1w b1b"),
        (select.path("blocks.*.bias"), "b0b b0c b1b"),
        (select.path("**.weight"), "b0w b1w w iw"),
        (select.path("head.*"), "w mean low iw im il"),
        (select.path("**.inner.m*"), "im"),
        (select.path("pair.first"), "x"),
        (select.type(Affine), "b0w b0b b0c b1w b1b"),
        (select.type(float, Buffered), "w mean low iw im il x"),
        (select.type(), ""),
        (select.role("buffer"), "mean im"),
        (select.role("param"), "b0w b0b b0c b1w b1b w x y"),
        (select.role("lora", "buffer"), "mean low iw im il"),
        (select.at(lambda m: m["head"].inner), "iw im il"),
        (select.at(lambda m: [m["blocks"][1], m["pair"].second]), "b1w b1b y"),
        (select.at(lambda m: [b.bias for b in m["blocks"]]), "b0b b0c b1b"),
        (select.path("blocks") & ~select.path("**.bias"), "b0w b1w"),
        (select.type(float) | select.role("buffer"), "mean im x"),
        (~select.type(Affine, Buffered), "x y"),
        (select.type(Affine) & (lambda leaf: leaf > 2), "b1w b1b"),
        ((lambda leaf: leaf > 10) | select.role("buffer"), "mean im x y"),
        (Pair | select.role("buffer"), "mean im x y"),
        ("blocks.0" | select.role("buffer"), "b0w b0b b0c mean im"),
        (select.role("buffer") & ..., "mean im"),
        (select.role("buffer") & False, ""),
        (True & select.role("buffer"), "mean im"),
        (Affine, "b0w b0b b0c b1w b1b"),
        ("pair", "x y"),
        (..., " ".join(NAMES)),
    ],
    ids=label,
)
def test_selector_picks(selector, expected):
    """By path, type, role and access, alone and combined; classes and strings as selectors."""
    assert picked(selector) == expected.split()


def test_repr_is_how_it_was_written():
    """A selector prints as the reader would write it, for errors quote it."""
    one = ~(select.role("a", "b") & select.type(Affine, int)) | True
    assert repr(one) == "(~(select.role('a', 'b') & select.type(Affine, int)) | True)"
    assert repr(select.path("a.*") & pm.is_array) == "(select.path('a.*') & is_array)"


def test_role_of_the_innermost_field_wins():
    """A buffer inside a "lora" field is a buffer; a plain parameter inside it is "lora"."""
    model = Buffered(0, 0, low_rank=Affine(1, Buffered(2, 3, 4)))

    assert pm.filter(model, select.role("lora")).low_rank == Affine(1, Buffered(2, None, 4))
    assert pm.filter(model, select.role("buffer")).low_rank == Affine(None, Buffered(None, 3, None))


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (select.path("block"), r"'block'.*blocks"),
        (select.path("heads.inner.mean"), r"'heads\.inner\.mean'.*'head\.inner\.mean'"),
        # Negated, it would pick everything; combined, nothing.
        (~select.path("blocks.7"), r"blocks\.7"),
        (select.path("head") & select.path("nothing.here"), r"nothing\.here"),
        (select.role("buffer") | "pairs", "pairs"),
        # A slash joins two keys.
        (select.path("head/inner/w"), "head"),
    ],
)
def test_a_path_that_matches_nothing_is_an_error(selector, text):
    """The error has the paths of the tree, and the nearest of them."""
    with pytest.raises(SpecError, match=f"(?s){text}.*blocks\\[0\\]\\.weight"):
        pm.filter(model(), selector)


def test_a_capture_picks_modules_themselves():
    """A path, an access and their combinations mean the node there, and nothing below it."""
    outer = pm.nn.Sequential([pm.nn.Sequential([pm.nn.Identity()] * 2), pm.nn.Identity()])
    for selector, names in (
        (select.path("layers[0]"), ["layers[0]"]),
        (select.at(lambda m: m.layers[0]), ["layers[0]"]),
        (select.at(lambda m: m), ["<root>"]),
        (select.path("**.layers[0]"), ["layers[0].layers[0]", "layers[0]"]),
    ):
        assert list(pm.capture(outer, selector)(ramp(2))[1]) == names


@pytest.mark.parametrize("spec", [3, None, ("weight", "bias"), pm.by({...: True})])
def test_what_is_no_selector_is_refused(spec):
    """A number, several selectors in a tuple, a rule of values."""
    with pytest.raises(SpecError, match="selector"):
        select.role("a") & spec
    with pytest.raises(SpecError, match="selector"):
        pm.by({spec: 0})

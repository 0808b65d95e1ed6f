"""`docs/reference/layers-compared.md` names every layer, and only existing names."""

import inspect
import operator
import re

import equinox
import pytest

from pytreemod import nn
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "layers-compared.md").read_text(encoding="utf-8")
COLUMNS = ("here", "Equinox", "Flax", "PyTorch")


NEWER = {"RoPE"}
"""Names that the oldest Flax with which this is tested has not yet."""


def names(text):
    """The names in backticks."""
    return re.findall(r"`([\w.]+)`", text)


def column(title):
    """All names in a column of the table."""
    rows = re.findall(r"^\| `.*\|$", PAGE, re.M)
    cells = [row.strip("|").split("|")[COLUMNS.index(title)] for row in rows]
    return [name for cell in cells for name in names(cell)]


def paragraph(start):
    """The names in a paragraph that begins so."""
    return {*names(PAGE.partition(f"\n{start}")[2].split("\n\n")[0])}


def layers_of(module, base):
    """The classes of a module whose instances are called."""
    public = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return {
        name
        for name, value in public.items()
        if issubclass(value, base) and "__call__" in dir(value) and not name.startswith("_")
    }


def test_no_layer_has_two_rows():
    """Our own layers need none; the page names the missing ones."""
    here = column("here")

    assert len({*here}) == len(here)
    assert {name for name in here if not hasattr(nn, name)} == paragraph("Not there yet:")


def test_every_layer_of_equinox_is_in_its_column():
    """Under its name, each once; where we have the layer, we call it so."""
    theirs = column("Equinox")
    # It is called as its content: its class has no `__call__`.
    assert {*theirs} == layers_of(equinox.nn, equinox.Module) | {"Shared"}
    assert {*theirs} <= {*column("here")}


def test_every_layer_of_flax_is_in_its_column():
    """Or among those that have no counterpart."""
    nnx = pytest.importorskip("flax.nnx", reason="compares names with Flax's")
    theirs = {*column("Flax")}
    layers = {
        name
        for name in layers_of(nnx, nnx.Module)
        if getattr(nnx, name).__module__.startswith("flax.nnx.nn.")
    }

    assert [name for name in theirs - NEWER if not hasattr(nnx, name)] == []
    assert layers - theirs - {"RNNCellBase"} == paragraph("Flax's layers without")


@pytest.mark.slow
def test_what_is_said_of_pytorch_is_there(torch):
    """PyTorch has many more, activations and losses, which are functions here."""
    for name in column("PyTorch"):
        assert callable(operator.attrgetter(name)(torch.nn)), name


@pytest.fixture
def torch():
    """PyTorch, or the test is skipped."""
    return pytest.importorskip("torch", reason="compares names with PyTorch's")

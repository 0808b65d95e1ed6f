"""The tables of shapes on the pages of layers hold, and every layer has a row on its page."""

import inspect
import re
import types

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.module.classes import Module
from tests.docs.pages import ROOT

PAGES = sorted((ROOT / "docs" / "reference" / "nn").glob("*.md"))
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
ROW = re.compile(r"^\| `(nn\..*?)` \| (.*) \| (.*) \|$", re.M)
ROWS = [(page, *row) for page, text in TEXTS.items() for row in ROW.findall(text)]
KEY = jax.random.key(0)


class Keyed(types.SimpleNamespace):
    """`nn`, whose layers need no key to be made; those that a table leaves out."""

    def __getattr__(self, name):
        make = getattr(nn, name)
        if "key" not in inspect.signature(make).parameters:
            return make
        return lambda *args, **options: make(*args, **{"key": KEY} | options)


SCOPE = {"nn": Keyed(), "jax": jax, "jnp": jnp}


def shapes_in(cell, more):
    """The shapes in a cell, with these axes for "..."."""
    texts = re.findall(r"`(\(.*?\))`", cell)
    texts = [re.sub(r"^\(\.\.\.\)$", "(...,)", text).replace("...", "*more") for text in texts]
    return [eval(text, {"more": more}) for text in texts]


def described(shape, dtype):
    """An array of that shape, or of each shape of a pair."""
    if all(isinstance(size, int) for size in shape):
        return jax.ShapeDtypeStruct(shape, dtype)
    return tuple(jax.ShapeDtypeStruct(one, dtype) for one in shape)


@pytest.mark.parametrize(("page", "layer", "given", "result"), ROWS, ids=lambda text: text[:60])
def test_shapes_are_those_of_the_table(page, layer, given, result):
    """Without, with one and with two axes for "..."."""

    def output(*arrays):
        made, state = pm.make_with_state(lambda: eval(layer, dict(SCOPE)))()
        options = {"key": KEY} if isinstance(made, nn.Dropout) else {}
        return made(*arrays, state)[0] if "a State" in given else made(*arrays, **options)

    for more in ((), (2,), (2, 3)) if "..." in given else ((),):
        dtype = jnp.int32 if "integers" in given else jnp.float32
        out = jax.eval_shape(output, *(described(shape, dtype) for shape in shapes_in(given, more)))
        assert jax.tree.map(lambda leaf: leaf.shape, out) == shapes_in(result, more)[0]


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "index"])
def test_every_layer_of_a_page_has_a_row(page):
    """Every layer that can be called with an input has one; other classes have none."""
    entries = set(re.findall(r"^::: pytreemod\.nn\.(\w+)$", TEXTS[page], re.M))
    layers = {
        name
        for name in entries - {"Stateful", "StatefulLayer", "RNNCellBase", "Shared"}
        if inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), Module)
    }

    rows = {re.match(r"nn\.(\w+)", layer).group(1) for where, layer, *_ in ROWS if where == page}

    assert rows == layers


def test_the_index_names_every_page():
    """With a row for each."""
    named = re.findall(r"^\| \[[^\]]*\]\((\w+)\.md\) \|", TEXTS["index"], re.M)

    assert sorted(named) == sorted(page for page in TEXTS if page != "index")


def public(module, kind):
    """The public members of a module of one kind, by name."""
    return {name: value for name, value in vars(module).items() if kind(value)}


FORMULAS = public(nn.functional, inspect.isroutine)
LAYERS = {
    name: value
    for name, value in public(nn, inspect.isclass).items()
    if issubclass(value, Module) and "__call__" in vars(value)
}
BASES = {"StatefulLayer", "RNNCellBase"}
CALLING = {"Sequential", "Stack", "Ensemble", "Bidirectional", "Lambda", "Shared", "Stateful"}
WITHOUT_FORMULA = (
    BASES
    | CALLING
    | {"Identity", "flip_sequences", "attention_mask", "empty_cache", "extend_cache"}
)
"""Wrappers that call their content, or move arrays."""


@pytest.mark.parametrize("name", [*FORMULAS, *LAYERS])
def test_every_entry_has_shapes_an_example_and_a_formula(name):
    """A layer may name the function that has its formula."""
    text = inspect.getdoc((FORMULAS | LAYERS)[name])

    assert "Shapes:" in text or name in WITHOUT_FORMULA
    assert ">>>" in text
    has_formula = "$" in text or re.search(r"The formula is that of \[(\w+)\]", text)
    assert bool(has_formula) is (name not in WITHOUT_FORMULA)

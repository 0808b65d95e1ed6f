"""What runs when the site is built: drawings, formulas, the sections of docstrings."""

import importlib
import json
import re
import sys
from xml.etree import ElementTree as ET

import pytest

from tests.docs.pages import ROOT

HOOKS = ROOT / "docs" / "hooks"


@pytest.fixture
def hook(monkeypatch):
    """Import a hook as MkDocs does, with its folder on the path; its names are gone afterwards."""
    monkeypatch.syspath_prepend(HOOKS)
    for file in HOOKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)

    def imported(name, *needs):
        for package in needs:
            pytest.importorskip(package, reason="the extra `docs` is not installed")
        return importlib.import_module(name)

    yield imported
    for file in HOOKS.glob("*.py"):
        sys.modules.pop(file.stem, None)


def texts(drawing):
    """What is written in a drawing; it is well-formed, or this fails."""
    return [text.text for text in ET.fromstring(drawing).iter("text")]


def test_the_plot_shows_what_was_measured(hook):
    """Each row has the median of each library, as the benchmarks printed it."""
    plot = hook("ratio_plot")
    results = json.loads(plot.RESULTS.read_text(encoding="utf-8"))
    written = texts(plot.draw_ratios())

    for name, label, title in plot.ROWS:
        row = next(row for row in results[name]["rows"] if row["label"] == label)
        start = written.index(title)
        shown = [float(text) for text in written[start + 2 : start + 5]]
        measured = [row[library]["ratio"]["median"] for library in plot.LIBRARIES]
        assert shown == pytest.approx(measured, rel=0.03)
        assert max(measured) <= plot.LAST


def test_the_plot_says_where_it_was_measured(hook):
    """Versions are those of the file."""
    plot = hook("ratio_plot")
    around = json.loads(plot.RESULTS.read_text(encoding="utf-8"))["dispatch"]["surroundings"]
    drawing = plot.draw_ratios()

    assert f"Python {around['python']}, JAX {around['jax']}" in drawing
    assert all(f"{name} {number}" in drawing for name, number in around["versions"].items())


def test_the_drawing_of_a_model_tells_its_parts(hook):
    """Leaves with their shapes, configuration, and what a transform does with both."""
    written = texts(hook("model_drawing").draw_model())

    assert {"MLP", "relu", "f32[8,3]", "arrays", "configuration", "new model"} <= set(written)


def test_a_drawing_that_is_not_there_stops_the_build(hook):
    """A misspelt mark is no empty place in a page."""
    drawings = hook("drawings", "mkdocs")

    assert "<svg" in drawings.on_page_content("<!-- drawing: model -->")
    with pytest.raises(Exception, match="no drawing 'modle'; there are model, ratios"):
        drawings.on_page_content("<!-- drawing: modle -->")


def words(markup):
    """MathML without its tags."""
    return re.sub(r"<[^>]*>", "", markup)


def test_formulas_become_mathml(hook):
    """Indices, exponents, fractions, roots, names and equations below each other."""
    mathml = hook("formulas", "mkdocs").mathml

    assert (
        words(mathml(r"\frac{1}{k} \sum_{j=0}^{k-1} x_{s i + j}")) == "1k∑j=0k\N{MINUS SIGN}1xsi+j"
    )
    assert "<msubsup><mo>∑</mo>" in mathml(r"\sum_{j=0}^{k}")
    assert mathml("x^2") == "<mrow><msup><mi>x</mi><mn>2</mn></msup></mrow>"
    assert "<msqrt><mrow><mi>d</mi></mrow></msqrt>" in mathml(r"\sqrt{d}")
    # Two letters are a product, three are a name.
    assert mathml("Wx + eps") == ("<mrow><mi>W</mi><mi>x</mi><mo>+</mo><mi>eps</mi></mrow>")
    equations = mathml("\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}")
    assert equations.count("<mtr>") == 2
    assert equations.count("<mtd>") == 4


def test_unknown_tex_stops_the_build(hook):
    """Nobody is to read backslashes."""
    with pytest.raises(Exception, match=r"does not know \\oint"):
        hook("formulas", "mkdocs").mathml(r"\oint f")


DOCSTRING = """A layer.

Shapes:
    x: (..., in); (...) if `in` is "scalar"
    return: the axes of x, and
        then (*out)

State and randomness: none. A State
    is handed back.

Source:
    A paper.

Args:
    size: as it is (or not).
"""


def test_own_sections_of_docstrings_become_tables_and_paragraphs(hook):
    """A row for each entry, shapes as code; what else there is stays as it was."""
    rewritten = hook("reference_sections", "griffe").rewritten(DOCSTRING)

    assert "| Shapes | |\n|---|---|\n" in rewritten
    assert '| `x` | `(..., in)`; `(...)` if `in` is "scalar" |\n' in rewritten
    assert "| `return` | the axes of x, and then `(*out)` |\n" in rewritten
    assert "State and randomness:</span> none. A State\nis handed back." in rewritten
    assert "Source:</span>\nA paper." in rewritten
    assert rewritten.endswith("Args:\n    size: as it is (or not).")


def test_the_settings_of_the_site_are_said_once():
    """Of two lists of hooks the second one alone was read, and the first was lost unseen."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    keys = re.findall(r"^(\w+):", text, re.M)
    assert sorted(keys) == sorted({*keys})

"""The hooks of the site: formulas, stored drawings, measured ratios, the table of layers."""

import importlib
import re
import sys

import pytest

import pytreemod as pm
from tests.docs.pages import PAGES, ROOT

HOOKS = ROOT / "docs" / "hooks"
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\w$`\\])\$(?! )([^$]+?)(?<! )\$(?!\w)", re.S)
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.S | re.M)


@pytest.fixture
def hook(monkeypatch):
    """Import a hook as MkDocs does, with its folder on the path; its names are gone afterwards."""
    monkeypatch.syspath_prepend(HOOKS)

    def imported(name, needs):
        pytest.importorskip(needs, reason="the extra `docs` is not installed")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield imported
    for file in HOOKS.glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_every_formula_becomes_mathml(hook):
    """Those of pages and docstrings; an unknown command stops the build."""
    pytest.importorskip("latex2mathml", reason="the extra `docs` is not installed")
    mathml = hook("formulas", "mkdocs").mathml
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "pytreemod").rglob("*.py")]
    texts += [CODE.sub("", page.read_text(encoding="utf-8")) for page in PAGES]
    formulas = [one or other for text in texts for one, other in FORMULA.findall(text)]

    assert len(formulas) > 40
    assert all(mathml(formula).startswith("<math ") for formula in formulas)
    assert "<mtext>eps</mtext>" in mathml(r"\sqrt{x + eps}")
    assert mathml("\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}").count("<mtr>") == 2
    with pytest.raises(Exception, match="unknown"):
        mathml(r"\unknown x")


def test_every_drawing_is_found(hook):
    """A misspelled mark does not leave a gap in a page."""
    shown = hook("drawings", "mkdocs").on_page_content
    marks = [m for page in PAGES for m in re.findall("<!-- drawing: .* -->", page.read_text())]

    assert marks
    assert all("<svg" in shown(mark) for mark in marks)
    with pytest.raises(Exception, match="modle"):
        shown("<!-- drawing: modle -->")


def test_every_ratio_is_measured(hook):
    """A page names a row of the results, and shows its number; a row that is gone is an error."""
    shown = hook("ratios", "mkdocs").on_page_markdown
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    marks = [m for text in texts for m in re.findall("<!-- ratio: .*? -->", text, re.S)]

    assert marks
    assert all(re.fullmatch(r"\d+(\.\d\d)?", shown(mark)) for mark in marks)
    with pytest.raises(Exception, match="no ratio"):
        shown("<!-- ratio: dispatch | a row that is gone | pytreemod -->")


def test_the_table_has_every_layer(hook):
    """Each layer is in it, with what it is and the shapes of an example; bases are not."""
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\S+\) \| \S.* \| \S.* \| \S.* \|$",
        hook("layers", "mkdocs").table(),
        re.M,
    )
    things = {name: getattr(pm.nn, name) for name in dir(pm.nn)}
    modules = {n for n, t in things.items() if isinstance(t, type) and issubclass(t, pm.Module)}
    bases = {"RNNCellBase", "Stateful", "StatefulLayer"}

    assert modules - {*rows} == {"Lazy", "RngStream", "Shared", "StateIndex", *bases}


def test_the_settings_of_the_site_are_said_once():
    """Of two lists of hooks the second one alone was read, and the first was lost unseen."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    keys = re.findall(r"^(\w+):", text, re.M)
    assert sorted(keys) == sorted({*keys})

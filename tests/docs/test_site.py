"""The built site: names are found, classes show how they are made, nothing comes from elsewhere."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow

WANTED = {
    "BatchNorm": "reference/nn/normalization/",
    "Linear": "reference/nn/linear/",
    "nn.BatchNorm": "reference/nn/normalization/",
    "Conv2d": "reference/nn/convolution/",
    "MultiheadAttention": "reference/nn/attention/",
    "filter_jit": "reference/transform/",
    "tree_at": "reference/tree/",
    "Optimizer": "reference/training/",
    "StateIndex": "reference/state/",
    "make_with_state": "reference/state/",
    "FSDP": "how-to/shard-parameters/",
    "tensor parallel": "how-to/split-layers-over-devices/",
    "pipeline": "how-to/run-a-pipeline/",
    "shard_map": "how-to/write-shard-map-code/",
}
"""Search terms, and the page that comes first."""

WITHOUT_ARGUMENTS = {
    "BoundMethod",
    "ChangedValues",
    "Computed",
    "Constraint",
    "Enumeration",
    "Flops",
    "GradientRow",
    "Layer",
    "Module",
    "RNNCellBase",
    "Selector",
    "StatefulLayer",
    "SummaryRow",
}
"""Classes that users do not call: bases, and results of other calls."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly; or the one that this very run of CI has built."""
    if built := os.environ.get("PYTREEMOD_SITE"):
        return ROOT / built
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, check=False, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def index(site):
    """The index of the search."""
    return json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))


def found_first(index, words):
    """The page that has all words, most of them in its title; then by weight and shortest title.

    In the browser a word in a title counts a thousand times as much as one in the text.
    """
    separator = re.compile(index["config"]["separator"])

    def parts(text):
        return separator.split(re.sub(r"<[^>]*>|¶", "", text).strip().lower())

    sought = set(parts(words))

    def score(entry):
        title, text = parts(entry["title"]), parts(entry["text"])
        if not sought <= {*title, *text}:
            return (0, 0)
        count = 1000 * len(sought & {*title}) + len(sought & {*text})
        return (entry.get("boost", 1) * count, -len(title))

    best = max(index["docs"], key=score)
    assert score(best) > (0, 0), f"no entry has {words}"
    return best["location"].partition("#")[0]


@pytest.mark.parametrize(("name", "page"), WANTED.items(), ids=WANTED)
def test_a_name_finds_its_entry(index, name, page):
    """Before all pages that only use it."""
    assert found_first(index, name) == page


def test_the_search_leaves_out_what_answers_nothing(index):
    """The page that names everything, and source code."""
    assert not [e for e in index["docs"] if "founding-documents" in e["location"]]
    assert not [e["location"] for e in index["docs"] if "Source code in" in e["text"]]


def entries(site, kind):
    """Every class or function of the reference, with the text below its heading."""
    entry = re.compile(
        rf'doc-{kind}">\s*<h\d id="([\w.]+)" class="doc doc-heading">.*?</h\d>', re.S
    )
    for page in sorted((site / "reference").rglob("index.html")):
        html = page.read_text(encoding="utf-8")
        for found in entry.finditer(html):
            yield found[1], html[found.end() : found.end() + 200]


@pytest.mark.parametrize("kind", ["class", "function"])
def test_every_entry_shows_its_signature(site, kind):
    """But classes that are made without arguments, or for you, and errors."""
    every = list(entries(site, kind))
    silent = {
        name.rpartition(".")[2]
        for name, rest in every
        if "doc-signature" not in rest
        and "doc-overloads" not in rest
        and not name.startswith("pytreemod.errors.")
    }

    assert len(every) > 50
    assert silent == (WITHOUT_ARGUMENTS if kind == "class" else set())


def test_sections_and_formulas_are_rendered(site):
    """No section of ours is left as a box of run-together lines, no formula as TeX."""
    pages = [page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html")]
    boxes = r'<details class="(?:shapes|fields|source|state-and-randomness)"'

    assert not [found for html in pages for found in re.findall(boxes, html)]
    assert not [html for html in pages if "arithmatex" in html]
    assert sum(html.count("<th>Shapes</th>") for html in pages) > 80


def test_nothing_is_fetched_from_another_host(site):
    """Scripts, styles, pictures and fonts are in the folder; the home page has its drawings."""
    fetched = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="?https?:|<link[^>]*href="?https?:')
    guilty = [
        page.relative_to(site).as_posix()
        for page in site.rglob("*.html")
        if fetched.search(page.read_text(encoding="utf-8"))
    ]
    home = (site / "index.html").read_text(encoding="utf-8")

    assert guilty == []
    assert home.count('<svg class="pm-picture"') == 3
    assert not (site / "hooks").exists()

"""Links from page to page lead somewhere: to a file that is there, and a heading that is in it."""

import re

from tests.docs.pages import PAGES, ROOT, name_of

# Not part of the site, so its own strict build does not check them.
BESIDE = ("CHANGELOG.md", "examples/README.md", "benchmarks/README.md")
EVERY = sorted({*PAGES, *(ROOT / name for name in BESIDE)})
# Made at the build, by docs/hooks/repository.py.
MADE = {ROOT / "docs/benchmarks.md": ROOT / "benchmarks/README.md"}

_FENCED = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


def links_of(text):
    """The targets of a page's links, except addresses of the web."""
    return _LINK.findall(re.sub(r"`[^`\n]+`", "", _FENCED.sub("", text)))


def anchors_of(page):
    """The anchors of a page: its entries of the reference, ids that are written out, headings."""
    prose = _FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+?)(?: \{.*\})?$", prose, re.M)
    entries = re.findall(r"^::: ([\w.]+)", prose, re.M)
    ids = re.findall(r"""(?:\bid=["']|\{ *#)([\w.-]+)""", prose)
    return {*map(slug, headings), *entries, *ids}


def slug(heading):
    """A heading's anchor, as the site makes it, and GitHub: its words, joined by hyphens."""
    shown = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", heading)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower())


def dead(page):
    """The links of a page that lead nowhere."""
    for link in links_of(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        target = MADE.get(target, target)
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            yield link


def test_links_lead_somewhere():
    """From a page to a file, and to a heading in it."""
    assert {name_of(page): [*dead(page)] for page in EVERY if [*dead(page)]} == {}


def test_dead_links_are_found(tmp_path):
    """This test can fail: a missing file, a missing heading, on this page and others."""
    (tmp_path / "other.md").write_text("# A `b`: c-d\n\n```text\n# no\n```\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md#a-b-c-d) [b](#top) [c](https://x.y#z) `[d](e)` [f](..)\n"
        "[g](gone.md) [h](#gone) [i](other.md#gone) [j](other.md#no)\n",
        encoding="utf-8",
    )

    assert [*dead(page)] == ["gone.md", "#gone", "other.md#gone", "other.md#no"]

"""The pages at the root are true: commands, numbers, versions."""

import re

import tasks
from pytreemod import __version__
from tests.docs.pages import ROOT


def text_of(name):
    """A page at the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_commands_are_tasks():
    """The commands in README and CONTRIBUTING exist: the two main commands first."""
    named = re.findall(r"^python3 tasks\.py (\w+) ", text_of("README.md"), re.M)
    others = re.findall(r"python3 tasks\.py (\w+)", text_of("CONTRIBUTING.md"))

    assert named == ["train", "test"]
    assert set(others) <= set(tasks.TASKS)


def test_ratios_are_the_measured_ones():
    """The sentence of README on speed has its numbers from the table that was measured last."""
    sentence = re.search(r"## How fast\n(.*?)\n## ", text_of("README.md"), re.S)[1]
    ours, equinox, nnx = re.findall(r"([\d.]+) times", sentence)
    (row, *_) = re.findall(
        r"^returns the updated model, 42 arrays (.+)$", text_of("benchmarks/README.md"), re.M
    )
    ratios = re.findall(r"([\d.]+) \(", row)

    assert ratios == [equinox, nnx, ours]
    assert f"42 arrays costs {ours} times" in text_of("docs/index.md")


def links_of(name):
    """The links of a page, with their texts."""
    return {link: shown for shown, link in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", text_of(name))}


def test_home_and_readme_link_every_lesson():
    """Files that are read without the site have no menu."""
    lessons = {f"tutorial/{page.name}" for page in (ROOT / "docs/tutorial").glob("*.md")}

    assert lessons <= {*links_of("docs/index.md")}
    assert lessons <= {link.removeprefix("docs/") for link in links_of("README.md")}


def test_how_tos_are_listed_by_their_titles():
    """In the menu's groups, each once."""
    pages = {p.name: p for p in (ROOT / "docs/how-to").glob("*.md") if p.name != "index.md"}
    titles = {
        name: re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M)[1]
        for name, page in pages.items()
    }

    assert links_of("docs/how-to/index.md") == titles


def test_the_citation_is_of_this_version():
    """As in `pytreemod/version.py`, and in a heading of the changes."""
    assert re.findall(r"^version: (.+)$", text_of("CITATION.cff"), re.M) == [__version__]
    (newest, *_) = re.findall(r"^## ([\d.]+)", text_of("CHANGELOG.md"), re.M)
    assert newest == __version__


def test_the_citation_has_what_the_format_asks_for():
    """Citation File Format 1.2.0: these four must be there; names of fields are words."""
    fields = re.findall(r"^([a-z-]+):", text_of("CITATION.cff"), re.M)

    assert {"cff-version", "message", "title", "authors"} <= set(fields)
    assert len(fields) == len(set(fields))
    assert re.search(r"^cff-version: 1\.2\.0$", text_of("CITATION.cff"), re.M)

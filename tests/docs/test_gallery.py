"""The gallery shows every example, with the output of the program as it is now; the notebooks."""

import contextlib
import importlib.util
import json
import re

import jax
import pytest

from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def script(path):
    """Import a program of the site."""
    spec = importlib.util.spec_from_file_location(f"site_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_example_has_a_page():
    """It is in a group of the gallery, and in the navigation."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    hook = script(ROOT / "docs" / "hooks" / "gallery.py")
    names = sorted(name for group in hook.GROUPS.values() for name in group)
    listed = re.findall(r"examples/(\w+)\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))

    assert names == [path.stem for path in EXAMPLES] == sorted({*listed} - {"index"})
    index = hook.index_page({path.stem: path for path in EXAMPLES})
    for path in EXAMPLES:
        page = hook.page_of(path)
        assert page.startswith(f"# {hook.title_of(path)[0]}\n")
        assert "```python\nimport" in page
        assert f"]({path.stem}.md)" in index


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_what_is_shown_is_what_the_program_prints_now(path):
    """After a change of a program, `python3 tasks.py gallery NAME`."""
    gallery = script(ROOT / "docs" / "scripts" / "gallery.py")
    file = gallery.RESULTS / f"{path.stem}.txt"
    if not file.exists():
        pytest.skip(f"`python3 tasks.py gallery {path.stem}` has not written it yet")
    shown = file.read_text("utf-8")
    assert shown.rstrip().endswith(f"program {gallery.fingerprint(path)}")


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """The cells of all notebooks, by name."""
    pytest.importorskip("nbformat", reason="the extra `gallery` is not installed")
    folder = tmp_path_factory.mktemp("notebooks")
    script(ROOT / "docs" / "scripts" / "notebooks.py").main(folder)
    return {path.stem: json.loads(path.read_text("utf-8"))["cells"] for path in folder.iterdir()}


@pytest.mark.slow
def test_each_lesson_and_each_example_is_a_notebook(notebooks):
    """Their code can be compiled, and has no prompts."""
    lessons = [path.stem for path in (ROOT / "docs" / "tutorial").glob("*.md")]
    assert sorted(notebooks) == sorted([*lessons, *(path.stem for path in EXAMPLES)])
    for name, cells in notebooks.items():
        for cell in cells:
            text = "".join(cell["source"])
            assert cell["cell_type"] == "markdown" or ">>>" not in text
            if cell["cell_type"] == "code":
                compile(text, name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1-first-module", "4-surgery", "vit"])
def test_a_notebook_runs(notebooks, name, monkeypatch, tmp_path):
    """From the first cell to the last, as users run it."""
    pytest.importorskip("sklearn", reason="the extra `examples` is not installed")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    cells = [cell for cell in notebooks[name] if cell["cell_type"] == "code"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for cell in cells:
            fails = "raises-exception" in cell["metadata"].get("tags", ())
            with pytest.raises(Exception, match=r"\w") if fails else contextlib.nullcontext():
                exec("".join(cell["source"]), namespace)

"""Draws the pictures of the pages when the site is built, with the pages' own code.

A page marks the position of a picture, on a separate line after the block that has made it:

    <!-- figure: what it shows -->

The picture is the matplotlib figure that is called `figure` there. The blocks of the
page up to that line are run as the tests run them: in order, in one namespace, in an empty folder.
Pages without such a line run nothing. Pictures are not stored: a page shows the output of its code.
"""

from __future__ import annotations

import contextlib
import doctest
import html
import io
import os
import re
import sys
import tempfile
import textwrap
import types
from pathlib import Path
from typing import Any

# Before JAX starts: a page about several devices needs them on any computer.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|pycon)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
_MARK = re.compile(r"^<!-- figure: (?P<caption>.*?) -->$", re.M | re.S)

# A placeholder for the color of the text around it, light or dark.
_INK = "#010203"
_STYLE = {
    # Of medium lightness, visible on white and on black.
    "axes.prop_cycle": "cycler('color', ['4c78d0', 'e07b39', '3da06f', 'c0504d', '8a68b8'])",
    "axes.facecolor": "none",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "figure.figsize": (6.4, 3.0),
    "font.size": 10,
    "image.cmap": "RdBu",
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    **dict.fromkeys(
        ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], _INK
    ),
}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page: insert the pictures."""
    return with_pictures(markdown, page.file.src_uri)


def with_pictures(markdown: str, name: str) -> str:
    """A page with its pictures instead of the lines that mark them.

    Raises:
        ValueError: there is no figure at such a line.
    """
    marks = list(_MARK.finditer(markdown))
    if not marks:
        return markdown
    import matplotlib as mpl

    mpl.use("Agg")
    # Each picture gets a name, so that its references do not lead into another one.
    pictures = []
    with mpl.rc_context(_STYLE), _in_empty_folder(), _page_module() as module:
        done = 0
        for number, mark in enumerate(marks):
            for block in _BLOCK.finditer(markdown, done, mark.start()):
                _run(block, markdown, name, vars(module))
            done = mark.end()
            figure = vars(module).get("figure")
            if not hasattr(figure, "savefig"):
                raise ValueError(f"{name}: there is no `figure` for {mark.group()!r}")
            mpl.rcParams["svg.hashsalt"] = f"{name} {number}"
            pictures.append(_as_html(figure, " ".join(mark["caption"].split())))
        mpl.pyplot.close("all")
    drawn = iter(pictures)
    return _MARK.sub(lambda _: next(drawn), markdown)


def _run(block: re.Match[str], markdown: str, name: str, namespace: dict[str, Any]) -> None:
    code = textwrap.dedent(block["code"])
    before = "\n" * markdown.count("\n", 0, block.start("code"))
    with contextlib.redirect_stdout(io.StringIO()):
        if block["language"] == "python":
            exec(compile(before + code, name, "exec"), namespace)
            return
        for example in doctest.DocTestParser().get_examples(code):
            # An error that the page shows is not an error of the page.
            shown = Exception if example.exc_msg is not None else ()
            with contextlib.suppress(shown):
                exec(compile(before + example.source, name, "single"), namespace)


def _as_html(figure: Any, caption: str) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # A style sheet would apply to the whole page, and ids of groups are the same in all figures.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    style = "max-width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt"
    label = html.escape(caption, quote=True)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}" style="{style}"', 1)
    # An empty line would end the HTML for Markdown.
    svg = re.sub(r"\n\s*", "\n", svg).strip()
    caption = f"<figcaption>{html.escape(caption)}</figcaption>"
    return f'<figure class="plot" data-search-exclude>\n{svg}\n{caption}\n</figure>'


@contextlib.contextmanager
def _in_empty_folder() -> Any:
    back = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(back)


@contextlib.contextmanager
def _page_module() -> Any:
    """The module for the page's definitions, where code looks up their source."""
    module = sys.modules["page"] = types.ModuleType("page")
    try:
        yield module
    finally:
        del sys.modules["page"]

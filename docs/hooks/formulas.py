"""Formulas as MathML, which browsers render natively: no script, no font from another host."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)
# A name in a formula, such as `eps`; it is no command, and no argument of one that takes words.
_NAME = re.compile(r"(?<![\\A-Za-z])(?<!\\mathrm{)(?<!\\begin{)(?<!\\end{)[A-Za-z]{3,}")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page's HTML."""
    return _FORMULA.sub(_set, html)


def _set(found: re.Match[str]) -> str:
    tex = unescape(found[2]).strip().removeprefix(r"\[").removesuffix(r"\]")
    if found[1] == "span":
        return mathml(tex)
    # In its own box, which scrolls where the formula is wider than a phone.
    return f'<div class="pm-formula">{mathml(tex, "block")}</div>'


def mathml(tex: str, display: str = "inline") -> str:
    """A TeX formula as MathML. An unknown command stops the build: no page shows backslashes."""
    # TeX has `aligned` inside of a formula; the converter knows it by the name it has outside.
    tex = _NAME.sub(r"\\text{\g<0>}", tex.replace("{aligned}", "{align*}"))
    converted = convert(tex, display=display)
    if "\\" in converted:
        raise PluginError(f"latex2mathml does not know a command of {tex!r}")
    return converted

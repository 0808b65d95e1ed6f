"""Formulas as MathML, which browsers render natively: no script, no font from another host.

This covers the TeX that docstrings and pages use, and no more. An unknown command stops the
build, so that no page shows backslashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape, unescape
from itertools import takewhile
from typing import Any

from mkdocs.exceptions import PluginError
from svg import element

SIGNS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "epsilon": "ε", "theta": "θ", "lambda": "λ",
    "mu": "μ", "sigma": "σ", "tau": "τ", "phi": "φ",
}  # fmt: skip
OPERATORS = {
    "cdot": "·", "times": "×", "circ": "∘", "sum": "∑", "prod": "∏", "le": "≤", "ge": "≥",
    "ne": "≠", "in": "∈", "approx": "≈", "leftarrow": "←", "to": "→", "dots": "…", "top": "⊤",
    "lfloor": "⌊", "rfloor": "⌋", "lVert": "‖", "rVert": "‖", "partial": "∂", "nabla": "∇",
    "odot": "⊙", "ll": "≪", "infty": "∞",
}  # fmt: skip
NAMES = {
    "bmod": "mod",
    **{name: name for name in ("min", "max", "sin", "cos", "tanh", "exp", "log")},
}
FENCES = "()[]{}‖⌊⌋"
SPACES = {",": ".17em", ";": ".28em", " ": ".33em", "quad": "1em"}

_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[A-Za-z]+|\d+(?:\.\d+)?|\S")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page's HTML."""
    return _FORMULA.sub(_set, html)


def _set(found: re.Match[str]) -> str:
    tex = unescape(found[2]).strip().removeprefix(r"\[").removesuffix(r"\]")
    if found[1] == "span":
        return element("math", mathml(tex))
    # In its own box, which scrolls where the formula is wider than a phone.
    return element("div", element("math", mathml(tex), display="block"), class_="pm-formula")


def mathml(tex: str) -> str:
    """A TeX formula as elements of MathML."""
    return _row(iter(list(_tokens(tex))), end="")


def _tokens(tex: str) -> Iterator[str]:
    """Commands, numbers, signs and letters; three or more letters are one name, as in `eps`."""
    for token in _TOKEN.findall(tex):
        yield from token if token.isalpha() and len(token) < 3 else [token]


def _row(tokens: Iterator[str], end: str) -> str:
    """The elements up to `end`, each with its index and exponent."""
    parts: list[tuple[str, dict[str, str]]] = []
    for token in tokens:
        if token == end:
            break
        if token in "_^":
            parts[-1][1][token] = _argument(tokens)
        elif token == "'":
            parts[-1][1]["^"] = element("mo", "′")
        else:
            parts.append((_atom(token, tokens), {}))
    return element("mrow", *(_scripted(base, scripts) for base, scripts in parts))


def _scripted(base: str, scripts: dict[str, str]) -> str:
    """An element with its index, its exponent, or both."""
    places = [place for place in "_^" if place in scripts]
    tag = {"_": "msub", "^": "msup", "_^": "msubsup", "": ""}["".join(places)]
    return element(tag, base, *(scripts[place] for place in places)) if tag else base


def _argument(tokens: Iterator[str]) -> str:
    """The argument of a command, an index or an exponent: a group, or one token."""
    return _atom(next(tokens), tokens)


def _atom(token: str, tokens: Iterator[str]) -> str:
    """One element, which may consume more tokens."""
    if token == "{":
        return _row(tokens, end="}")
    if token.startswith("\\"):
        return _command(token[1:], tokens)
    if token[0].isdigit():
        return element("mn", token)
    if token.isalpha():
        return element("mi", token)
    # Fences have the size of letters, because these formulas are in lines of text.
    options = {"stretchy": "false"} if token in FENCES else {}
    return element("mo", escape(token.replace("-", "−")), **options)


def _command(name: str, tokens: Iterator[str]) -> str:
    """The element for a command that begins with a backslash."""
    if name in SIGNS:
        return element("mi", SIGNS[name])
    if name in NAMES:
        return element("mi", NAMES[name]) + element("mspace", width=".2em")
    if name in OPERATORS:
        return _atom(OPERATORS[name], tokens)
    if name in SPACES:
        return element("mspace", width=SPACES[name])
    if name == "sqrt":
        return element("msqrt", _argument(tokens))
    if name == "frac":
        return element("mfrac", _argument(tokens), _argument(tokens))
    if name == "mathbin":
        return _argument(tokens)
    if name in ("mathrm", "text"):
        return element("mi", _word(tokens), mathvariant="normal")
    if name == "begin":
        return _aligned(_word(tokens), tokens)
    raise PluginError(
        f"docs/hooks/formulas.py does not know \\{name}: add it, or write it plainly."
    )


def _word(tokens: Iterator[str]) -> str:
    """A word in braces."""
    return "".join(takewhile("}".__ne__, tokens)).removeprefix("{")


def _aligned(environment: str, tokens: Iterator[str]) -> str:
    """Equations in rows, aligned in columns."""
    if environment != "aligned":
        raise PluginError(f"docs/hooks/formulas.py does not know the environment {environment}.")
    lines: list[list[list[str]]] = [[[]]]
    for token in takewhile("\\end".__ne__, tokens):
        if token == "\\\\":
            lines.append([[]])
        elif token == "&":
            lines[-1].append([])
        else:
            lines[-1][-1].append(token)
    _word(tokens)
    rows = ([element("mtd", _row(iter(cell), end="")) for cell in line] for line in lines)
    table = (element("mtr", *row) for row in rows)
    return element(
        "mtable", *table, columnalign="right left", displaystyle="true", class_="aligned"
    )

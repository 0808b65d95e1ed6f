"""Docstrings in the reference: the project's own sections, and signatures of all classes.

Loaded by mkdocstrings (`mkdocs.yml`, `extensions`). Its parser knows Google's sections. For another
heading it makes a box, in which lines run together, with the text beside the heading as the
title. So the project's own sections are rewritten as Markdown first: *Shapes* and *Fields*
become tables, *State and randomness* and *Source* paragraphs with a title.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pkgutil import resolve_name

import griffe

TABLES = ("Shapes", "Fields")
PARAGRAPHS = ("State and randomness", "Source")

_HEADING = re.compile(rf"^({'|'.join((*TABLES, *PARAGRAPHS))}):(.*)$")
_ENTRY = re.compile(r"^([\w*, ]+): (.*)$", re.S)
_CODE = re.compile(r"`[^`]*`")
# Something like a shape: sizes, names of sizes and sums of them, in parentheses.
_SHAPE = re.compile(r"\((?:[\w*.+/ -]+,? ?)*\)")


def rewritten(text: str) -> str:
    """A docstring in which the project's own sections are tables and paragraphs of Markdown."""
    return "\n".join(_rewritten_lines(text.splitlines()))


def _rewritten_lines(lines: list[str]) -> Iterator[str]:
    """The lines, with each of the project's own sections replaced."""
    rest = iter(enumerate(lines))
    for number, line in rest:
        found = _HEADING.match(line)
        if found is None:
            yield line
            continue
        body = _indented(lines[number + 1 :])
        for _ in body:
            next(rest)
        yield from _section(found[1], found[2].strip(), inspect.cleandoc("\n".join(body)))


def _indented(lines: list[str]) -> list[str]:
    """The lines that belong to the heading above: up to the next line that is not indented."""
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return lines[:end]


def _section(title: str, beside: str, body: str) -> Iterator[str]:
    """One section as Markdown, with an empty line before and after."""
    yield ""
    if title in TABLES:
        yield from (f"| {title} | |", "|---|---|")
        for entry in re.split(r"\n(?! )", body):
            yield _row(" ".join(entry.split()))
    else:
        yield f'<span class="doc-section-title">{title}:</span> {beside}'.rstrip()
        yield body
    yield ""


def _row(entry: str) -> str:
    """`name: text` as a row; without a name, the text fills the second column."""
    found = _ENTRY.match(entry)
    name, text = (f"`{found[1]}`", found[2]) if found else ("", entry)
    return f"| {name} | {_marked(text)} |"


def _marked(text: str) -> str:
    """Shapes as code, so that no `*` or `_` in them becomes emphasis."""
    pieces = _CODE.split(text)
    codes = [*_CODE.findall(text), ""]
    plain = (_SHAPE.sub(lambda shape: f"`{shape[0]}`", piece) for piece in pieces)
    marked = "".join(piece + code for piece, code in zip(plain, codes, strict=True))
    return marked.replace("|", r"\|")


def _written_init(cls: griffe.Class) -> griffe.Function | None:
    """The `__init__` that a Module gets from its fields, which is not in the source."""
    made = resolve_name(cls.path)
    if not hasattr(vars(made).get("__init__"), "is_written"):
        return None
    shown = inspect.signature(made).parameters.values()
    parameters = [
        griffe.Parameter(
            parameter.name,
            kind=griffe.ParameterKind(parameter.kind.description),
            annotation=cls.members[parameter.name].annotation,
            default=None if parameter.default is parameter.empty else repr(parameter.default),
        )
        for parameter in shown
    ]
    own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    written = griffe.Function("__init__", parameters=griffe.Parameters(own, *parameters))
    return written if parameters else None


class ReferenceSections(griffe.Extension):
    """Changes each object when it is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the project's own sections."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        """Show the constructor if it follows from the fields."""
        if "__init__" not in cls.members:
            written = _written_init(cls)
            if written is not None:
                cls.set_member("__init__", written)

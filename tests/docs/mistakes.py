"""Mistakes that users make, as data: the program, the output, why, and the correct line.

`mistakes.md`, beside this file, has them; `docs/reference/mistakes.md` is made from it. There, `##`
begins a group and `###` a mistake, which is

- a program in ```python, whose last statement is the mistake;
- the text that is seen, in ```text: `…` matches any text, for instance JAX's own;
- why, in a sentence or two;
- the lines instead in ```python, which go on where the program stopped; and
- if they end in an expression, its value in ```text.

Programs have the names of `PREAMBLE`. With UPDATE_GOLDEN=1 the tests write the texts and values
that have changed, and the page.
"""

import ast
import re
import types
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import ROOT, blocks_in
from tests.goldens import text_of

SOURCE = Path(__file__).with_name("mistakes.md")
PAGE = ROOT / "docs" / "reference" / "mistakes.md"

PREAMBLE = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytreemod as pm
from pytreemod import nn

key = jax.random.key(0)
"""

INTRODUCTION = f"""\
# Mistakes

{{count}} programs with a mistake in them, and for each the error, the reason, and the line to write
instead. Search this page for what you were doing, or for words of the error that you see.
[Errors](errors.md) has their classes.

Every text here is compared with what the library really says, and every line instead is run. `…`
is text of JAX or Python, which differs from version to version. All programs begin with:

```python
{PREAMBLE}```
"""


class Mistake(NamedTuple):
    """One mistake of the file."""

    group: str
    title: str
    program: str
    seen: str
    why: str
    instead: str
    value: str


def mistakes_of(text: str) -> Iterator[Mistake]:
    """All mistakes of a text, in order.

    Raises:
        ValueError: one of them has not the form that this file states.
    """
    for group in re.split(r"^## ", text, flags=re.M)[1:]:
        name, _, entries = group.partition("\n")
        for entry in re.split(r"^### ", entries, flags=re.M)[1:]:
            title, _, body = entry.partition("\n")
            blocks = blocks_in(body)
            why = re.sub(r"^```.*?^```$", "", body, flags=re.M | re.S).strip()
            languages = [block.language for block in blocks]
            if languages not in (["python", "text", "python"], ["python", "text"] * 2) or not why:
                raise ValueError(f"{title}: expected program, text, why, program, got {languages}")
            program, seen, instead, value = [block.code.rstrip() for block in blocks] + [""] * (
                4 - len(blocks)
            )
            yield Mistake(name, title, program, seen, why, instead, value)


def seen_and_value(mistake: Mistake, module: types.ModuleType) -> tuple[str, str]:
    """The real output of the mistake, and the value of the correct lines."""
    scope = vars(module)
    exec(PREAMBLE, scope)
    *setup, last = ast.parse(mistake.program).body
    exec(compile(ast.Module(setup, []), "program.py", "exec"), scope)
    try:
        exec(compile(ast.Module([last], []), "program.py", "exec"), scope)
    except Exception as error:
        seen = text_of(error)
    else:
        seen = "nothing"
    *setup, last = ast.parse(mistake.instead).body
    if not mistake.value or not isinstance(last, ast.Expr):
        exec(compile(mistake.instead, "program.py", "exec"), scope)
        return seen, ""
    exec(compile(ast.Module(setup, []), "program.py", "exec"), scope)
    return seen, repr(eval(compile(ast.Expression(last.value), "program.py", "eval"), scope))


def with_texts(text: str, mistake: Mistake, seen: str, value: str) -> str:
    """The file, with the real output and value of one mistake."""
    before, title, rest = text.partition(f"### {mistake.title}\n")
    rest = rest.replace(f"```text\n{mistake.seen}\n```", f"```text\n{seen}\n```", 1)
    if value:
        old, new = (f"{mistake.instead}\n```\n\n```text\n{v}\n```" for v in (mistake.value, value))
        rest = rest.replace(old, new, 1)
    return before + title + rest


def page_of(mistakes: list[Mistake]) -> str:
    """The page: an index, and below it the mistakes."""
    groups = [(name, list(them)) for name, them in groupby(mistakes, lambda m: m.group)]
    index = [
        f"- [{name}](#{slug(name)}): " + " · ".join(f"[{m.title}](#{slug(m.title)})" for m in them)
        for name, them in groups
    ]
    parts = [INTRODUCTION.format(count=len(mistakes)), "\n".join(index) + "\n"]
    for name, them in groups:
        parts.append(f"## {name}\n")
        for mistake in them:
            parts.append(f"### {mistake.title}\n")
            parts.append(f"```python\n{mistake.program}\n```\n")
            # Long lines are broken there, so that all of the text is seen at once.
            parts.append('<div class="pm-seen" markdown>\n')
            parts.append(f"```text\n{mistake.seen}\n```\n")
            parts.append("</div>\n")
            parts.append(f"{mistake.why} Instead:\n")
            parts.append(f"```python\n{mistake.instead}\n```\n")
            if mistake.value:
                parts.append(f"This gives `{mistake.value}`.\n")
    return "\n".join(parts)


def slug(heading: str) -> str:
    """A heading's anchor, as the site makes it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())

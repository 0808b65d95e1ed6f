"""Reading prose: the sentences of pages, docstrings, comments and messages, and what is wrong."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import proselint.checks
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

LONGEST = 30
"""Words in a sentence."""

BANNED = {
    r"(?:told|tell|tells)": "passed, given, warned, reported",
    r"(?:stands?|stood|standing)(?! ?-?(?:in|alone)\b)": "is, represents, appears",
    r"kept": "cached, stored",
    r"spots?": "path, location, position",
    r"(?<!in )(?<!in-)(?<!take )(?<!takes )(?<!took )places?": "path, location",
    r"in the places? of": "instead of",
    r"cures?": "hint, fix",
    r"(?:resting|rests)": "frozen",
    r"way back": "backward pass",
    r"dice": "randomness",
    r"rightly": "correctly",
    r"in vain": "has no effect",
    r"(?:nobody|whoever|lest|thereof|hence|thus)": "(rewrite)",
    r"(?:all else|else than)": "everything else; other than",
    r"of one's own": "your own",
    r"what (?:is|are|was|were|has|had|comes|came|goes|went|stays|follows|remains)": "(a noun)",
    r"(?:came|come|comes) (?:of|out as)": "(name the subject)",
    r"for (?:it|they|there|this|that|these) (?:is|are|was|were|has|have|can|would)": "because",
    r"processors?": "CPU",
    r"read right": "accuracy",
    r"(?:lies|lie|lay) (?:on|there|elsewhere|as)": "is on, is sharded",
    r"(?:optimise|initialise|normalise|quantise|serialise|behaviour|colour|centre)\w*": "American",
}
"""What we do not write, as a pattern, and what we write instead."""

_BANNED = {re.compile(rf"\b{pattern}\b", re.I): instead for pattern, instead in BANNED.items()}

_UNUSED = re.compile(
    # Quotes and dots as a terminal has them; words that are this field's; counts of marks.
    r"^(?:typography|misc\.phrasal_adjectives|weasel_words|spelling|hedging|lexical_illusions"
    r"|uncomparables|annotations|social_awareness|dates_times|archaism)"
)


@dataclass(frozen=True)
class Passage:
    """A paragraph, an item of a list, a cell of a table, a message."""

    text: str
    line: int
    is_prose: bool = True
    """Whether it consists of sentences; a message has parts that are put together."""


def findings(passage: Passage) -> Iterator[str]:
    """What is wrong with a passage."""
    for pattern, instead in _BANNED.items():
        for found in pattern.finditer(passage.text):
            # A question may begin with its "what".
            if not (found[0].startswith("What") and passage.text.endswith("?")):
                yield f"{found[0]!r}: {instead}"
    if passage.is_prose:
        for sentence in sentences(passage.text):
            count = len(re.findall(r"[\w'`-]+", sentence))
            if count > LONGEST:
                yield f"{count} words: {sentence[:60]}..."


def sentences(text: str) -> list[str]:
    """The sentences of a passage; a colon ends one, too."""
    return re.split(r"(?<=[.!?:])\s+", text)


def proselint_findings(passages: list[Passage]) -> Iterator[tuple[int, str]]:
    """What proselint says of passages, with the line of each."""
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(proselint.checks.__register__)
    text = "\n\n".join(passage.text for passage in passages)
    starts, at = [], 0
    for passage in passages:
        starts.append(at)
        at += len(passage.text) + 2
    for found in LintFile("page", content=text).lint():
        result = found.check_result
        if not _UNUSED.match(result.check_path):
            first = result.span[0] - 1  # proselint counts from 1.
            which = max(i for i, start in enumerate(starts) if start <= max(first, 0))
            yield passages[which].line, result.message


# ---- passages


def passages_of_page(text: str) -> list[Passage]:
    """The prose of a page of Markdown: not its code, comments, drawings."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    text = re.sub(r"\A---\n.*?\n---\n", blank, text, flags=re.S)
    text = re.sub(r"^( *)```.*?^\1```$", blank, text, flags=re.S | re.M)
    text = re.sub(r"<!-- figure: (.*?)-->", r"\1", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.S)
    text = re.sub(r"^::: .*?(?=^\S|\Z)", blank, text, flags=re.S | re.M)
    return list(_passages(text, 1))


def passages_of_source(text: str) -> list[Passage]:
    """The prose of a Python file: docstrings, comments, and strings of several words."""
    tree = ast.parse(text)
    docstrings = {id(node): line for node, line in _docstrings(tree)}
    found: list[Passage] = []
    in_f_strings: set[int] = set()
    at_top = next((id(node) for node, _ in _docstrings(ast.Module(tree.body[:1], []))), None)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            in_f_strings.update(id(part) for part in node.values)
            parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            found.append(Passage("".join(map(str, parts)), node.lineno, is_prose=False))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                said = _without_blocks(node.value) if at_top == id(node) else node.value
                found += _passages(_without_examples(said), node.lineno)
            elif id(node) not in in_f_strings and node.value.count(" ") >= 2:
                found.append(Passage(node.value, node.lineno, is_prose=False))
    return [*found, *_comments(text)]


def _docstrings(tree: ast.AST) -> Iterator[tuple[ast.Constant, int]]:
    """Strings that are statements: docstrings, and those below an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value, node.lineno


def _without_examples(text: str) -> str:
    """A docstring without its sessions, and with an empty line between its arguments."""
    lines, in_session = [], False
    for line in text.splitlines():
        in_session = line.strip().startswith(">>>") or (in_session and bool(line.strip()))
        lines.append("" if in_session else line)
    text = "\n".join(lines)
    text = re.sub(
        r"^ *(?:Args|Returns|Raises|Examples|Source|Attributes|Yields|Note):$", "", text, flags=re.M
    )
    # An entry of a section begins a passage of its own; its name is no word of the sentence.
    return re.sub(r"^ +\*{0,2}[\w, *]+(?: \([^)]*\))?: ", "\n", text, flags=re.M)


def _without_blocks(text: str) -> str:
    """The docstring of a file without its indented blocks, which are commands and tables."""
    return re.sub(r"(?<=\n\n)(?: {4}.*\n|\n)+", "\n", text)


def _comments(text: str) -> Iterator[Passage]:
    block: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, said = token.start[0], token.string.lstrip("#: ")
            if re.match(r"pyright:|type:|noqa|fmt:|pragma|!", said):
                continue
            if line != last + 1 and block:
                yield Passage(_plain(" ".join(block)), first)
                block = []
            if not block:
                first = line
            block.append(said)
            last = line
    if block:
        yield Passage(_plain(" ".join(block)), first)


def _passages(text: str, line: int) -> Iterator[Passage]:
    """Paragraphs, items of lists and cells of tables, with the line each begins at."""
    for paragraph in re.finditer(r"(?:^.*\S.*\n?)+", text, re.M):
        at = line + text.count("\n", 0, paragraph.start())
        if paragraph[0].lstrip().startswith("|"):
            for i, row in enumerate(paragraph[0].splitlines()):
                cells = re.split(r"(?<!\\)\|", row.strip().strip("|"))
                yield from (Passage(_plain(c), at + i) for c in cells if re.search("[a-z]", c))
            continue
        for item in re.split(r"^(?= *(?:[-*+]|\d+\.) )", paragraph[0], flags=re.M):
            if re.search("[a-z]", item):
                marker = re.sub(r"^ *(?:[-*+]|\d+\.|#+) +", "", item)
                yield Passage(_plain(marker), at)
            at += item.count("\n")


def _plain(text: str) -> str:
    """A passage in one line, without marks: `code` is one word, a link is its text."""
    text = re.sub(r"(`+)(?:(?!\1).)+\1", "X", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"<[^>]+>|\{[^}]*\}|\*\*", "", text)
    return re.sub(r"\s+", " ", text).strip()


def passages_of(path: Path) -> list[Passage]:
    """The prose of a file."""
    text = path.read_text(encoding="utf-8")
    return passages_of_source(text) if path.suffix == ".py" else passages_of_page(text)

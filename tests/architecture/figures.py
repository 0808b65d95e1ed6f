"""How large the library is, and how much of it is hidden: a table, to compare before and after.

    python -m tests.architecture.figures

Lines of code are lines with a token of the program on them: no blanks, comments or docstrings.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.architecture.imports import PACKAGE

TESTS = Path(__file__).parents[1]
GLOSSARY = PACKAGE.parent / "docs" / "contributing" / "words.md"
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_HIDDEN = frozenset(
    """
    local ContextVar Lock RLock Condition WeakKeyDictionary WeakValueDictionary WeakSet
    lru_cache cache make_user_context
    """.split()  # noqa: SIM905
)


class Figures(NamedTuple):
    """Sums over some files.

    Attributes:
        files: how many.
        total: lines of any kind.
        code: lines of code.
        imports: those that import.
        refusals: those that make the text of an error, or check for one.
        hidden: calls that create caches, locks and contexts.
    """

    files: int
    total: int
    code: int
    imports: int
    refusals: int
    hidden: int

    def __add__(self, other):
        return Figures(*map(sum, zip(self, other, strict=True)))


def figures_of(text: str) -> Figures:
    """Of one file.

    Examples:
        >>> figures_of("import jax\\n\\n# Why.\\nx = 1\\n")
        Figures(files=1, total=4, code=2, imports=1, refusals=0, hidden=0)
    """
    tree = ast.parse(text)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    imports, refusals, hidden = set[int](), set[int](), 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                code -= _lines(first) if isinstance(first.value.value, str) else set()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports |= _lines(node)
        if isinstance(node, ast.Raise) or _is_refusal(node):
            refusals |= _lines(node)
        hidden += isinstance(node, ast.Call) and _name_of(node.func) in _HIDDEN
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            named = (_name_of(each) for each in node.decorator_list)
            hidden += sum(name in _HIDDEN for name in named)
    return Figures(
        1, text.count("\n"), len(code), len(imports & code), len(refusals & code), hidden
    )


def _lines(node) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def _name_of(node) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_refusal(node) -> bool:
    """Whether it is a function, or a call of one, that refuses, checks or explains."""
    if isinstance(node, ast.FunctionDef):
        return node.name.lstrip("_").startswith(("refuse", "check"))
    called = _name_of(node.func).lstrip("_") if isinstance(node, ast.Call) else ""
    return called.startswith(("refuse", "check", "explain"))


def by_room(folder: Path) -> dict[str, Figures]:
    """The sums of each top-level folder; single files are separate rooms."""
    found: dict[str, Figures] = {}
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        own = figures_of(path.read_text(encoding="utf-8"))
        found[room] = found[room] + own if room in found else own
    return found


def words_for_the_source() -> int:
    """How many words a reader of the source has to learn."""
    table = GLOSSARY.read_text(encoding="utf-8")
    return sum(line.startswith("| **") for line in table.splitlines())


def main() -> None:
    """Print the table."""
    rooms = by_room(PACKAGE)
    whole = sum(rooms.values(), Figures(0, 0, 0, 0, 0, 0))
    rows = {**rooms, "all": whole, "tests": figures_of_tests()}
    print("| room | " + " | ".join(Figures._fields) + " | without imports |")
    print("|---" * (len(Figures._fields) + 2) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(map(str, row)) + f" | {row.code - row.imports} |")
    print(f"\nerror texts and checks: {100 * whole.refusals / whole.code:.1f} % of code")
    print(f"words for the source: {words_for_the_source()}")
    kinds = Counter(hidden_kinds())
    print("hidden state:", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))


def figures_of_tests() -> Figures:
    """Of all tests."""
    return sum(by_room(TESTS).values(), Figures(0, 0, 0, 0, 0, 0))


def hidden_kinds() -> list[str]:
    """Calls that cache something, by the name of the function."""
    found: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            calls = [node.func] if isinstance(node, ast.Call) else []
            calls += node.decorator_list if isinstance(node, ast.FunctionDef) else []
            found += [_name_of(each) for each in calls if _name_of(each) in _HIDDEN]
    return found


if __name__ == "__main__":
    main()

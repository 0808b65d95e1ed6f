"""The imports of the package, read from its source: top-level, lazy and for type checkers alike."""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pytreemod"


class Import(NamedTuple):
    """One import of one file."""

    source: str
    target: str
    line: int


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
"""Every file of the package by its dotted name."""


def imports_of(source: str, text: str) -> list[Import]:
    """The imports in a file, anywhere: `import a.b`, `from a import b`, `__import__("a")`."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [Import(source, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: a relative import"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                found.append(
                    Import(source, dotted if dotted in FILES else str(node.module), node.lineno)
                )
        elif isinstance(node, ast.Call) and _is_dynamic(node.func):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            found += [Import(source, str(name), node.lineno) for name in names]
    return found


def _is_dynamic(function: ast.expr) -> bool:
    return ast.unparse(function) in ("__import__", "importlib.import_module", "import_module")


ALL_IMPORTS = [i for name, path in FILES.items() for i in imports_of(name, path.read_text())]
"""Every import of every file."""

OWN_IMPORTS = [i for i in ALL_IMPORTS if i.target.split(".")[0] == "pytreemod"]
"""Those of the package's own files."""

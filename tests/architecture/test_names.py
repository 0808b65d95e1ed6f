"""One word, one thing: a shared name has the same meaning in all files."""

import ast
from collections import defaultdict

from tests.architecture.imports import PACKAGE


def names_of(text):
    """The names without an underscore that a file binds by itself, at its top."""
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            targets = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            bound = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [target.id for target in bound if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in targets if not name.startswith("_"))


def test_no_name_is_two_things():
    """Other files import a name without an underscore, so it must have one meaning."""
    files = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in names_of(path.read_text(encoding="utf-8")):
            files[name].add(path.relative_to(PACKAGE).as_posix())
    several = {name: sorted(where) for name, where in files.items() if len(where) > 1}

    assert {name: several[name] for name in several} == {}

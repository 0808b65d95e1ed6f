"""Every example in a docstring of the package prints the output that it shows.

The docstrings are read from the source, not from the imported objects: whatever holds a function
(a descriptor, a decorator, a class attribute), its example is found.
"""

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PACKAGE = ROOT / "pytreemod"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def docstrings_in(path: Path) -> Iterator[tuple[str, str, int]]:
    """Every docstring with an example: its owner's name, its text, the lines before it."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, f"{name}.{child.name}" if name else child.name)
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                text = child.value.value
                if isinstance(text, str) and ">>>" in text:
                    yield name, text, child.lineno - 1

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def examples() -> Iterator[doctest.DocTest]:
    """The examples of the package, each with the globals of its file."""
    parser = doctest.DocTestParser()
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for name, text, line in docstrings_in(path):
            scope = {**vars(importlib.import_module(module))}
            # As at a prompt: with the file's future import, annotations would be texts, read among
            # the names of the file and not of the example.
            scope.pop("annotations", None)
            yield parser.get_doctest(text, scope, f"{module}.{name}", str(path), line)


EXAMPLES = list(examples())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
@pytest.mark.sampled
def test_example_gives_what_it_shows(example, monkeypatch, tmp_path):
    """Each example is a separate program: with the names of its file, and an empty folder."""
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(example, out=report.append)

    assert not runner.failures, "".join(report)


def test_examples_are_found_behind_decorators_and_in_classes():
    """The list has functions, classes, methods and the functions of descriptors."""
    names = {example.name for example in EXAMPLES}

    assert {
        "pytreemod.tree.surgery.tree_at",
        "pytreemod.module.classes.Module",
        "pytreemod.module.classes.Module.replace",
        "pytreemod.transform.jit.filter_jit",
        "pytreemod.nn.pooling.MaxPool2d",
        "pytreemod.state.values.State.set",
    } <= names

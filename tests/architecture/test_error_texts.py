"""Errors describe their argument in their own words, without the message of another error."""

import ast

from tests.architecture.imports import PACKAGE

SAID = {"where", "expected", "got"}


def said(tree):
    """The arguments where, expected and got of `explain`, or earlier variables of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "explain":
            yield from node.args
        elif isinstance(node, ast.Assign) and SAID & {getattr(t, "id", None) for t in node.targets}:
            yield node.value


def pasted(text):
    """The lines in which it has the text of an error that was caught, or is called error."""
    tree = ast.parse(text)
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    caught = {"error", *(handler.name for handler in handlers if handler.name)}
    for node in (node for part in said(tree) for node in ast.walk(part)):
        is_str = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "str"
        shown = [*node.args] if is_str else [getattr(node, "value", None)]
        if isinstance(node, ast.FormattedValue) or is_str:
            yield from (n.lineno for n in shown if getattr(n, "id", None) in caught)


def test_no_text_of_another_error_is_pasted_into_what_was_given():
    """It is the cause, or has a separate line."""
    found = {
        path.relative_to(PACKAGE).as_posix(): [*pasted(path.read_text(encoding="utf-8"))]
        for path in PACKAGE.rglob("*.py")
    }

    assert {path: lines for path, lines in found.items() if lines} == {}


def test_such_a_text_is_found():
    """In an f-string, by `str`, and under a name."""
    source = """
try: f()
except ValueError as why:
    explain("a", "b", f"c {why}")
    explain("a", "b", str(why).splitlines()[0])
    got = f"{type(why).__name__}: {why}"
    explain("a", f"b {why.name}", got, hint=f"it says: {why}", places=[str(why)])
"""
    assert sorted(pasted(source)) == [4, 5, 6]

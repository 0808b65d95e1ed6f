"""No test fails because a machine is busy."""

import ast

from hypothesis import settings

from tests.architecture.imports import ROOT


def test_no_test_has_a_deadline():
    """Neither Hypothesis's default of 200 ms, nor one of a process or a thread."""
    given = [
        f"{path.relative_to(ROOT).as_posix()}:{node.value.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg in ("deadline", "timeout")
        if not (isinstance(node.value, ast.Constant) and node.value.value is None)
    ]

    assert settings().deadline is None
    assert given == []

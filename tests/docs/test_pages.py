"""The code on every page of the documentation runs, and prints the output on the page.

`docs/contributing/checks.md` states the convention: ```python is executed, ```pycon is a session
whose output is compared, ```console has commands whose output is compared, and the blocks of a page
share one namespace and one folder, in order.
"""

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import jax
import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, name_of

# Every page compiles its code, and takes a second, so they are slow.
pytestmark = pytest.mark.slow

RUN = ("python", "pycon", "console")
NOT_RUN = ("sh", "text")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

WITH_CODE = [page for page in PAGES if any(block.language in RUN for block in blocks_of(page))]


def execute(block: Block, page: Path, namespace: dict) -> None:
    """Run a block as a script; a traceback shows the page's own lines."""
    source = "\n" * block.line + block.code
    exec(compile(source, str(page), "exec"), namespace)


def check_session(block: Block, page: Path, namespace: dict) -> None:
    """Run a session, and compare its output with that on the page."""
    parsed = doctest.DocTestParser().get_doctest(
        block.code, {}, name_of(page), str(page), block.line
    )
    parsed.globs = namespace
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(parsed, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)


def check_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m` commands, in this process, and compare their output with the page."""
    commands = re.findall(r"^\$ python -m (.*)\n((?:(?!\$ ).*\n)*)", block.code, re.M)
    assert len(commands) == block.code.count("$ "), "a command that is no `python -m`"
    for command, shown in commands:
        module, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        example = doctest.Example(command, shown)
        checker = doctest.OutputChecker()
        assert checker.check_output(shown, printed.getvalue(), FLAGS), checker.output_difference(
            example, printed.getvalue(), FLAGS
        )


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_block_runs(page, monkeypatch, tmp_path):
    """The blocks of a page, run in one namespace, print the output on the page."""
    module = types.ModuleType("page")
    # The module of the classes that the page defines, for look-ups.
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    # Where a program that the page starts finds the library, be it installed or not.
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    # As a reader has it: optax itself does not pass under the strict rules of the other tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks_of(page):
            if block.language == "python":
                execute(block, page, vars(module))
            elif block.language == "pycon":
                check_session(block, page, vars(module))
            elif block.language == "console":
                check_commands(block, monkeypatch)
    if "matplotlib.pyplot" in sys.modules:
        # It keeps all figures that were ever made, and warns when these are many.
        sys.modules["matplotlib.pyplot"].close("all")


def test_readme_and_home_show_one_program():
    """What a reader meets first is the same in both places."""
    readme, home = (
        [block.code for block in blocks_of(ROOT / name) if block.language in ("python", "pycon")]
        for name in ("README.md", "docs/index.md")
    )

    assert readme
    assert readme == home


def test_no_block_escapes():
    """Every block says in which language it is: no code is left out by a misspelt fence."""
    for page in PAGES:
        blocks = blocks_of(page)

        assert {block.language for block in blocks} <= {*RUN, *NOT_RUN}, page
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks), page
        # Without its prompt a session is text, and nothing in it is compared.
        sessions = [block.code for block in blocks if block.language == "pycon"]
        assert all(code.startswith(">>> ") for code in sessions), page


def test_the_check_can_fail(monkeypatch):
    """A session, or a command, that shows another output than it gives is reported."""
    wrong = Block("pycon", ">>> 1 + 1\n3\n", 0)
    command = Block("console", "$ python -m calendar 2024 2\nMarch\n", 0)

    with pytest.raises(AssertionError, match="Expected"):
        check_session(wrong, PAGES[0], {})
    with pytest.raises(AssertionError, match="Expected"):
        check_commands(command, monkeypatch)
    with pytest.raises(AssertionError, match="no `python -m`"):
        check_commands(Block("console", "$ rm -r .\n", 0), monkeypatch)

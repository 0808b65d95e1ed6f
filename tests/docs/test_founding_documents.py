"""`founding-documents.md` is complete, and the tests that it names show it."""

import ast
import functools as ft
import re
import subprocess
import sys
from collections import defaultdict
from xml.etree import ElementTree as ET

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "tests" / "docs" / "founding-documents.md").read_text(encoding="utf-8")
CAPABILITIES = {"F": 14, "G": 21, "L": 19, "X": 12, "S": 14}
ROWS = re.findall(r"^\| ([FGLXS]\d+) \| (.+?) \| (.+?) \|(?: (.+?))? \|$", PAGE, re.M)
NAMED = {row[0]: re.findall(r"`(tests/[^`]+)`", row[3]) for row in ROWS}
EVERY = sorted({test for tests in NAMED.values() for test in tests})
UNREASONED = re.compile("|Skipped|unconditional skip|got empty parameter set.*")
"""pytest's message for a test that is skipped without a reason."""


def test_every_capability_has_one_row():
    """F1 to F14, G1 to G21, L1 to L19, X1 to X12 and S1 to S14, in order."""
    every = [f"{letter}{n}" for letter, last in CAPABILITIES.items() for n in range(1, last + 1)]

    assert [row[0] for row in ROWS] == every


def test_every_row_names_a_test():
    """No row is open."""
    assert [row[0] for row in ROWS if "lanned: " in row[2]] == []
    assert [name for name, tests in NAMED.items() if not tests] == []


@ft.cache
def functions_in(path):
    """The tests that pytest finds in a file."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return {name for name in defined if name.startswith("test_")}


def test_what_is_named_is_a_test():
    """A file of tests, and one of them, by which pytest finds it."""
    pairs = [named.split("::") for named in EVERY]

    assert [path for path, _ in pairs if not re.fullmatch(r"tests/(\w+/)*test_\w+\.py", path)] == []
    assert [pair for pair in pairs if pair[1] not in functions_in(pair[0])] == []


def outcomes(report):
    """For each test, the outcomes of its cases in the XML report: nothing if it passed."""
    found = defaultdict(list)
    for case in ET.fromstring(report).iter("testcase"):
        path = case.get("classname", "").replace(".", "/")
        name, said = case.get("name", "").partition("[")[0], [*case]
        found[f"{path}.py::{name}"].append(
            (said[0].tag, said[0].get("message", "")) if said else None
        )
    return found


def is_good(outcome):
    """Whether a case passed, or was skipped with a reason."""
    return outcome is None or (outcome[0] == "skipped" and not UNREASONED.fullmatch(outcome[1]))


@pytest.mark.slow
def test_what_is_named_passes(request, tmp_path):
    """Each is part of this run, or of a separate one: it is found, does not fail, is not skipped.

    A run of all tests has them already: twice would take minutes. By hand, of this file alone, all
    are run here.
    """
    here = {item.nodeid.partition("[")[0] for item in request.session.items}
    skipped = [i.nodeid for i in request.session.items if i.get_closest_marker("skip")]
    assert [test for test in skipped if test.partition("[")[0] in EVERY] == []
    rest = [test for test in EVERY if test not in here]
    if rest:
        check_run_of(rest, tmp_path / "report.xml")


def check_run_of(tests, report):
    """Run tests in one run of pytest: none fails, none is skipped in silence."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = outcomes(report.read_text(encoding="utf-8"))

    assert sorted(found) == tests
    bad = {test: [o for o in cases if not is_good(o)] for test, cases in found.items()}
    assert {test: cases for test, cases in bad.items() if cases} == {}


def test_the_reader_of_reports_can_fail():
    """Passed, skipped with a reason and without, failed: by name, whatever the parameter."""
    report = (
        '<testsuites><testsuite><testcase classname="tests.a.test_b" name="test_c[1-x.y]"/>'
        '<testcase classname="tests.a.test_b" name="test_c[2]"><skipped message="no torch"/>'
        '</testcase><testcase classname="tests.a.test_b" name="test_d"><skipped message=""/>'
        '</testcase><testcase classname="tests.a.test_b" name="test_e"><failure message="no"/>'
        "</testcase></testsuite></testsuites>"
    )
    found = outcomes(report)

    assert found["tests/a/test_b.py::test_c"] == [None, ("skipped", "no torch")]
    assert {name[-1]: [is_good(o) for o in cases] for name, cases in found.items()} == {
        "c": [True, True],
        "d": [False],
        "e": [False],
    }

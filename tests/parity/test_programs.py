"""Complete programs, each a file of `programs/`: run unchanged, and with their import changed.

A program is written for Equinox, without pytreemod in mind. Only the line `import equinox as eqx`
changes; the result of its `main` must be the same.
"""

import sys
import types
import warnings
from pathlib import Path

import jax
import pytest

from tests.parity.helpers import assert_same

PROGRAMS = Path(__file__).parent / "programs"
IMPORT = "import equinox as eqx"
# Known differences: the program, and the missing feature.
NOT_YET: dict[str, str] = {}
# A few for every run; the others are in the slow one, for each compiles for a second.
ALWAYS = frozenset(
    {"attribute_hooks", "gaussian_process", "levenberg_marquardt", "quantity", "static_callables"}
)


def run(path: Path, library: str) -> object:
    """The result of `main()` of the program when it imports `library`."""
    source = path.read_text()
    assert source.count(IMPORT) == 1, f"{path.name} imports Equinox in one line"
    # The module has a separate name and is registered under it, as dataclasses and pickle expect.
    module = types.ModuleType(f"{path.stem}_over_{library}")
    sys.modules[module.__name__] = module
    try:
        source = source.replace(IMPORT, f"import {library} as eqx")
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        return module.main()
    finally:
        del sys.modules[module.__name__]


def as_parameter(path: Path):
    """A program under its file's name; one that waits for something is expected to fail."""
    marks = [] if path.stem in ALWAYS else [pytest.mark.slow]
    if path.stem in NOT_YET:
        marks.append(pytest.mark.xfail(reason=NOT_YET[path.stem]))
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [as_parameter(path) for path in sorted(PROGRAMS.glob("*.py"))])
@pytest.mark.sampled
def test_a_program_runs_the_same_with_its_import_changed(path):
    """Same structures, types, strings and numbers; arrays within tolerance.

    JAX's promotion is the one that users have: their programs need not pass under a strict one.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Equinox warns of these, but they work
            theirs = run(path, "equinox")
        ours = run(path, "pytreemod")
    assert theirs is not None, "a program returns what is to be compared"
    assert_same(theirs, ours)

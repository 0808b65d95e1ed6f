"""What `pyproject.toml` makes of this folder, without building anything."""

import re

import pytest

import pytreemod as pm
from tests.architecture.imports import ALL_IMPORTS
from tests.architecture.test_layers import DEPENDENCIES
from tests.docs.pages import ROOT

PACKAGE = ROOT / "pytreemod"


@pytest.fixture(scope="module")
def wheel():
    """What builds the wheel, with its configuration read."""
    building = pytest.importorskip("hatchling.builders.wheel", reason="builds the wheel")
    return building.WheelBuilder(str(ROOT))


def test_the_version_is_written_once(wheel):
    """The wheel has the version of the package, and so has the newest heading of the changes."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", changes, re.M)

    assert wheel.metadata.version == pm.__version__
    assert newest is not None
    assert newest[1] == pm.__version__


def test_the_wheel_takes_every_file_of_the_package(wheel):
    """A folder that `.gitignore` names, such as `build`, would be left out."""
    taken = {file.distribution_path for file in wheel.recurse_included_files()}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    assert taken == {path.relative_to(ROOT).as_posix() for path in files}


def names_of(requirements):
    """The names of the packages that lines of `Requires-Dist` are about."""
    return {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in requirements}


def test_what_is_declared_is_what_is_imported(wheel):
    """Each dependency is imported somewhere, and nothing that comes by way of another is."""
    imported = {i.target.split(".")[0] for i in ALL_IMPORTS}

    assert imported >= DEPENDENCIES
    # JAX imports jaxlib: the bound here is for both.
    assert names_of(wheel.metadata.core.dependencies) == DEPENDENCIES | {"jaxlib"}

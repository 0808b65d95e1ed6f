"""The files for a registry: a wheel and an sdist that are complete, and work."""

import email
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import jax
import pytest

import pytreemod as pm
from tests.docs.pages import ROOT

# Building, and a fresh environment with pip in it, take ten seconds.
pytestmark = pytest.mark.slow

NAME = f"pytreemod-{pm.__version__}"
SITE = Path(jax.__file__).parents[1]
PROGRAM = """
import jax, pytreemod as pm
model = pm.nn.MLP(2, 1, width_size=3, depth=1, key=jax.random.key(0))
print(pm.__file__, pm.__version__, pm.filter_jit(model)(jax.numpy.ones((4, 2))).shape)
"""


def run(*command, cwd, **options):
    """Run a program to its end and return its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of this folder, and the wheel from the content of the sdist."""
    pytest.importorskip("hatchling", reason="builds the wheel")
    dist = tmp_path_factory.mktemp("dist")
    build = sys.executable, "-m", "hatchling", "build", "-d", str(dist), "-t"
    run(*build, "sdist", cwd=ROOT)
    with tarfile.open(dist / f"{NAME}.tar.gz") as sdist:
        sdist.extractall(dist, filter="data")
    run(*build, "wheel", cwd=dist / NAME)
    return dist


def files_below(folder):
    """All hand-written files there, from the root of the repository."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    kept = (path for path in found if "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in kept}


def test_the_wheel_has_the_package_and_nothing_else(built):
    """Every file of it, with `py.typed`; the license; no test, no example, no page."""
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        metadata = email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
        license_text = wheel.read(f"{NAME}.dist-info/licenses/LICENSE").decode()
    about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}

    assert "pytreemod/py.typed" in names
    assert names - about == files_below("pytreemod")
    assert license_text == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (metadata["Name"], metadata["Version"]) == ("pytreemod", pm.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    required = {line for line in metadata.get_all("Requires-Dist") if "extra" not in line}
    assert "jax>=0.8.0" in required
    assert metadata.get_payload().startswith("# pytreemod\n")


def test_the_sdist_has_what_its_tests_need(built):
    """The package, the tests, and all files that they read: pages, programs, `pyproject.toml`."""
    root = built / NAME
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    beside = {
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "mkdocs.yml",
        "pyproject.toml",
        "tasks.py",
    }

    assert names >= beside | files_below("pytreemod") | files_below("tests")
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"benchmarks", "docs", "examples", "pytreemod", "tests"}


def test_the_wheel_works_where_it_is_installed(built, tmp_path):
    """In a fresh environment, which has JAX from here, and pytreemod from the wheel alone."""
    home = tmp_path / "home"
    venv.create(home, with_pip=True)
    python = str(home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wheel = str(built / f"{NAME}-py3-none-any.whl")
    pip = "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"
    run(python, *pip, wheel, cwd=tmp_path, env=alone)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run(python, "-c", purelib, cwd=tmp_path, env=alone).strip())
    # After its own packages: such files in that folder are not read, for example those of
    # editables.
    (own / "packages-from-here.pth").write_text(f"{SITE}\n", encoding="utf-8")
    printed = run(python, "-W", "error", "-c", PROGRAM, cwd=tmp_path, env=alone)

    assert printed.split(" ", 1) == [
        str(own / "pytreemod" / "__init__.py"),
        f"{pm.__version__} (4, 1)\n",
    ]

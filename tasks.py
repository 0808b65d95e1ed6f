"""The project's tasks. Each installs what it needs; you need only Python 3.11 or newer.

    python3 tasks.py train [--epochs 5]    train a network on handwritten digits
    python3 tasks.py ensemble              train eight networks at once, and let them vote
    python3 tasks.py test [-k linear]      run the tests
    python3 tasks.py check                 run ruff and pyright
    python3 tasks.py bench [--quick]       measure against JAX, Equinox and Flax NNX
    python3 tasks.py docs                  build the documentation into site/
    python3 tasks.py gallery [digits vae]  run the examples, and keep what the site shows of them
    python3 tasks.py notebooks             write the lessons and the examples as notebooks
    python3 tasks.py size                  count lines of code by room, beside their budgets
    python3 tasks.py stub                  write pytreemod/__init__.pyi, which type checkers read
    python3 tasks.py install peers hub     install PyTorch, Flax and transformers, for some tests
    python3 tasks.py clean                 remove everything that was built

Arguments after the name of the task go to the program that it runs. Each version of Python has its
own virtual environment in .venvs/, which the first task makes.
"""

import ast
import hashlib
import shutil
import subprocess
import sys
import tokenize
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
HOME = ROOT / ".venvs" / VERSION
PYTHON = HOME / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
BUILT = (".venvs", "build", "dist", "site", ".pytest_cache", ".ruff_cache", ".hypothesis")

# What to expect of a task: measured on two cores.
EXPECT = {
    "train": "train a network: up to a minute on two cores, and one to install (0.8 GB)",
    "test": "run the tests: three to six minutes on two cores, and one or two to install (1.2 GB)",
}

# For each task, the extra of pyproject.toml that it needs, and its commands without `python`. The
# last command gets the arguments after the name of the task.
TASKS: dict[str, tuple[str, list[list[str]]]] = {
    "train": ("examples", [["examples/digits.py"]]),
    "ensemble": ("examples", [["examples/ensemble.py"]]),
    "test": ("tests", [["-m", "pytest", "-n", "2", "-m", "not slow"]]),
    "check": (
        "tests",
        [
            ["-m", "ruff", "check", "."],
            ["-m", "ruff", "format", "--check", "."],
            ["-m", "pyright", "--pythonpath", str(PYTHON)],
        ],
    ),
    "bench": ("benchmarks", [["-m", "benchmarks"]]),
    "docs": ("docs", [["-m", "mkdocs", "build", "--strict"]]),
    "gallery": ("gallery", [["docs/scripts/gallery.py"]]),
    "notebooks": ("gallery", [["docs/scripts/notebooks.py"]]),
}


def install(extra: str) -> None:
    """Make the environment and install this project with an extra, unless that was done before."""
    project = (ROOT / "pyproject.toml").read_bytes()
    stamp = HOME / f"installed-{extra}-{hashlib.sha256(project).hexdigest()[:16]}"
    if stamp.exists():
        return
    print(f"installing pytreemod[{extra}] into {HOME.relative_to(ROOT)}", flush=True)
    if not PYTHON.exists():
        venv.create(HOME, with_pip=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--editable", f".[{extra}]"])
    # Written last, so that an interrupted installation starts again.
    stamp.touch()


def run(command: Sequence[str]) -> None:
    """Run the Python of the environment; exit with its status if it fails."""
    status = subprocess.run([str(PYTHON), *command], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


def code_lines(path: Path) -> int:
    """Count the lines of a file with code: without blank lines, comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    with tokenize.open(path) as file:
        text = file.read()
    for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def sizes() -> dict[str, int]:
    """Count lines of code by room, all lines of the tests, and words of the pages."""
    found: dict[str, int] = {}
    for path in sorted((ROOT / "pytreemod").rglob("*.py")):
        room = path.relative_to(ROOT / "pytreemod").parts[0]
        room = "front" if room.endswith(".py") else room
        found[room] = found.get(room, 0) + code_lines(path)
    found["package"] = sum(found.values())
    tests = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    pages = [path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")]
    found["tests, all lines"] = sum(text.count("\n") for text in tests)
    found["pages, words"] = sum(len(text.split()) for text in pages)
    return found


def budgets() -> dict[str, int]:
    """Read from pyproject.toml how large each of these may be."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return project["tool"]["pytreemod"]["size"]


def print_sizes() -> None:
    """Print what there is beside what there may be."""
    print(f"{'':18}{'now':>8}{'at most':>10}")
    for name, count in sizes().items():
        print(f"{name:18}{count:8,}{budgets()[name]:10,}")


def stub() -> str:
    """Make what type checkers read of the front door: an import for each of its names."""
    lines = ['"""Made of `__init__.py` by `python3 tasks.py stub`."""\n']
    for node in ast.parse((ROOT / "pytreemod" / "__init__.py").read_text("utf-8")).body:
        match node:
            case ast.ImportFrom(str(file), names) if file.startswith("pytreemod"):
                public = [each.name for each in names if each.asname is None]
                lines += [f"from {file} import {name} as {name}" for name in public]
            case ast.Assign([ast.Name("_PARTS")], parts):
                names = ast.literal_eval(parts)
                lines += [f"from pytreemod import {name} as {name}" for name in names]
            case ast.Assign([ast.Name("_LATER")], table):
                for file, names in ast.literal_eval(table).items():
                    imported = [f"import {name} as {name}" for name in names.split()]
                    lines += [f"from pytreemod.{file} {each}" for each in imported]
            case ast.Assign([ast.Name()], ast.Name()):
                lines.append(ast.unparse(node))
            case _:
                pass
    return "\n".join([*lines, ""])


def clean() -> None:
    """Remove everything that the tasks have made."""
    for name in BUILT:
        shutil.rmtree(ROOT / name, ignore_errors=True)


def main(words: Sequence[str]) -> None:
    """Run the task that the first word names."""
    if list(words[:1]) == ["clean"]:
        clean()
    elif list(words[:1]) == ["size"]:
        print_sizes()
    elif list(words[:1]) == ["stub"]:
        (ROOT / "pytreemod" / "__init__.pyi").write_text(stub(), "utf-8")
    elif list(words[:1]) == ["install"] and len(words) > 1:
        for extra in words[1:]:
            install(extra)
    elif not words or words[0] not in TASKS:
        sys.exit(__doc__)
    else:
        extra, commands = TASKS[words[0]]
        if len(words) == 1 and words[0] in EXPECT:
            print(EXPECT[words[0]], flush=True)
        install(extra)
        *before, last = commands
        for command in before:
            run(command)
        run([*last, *words[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])

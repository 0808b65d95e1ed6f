"""Run the examples, and keep what the gallery shows of each: its last lines, its time, a picture.

    python3 tasks.py gallery                 # all of them: half an hour on two cores
    python3 tasks.py gallery digits vae

The files are `examples/results/NAME.txt` and `NAME.png`.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import jax

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RESULTS = EXAMPLES / "results"
LINES = 14

# What a program needs beside its name; `{runs}` is a new folder.
ARGUMENTS = {
    "checkpoint": ["{runs}/digits"],
    "hosts": ["{runs}/hosts", "--processes", "2"],
    "gpt": ["{runs}/gpt", "--minutes", "5"],
    "interpret": ["{runs}/small", "--minutes", "1"],
    "llama": ["--quantize", "int8"],
}


def fingerprint(path: Path) -> str:
    """A hash of what a program does: comments, docstrings and its form do not count."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def run(name: str, runs: str) -> None:
    """Run one program, and write its files."""
    path = EXAMPLES / f"{name}.py"
    arguments = [each.replace("{runs}", runs) for each in ARGUMENTS.get(name, [])]
    shown = [each.replace("{runs}", "runs") for each in ARGUMENTS.get(name, [])]
    if '"--plot"' in path.read_text("utf-8"):
        arguments += ["--plot", str(RESULTS / f"{name}.png")]
        shown += ["--plot", f"{name}.png"]
    began = perf_counter()
    # Errors and progress bars go to the terminal.
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    seconds = perf_counter() - began
    lines = [
        line.replace(f"{RESULTS}/", "").replace(runs, "runs") for line in done.stdout.splitlines()
    ]
    text = [" ".join(["$ python", f"examples/{name}.py", *shown])]
    text += ["..."] * (len(lines) > LINES) + lines[-LINES:]
    text += ["", f"{seconds:.0f} s, JAX {jax.__version__}, program {fingerprint(path)}"]
    (RESULTS / f"{name}.txt").write_text("\n".join(text) + "\n", "utf-8")
    print(f"{name}: {seconds:.0f} s", flush=True)


def main(names: list[str]) -> None:
    """Run the programs of these names; all by default."""
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as runs:
        for name in names or sorted(path.stem for path in EXAMPLES.glob("*.py")):
            run(name, runs)


if __name__ == "__main__":
    main(sys.argv[1:])

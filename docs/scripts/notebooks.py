"""Write the lessons and the examples as notebooks.

python3 tasks.py notebooks               # into build/notebooks
python3 tasks.py notebooks ~/lessons
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(python|pycon)[^\n]*\n(.*?)^```\n", re.M | re.S)
_MAIN = 'if __name__ == "__main__":'


def of_lesson(text: str) -> nbformat.NotebookNode:
    """A page: a cell for each block of code, without its output, and for the text between them."""
    cells, at = [], 0
    for found in _BLOCK.finditer(text):
        cells.append(new_markdown_cell(text[at : found.start()].strip()))
        cells.append(_code_cell(found[2], is_session=found[1] == "pycon"))
        at = found.end()
    cells.append(new_markdown_cell(text[at:].strip()))
    return new_notebook(cells=[cell for cell in cells if cell.source])


def _code_cell(text: str, is_session: bool) -> nbformat.NotebookNode:
    if not is_session:
        return new_code_cell(text)
    lines = [line[4:] for line in text.splitlines() if line.startswith((">>>", "..."))]
    cell = new_code_cell("\n".join(lines))
    if "Traceback" in text:
        # A lesson about an error: Jupyter goes on after this cell.
        cell.metadata["tags"] = ["raises-exception"]
    return cell


def of_program(text: str) -> nbformat.NotebookNode:
    """An example: its docstring, its code, and a call without arguments."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    end = ast.parse(text).body[0].end_lineno or 0
    code, _, last = "\n".join(text.splitlines()[end:]).partition(_MAIN)
    # Its arguments are those of the program, not of the notebook's kernel.
    call = "\n".join(line.strip() for line in last.splitlines()).replace("main()", "main([])")
    cells = [new_markdown_cell(docstring), new_code_cell(code.strip()), new_code_cell(call.strip())]
    return new_notebook(cells=cells)


def main(folder: Path) -> None:
    """Write all of them into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
    made = {path.stem: of_lesson(path.read_text("utf-8")) for path in pages}
    programs = sorted((ROOT / "examples").glob("*.py"))
    made |= {path.stem: of_program(path.read_text("utf-8")) for path in programs}
    for name, notebook in made.items():
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.validate(notebook)
        nbformat.write(notebook, folder / f"{name}.ipynb")
    print(f"{len(made)} notebooks in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "notebooks")

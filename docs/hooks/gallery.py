"""The gallery: a page for each program in `examples/`, and one page that shows them all.

A page has the program's docstring, its picture, the last lines of its output, and its code.
Pictures and output are files in `examples/results`, which `python3 tasks.py gallery` writes: some
programs take minutes, so they do not run at the build.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

FOLDER = Path(__file__).parents[2] / "examples"
RESULTS = FOLDER / "results"

# By what people look for.
GROUPS = {
    "Images": ("digits", "vae", "ensemble", "resnet", "vit"),
    "Text": ("gpt", "lstm_language_model", "llama", "gpt2", "interpret"),
    "Training": ("checkpoint", "lora", "parallel", "hosts"),
    "Science": ("neural_ode", "solver", "physics", "gaussian_process", "dqn"),
}


def on_files(files: Any, *, config: Any) -> Any:
    """Called by MkDocs with all files: add the pages, and their pictures."""
    programs = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
    listed = {name for names in GROUPS.values() for name in names}
    if listed != programs.keys():
        wrong = ", ".join(sorted(listed ^ programs.keys()))
        raise PluginError(f"docs/hooks/gallery.py and examples/ differ: {wrong}")
    files.append(File.generated(config, "examples/index.md", content=index_page(programs)))
    for name, path in programs.items():
        files.append(File.generated(config, f"examples/{name}.md", content=page_of(path)))
        picture = picture_of(name)
        if picture is not None:
            source = str(picture)
            files.append(File.generated(config, f"examples/{picture.name}", abs_src_path=source))
    return files


def index_page(programs: dict[str, Path]) -> str:
    """The page that shows all programs: a picture, if there is one, and a sentence for each."""
    parts = ["# Examples", "Complete programs, each one file. You can copy any of them."]
    for group, names in GROUPS.items():
        parts += [f"## {group}", '<div class="gallery" markdown>']
        for name in names:
            title, rest = title_of(programs[name])
            picture = picture_of(name)
            shown = f"![]({picture.name}){{ loading=lazy }}\n\n" if picture else ""
            parts.append(f"<div markdown>\n{shown}**[{title}]({name}.md)** {rest}\n</div>")
        parts.append("</div>")
    return "\n\n".join(parts) + "\n"


def page_of(path: Path) -> str:
    """The page of one program."""
    docstring, code = _split(path)
    title, _ = title_of(path)
    sentence, _, text = docstring.partition("\n")
    # Not stripped of spaces: the commands are indented, which makes them a block.
    parts = [f"# {title}", sentence, text.strip("\n")]
    picture, output = picture_of(path.stem), RESULTS / f"{path.stem}.txt"
    if picture is not None:
        parts.append(f"![What the program draws]({picture.name}){{ loading=lazy }}")
    if output.is_file():
        parts += ["## Output", f"```text\n{output.read_text('utf-8').rstrip()}\n```"]
    parts += [f"## examples/{path.name}", f"```python\n{code}```"]
    return "\n\n".join(parts) + "\n"


def title_of(path: Path) -> tuple[str, str]:
    """The first sentence of a program's docstring, in two parts: up to a colon, and the rest."""
    sentence = _split(path)[0].partition("\n")[0].rstrip(".")
    title, _, rest = sentence.partition(": ")
    return title, f"{rest[:1].upper()}{rest[1:]}." if rest else ""


def picture_of(name: str) -> Path | None:
    """The picture that a program has drawn."""
    found = RESULTS / f"{name}.png"
    return found if found.is_file() else None


def _split(path: Path) -> tuple[str, str]:
    """The docstring of a program, and its code without it."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    end = tree.body[0].end_lineno or 0
    return ast.get_docstring(tree) or "", "".join(text.splitlines(keepends=True)[end:]).lstrip("\n")

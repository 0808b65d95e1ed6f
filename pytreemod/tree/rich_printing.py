"""How treescope shows a Module or a State in a notebook: its stored values, with roles and ties.

Treescope calls a node's `__treescope_repr__`, so it is installed and imported wherever this runs.
Otherwise it would read the fields of a Module, and show a tie as a second array and a computed
leaf as its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytreemod.tree.instances import reading_stored, record_of
from pytreemod.tree.nodes import DEFAULT_ROLE, InheritedRole, own_class
from pytreemod.tree.printing import printed_fields
from pytreemod.typing import jtu


def rich_doc(node: Any, path: str | None, renderer: Callable[..., Any], note: str = "") -> Any:
    """Return a record, as treescope shows it.

    Args:
        node: a Module.
        path: to it, as Python code; None if there is none.
        renderer: treescope's, for its contents.
        note: a comment on the record.
    """
    record = record_of(node)
    assert record is not None
    rows: list[tuple[str, Any, str]] = []
    data = {*record.data_names(node)}
    for name, value in printed_fields(node).items():
        below = InheritedRole().of_child(node, jtu.GetAttrKey(name))
        roles = [below.role] if name in data and below.role != DEFAULT_ROLE else []
        roles += [f"{'.'.join(steps)}: {role}" for steps, role in below.given or ()]
        rows.append((name, value, ", ".join(roles)))
    with reading_stored():
        return rich_rows(own_class(node), rows, path, renderer, note)


def rich_rows(
    cls: type,
    rows: Sequence[tuple[str, Any, str]],
    path: str | None,
    renderer: Callable[..., Any],
    note: str = "",
) -> Any:
    """Return an object as its class and named values, as treescope shows it.

    Args:
        cls: its class.
        rows: for each value its name, the value, and a comment.
        path: to the object, as Python code; None if its values have no path.
        renderer: treescope's, for the values.
        note: a comment on the object.
    """
    from treescope import rendering_parts as parts  # pyright: ignore[reportMissingTypeStubs]

    def comment(text: str) -> list[Any]:
        return [parts.comment_color(parts.text(f"  # {text}"))] if text else []

    lines: list[Any] = []
    for name, value, text in rows:
        child = renderer(value, path=None if path is None else f"{path}.{name}")
        line = parts.siblings_with_annotations(f"{name}=", child, extra_annotations=comment(text))
        lines.append(line)
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(parts.maybe_qualified_type_name(cls), "("),
        children=lines,
        suffix=")",
        comma_separated=True,
        path=path,
        first_line_annotation=comment(note)[0] if note else None,
    )


def rich_text(text: str) -> Any:
    """Return a string, as treescope shows it."""
    from treescope import rendering_parts  # pyright: ignore[reportMissingTypeStubs]

    return rendering_parts.text(text)

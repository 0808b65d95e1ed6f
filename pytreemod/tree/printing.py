"""Trees and reports as strings: by wadler_lindig, with a hook for what it does not know.

`tree_pformat` prints everything that is stored. `short_text`, the `repr` of a Module, leaves out
what says nothing, and prints equal layers once. `rich_doc` is for treescope.
"""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from pytreemod.errors import describe, short_dtype
from pytreemod.tree.instances import (
    all_stored,
    is_module,
    notes_of,
    reading_stored,
    schema_of,
    split_of,
)
from pytreemod.tree.nodes import DEFAULT_ROLE, InheritedRole, own_class
from pytreemod.tree.paths import pattern_text
from pytreemod.tree.predicates import same_static
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import PyTree, class_of, is_instance, jtu


class _Late:
    def __getattr__(self, name: str) -> Any:
        # Programs that print nothing do not wait for it: 10 ms.
        import wadler_lindig

        return getattr(wadler_lindig, name)


wl: Any = _Late()
_WRAPPERS: tuple[type, ...] = (jax.custom_jvp, jax.custom_vjp, type(jax.jit(lambda: None)))


def tree_pformat(
    pytree: PyTree,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] | None = None,
) -> str:
    """A tree as readable text, arrays as `f32[3,4]`; fields with their default value are left out.

    Args:
        pytree: any tree.
        width: characters in a line, where possible.
        indent: characters by which each level is indented.
        short_arrays: print `f32[3,4]` instead of an array's values.
        struct_as_array: print a `jax.ShapeDtypeStruct` as if it were an array.
        truncate_leaf: nodes to print as the name of their type.

    Returns:
        The string.

    Examples:
        >>> import jax.numpy as jnp
        >>> tree_pformat({"a": jnp.ones((3, 4)), "b": "text"})
        "{'a': f32[3,4], 'b': 'text'}"
    """

    def custom(node: Any) -> Any:
        if truncate_leaf is not None and truncate_leaf(node):
            return wl.TextDoc(f"{type(node).__name__}(...)")
        return _leaf_doc(node, short_arrays, struct_as_array)

    # Print the tree, and not the values computed from it.
    with reading_stored():
        return wl.pformat(
            pytree, width=width, indent=indent, custom=custom, short_arrays=short_arrays
        )


def tree_pprint(pytree: PyTree, **options: Any) -> None:
    """Print the result of [`tree_pformat`][pytreemod.tree_pformat].

    Args:
        pytree: any tree.
        **options: as for `tree_pformat`.

    Examples:
        >>> tree_pprint([1, "a"])
        [1, 'a']
    """
    print(tree_pformat(pytree, **options))


def _leaf_doc(node: Any, short_arrays: bool = True, struct_as_array: bool = False) -> Any:
    if isinstance(node, _WRAPPERS):
        # JAX would print an address in memory, which is different in each run.
        return wl.pdoc(inspect.unwrap(node))
    is_array = short_arrays and isinstance(node, (jax.Array, np.ndarray))
    is_struct = struct_as_array and isinstance(node, jax.ShapeDtypeStruct)
    return _array_doc(node) if is_array or is_struct else None


def _array_doc(array: Any) -> Any:
    dtype = short_dtype(array.dtype)
    if getattr(array, "weak_type", False):
        dtype = f"weak_{dtype}"
    kind = "numpy" if is_instance(array, np.ndarray) else None
    return wl.array_summary(array.shape, dtype, kind)


def short_text(tree: PyTree) -> str:
    """Return a tree in few lines: the output of `print` for a Module.

    Two kinds of fields are left out: configuration that equals the default of the constructor, and
    a field that is None if its annotation allows None.
    Items of a list that print alike are printed once, with their number. A field shows its role if
    that is not `"param"`, and a tie shows its source. Where a node has values for a model (an
    optimizer), trees of the model's structure are counted.
    [`tree_pformat`][pytreemod.tree_pformat] prints everything.

    Args:
        tree: any tree.

    Returns:
        The string.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> short_text({"out": nn.Linear(2, 3, use_bias=False, key=jax.random.key(0))})
        "{'out': Linear(weight=f32[3,2], in_features=2, out_features=3, use_bias=False)}"
    """
    with reading_stored():
        return wl.pformat(tree, width=_WIDTH, custom=ft.partial(_short_doc, set(), False))


# Characters in a line: a layer with its arrays and sizes fits.
_WIDTH = 100


def _short_doc(seen: set[int], is_counted: bool, node: Any) -> Any:
    """Return the document of a node; None for the one that wadler_lindig makes.

    Args:
        seen: the nodes around this one.
        is_counted: whether the leaves of Modules are only counted.
        node: any node.
    """
    if class_of(node) in (list, tuple) and node and all(is_module(x) for x in node):
        return _folded(node, ft.partial(_short_doc, seen, is_counted), seen)
    if not is_module(node):
        return _leaf_doc(node)
    cls = own_class(node)
    if is_counted:
        return wl.TextDoc(f"{cls.__name__}({len(jtu.tree_leaves(node))} leaves)")
    if hasattr(class_of(node), "__pdoc__"):
        return None
    hook = ft.partial(_short_doc, seen, hasattr(cls, "__holds_values__"))
    parameters: Any = inspect.signature(cls.__init__).parameters
    fields: Any = getattr(cls, "__dataclass_fields__", {})
    data, docs = split_of(node).data, list[Any]()
    for name, value in printed_fields(node).items():
        field = fields.get(name)
        if _says_nothing(value, name in data, field, parameters.get(name, field)):
            continue
        roles = _roles_text(node, name) if name in data and value is not None else ""
        doc = wl.pdoc(value, custom=hook, seen_ids=seen)
        docs.append(wl.TextDoc(f"{name}=") + doc + wl.TextDoc(f" ({roles})" if roles else ""))
    return _in_brackets(f"{cls.__name__}(", docs, ")")


def _folded(items: Sequence[Any], hook: Any, seen: set[int]) -> Any:
    docs = [wl.pdoc(item, custom=hook, seen_ids=seen) for item in items]
    texts = [wl.pformat(doc, width=_WIDTH) for doc in docs]
    rows: list[Any] = []
    for _, group in groupby(zip(texts, docs, strict=True), itemgetter(0)):
        (_, doc), *others = group
        times = f"{len(others) + 1} \N{MULTIPLICATION SIGN} " if others else ""
        rows.append(wl.TextDoc(times) + doc)
    if isinstance(items, list):
        return _in_brackets("[", rows, "]")
    return _in_brackets("(", rows, ",)" if len(items) == 1 else ")")


def _in_brackets(begin: str, docs: list[Any], end: str) -> Any:
    begin, end = wl.TextDoc(begin), wl.TextDoc(end)
    return wl.bracketed(begin=begin, docs=docs, sep=wl.comma, end=end, indent=2)


def _says_nothing(value: Any, is_data: bool, field: Any, parameter: Any) -> bool:
    """Whether a value is None where the annotation allows it, or a default of the constructor."""
    kind = str(getattr(field, "type", ""))
    if value is None and ("None" in kind or "Optional" in kind):
        return True
    return (value is None or not is_data) and same_static(value, getattr(parameter, "default", wl))


def _roles_text(node: Any, name: str) -> str:
    """The role of a field, if it is another than the default, and those given to leaves below."""
    here = InheritedRole().of_child(node, jtu.GetAttrKey(name))
    own = [here.role] if here.role != DEFAULT_ROLE else []
    return ", ".join([*own, *(f"{'.'.join(steps)}: {role}" for steps, role in here.given)])


class _TiedTo:
    """Stands for the value at a tied path."""

    def __init__(self, value: Any, source: str):
        self._text = f"{describe(value)} tied to {source}"

    def __repr__(self) -> str:
        return self._text

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return rich_text(self._text)


def printed_fields(node: Any) -> dict[str, Any]:
    """Return the stored fields of a Module that are printed; a tied path shows its source."""
    values = all_stored(node)
    for tie in notes_of(node).ties:
        (first, *below), value = tie.place, None
        # A tree of gradients, or of specs, has no values.
        with suppress(Exception):
            value = schema_of(node).tied_value(node, tie)
        shown = _TiedTo(value, pattern_text(tie.source))
        values[first.name] = replace_at(values[first.name], [(tuple(below), shown)])
    fields: dict[str, Any] = node.__dataclass_fields__
    return {name: x for name, x in values.items() if name in fields and fields[name].repr}


_AROUND: ContextVar[str] = ContextVar("around", default="")


@contextmanager
def noted(text: str) -> Generator[str]:
    """Print a node with a note, which applies to everything inside it, too.

    Args:
        text: the note; empty for no note.

    Yields:
        The text to print behind the node: nothing if a node around it has the same note.
    """
    around = _AROUND.get()
    token = _AROUND.set(text or around)
    try:
        yield "" if text == around else text
    finally:
        _AROUND.reset(token)


# ---- treescope, in a notebook
#
# It calls a node's `__treescope_repr__`, so it is installed wherever this runs. Otherwise it would
# read the fields of a Module, and show a tie as a second array and a computed leaf as its value.


def rich_doc(node: Any, path: str | None, renderer: Callable[..., Any], note: str = "") -> Any:
    """Return a Module, as treescope shows it.

    Args:
        node: a Module.
        path: to it, as Python code; None if there is none.
        renderer: treescope's, for its contents.
        note: a comment on the Module.
    """
    data = split_of(node).data
    fields = printed_fields(node).items()
    rows = [(name, x, _roles_text(node, name) if name in data else "") for name, x in fields]
    with reading_stored():
        made = rich_rows(own_class(node), rows, path, renderer)
    return _commented(made, note) if note else made


def rich_rows(
    cls: type, rows: Sequence[tuple[str, Any, str]], path: str | None, renderer: Callable[..., Any]
) -> Any:
    """Return an object as its class and named values, as treescope shows it.

    Args:
        cls: its class.
        rows: for each value its name, the value, and a comment.
        path: to the object, as Python code; None if its values have no path.
        renderer: treescope's, for the values.
    """
    from treescope import repr_lib  # pyright: ignore[reportMissingTypeStubs]

    values = {name: _Commented(value, text) if text else value for name, value, text in rows}
    return repr_lib.render_object_constructor(cls, values, path, renderer)


class _Commented(NamedTuple):
    """A value with a comment behind it."""

    value: Any
    text: str

    def __treescope_repr__(self, path: str | None, renderer: Callable[..., Any]) -> Any:
        return _commented(renderer(self.value, path=path), self.text)


def _commented(made: Any, text: str) -> Any:
    from treescope import rendering_parts as parts  # pyright: ignore[reportMissingTypeStubs]

    comment = parts.comment_color(parts.text(f"  # {text}"))
    return parts.siblings_with_annotations(made, extra_annotations=[comment])


def rich_text(text: str) -> Any:
    """Return a string, as treescope shows it."""
    from treescope import rendering_parts  # pyright: ignore[reportMissingTypeStubs]

    return rendering_parts.text(text)


def report_text(
    name: str,
    rows: Mapping[str, Sequence[str]],
    rest: Sequence[str] = (),
    always: str = "",
    most: int | None = 10,
) -> str:
    """Return a report as a string: how many findings of each kind, and the first few of them.

    Args:
        name: of the report.
        rows: a list for each kind.
        rest: other counts.
        always: the kind that is counted even if it is empty.
        most: how many of each kind are printed; None for all.

    Examples:
        >>> print(report_text("Report", {"added": ["a", "b"], "removed": []}, ["3 equal"]))
        Report: 2 added, 3 equal
          added
            a
            b
    """
    counts = [f"{len(items)} {kind}" for kind, items in rows.items() if items or kind == always]
    lines = [f"{name}: {', '.join([*counts, *rest])}"]
    for kind, items in rows.items():
        lines += [f"  {kind}"] if items else []
        lines += [f"    {item}" for item in items[:most]]
        lines += [f"    and {len(items) - most} more"] if most and len(items) > most else []
    return "\n".join(lines)


def aligned(lines: Sequence[Sequence[str]], sides: str) -> list[str]:
    r"""Lines of cells as strings, with aligned columns.

    Args:
        lines: with equally many cells.
        sides: for each column `<` for flush left, `>` for flush right.

    Examples:
        >>> print("\n".join(aligned([["path", "size"], ["a.b", "3"]], "<>")))
        path  size
        a.b      3
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*line).rstrip() for line in lines]

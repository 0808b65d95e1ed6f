"""Trees as strings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from pytreemod.errors import describe, short_dtype
from pytreemod.tree.instances import all_stored, notes_of, reading_stored, record_of
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import DEFAULT_ROLE, InheritedRole, own_class
from pytreemod.tree.paths import pattern_text
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import PyTree, class_of, jtu

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
    import wadler_lindig as wl  # Here, so that programs that print nothing do not wait for it.

    def custom(node: Any) -> Any:
        if truncate_leaf is not None and truncate_leaf(node):
            return wl.TextDoc(f"{type(node).__name__}(...)")
        return _leaf_doc(node, custom, short_arrays, struct_as_array)

    return _printed(pytree, width, indent, custom, short_arrays)


def _printed(tree: PyTree, width: int, indent: int, custom: Any, short_arrays: bool) -> str:
    import wadler_lindig as wl

    # Print the tree, and not the values computed from it.
    with reading_stored():
        return wl.pformat(
            tree, width=width, indent=indent, custom=custom, short_arrays=short_arrays
        )


def _leaf_doc(node: Any, custom: Any, short_arrays: bool, struct_as_array: bool) -> Any:
    import wadler_lindig as wl

    if isinstance(node, _WRAPPERS):
        # JAX would print an address in memory, which is different in each run.
        return custom(node.__wrapped__) or wl.pdoc(node.__wrapped__)
    if struct_as_array and isinstance(node, jax.ShapeDtypeStruct):
        return wl.array_summary(node.shape, short_dtype(node.dtype), None)
    if short_arrays and isinstance(node, (jax.Array, np.ndarray)):
        return array_doc(node)
    return None


def short_text(tree: PyTree) -> str:
    """Return a tree in few lines: the output of `print` for a Module.

    Two kinds of fields are left out: configuration that equals the default of the constructor, and
    a field that is None if its annotation allows None.
    Items of a list that print alike are printed once, with their number. An array shows its role if
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
    return _printed(tree, _SHORT_WIDTH, 2, _Short().doc, True)


_SHORT_WIDTH = 100
"""Characters in a line: a layer with its arrays and sizes fits."""

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


class _Short:
    """Documents of nodes for `short_text`; the printer calls it for each node, from the root."""

    def __init__(self) -> None:
        self._here = InheritedRole()
        self._is_counted = False
        self._seen: set[int] = set()

    def doc(self, node: Any) -> Any:
        """Return the document of a node; None for the default one."""
        import wadler_lindig as wl

        found = _leaf_doc(node, self.doc, True, False)
        if found is not None:
            role = self._here.role
            return found if role == DEFAULT_ROLE else found + wl.TextDoc(f" ({role})")
        kind, record = class_of(node), record_of(node)
        if kind in (list, tuple):
            return self._doc_of_items(node) if node else None
        if kind is dict:
            return self._doc_of_dict(node) if node else None
        if record is None:
            return None
        if self._is_counted:
            count = len(jtu.tree_leaves(node))
            return wl.TextDoc(f"{own_class(node).__name__}({count} leaves)")
        # A Module that prints itself, or that the user has given a text.
        return None if hasattr(kind, "__pdoc__") else self._doc_of_record(node, record)

    def _doc_of_record(self, node: Any, record: Any) -> Any:
        import wadler_lindig as wl

        was, self._is_counted = self._is_counted, hasattr(own_class(node), "__holds_values__")
        data, defaults = {*record.data_names(node)}, _defaults_of(own_class(node))
        rows: list[Any] = []
        beside: list[Any] = []
        values = printed_values(node)
        for name in printed_names(node, record):
            value = values[name]
            if value is None and (_may_be_none(node, name) or defaults.get(name, 0) is None):
                continue
            if name not in data and _is_default(value, name, defaults):
                continue
            text = wl.TextDoc(f"{name}=") + self._doc_of_child(node, jtu.GetAttrKey(name), value)
            if name in data:
                rows += [*_in_a_row(beside), text.group()]
                beside = []
            else:
                beside.append(text.group())
        rows += _in_a_row(beside)
        self._is_counted = was
        return _in_brackets(f"{own_class(node).__name__}(", rows, ")")

    def _doc_of_child(self, node: Any, key: Any, child: Any) -> Any:
        import wadler_lindig as wl

        here, self._here = self._here, self._here.of_child(node, key)
        try:
            return wl.pdoc(child, custom=self.doc, seen_ids=self._seen)
        finally:
            self._here = here

    def _doc_of_items(self, node: Any) -> Any:
        import wadler_lindig as wl

        docs: list[Any] = []
        texts: list[str] = []
        for i, item in enumerate(node):
            doc = self._doc_of_child(node, jtu.SequenceKey(i), item)
            # Numbers are read one by one; only repeated Modules take many lines.
            text = wl.pformat(doc, width=_SHORT_WIDTH) if record_of(item) is not None else ""
            if text and texts and texts[-1] == text:
                docs[-1][1] += 1
            else:
                docs.append([doc, 1])
                texts.append(text)
        items = [
            doc if count == 1 else wl.TextDoc(f"{count} \N{MULTIPLICATION SIGN} ") + doc
            for doc, count in docs
        ]
        begin, end = ("[", "]") if class_of(node) is list else ("(", ")")
        end = f",{end}" if class_of(node) is tuple and len(node) == 1 else end
        return _in_brackets(begin, items, end)

    def _doc_of_dict(self, node: Any) -> Any:
        import wadler_lindig as wl

        docs = [
            wl.TextDoc(f"{key!r}: ") + self._doc_of_child(node, jtu.DictKey(key), value)
            for key, value in node.items()
        ]
        return _in_brackets("{", docs, "}")


def _in_brackets(begin: str, docs: list[Any], end: str) -> Any:
    import wadler_lindig as wl

    if len(docs) == 1:
        # A single item needs no lines for its brackets.
        return wl.TextDoc(begin) + docs[0] + wl.TextDoc(end)
    return wl.bracketed(
        begin=wl.TextDoc(begin), docs=docs, sep=wl.comma, end=wl.TextDoc(end), indent=2
    )


def _in_a_row(docs: list[Any]) -> list[Any]:
    """Configuration, as much in each line as fits."""
    import wadler_lindig as wl

    if not docs:
        return []
    row = docs[0]
    for doc in docs[1:]:
        # In a separate group, so that a line breaks only where the next item does not fit.
        row = row + wl.TextDoc(",") + (wl.BreakDoc(" ") + doc).group()
    return [row]


def printed_names(node: Any, record: Any) -> list[str]:
    """Return the fields that are printed."""
    hidden = {
        field.name for field in getattr(node, "__dataclass_fields__", {}).values() if not field.repr
    }
    return [name for name in record.names(node) if name not in hidden]


class _TiedTo:
    """Stands for the value at a tied path."""

    def __init__(self, value: Any, source: str):
        self._text = f"{describe(value)} tied to {source}"

    def __repr__(self) -> str:
        return self._text


def printed_values(node: Any) -> dict[str, Any]:
    """Return the stored fields of a Module, with texts at tied paths."""
    values = all_stored(node)
    for tie in notes_of(node).ties:
        (first, *below), value = tie.place, "?"
        # Of a tree that is no model, such as one of gradients.
        with suppress(Exception):
            value = record_of(node).tied_value(node, tie)
        shown = _TiedTo(value, pattern_text(tie.source))
        old = values[first.name]
        values[first.name] = replace_at(old, [(tuple(below), shown)]) if below else shown
    return values


def _defaults_of(cls: Any) -> dict[str, Any]:
    """Return the defaults of a class's constructor, and of its fields."""
    fields = getattr(cls, "__dataclass_fields__", {}).values()
    defaults = {field.name: field.default for field in fields}
    try:
        parameters = inspect.signature(cls.__init__).parameters
    except (TypeError, ValueError):
        return defaults
    return defaults | {name: each.default for name, each in parameters.items()}


def _may_be_none(node: Any, name: str) -> bool:
    """Whether a field's annotation allows None, so that a None is not worth printing."""
    field = getattr(node, "__dataclass_fields__", {}).get(name)
    return field is not None and ("None" in str(field.type) or "Optional" in str(field.type))


def _is_default(value: Any, name: str, defaults: dict[str, Any]) -> bool:
    return name in defaults and are_one(value, defaults[name])


def array_doc(array: Any, shape: Sequence[int] | None = None) -> Any:
    """Return how an array is printed; with a shape, an array that differs in its shape alone."""
    import wadler_lindig as wl

    dtype = short_dtype(array.dtype)
    if getattr(array, "weak_type", False):
        dtype = f"weak_{dtype}"
    kind = None if isinstance(array, jax.Array) else "numpy"
    return wl.array_summary(tuple(array.shape if shape is None else shape), dtype, kind)


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

"""Teaching JAX to flatten and unflatten a Module class.

Flattening runs for every node of every tree in every call of a transform, so each layout of a
class gets code of its own, written out field by field: no loop, no lookup of names. This is what
it looks like for `class Linear` with data `weight`, `bias` and configuration `n`:

    def flatten(node):
        d = node.__dict__
        return (d["weight"], d["bias"]), (layout, d["n"])

    def unflatten(aux, children):
        made = new(cls)
        a, b = children
        _, c = aux
        set_fields(made, {"<layout>": layout, "weight": a, "bias": b, "n": c})
        return made

`benchmarks/dispatch.py` measures it against nested dicts, which JAX flattens in C++.
"""

from typing import Any

from pytreemod.module.division import KNOWN_DATA
from pytreemod.module.records import set_fields
from pytreemod.module.schema import LAYOUT, Layout, Schema
from pytreemod.tree.pending import settle
from pytreemod.typing import jtu


def compile_functions(source: str, scope: dict[str, Any], name: str) -> dict[str, Any]:
    """Run generated source; the names that it defines are returned in `scope`."""
    exec(compile(source, f"<generated for {name}>", "exec"), scope)
    return scope


def _code(layout: Layout) -> tuple[str, str, str]:
    """The expressions of one layout: what flatten returns, plain and with keys; unflatten's body."""
    reads = "".join(f"d[{name!r}], " for name in layout.data)
    keyed = "".join(f"(k{i}, d[{name!r}]), " for i, name in enumerate(layout.data))
    aux = "(layout, " + "".join(f"d[{name!r}], " for name in layout.config) + ")"
    children = [f"x{i}" for i in range(len(layout.data))]
    held = [f"c{i}" for i in range(len(layout.config))]
    pairs = zip((*layout.data, *layout.config), (*children, *held), strict=True)
    values = ", ".join(f"{name!r}: {variable}" for name, variable in pairs)
    body = f"""
    {", ".join(["_", *held])}, = aux
    {", ".join(children) + ", = children" if children else ""}
    made = new(cls)
    set_fields(made, {{{LAYOUT!r}: layout, {values}}})
    return made
"""
    return f"({reads}), {aux}", f"({keyed}), {aux}", body


def _scope(layout: Layout) -> dict[str, Any]:
    keys = {f"k{i}": jtu.GetAttrKey(name) for i, name in enumerate(layout.data)}
    return {
        "layout": layout,
        "cls": layout.cls,
        "new": object.__new__,
        "set_fields": set_fields,
        **keys,
    }


def write_layout(layout: Layout) -> None:
    """Write the code that flattens and unflattens the instances of one layout."""
    plain, keyed, body = _code(layout)
    source = f"""
def flatten(d):
    return {plain}

def flatten_with_keys(d):
    return {keyed}

def unflatten(aux, children):{body}"""
    scope = compile_functions(source, _scope(layout), layout.cls.__qualname__)
    layout.flatten = scope["flatten"]
    layout.flatten_with_keys = scope["flatten_with_keys"]
    layout.unflatten = scope["unflatten"]


def register(schema: Schema) -> None:
    """Register a Module class with JAX.

    The functions that JAX calls are those of the class's usual layout, with a guard: an instance
    that is pending, was put together by hand, or divides in another way, takes the longer road.
    """

    def flatten_slowly(node: Any) -> Any:
        layout = schema.split(node)
        settle(node)
        return layout.flatten(node.__dict__)

    def flatten_with_keys(node: Any) -> Any:
        layout = schema.split(node)
        settle(node)
        return layout.flatten_with_keys(node.__dict__)

    layout = schema.layout
    plain, _, body = _code(layout)
    source = f"""
def flatten(node):
    d = node.__dict__
    try:
        if d[{LAYOUT!r}] is layout:
            return {plain}
    except KeyError:
        pass
    return flatten_slowly(node)

def unflatten(aux, children):
    if aux[0] is not layout:
        return aux[0].unflatten(aux, children){body}"""
    scope = {**_scope(layout), "flatten_slowly": flatten_slowly}
    compile_functions(source, scope, schema.cls.__qualname__)
    jtu.register_pytree_with_keys(
        schema.cls, flatten_with_keys, scope["unflatten"], scope["flatten"]
    )
    KNOWN_DATA.add(schema.cls)

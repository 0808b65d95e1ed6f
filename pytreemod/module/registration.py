"""Teaching JAX to flatten and unflatten a Module class.

Flattening runs for every node of every tree in every call of a transform, so each class gets code
of its own, written out field by field: no loop, no lookup of names. This is what it looks like for
`class Linear` with data `weight`, `bias` and configuration `n`:

    def flatten(node):
        d = node.__dict__
        layout = d["<layout>"]
        return (d["weight"], d["bias"]), (layout, d["n"])

    def unflatten(aux, children):
        layout, c0 = aux
        x0, x1 = children
        made = new(cls)
        set_fields(made, {"<layout>": layout, "weight": x0, "bias": x1, "n": c0})
        return made

`benchmarks/dispatch.py` measures it against nested dicts, which JAX flattens in C++.
"""

from __future__ import annotations

from typing import Any

from pytreemod.module.division import Held
from pytreemod.module.records import set_fields
from pytreemod.module.schema import LAYOUT, Code, Schema
from pytreemod.tree.pending import settle
from pytreemod.typing import jtu


def compile_functions(source: str, scope: dict[str, Any], name: str) -> dict[str, Any]:
    """Run generated source; the names that it defines are returned in `scope`."""
    exec(compile(source, f"<generated for {name}>", "exec"), scope)
    return scope


def _expressions(code: Code) -> tuple[str, str, str]:
    """What flatten returns, plain and with keys, and the body of unflatten."""
    reads = "".join(f"d[{name!r}], " for name in code.data)
    keyed = "".join(f"(k{i}, d[{name!r}]), " for i, name in enumerate(code.data))
    held = {name: f"hold(d[{name!r}])" for name in code.held}
    aux = "".join(f"{held.get(name, f'd[{name!r}]')}, " for name in code.config)
    children = [f"x{i}" for i in range(len(code.data))]
    config = [f"c{i}" for i in range(len(code.config))]
    given = [
        f"{variable}.give()" if name in code.held else variable
        for name, variable in zip(code.config, config, strict=True)
    ]
    pairs = zip((*code.data, *code.config), (*children, *given), strict=True)
    values = ", ".join(f"{name!r}: {value}" for name, value in pairs)
    body = f"""
    {", ".join(["layout", *config])}, = aux
    {", ".join(children) + ", = children" if children else ""}
    made = new(cls)
    set_fields(made, {{{LAYOUT!r}: layout, {values}}})
    return made
"""
    return f"({reads}), (layout, {aux})", f"({keyed}), (layout, {aux})", body


def _scope(cls: type, code: Code) -> dict[str, Any]:
    keys = {f"k{i}": jtu.GetAttrKey(name) for i, name in enumerate(code.data)}
    return {"cls": cls, "new": object.__new__, "set_fields": set_fields, "hold": Held, **keys}


def write_code(cls: type, code: Code) -> tuple[Any, Any, Any]:
    """Write the functions that flatten and unflatten instances of one division of fields."""
    plain, keyed, body = _expressions(code)
    source = f"""
def flatten(d, layout):
    return {plain}

def flatten_with_keys(d, layout):
    return {keyed}

def unflatten(aux, children):{body}"""
    scope = compile_functions(source, _scope(cls, code), cls.__qualname__)
    return scope["flatten"], scope["flatten_with_keys"], scope["unflatten"]


def register(schema: Schema) -> None:
    """Register a Module class with JAX.

    The functions that JAX calls are those of the class's usual division, with a guard: an instance
    that is pending, was put together by hand, or divides in another way, takes the longer road.
    """

    def flatten_slowly(node: Any) -> Any:
        layout = schema.split(node)
        settle(node)
        return layout.code.functions[0](node.__dict__, layout)

    def flatten_with_keys(node: Any) -> Any:
        layout = schema.split(node)
        settle(node)
        return layout.code.functions[1](node.__dict__, layout)

    plain, _, body = _expressions(schema.code)
    source = f"""
def flatten(node):
    d = node.__dict__
    try:
        layout = d[{LAYOUT!r}]
        if layout.is_usual:
            return {plain}
    except KeyError:
        pass
    return flatten_slowly(node)

def unflatten(aux, children):
    if not aux[0].is_usual:
        return aux[0].code.functions[2](aux, children){body}"""
    scope = {**_scope(schema.cls, schema.code), "flatten_slowly": flatten_slowly}
    compile_functions(source, scope, schema.cls.__qualname__)
    jtu.register_pytree_with_keys(
        schema.cls, flatten_with_keys, scope["unflatten"], scope["flatten"]
    )

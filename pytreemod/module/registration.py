"""Teaching JAX to flatten and unflatten a Module class.

Flattening runs for every node of every tree in every call of a transform, so each class gets code
of its own, written out field by field: no loop, no lookup of names. This is what it looks like for
`class Linear` with data `weight`, `bias` and configuration `n`:

    def flatten(node):
        d = node.__stored__
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

import functools as ft
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

from pytreemod.module.division import Held
from pytreemod.module.records import set_fields
from pytreemod.module.schema import LAYOUT, Code, Schema
from pytreemod.tree.pending import settle
from pytreemod.typing import class_of, jtu


def compile_functions(
    source: str, scope: dict[str, Any], name: str, fields: Iterable[str]
) -> dict[str, Any]:
    """Run generated source; the names that it defines are returned in `scope`.

    In the source, `quoted(i)` stands for the name of the field `i`, so that classes that differ in
    names only share what is compiled. Compiling took two thirds of the time in which a class and
    its first instance are made (0.9 ms, now 0.35). To switch it off, take the cache from
    `_compiled`.
    """
    names = {_placeholder(i): sys.intern(field) for i, field in enumerate(fields)}
    exec(_renamed(_compiled(source), names, f"<generated for {name}>"), scope)
    return scope


def quoted(index: int) -> str:
    """What stands in generated source for the quoted name of a field."""
    return repr(_placeholder(index))


def _placeholder(index: int) -> str:
    return f"<{index}>"


@ft.lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<generated>", "exec")


def _renamed(code: CodeType, names: dict[str, str], filename: str) -> CodeType:
    """A copy, with code of its own for each function: Python notes in it what it has met there."""
    constants = tuple(_renamed_constant(c, names, filename) for c in code.co_consts)
    return code.replace(co_consts=constants, co_filename=filename)


def _renamed_constant(constant: Any, names: dict[str, str], filename: str) -> Any:
    # Not inside `_renamed`: a function that speaks of itself is a ring of objects, which would be
    # left to the garbage collector for each function of each class (a fifth of what a class makes).
    if isinstance(constant, CodeType):
        return _renamed(constant, names, filename)
    if class_of(constant) is tuple:
        return tuple(_renamed_constant(c, names, filename) for c in constant)
    return names.get(constant, constant) if isinstance(constant, str) else constant


def _expressions(code: Code) -> tuple[str, str, str]:
    """What flatten returns, plain and with keys, and the body of unflatten."""
    places = {name: quoted(i) for i, name in enumerate((*code.data, *code.config))}
    reads = "".join(f"d[{places[name]}], " for name in code.data)
    keyed = "".join(f"(k{i}, d[{places[name]}]), " for i, name in enumerate(code.data))
    held = {name: f"hold(d[{places[name]}])" for name in code.held}
    aux = "".join(f"{held.get(name, f'd[{places[name]}]')}, " for name in code.config)
    children = [f"x{i}" for i in range(len(code.data))]
    config = [f"c{i}" for i in range(len(code.config))]
    given = [
        f"{variable}.give()" if name in code.held else variable
        for name, variable in zip(code.config, config, strict=True)
    ]
    pairs = zip((*code.data, *code.config), (*children, *given), strict=True)
    values = ", ".join(f"{places[name]}: {value}" for name, value in pairs)
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
    names = (*code.data, *code.config)
    scope = compile_functions(source, _scope(cls, code), cls.__qualname__, names)
    return scope["flatten"], scope["flatten_with_keys"], scope["unflatten"]


def register(schema: Schema) -> None:
    """Register a Module class with JAX.

    The functions that JAX calls are those of the class's usual division, with a guard: an instance
    that divides in another way (a function in a field not declared static) is handed on to those of
    its own; one that is pending, or was put together by hand, lacks an entry and takes the longer
    road. Written out, they take half of what loops over the fields would (2.4 times what dicts
    take, in place of 4). A copy of what flattening gives, kept with each instance in a slot, saves
    8 % more: it is not worth instances that could be out of date.
    """

    def flatten_slowly(node: Any) -> Any:
        layout = schema.split(node)
        settle(node)
        return layout.code.functions[0](node.__stored__, layout)

    def flatten_with_keys(node: Any) -> Any:
        layout = schema.split(node)
        settle(node)
        return layout.code.functions[1](node.__stored__, layout)

    schema.registered = _write_registered(schema, flatten_slowly)
    flatten, unflatten = schema.registered
    jtu.register_pytree_with_keys(schema.cls, flatten_with_keys, unflatten, flatten)


def register_again(schema: Schema) -> None:
    """Let the functions that JAX knows do what suits the fields that the class has by now.

    There are no instances yet: nobody is just calling them.
    """
    flatten, _ = schema.registered
    written = _write_registered(schema, flatten.__globals__["flatten_slowly"])
    for old, new in zip(schema.registered, written, strict=True):
        old.__globals__.update(new.__globals__)
        old.__code__ = new.__code__


def _write_registered(schema: Schema, flatten_slowly: Any) -> tuple[Any, Any]:
    plain, _, body = _expressions(schema.code)
    source = f"""
def flatten(node):
    d = node.__stored__
    try:
        layout = d[{LAYOUT!r}]
        if layout.is_usual:
            return {plain}
        return layout.code.functions[0](d, layout)
    except KeyError:
        pass
    return flatten_slowly(node)

def unflatten(aux, children):
    if not aux[0].is_usual:
        return aux[0].code.functions[2](aux, children){body}"""
    scope = {**_scope(schema.cls, schema.code), "flatten_slowly": flatten_slowly}
    names = (*schema.code.data, *schema.code.config)
    compile_functions(source, scope, schema.cls.__qualname__, names)
    return scope["flatten"], scope["unflatten"]

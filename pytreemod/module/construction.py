"""Building instances: the generated `__init__`, and what happens after any `__init__`.

An instance is finished in this order. Defaults of the class are filled in, and every field must be
set. Converters run, and constrained values are converted to their stored form. The fields are
divided into data and configuration, and the instance becomes immutable. Ties that `__init__` asked
for are made, annotations are checked (only under jaxtyping), and `__check_init__` runs.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from operator import is_
from types import CodeType
from typing import Any

from pytreemod.errors import FieldError, nearest
from pytreemod.module.constraining import take_in
from pytreemod.module.division import hides_arrays, is_clear_data, warn_of_arrays
from pytreemod.module.fields import declares, refuse_declaration
from pytreemod.module.flattening import Layout
from pytreemod.module.overriding import drop_overridden, is_bound
from pytreemod.module.reading import ASKED, MADE, is_computed, observe
from pytreemod.module.records import ClassValue, add_fields, make_record, refuse_itself, set_fields
from pytreemod.module.schema import Schema
from pytreemod.tree.pending import FLAT, PRIVATE
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import class_of


class _Factory:
    def __repr__(self) -> str:
        return "<factory>"

    def __reduce__(self) -> str:
        return "_FACTORY"


_FACTORY = _Factory()


class _Storing:
    # A generated `__init__` calls these. It reads them here because it may be pickled by value, and
    # Python's own setter of a dict cannot be.
    add, set = staticmethod(add_fields), staticmethod(set_fields)


_MISSING = dataclasses.MISSING


def write_finish(schema: Schema) -> Callable[[Any], Any]:
    """Generate the function that finishes an instance of one class, and returns it.

    All eager code constructs instances, so the checks of one class are written out: for most
    instances they reduce to a few look-ups of types.
    """
    name = schema.cls.__qualname__
    scope: dict[str, Any] = {
        "hides_arrays": hides_arrays,
        "is_computed": is_computed,
        "layouts": schema.layouts_by_type,
        "schema": schema,
        "unmet": (None, ()),
        "fill": ft.partial(fill_defaults, schema),
        "divide": ft.partial(_divide, schema),
        "run_checks": run_checks,
        **{f"convert_{i}": convert for i, convert in enumerate(schema.converters.values())},
        **{
            f"constrain_{i}": ft.partial(take_in, constraint, where=f"{name}.{field}")
            for i, (field, constraint) in enumerate(schema.constraints.items())
        },
    }
    return compile_functions(_source_of_finish(schema), scope, name, schema.fields)["finish"]


def _source_of_finish(schema: Schema) -> str:
    places = {name: quoted(i) for i, name in enumerate(schema.fields)}
    converts = "".join(
        f"    if not is_computed(d[{places[n]}]): d[{places[n]}] = convert_{i}(d[{places[n]}])\n"
        for i, n in enumerate(schema.converters)
    )
    constrains = "".join(
        f"    d[{places[n]}] = constrain_{i}(d[{places[n]}])\n"
        for i, n in enumerate(schema.constraints)
    )
    kinds = "".join(f"type(d[{place}]), " for place in places.values())
    return f"""
def finish(node):
    d = node.__stored__
    asked = d.pop({ASKED!r}) if {ASKED!r} in d else None
    if len(d) != {len(schema.fields)}:
        fill(d)
{converts}{constrains}
    layout, looked_into = layouts.get(({kinds}), unmet)
    for name, known in looked_into:
        if d[name] is not known and hides_arrays(d[name]):
            layout = None
            break
    if layout is not None:
        d[{PRIVATE!r}] = layout
    else:
        node = divide(node, d)
    if asked is not None:
        node = asked.tied(node)
    checks = schema.checks
    return run_checks(node, checks) if checks else node
"""


def run_checks(node: Any, checks: Iterable[Callable[[Any], Any]]) -> Any:
    """Run checks on an instance; return it with any changes that they made."""
    before = dict(node.__stored__)
    for check in checks:
        check(node)
    return as_changed(node, before)


def as_changed(node: Any, before: dict[str, Any]) -> Any:
    """Return an instance after its checks, which may have changed it by `object.__setattr__`.

    Caches that were filled while they ran are dropped, and a changed instance is divided again.

    Args:
        node: the instance.
        before: the contents of its dict before the checks.
    """
    values = node.__stored__
    before.pop(FLAT, None)
    values.pop(FLAT, None)
    before[PRIVATE] = values[PRIVATE] = layout = before[PRIVATE].layout
    # Added entries are last, and are not fields.
    if all(map(is_, before.values(), values.values())):
        return node
    del values[PRIVATE]
    schema: Schema = class_of(node).__record__
    return _divide(schema.original, node, values, layout.notes)


def _divide(
    schema: Schema, node: Any, values: dict[str, Any], notes: Mapping[str, Any] = Layout.notes
) -> Any:
    """Divide an instance by its values, not its types; it may become one of another class."""
    for name, value in values.items():
        if type(value) is dataclasses.Field:
            refuse_declaration(schema.cls, name)
    found = schema.for_values({**values, **notes})
    if found.cls is not class_of(node):
        # Not by assigning `__class__`: Python allows that only for classes with the same first
        # base.
        node = make_record(found.cls, values)
    layout = found.decide(values, notes)
    for name in layout.config:
        warn_of_arrays(schema.cls, name, values[name])
    for name in layout.data:
        if not is_clear_data(values[name]):
            refuse_itself(node, name, values[name])
    if found is schema:
        schema.note_types(layout, values)
    values[PRIVATE] = layout
    if schema.computes:
        made = observe(node)
        # It may have been flattened while the layout was not yet known.
        values.pop(FLAT, None)
        values[PRIVATE] = layout.with_notes({**notes, MADE: made})
    return node


def compile_functions(
    source: str, scope: dict[str, Any], name: str, fields: Iterable[str]
) -> dict[str, Any]:
    """Run generated source; the names that it defines are returned in `scope`.

    In the source, `quoted(i)` represents the name of field `i`, so that classes that differ only in
    names share the compiled code. Compiling took two thirds of the time of making a class and
    its first instance (0.9 ms, now 0.35). To switch it off, remove the cache from
    `_compiled`.
    """
    names = {_placeholder(i): sys.intern(field) for i, field in enumerate(fields)}
    exec(_renamed(_compiled(source), names, f"<generated for {name}>"), scope)
    return scope


def quoted(index: int) -> str:
    """Return the placeholder in generated source for the quoted name of a field."""
    return repr(_placeholder(index))


def _placeholder(index: int) -> str:
    return f"<{index}>"


@ft.lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<generated>", "exec")


def _renamed(code: CodeType, names: dict[str, str], filename: str) -> CodeType:
    """A copy with new code objects for each function: Python stores its specializations in them."""
    constants = tuple(_renamed_constant(c, names, filename) for c in code.co_consts)
    return code.replace(co_consts=constants, co_filename=filename)


def _renamed_constant(constant: Any, names: dict[str, str], filename: str) -> Any:
    # Not inside `_renamed`: a function that refers to itself is a reference cycle. The garbage
    # collector would have to free one for each function of each class (a fifth of a class's cost).
    if isinstance(constant, CodeType):
        return _renamed(constant, names, filename)
    if class_of(constant) is tuple:
        return tuple(_renamed_constant(c, names, filename) for c in constant)
    return names.get(constant, constant) if isinstance(constant, str) else constant


def fill_defaults(schema: Schema, values: dict[str, Any]) -> None:
    """Give fields that `__init__` did not set the class's defaults.

    Raises:
        FieldError: if a field has neither a value nor a default.
    """
    drop_overridden(schema.cls, schema.overridden, values)
    _fill(schema, values, ())
    unset = [name for name in schema.fields if name not in values]
    if unset:
        _refuse_unset(schema, unset)


def _fill(schema: Schema, values: dict[str, Any], unset: Container[str]) -> list[str]:
    """Add the class's values for fields that are not set; return their names."""
    found = {
        name: _class_value(schema.cls, field)
        for name, field in schema.fields.items()
        if name not in values and name not in unset
    }
    added = [name for name, value in found.items() if value is not _MISSING]
    values |= {name: found[name] for name in added}
    return added


def fill_restored(schema: Schema, values: dict[str, Any], unset: Container[str] = ()) -> None:
    """Give fields that a pickled instance lacks the values that a new instance would have.

    So a pickle of an older version of the class becomes an instance of the present one.

    Args:
        schema: of the class.
        values: of the pickled instance; missing ones are added.
        unset: names that it need not have.
    """
    for name in _fill(schema, values, unset):
        found = _converted(schema, name, values[name])
        if name in schema.constraints:
            where = f"{schema.cls.__qualname__}.{name}"
            found = take_in(schema.constraints[name], found, where)
        values[name] = found


def _converted(schema: Schema, name: str, value: Any) -> Any:
    # A converter would replace a computed leaf by its value.
    is_left = name not in schema.converters or is_computed(value)
    return value if is_left else schema.converters[name](value)


def refuse_version(schema: Schema, values: dict[str, Any], unset: Container[str]) -> None:
    """Refuse a pickle of a version of the class that had other fields.

    Args:
        schema: of the class.
        values: of the pickled instance, with its notes.
        unset: names that it need not have.

    Raises:
        FieldError: if a field has no value, or a value has no field.
    """
    lacking = [name for name in schema.fields if name not in values and name not in unset]
    # Other names are notes, or copied by `module_update_wrapper`.
    unknown = [n for n in values if n not in schema.fields and n.isidentifier() and n[:2] != "__"]
    if not lacking and not unknown:
        return
    found = [f"no value for {', '.join(lacking)}"] if lacking else []
    found += [f"{', '.join(unknown)}, which the class does not have"] if unknown else []
    # A line that works for pickles of every version.
    line = f'state.pop("{unknown[0]}", None)' if unknown else "..."
    line = f'state.setdefault("{lacking[0]}", {line})' if lacking else line
    raise FieldError(
        f"pickle of {schema.cls.__qualname__}",
        f"the fields that the class has now ({', '.join(schema.fields) or 'none'})",
        "; and ".join(found),
        hint=[
            "another version of the class wrote it; give new fields a default, or convert it:",
            "def __setstate__(self, state):",
            f"    {line}",
            "    self.__dict__.update(state)",
        ],
    )


def _class_value(cls: type, field: dataclasses.Field[Any]) -> Any:
    """Return the value that reading an unset field finds in the present class, or in its bases.

    That is its default, or the attribute that a subclass or a mixin has instead. A factory
    counts as an attribute of the class that declares the field. Functions and properties are not
    values: Python binds them.
    """
    name = field.name
    for base in cls.__mro__:
        own = vars(base)
        found = own.get(name, _MISSING)
        if type(found) is ClassValue:
            found = found.value
        if found is not _MISSING and (found is field.default or not is_bound(found)):
            return found
        if field.default_factory is not _MISSING and declares(base, name):
            return field.default_factory()
    return _MISSING


def _refuse_unset(schema: Schema, names: list[str]) -> None:
    cls = schema.cls
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    own = inspect.get_annotations(cls)
    declarer = next(base for base in cls.__mro__ if names[0] in inspect.get_annotations(base))
    found = f"Field {names[0]!r} was not initialized"
    if len(names) > 1:
        found = f"Fields {', '.join(map(repr, names))} were not initialized"
    if schema.custom_init and owner is not cls and all(name in own for name in names):
        found += f" by the __init__ inherited from {owner.__qualname__}"
        hint = f"def __init__(self, {', '.join(names)}, **kwargs): ..."
    elif schema.custom_init and owner is cls is not declarer and "__init__" in vars(declarer):
        hint = "super().__init__(...)"
    else:
        hint = f"self.{names[0]} = ..."
    raise FieldError(f"{cls.__qualname__}: {found}", hint=hint)


def write_init(schema: Schema) -> Callable[..., None]:
    """Generate the `__init__` of a class that has none: one parameter for each field, in order.

    It does the same as one that `dataclasses` generates, but stores into the instance's dict
    directly: every assignment would call `__setattr__`, in Python. Fields that a subclass's own
    `__init__` has assigned before it calls this one are preserved.

    Raises:
        FieldError: if a field without a default follows one with a default.
    """
    cls = schema.cls
    everything: dict[str, dataclasses.Field[Any]] = vars(cls)["__dataclass_fields__"]
    params = [f for f in everything.values() if f.init and _is_parameter(f, schema)]
    normal = [f for f in params if not f.kw_only]
    only = [f for f in params if f.kw_only]
    _check_order(cls, normal)
    # A field may be called `self`; `dataclasses` renames the parameter, too.
    owner = "self" if "self" not in everything else "_dataclass_self"
    signature = ", ".join(
        [owner, *map(_parameter, normal), *(["*"] if only else []), *map(_parameter, only)]
    )
    stored = ", ".join(filter(None, map(_store, schema.fields.values())))
    lines = [f"(_storing.add if {owner}.__stored__ else _storing.set)({owner}, {{{stored}}})"]
    if hasattr(cls, "__post_init__"):
        extra = ", ".join(f.name for f in params if f.name not in schema.fields)
        lines.append(f"{owner}.__post_init__({extra})")
    made: dict[str, Any] = {"_factory": _FACTORY, "_storing": _Storing}
    for f in everything.values():
        made[f"_default_{f.name}"] = f.default
        made[f"_make_{f.name}"] = f.default_factory
    body = "\n        ".join(lines)
    source = f"def _outer({', '.join(made)}):\n    def __init__({signature}):\n        {body}\n"
    # With the user's globals, in which string annotations can be evaluated.
    scope = getattr(sys.modules.get(cls.__module__), "__dict__", {})
    local: dict[str, Any] = {}
    exec(
        compile(source + "    return __init__", f"<generated for {cls.__qualname__}>", "exec"),
        scope,
        local,
    )
    init: Any = local["_outer"](**made)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__module__ = cls.__module__
    init.__doc__ = cls.__init__.__doc__
    init.is_written = True
    init.__annotations__ = {f.name: _annotation(f, schema) for f in params} | {"return": None}
    return init


def _is_parameter(field: dataclasses.Field[Any], schema: Schema) -> bool:
    if field.name in schema.fields:
        return True
    kind = field.type
    if isinstance(kind, str):
        return kind.split("[")[0].rsplit(".", 1)[-1] == "InitVar"
    return kind is dataclasses.InitVar or isinstance(kind, dataclasses.InitVar)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not _MISSING or field.default_factory is not _MISSING


def _check_order(cls: type, fields: list[dataclasses.Field[Any]]) -> None:
    first: str | None = None
    for f in fields:
        if _has_default(f):
            first = first or f.name
        elif first is not None:
            raise FieldError(
                cls.__qualname__,
                "fields with a default after those without",
                f"non-default argument {f.name!r} follows default argument {first!r}",
                hint=[
                    "give it a default, or make it a keyword:",
                    f"{f.name}: ... = pm.field(kw_only=True)",
                ],
            )


def _parameter(field: dataclasses.Field[Any]) -> str:
    if field.default is not _MISSING:
        return f"{field.name}=_default_{field.name}"
    if field.default_factory is not _MISSING:
        return f"{field.name}=_factory"
    return field.name


def _store(field: dataclasses.Field[Any]) -> str:
    name = field.name
    made = field.default_factory is not _MISSING
    if field.init:
        given = f"_make_{name}() if {name} is _factory else {name}" if made else name
        return f"{name!r}: {given}"
    # Without a parameter, the default is the class's attribute, which fills in unset fields.
    return f"{name!r}: _make_{name}()" if made else ""


def _annotation(field: dataclasses.Field[Any], schema: Schema) -> Any:
    """The parameter's annotation: that of the converter's parameter, if there is a converter."""
    if field.name not in schema.converters:
        annotation: Any = field.type
        return annotation.type if isinstance(field.type, dataclasses.InitVar) else annotation
    try:
        parameters = inspect.signature(schema.converters[field.name]).parameters
    except (TypeError, ValueError):
        return Any
    first = next(iter(parameters.values()), None)
    if first is None or first.annotation is inspect.Parameter.empty:
        return Any
    return Any if isinstance(first.annotation, str) else first.annotation


def replace_values(node: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The values of a finished copy of `node` with some fields replaced, checked and converted.

    Configuration is checked together with everything that may refer to it.

    Raises:
        FieldError: if a name is not a field.
    """
    schema: Schema = class_of(node).__record__
    unknown = [name for name in changes if name not in schema.fields]
    if unknown:
        raise FieldError(
            f"{schema.cls.__qualname__}.replace: no field "
            + ", ".join(f"{name!r}{nearest(name, schema.fields)}" for name in unknown)
        )
    return {name: _converted(schema, name, new) for name, new in changes.items()}


def put_together(cls: Any, values: dict[str, Any], config: Iterable[str]) -> Any:
    """Return an instance of the class, or the variant, that these values require.

    Args:
        cls: a Module class.
        values: of fields and notes, by name.
        config: the names of configuration.
    """
    schema: Schema = cls.__record__.for_values(values)
    attributes, notes = schema.apart(values)
    layout = schema.layout_for(attributes, {*config}, notes)
    made = make_record(schema.cls, {PRIVATE: layout, **attributes})
    if schema.computes and MADE not in notes:
        # From a file, which stores the shapes of its arrays.
        return put_together(cls, {**values, MADE: observe(made)}, config)
    return made


def with_notes(node: Any, notes: dict[str, Any], fields: dict[str, Any] | None = None) -> Any:
    """Copy a Module with other notes.

    Args:
        node: the Module.
        notes: by name; empty ones are removed.
        fields: new values of fields, in their stored form.
    """
    layout = class_of(node).__record__.split(node)
    values = all_of(node) | (fields or {}) | notes
    values = {name: value for name, value in values.items() if name not in notes or value}
    return put_together(class_of(node), values, layout.config)


def all_of(node: Any) -> dict[str, Any]:
    """Return the attributes of a Module in their stored form, and its notes."""
    layout = class_of(node).__record__.split(node)
    return {n: stored(node, n) for n in (*layout.data, *layout.config)} | layout.notes

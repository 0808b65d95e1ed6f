"""`Module`, and the metaclass that makes a class body into one.

A class becomes a Module in four steps: `dataclasses` collects its fields and writes an `__init__`,
unless there is one; the `Schema` is made; methods are wrapped, so that bound ones are trees; and
each field gets its `LazyField`. An instance is built by `__init__`, and divided into data and
configuration when that ends. From then on it is immutable.
"""

from __future__ import annotations

import abc
import copy
import copyreg
import dataclasses
import functools as ft
import inspect
import types
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

import jax

from pytreemod.errors import (
    ArgumentError,
    FieldError,
    FieldWarning,
    FrozenError,
    explain,
    nearest,
    warn,
)
from pytreemod.module.fields import buffer, field, static_field
from pytreemod.module.methods import BoundMethod, Method, as_method
from pytreemod.module.reading import is_computed
from pytreemod.module.references import JAX_FUNCTIONS, reduce_by_name
from pytreemod.module.schema import Schema, fits
from pytreemod.other_words import explain_argument
from pytreemod.tree.comparison import are_equal
from pytreemod.tree.instances import (
    BUILDING,
    MISSING,
    LazyField,
    Stored,
    all_stored,
    flat_of,
    get_split,
    is_finished,
    reading_stored,
    register,
    set_flat,
    set_split,
    with_notes,
)
from pytreemod.tree.nodes import children_of, own_class, with_new_containers
from pytreemod.tree.printing import rich_doc, short_text
from pytreemod.typing import Tracer, class_of, is_instance, jtu

# Not `Self`, which runtime type checkers (beartype) refuse in single methods.
_M = TypeVar("_M", bound="Module")
_R = TypeVar("_R", bound="_Assignable")
_new: Any = object.__new__
# Typed, because a strict checker does not know what is in a class.
_vars: Callable[[Any], dict[str, Any]] = vars

_PROPERTIES = (property, ft.cached_property)
# What replaces a field of a base, if a class defines it in the field's place.
_REPLACING = (*_PROPERTIES, types.FunctionType, Method)


# ---- instances


class _Assignable(Stored):
    """Assignable while it is being built, immutable from then on."""

    __slots__ = ()
    # No annotation: the type hints of a Module class would include it.
    __module_schema__ = cast(Schema, None)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            is_built = get_split(self) is not BUILDING
        except AttributeError:
            is_built = is_finished(self)
        if is_built:
            _refuse_change(self, "assign to", name)
        if name not in self.__module_schema__.fields:
            _assign_other(self, name, value)
            return
        if class_of(value) not in _PLAIN and _is_or_holds(value, self):
            cls = type(self).__qualname__
            raise FieldError(f"{cls}.{name}: an instance cannot contain itself, or its own method")
        self.__stored__[name] = value

    def __delattr__(self, name: str) -> None:
        if is_finished(self):
            _refuse_change(self, "delete", name)
        object.__delattr__(self, name)


# Classes of values that hold no instance.
_PLAIN: set[type] = {bool, int, float, complex, str, bytes, type(None), types.FunctionType, type}


def _is_or_holds(value: Any, node: Any) -> bool:
    """Whether a value is an instance, its method, or a node with one of these.

    Flattening it would never end. Deeper down, it could only be inside another Module, which was
    checked when that was built.
    """
    if is_instance(value, (jax.Array, *JAX_FUNCTIONS)):
        _PLAIN.add(class_of(value))  # A class of JAX's, known from now on.
        return False
    if value is node:
        return True
    kind: type = class_of(value)
    inside: Any = value
    if kind is dict:
        # JAX would sort the keys, of what may be configuration.
        inside = value.values()
    elif kind is not list and kind is not tuple:
        inside = [child for _, child in children_of(value) or ()]
    return any(x is node or (class_of(x) is BoundMethod and x.args[0] is node) for x in inside)


def _refuse_change(node: Any, what: str, name: str) -> None:
    is_field = name in class_of(node).__module_schema__.fields
    hint = f"model = model.replace({name}=...)" if is_field else f"{name}: ...  # in the class body"
    fact = f"cannot {what} {type(node).__qualname__}.{name}: Modules are immutable"
    raise FrozenError(fact, hint=hint)


def _assign_other(node: Any, name: str, value: Any) -> None:
    """Assign to something that is no field: to a property, or nothing else."""
    if hasattr(inspect.getattr_static(node, name, None), "__set__"):
        object.__setattr__(node, name, value)
        return
    cls, known = type(node).__qualname__, class_of(node).__module_schema__.fields
    raise FrozenError(
        f"cannot assign to {cls}.{name}: the class declares no such field{nearest(name, known)}",
        hint=f"{name}: ...  # in the class body",
    )


# ---- classes


@dataclass_transform(
    field_specifiers=(
        dataclasses.field, field, buffer, static_field,
    )
)  # fmt: skip
class ModuleMeta(abc.ABCMeta):
    """Makes Module classes. Cooperative: combine it with other metaclasses as usual."""

    __module_schema__ = cast(Schema, None)

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        *,
        strict: bool | None = False,
        is_abstract: bool = False,
        kw_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Make a Module class."""
        namespace = {key: value for key, value in namespace.items() if key != "__slots__"}
        if all(isinstance(base, ModuleMeta) or base is _Assignable for base in bases):
            namespace["__slots__"] = ()
        else:
            # Before that of a plain base, which does not fill instances in.
            namespace.setdefault("__dict__", _vars(Stored)["__dict__"])
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        code = getattr(namespace.get("__init__"), "__code__", None)
        called = {"__init__", "__post_init__"}
        if code is not None and hasattr(cls, "__post_init__") and called.isdisjoint(code.co_names):
            fact = f"{name} has both an `__init__` method and a `__post_init__`, which does not run"
            warn(FieldWarning, fact, hint="def __check_init__(self): ...")
        register(cls)
        if namespace.keys() - {"__orig_bases__", "__slots__", "__dict__"} == {"__module__"}:
            # Only cloudpickle makes such a class; a class statement defines a `__qualname__`, too.
            type.__setattr__(cls, "__module_schema__", _Later(cls))
        else:
            _complete(cls, kw_only, is_abstract or strict is None)
        return cls

    # Typed so that type checkers find the parameters in `__init__`.
    def __call__(  # noqa: D102  (see below)
        cls: type[_R],  # pyright: ignore[reportGeneralTypeIssues]  (its instances are Modules)
        *args: Any,
        **kwargs: Any,
    ) -> _R:
        # Build, divide and freeze an instance. No docstring, because `help` would show it for any
        # `__call__` of an instance that has none.
        schema = cls.__module_schema__
        if schema.refusal is not None:
            # A method of an instance with rules may call `type(self)`.
            if "__passes_for__" in _vars(cls):
                return _vars(cls)["__passes_for__"](*args, **kwargs)
            raise FieldError(schema.refusal)
        try:
            if schema.is_marked:
                # Each assignment in `__init__` finds the mark at once, not three empty slots.
                node = _new(cls)
                set_split(node, BUILDING)
                cls.__init__(node, *args, **kwargs)
            else:
                node = schema.build(*args, **kwargs)
        except TypeError as error:
            explain_argument(error)
            raise
        # Only an instance that __init__ has built now: __new__ may return any object.
        if class_of(node) is not cls:
            return node
        if schema.is_fast:
            # Most instances: every field is set, and what divides them is known by their types.
            values = node.__stored__
            try:
                split = schema.splits.get(schema.types_of(values))
            except KeyError:
                split = None
            if split and not (split.computed or (split.asked and not fits(split, values))):
                set_split(node, split)
                for check in schema.checks:
                    check(node)
                return node
        return schema.finish(node)

    def __setattr__(cls, name: str, value: Any) -> None:
        schema = _vars(cls).get("__module_schema__")  # None while the class is being made.
        if name == "__module_schema__":
            return  # A class makes its own.
        is_field = isinstance(schema, Schema) and name in schema.fields
        if is_field and not hasattr(value, "__set__") and class_of(value) is not LazyField:
            value = LazyField(name, value)
        super().__setattr__(name, as_method(name, value))

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def _complete(cls: Any, kw_only: bool, is_abstract: bool) -> None:
    """Give a class its fields, its `__init__` and its schema, and wrap its methods."""
    put: Any = ft.partial(type.__setattr__, cls)
    put("__is_abstract__", is_abstract)
    abstract = _abstract_attributes(cls)
    owner = next(base for base in cls.__mro__ if "__init__" in _vars(base))
    has_init = owner is not object and not hasattr(_vars(owner)["__init__"], "is_written")
    _as_dataclass(cls, abstract, has_init, kw_only)
    schema = Schema(cls)
    for name, each in schema.fields.items():
        default: Any = each.default
        is_declaration = any(default is declare for declare in (field, buffer, static_field))
        if is_declaration or is_instance(default, _PROPERTIES):
            what = f"pm.{default.__name__}, not called" if is_declaration else "a property"
            fact = f"{cls.__qualname__}.{name}: the value of a field, not {what}"
            raise FieldError(fact, hint=f"{name}: ... = pm.field()")
    # The call that follows this metaclass's, looked up once (saves 0.1 us for each instance).
    above: Any = super(ModuleMeta, cls)
    schema.build = above.__call__
    is_plain: bool = cls.__new__ is _new and schema.build == type.__call__.__get__(cls)
    schema.is_marked = is_plain and (has_init or hasattr(cls, "__post_init__"))
    schema.refusal = _refusal(cls, schema, abstract, is_abstract)
    for name, value in list(_vars(cls).items()):
        if name not in schema.fields and as_method(name, value) is not value:
            put(name, as_method(name, value))
    for name in schema.fields:
        found, value = inspect.getattr_static(cls, name, None), _class_value(cls, name)
        if class_of(found) is not LazyField or found.default is not value:
            put(name, LazyField(name, value))
    if not has_init:
        cls.__init__.is_written = True
        # A converter takes other types than the field's, and so does a constraint: a number.
        converted = schema.converters | schema.constraints
        cls.__init__.__annotations__ |= dict.fromkeys(converted, Any)
    put("__module_schema__", schema)


def _as_dataclass(cls: Any, abstract: set[str], has_init: bool, kw_only: bool) -> None:
    """Let `dataclasses` collect the fields of a class, and write its `__init__`.

    It sees the class without its abstract attributes, and with a ClassVar for each property or
    method that replaces a field of a base. With `frozen`, its `__init__` stores past `__setattr__`.
    """
    put: Any = ft.partial(type.__setattr__, cls)
    whole, doc = inspect.get_annotations(cls), cls.__doc__
    inherited = [name for name in getattr(cls, "__dataclass_fields__", ()) if name not in whole]
    found = {name: inspect.getattr_static(cls, name, None) for name in inherited}
    replaced = [name for name, value in found.items() if isinstance(value, _REPLACING)]
    seen = {name: kind for name, kind in whole.items() if name not in abstract}
    put("__annotations__", seen | dict.fromkeys(replaced, ClassVar))
    put("__doc__", doc or ".")  # Else it would be made from the signature, slowly.
    # It refuses a class with its own `__setattr__`, and would put others in.
    names = ("__setattr__", "__delattr__", "__replace__")
    own = {name: _vars(cls)[name] for name in names if name in _vars(cls)}
    for name in own:
        type.__delattr__(cls, name)
    options: Any = {"repr": False, "eq": False, "frozen": True, "kw_only": kw_only}
    dataclasses.dataclass(init=not has_init, **options)(cls)
    for name in names:
        if name in own:
            put(name, own[name])
        elif name in _vars(cls):
            type.__delattr__(cls, name)
    put("__annotations__", whole)
    put("__doc__", doc)


# ---- abstract attributes


def _abstract_attributes(cls: type) -> set[str]:
    """The attributes that a class body annotates as abstract."""
    found: set[str] = set()
    for name, annotation in inspect.get_annotations(cls).items():
        if isinstance(annotation, str):
            mark = annotation.partition("[")[0].rpartition(".")[2]
        else:
            mark = next(iter(getattr(annotation, "__metadata__", ())), "")
        if mark in ("AbstractVar", "AbstractClassVar"):
            found.add(name)
            if name in _vars(cls):
                fact = f"{cls.__qualname__}: Abstract attribute {name} cannot have value"
                raise FieldError(fact)
    return found


def _refusal(cls: Any, schema: Schema, abstract: set[str], is_abstract: bool) -> str | None:
    """Note the abstract attributes that a class lacks; return why it has no instances."""
    bases: tuple[type, ...] = cls.__mro__
    inherited: set[str] = {name for base in bases for name in _vars(base).get("__lacks__", ())}
    lacks = abstract | {
        n for n in inherited if n not in schema.fields and _class_value(cls, n) is MISSING
    }
    type.__setattr__(cls, "__lacks__", frozenset(lacks))
    methods = sorted(f"{name}()" for name in getattr(cls, "__abstractmethods__", ()))
    name = cls.__qualname__
    if is_abstract:
        fact = f"Cannot instantiate abstract Module {name}"
        return explain(fact, hint=f"class My{cls.__name__}({cls.__name__}): ...")
    if lacks or methods:
        # As Python says it of its abstract classes.
        text = ", ".join([*sorted(lacks), *methods])
        return f"Can't instantiate abstract class {name} with abstract attributes {text}"
    return "made at run time" if "__passes_for__" in _vars(cls) else None


def _class_value(cls: type, name: str) -> Any:
    """The value that a class, or a base, has for a field, such as a default; MISSING for none."""
    for own in map(vars, cls.__mro__):
        found = own.get(name, MISSING)
        found = found.default if class_of(found) is LazyField else found
        if found is not MISSING:
            # A default that is a function: the class took it for a method.
            return found.__wrapped__ if class_of(found) is Method else found
    return MISSING


# ---- classes that are pickled by value, those of a script or a notebook


class _Later:
    """Stands for the schema of a class that cloudpickle makes.

    cloudpickle makes an empty class, and gives it its attributes one by one, sorted by name. So the
    schema is made when it is first asked for.
    """

    def __init__(self, cls: Any):
        self.cls = cls
        # Those that its methods name arrive before its fields.
        self.instances: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `abc` asks each attribute whether it is abstract.
            raise AttributeError(name)
        cls = self.cls
        if _vars(cls)["__module_schema__"] is self:
            _declare_again(cls)
            _complete(cls, False, getattr(cls, "__is_abstract__", False))
            for node, *parts in self.instances:
                set_flat(node, flat_of(_restore(cls, *parts)))
        return getattr(_vars(cls)["__module_schema__"], name)


def _declare_again(cls: Any) -> None:
    """Put the fields of a pickled class where `dataclasses` looks for them."""
    fields: dict[str, Any] = _vars(cls).get("__dataclass_fields__", {})
    for name in inspect.get_annotations(cls).keys() & fields.keys():
        declared = fields[name]
        declared.default = _class_value(cls, name)
        for option in ("default_factory", "kw_only"):
            # The mark for no value is recognized by identity, which a pickle does not preserve.
            if class_of(getattr(declared, option)) is class_of(MISSING):
                setattr(declared, option, MISSING)
        type.__setattr__(cls, name, declared)
    if hasattr(_vars(cls).get("__init__"), "is_written"):
        type.__delattr__(cls, "__init__")


def StrictConfig(force_abstract: bool = False, **kwargs: object) -> bool | None:
    """Older spelling of a class option: `is_abstract=True`.

    Args:
        force_abstract: whether the class is abstract.
        **kwargs: ignored.

    Returns:
        The value for `strict=`.

    Examples:
        >>> import pytreemod as pm
        >>> class Solver(pm.Module, strict=pm.StrictConfig(force_abstract=True)): ...
        >>> class Newton(Solver): ...
        >>> Newton()
        Newton()
    """
    return None if force_abstract else False


class Module(_Assignable, metaclass=ModuleMeta):
    """Base class of models: an immutable dataclass that is also a pytree.

    Declare fields in the class body. Arrays, containers and Modules in them are *data*, the
    children of the pytree. Functions, strings, classes and fields declared
    `field(static=True)` are *configuration*, part of its structure. An instance never changes:
    every change makes a new one.

    **Form.** A subclass may define `__init__`, which assigns `self.x = ...`. If it does not, an
    `__init__` is generated from the fields, as for dataclasses. Class options: `kw_only=True` makes
    the fields keyword-only, `is_abstract=True` forbids instances.

    **Make.** Call the class. Converters run, fields are divided into data and configuration, and
    the instance becomes immutable. Then every `__check_init__` in the class and its bases is
    called.

    **Use.** Read fields, call methods (bound methods are pytrees too), pass the instance through
    any JAX transform; `replace` and [`tree_at`][pytreemod.tree_at] make changed copies.

    **Laws.** `unflatten(flatten(m)) == m`, whatever the leaves are; `m.replace() == m`;
    `m.replace(x=v).x == v` where `x` has no converter.

    Raises:
        FieldError: if the class body or the construction is wrong; the message has a hint.
        FrozenError: if code assigns to an instance, or deletes from it, after construction.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Linear(pm.Module):
        ...     weight: jax.Array
        ...     bias: jax.Array
        ...     def __call__(self, x):
        ...         return self.weight @ x + self.bias
        >>> layer = Linear(jnp.ones((2, 3)), jnp.zeros(2))
        >>> jax.jit(lambda m, x: m(x))(layer, jnp.ones(3))
        Array([3., 3.], dtype=float32)
        >>> jax.tree.map(jnp.shape, layer)
        Linear(weight=(2, 3), bias=(2,))

    Source:
        The idea of callable pytrees: Kidger & Garcia 2021, "Equinox: neural networks in JAX via
        callable PyTrees and filtered transformations".
    """

    def replace(self: _M, /, **changes: Any) -> _M:
        """Copy the instance with some fields replaced, whatever the class's `__init__` is.

        Converters run on the new values, and all checks run again. A constrained field takes its
        constrained value.

        Args:
            **changes: new values by field name.

        Returns:
            A new instance.

        Raises:
            FieldError: if a name is not a field, a static field would hold an array, or a value is
                outside its constraint.
            ShapeError: if the arrays of a layer of `pytreemod.nn` do not fit its new configuration.

        Examples:
            >>> import pytreemod as pm
            >>> class Point(pm.Module):
            ...     x: float
            ...     y: float
            >>> Point(1.0, 2.0).replace(y=3.0)
            Point(x=1.0, y=3.0)
        """
        schema = class_of(self).__module_schema__
        for name in [name for name in changes if name not in schema.fields]:
            fact = f"{type(self).__qualname__}.replace: no field {name!r}"
            raise FieldError(f"{fact}{nearest(name, schema.fields)}")
        for name in filter(schema.converters.__contains__, [*changes]):
            if not is_computed(changes[name]):
                changes[name] = schema.converters[name](changes[name])
        made = schema.rebuild(with_new_containers(self), changes, is_given=True, decide=True)
        for check in schema.checks:
            check(made)
        return made

    def __replace__(self: _M, /, **changes: Any) -> _M:
        return type(self).replace(self, **changes)

    def __repr__(self) -> str:
        return short_text(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Callable[..., Any]) -> Any:
        return rich_doc(self, path, subtree_renderer)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and are_equal(self, other)

    def __hash__(self) -> int:
        leaves, treedef = jtu.tree_flatten(self)
        try:
            return hash((*leaves, treedef))
        except TypeError as error:
            fact = f"{type(self).__qualname__} has no hash, because its leaves have none"
            hint = "jax.jit(lambda model, x: model(x))(model, x), or pm.filter_jit(model)(x)"
            raise ArgumentError(fact, hint=hint) from error

    def __reduce__(self) -> Any:
        cls, (_, (split, notes, *_)) = own_class(self), flat_of(self)
        if _has_own_state(cls):
            return _restore_state, (cls, _own_state(self), notes)
        return _restore, (cls, all_stored(self), split.config, notes)

    def __deepcopy__(self: _M, memo: Any) -> _M:
        if _has_own_state(type(self)):
            state = copy.deepcopy(_own_state(self), memo)
            return _restore_state(type(self), state, flat_of(self)[1][1])

        # Configuration is shared: a copied jitted function would be another function.
        # A tracer is its own copy: as another one, a stream's key would pass for another key.
        def copied(leaf: Any) -> Any:
            return leaf if isinstance(leaf, Tracer) else copy.deepcopy(leaf, memo)

        return jtu.tree_map(copied, self)


def _has_own_state(cls: Any) -> bool:
    """Whether a user's class defines how it is pickled or restored."""
    return hasattr(cls, "__setstate__") or cls.__getstate__ is not Stored.__getstate__


def _own_state(node: Any) -> Any:
    """Return what a class's own method says is its state, with fields in their stored form."""
    with reading_stored():
        state: Any = node.__getstate__()
    # Fields that read as something else are not in `vars(self)`.
    rest = {n: x for n, x in all_stored(node).items() if n not in node.__stored__}
    return {**rest, **state} if class_of(state) is dict else state


def _restore(cls: Any, values: Any, config: tuple[str, ...], notes: Any) -> Any:
    """Make a pickled instance again; fields that the class has gained since get their defaults."""
    if class_of(cls.__module_schema__) is _Later and "__dataclass_fields__" not in _vars(cls):
        node = _new(cls)
        cls.__module_schema__.instances.append((node, values, config, notes))
        return node
    schema, values = cls.__module_schema__, dict(values)
    unknown = [name for name in values if name not in schema.fields]
    if unknown:
        fact = f"pickle of {cls.__qualname__}: it has values of {unknown}, which are no fields now"
        raise FieldError(fact, hint="def __setstate__(self, state): ...")
    schema.fill_defaults(values)
    return schema.make(values, (*config, *schema.static), notes)


for _kind in JAX_FUNCTIONS:
    copyreg.pickle(_kind, reduce_by_name)


def _restore_state(cls: Any, state: Any, notes: Any) -> Any:
    """Make an instance from a pickled state, by the class's own method."""
    node = _new(cls)
    set_state = getattr(node, "__setstate__", node.__stored__.update)
    set_state(state)
    return with_notes(cls.__module_schema__.finish(node), **notes._asdict())

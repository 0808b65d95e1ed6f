"""`Module`, and the pipeline that makes a class into one.

A class body becomes a Module class in named steps. Abstract attributes are collected; `dataclasses`
collects the fields; an `__init__` is generated or inherited; the schema is made. Then the code that
finishes and flattens instances is generated, the class is registered with JAX, and its methods are
wrapped.
"""

from __future__ import annotations

import abc
import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, TypeVar, cast, dataclass_transform

from pytreemod.errors import ArgumentError, FieldError, FieldWarning, describe, explain, warn
from pytreemod.module.abstracts import SETS, split_annotations, unmet
from pytreemod.module.annotations import FieldCheck, letting_nodes_pass, type_checker_of
from pytreemod.module.construction import as_changed, replace_values, write_finish, write_init
from pytreemod.module.fields import (
    buffer,
    field,
    refuse_mutable_default,
    refuse_not_called,
    static_field,
)
from pytreemod.module.flattening import register
from pytreemod.module.methods import InheritedMethod, as_method, is_method
from pytreemod.module.overriding import find_overridden, mark_overridden, refuse_properties
from pytreemod.module.pickling import PickledSchema, deep_copied, fill, is_own, is_skeleton, reduced
from pytreemod.module.pickling import restore_state as restore_state
from pytreemod.module.reading import Read, Reading
from pytreemod.module.records import ClassValue, FieldsDict, Record, make_record, write_setattr
from pytreemod.module.schema import Schema
from pytreemod.tree.comparison import are_equal
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.pending import (
    FLAT,
    PRIVATE,
    Waiting,
    has_attribute,
    has_own_attribute,
    open_to_waiting,
)
from pytreemod.tree.printing import rich_doc, short_text
from pytreemod.tree.renewing import with_new_containers
from pytreemod.typing import class_of, jtu

_R = TypeVar("_R", bound=Record)
# Not `Self`, which runtime type checkers (beartype) refuse in single methods.
_M = TypeVar("_M", bound="Module")


@dataclass_transform(
    field_specifiers=(
        dataclasses.field, field, buffer, static_field,
    )
)  # fmt: skip
class ModuleMeta(abc.ABCMeta):
    """Makes Module classes. Cooperative: combine it with other metaclasses as usual."""

    __record__ = cast(Schema, None)

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
        # An instance always has a dict, for its fields.
        if "__slots__" in namespace:
            namespace = {key: value for key, value in namespace.items() if key != "__slots__"}
        is_empty = is_skeleton(namespace)
        if any(map(_shows_dict, bases)):
            namespace = {"__dict__": FieldsDict(), **namespace}
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        _refuse_content(cls)
        own_abstract = _collect_fields(cls, kw_only)
        overridden = find_overridden(cls, (ClassValue, Waiting))
        mark_overridden(cls, frozenset(overridden))
        schema = Schema(cls, make_record, overridden)
        _note_abstract(schema, own_abstract, is_abstract or strict is None)
        _choose_init(schema, namespace)
        _write(schema)
        _note_waiting(schema)
        # The next `__call__` after this metaclass, looked up once (saves 0.1 us for each instance).
        schema.build = super(ModuleMeta, cls).__call__
        if is_empty:
            schema.early_instances = []
        type.__setattr__(cls, "__record__", schema)
        register(cls)
        _wrap_methods(cls)
        return cls

    # Typed so that type checkers find the parameters in `__init__`.
    def __call__(  # noqa: D102  (see below)
        cls: type[_R],  # pyright: ignore[reportGeneralTypeIssues]  (its instances are Records)
        *args: Any,
        **kwargs: Any,
    ) -> _R:
        # Build, finish and freeze an instance. No docstring, because `help` would show it for any
        # `__call__` of an instance that has none.
        schema = cls.__record__
        if schema.refusal is not None:
            if schema.original is not schema:
                return _call_original(cls, args, kwargs)
            raise FieldError(schema.refusal)
        node = schema.build(*args, **kwargs)
        # Only an instance that __init__ has built now: __new__ may return any object.
        if class_of(node) is cls:
            fields = node.__stored__
            if FLAT not in fields and PRIVATE not in fields:
                return schema.finish(node)
        return node

    def __setattr__(cls, name: str, value: Any) -> None:
        schema = vars(cls).get("__record__")  # None while the class is being made.
        if schema is not None and is_own(name, value):
            if isinstance(value, PickledSchema) and schema.early_instances is not None:
                fill(schema, value)
                _write(schema)
            return
        if name == "__init__" and schema is not None and not schema.custom_init:
            is_checked = type_checker_of(value) is not None and hasattr(value, "__wrapped__")
            value = letting_nodes_pass(value, schema) if is_checked else value
        declared = None if schema is None else schema.fields.get(name)
        is_ready = class_of(value) in (Waiting, ClassValue)  # That of a pickled class.
        if is_ready or (declared is not None and value is declared.default):
            super().__setattr__(name, value)
            return
        stored = as_method(name, value)
        # Python finds an attribute with `__set__` before the entry in an instance.
        if declared is not None and not hasattr(stored, "__set__"):
            stored = ClassValue(name, stored)
        super().__setattr__(name, stored)
        if name in ("__init__", "__check_init__"):
            _note_checks(cls.__record__)

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)
        parameters = list(signature.parameters.values())[1:]
        return signature.replace(parameters=parameters)


def _shows_dict(base: type) -> bool:
    """Whether a class with this base might expose the dicts of its instances.

    A base that is not a Module does so if it has a dict; if it has none, Python adds one to the
    class.
    """
    return not isinstance(base, ModuleMeta) and base is not Record


def _call_original(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make an instance of the original class when a method of a variant calls `type(self)(...)`.

    Raises:
        FieldError: if fields are stored in another form than they are read in.
            `dataclasses.replace` calls the class with the values that it has read.
    """
    if not issubclass(cls, Reading):
        return cls.__passes_for__(*args, **kwargs)
    name = cls.__qualname__
    names = [field for field, value in vars(cls).items() if isinstance(value, Read)]
    raise FieldError(
        f"type(model)(...), or dataclasses.replace(model, ...), of a {name}",
        "a model in which all fields are read as they are stored",
        f"a model with ties or computed leaves ({', '.join(names)}), which its "
        "attributes do not contain",
        hint=[
            "replace fields, or name the class:",
            "model = model.replace(field=new)",
            f"{cls.__name__}(...)",
        ],
    )


def _write(schema: Schema) -> None:
    """Generate the functions of a class that make its instances."""
    if not schema.custom_init:
        type.__setattr__(schema.cls, "__init__", write_init(schema))
    _note_checks(schema)
    if schema.custom_init or hasattr(schema.cls, "__post_init__"):
        write_setattr(schema)
    schema.finish = ft.partial(_finish_first, schema)


def _finish_first(schema: Schema, node: Any) -> Any:
    # Generated for the first instance: many imported classes never have one.
    # Threads that get here at the same time generate the same.
    schema.finish = write_finish(schema)
    return schema.finish(node)


def _collect_fields(cls: type, kw_only: bool) -> dict[str, str]:
    """Let `dataclasses` read the class body; return the kinds of the abstract attributes."""
    refuse_not_called(cls)
    annotations, abstract = split_annotations(cls)
    whole = inspect.get_annotations(cls)
    doc = cls.__doc__
    # `dataclasses` would add a docstring where there is none, from a signature that the
    # class does not have yet.
    cls.__doc__ = doc or "."
    type.__setattr__(cls, "__annotations__", annotations)
    replaces = "__replace__" in vars(cls)
    try:
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    except ValueError as error:
        refuse_mutable_default(cls, error)
        raise
    if "__replace__" in vars(cls) and not replaces:
        del cls.__replace__  # pyright: ignore[reportAttributeAccessIssue]
    type.__setattr__(cls, "__annotations__", whole)
    cls.__doc__ = doc
    refuse_properties(cls)
    return abstract


def _refuse_content(cls: type) -> None:
    """Refuse a base whose instances have contents beside their dict, such as exceptions and dicts.

    Raises:
        FieldError: if there is one. Its contents are not a field, so every transform would lose
            them.
    """
    for base in cls.__mro__:
        # Such classes have their own `__new__`, in C.
        new = vars(base).get("__new__")
        if isinstance(new, BuiltinFunctionType) and new is not object.__new__:
            name = next(own.__name__ for own in cls.__bases__ if issubclass(own, base))
            raise FieldError(
                cls.__qualname__,
                "bases whose instances only have attributes",
                f"{name}, whose content would not be a field, and transforms would lose it",
                hint=["make it a field:", f"{name.lower()}: {name}"],
            )


def _note_abstract(schema: Schema, own_abstract: dict[str, str], is_abstract: bool) -> None:
    cls = schema.cls
    provided = {*schema.fields, *inspect.get_annotations(cls)} - own_abstract.keys()
    missing = unmet(cls, own_abstract, provided)
    for kind, attribute in SETS.items():
        names = frozenset(name for name, found in missing.items() if found == kind)
        type.__setattr__(cls, attribute, names)
    name = cls.__qualname__
    methods = sorted(getattr(cls, "__abstractmethods__", ()))
    if is_abstract:
        schema.refusal = explain(
            name,
            "a concrete class",
            "a class declared with is_abstract=True. Cannot instantiate abstract Module",
            hint=["subclass it:", f"class My{cls.__name__}({cls.__name__}): ..."],
        )
    elif missing or methods:
        lacks = ", ".join([*sorted(missing), *(f"{m}()" for m in methods)])
        schema.refusal = explain(
            # As Python says it of its abstract classes.
            f"Can't instantiate abstract class {name} with abstract attributes {lacks}"
        )


def _init_owner(cls: type) -> type:
    return _first_owner(cls, "__init__")


def _is_custom(owner: type) -> bool:
    record = vars(owner).get("__record__")
    if isinstance(record, Schema):
        return record.custom_init
    return owner is not object and owner is not Record


def _choose_init(schema: Schema, namespace: dict[str, Any]) -> None:
    """Decide whether the class or one of its bases defines `__init__`."""
    cls = schema.cls
    schema.custom_init = "__init__" in namespace or _is_custom(_init_owner(cls))
    if schema.custom_init and _ignores_post_init(cls, namespace):
        _warn_of_post_init(cls, "__init__" in namespace)


def _ignores_post_init(cls: Any, namespace: dict[str, Any]) -> bool:
    """Whether a class with its own `__init__` has a `__post_init__` that does not run."""
    if "__post_init__" in namespace:
        return True
    if not hasattr(cls, "__post_init__"):
        return False
    init = vars(_init_owner(cls))["__init__"]
    if "__init__" in namespace:
        # Classes that are made for instances inherit it.
        is_new = all(vars(base).get("__init__") is not init for base in cls.__mro__[1:])
    else:
        # A mixin defines the other.
        post = _first_owner(cls, "__post_init__")
        is_new = not any(
            _init_owner(b) is _init_owner(cls) and issubclass(b, post) for b in cls.__bases__
        )
    if not is_new:
        return False
    # An `__init__` that calls another one may run it.
    code = getattr(inspect.unwrap(init), "__code__", None)
    return code is not None and not {"__init__", "__post_init__"} & {*code.co_names}


def _warn_of_post_init(cls: type, own: bool) -> None:
    name = cls.__qualname__
    where = name if own else _init_owner(cls).__qualname__
    warn(
        FieldWarning,
        name,
        "either __init__ or __post_init__",
        f"a class that has both an `__init__` method ({where}.__init__) and a `__post_init__`, "
        "which does not run by itself",
        hint=[
            "move its lines to the end of __init__, or turn them into checks:",
            "def __check_init__(self): ...",
        ],
    )


def _note_checks(schema: Schema) -> None:
    """Collect the checks of a finished instance."""
    cls = schema.cls
    checks: list[Any] = [
        vars(base)["__check_init__"] for base in cls.__mro__ if "__check_init__" in vars(base)
    ]
    type_checker = type_checker_of(cls.__init__)
    if type_checker is not None:
        checks.insert(0, FieldCheck(schema, type_checker))
    schema.checks = tuple(checks)


def _note_waiting(schema: Schema) -> None:
    """Decide whether instances may be filled in at their first read.

    They may not if the user's code answers all attribute reads; nor can fields for which the class
    itself has an attribute (a default).
    """
    cls: Any = schema.cls
    schema.can_wait = cls.__getattribute__ is object.__getattribute__
    schema.shown = tuple(n for n in schema.fields if has_attribute(cls, n))
    open_to_waiting(cls, schema.fields.keys() - schema.shown)


def _wrap_methods(cls: type) -> None:
    fields = vars(cls)["__record__"].fields
    for name, value in list(vars(cls).items()):
        wrapped = value if name in fields else as_method(name, value)
        if wrapped is not value:
            type.__setattr__(cls, name, wrapped)
    plain = [b for b in cls.__mro__ if not isinstance(b, ModuleMeta) and b not in (Record, object)]
    for base in plain:
        for name, value in vars(base).items():
            if is_method(name, value) and name not in fields and _first_owner(cls, name) is base:
                type.__setattr__(cls, name, InheritedMethod(cls, name, value))


def _first_owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if has_own_attribute(base, name))


def _unhashable_text(node: Any) -> str:
    found = [place for place in locations(node) if not _has_hash(place.leaf)]
    return explain(
        f"hash of {type(node).__qualname__}",
        "leaves that have a hash",
        "leaves without one",
        at=[f"{path_text(place.path)}: {describe(place.leaf)}" for place in found],
        hint=[
            "JAX hashes the function that it transforms. Pass the model as an argument, or use a "
            "transform that accepts a callable tree:",
            "jax.jit(lambda model, x: model(x))(model, x)",
            "pm.filter_jit(model)(x), pm.filter_checkpoint(model)(x)",
            "pm.filter_cond(pred, model1, model2, x), pm.filter_switch(i, [model1, model2], x)",
            "pm.filter_scan(model, init, xs)",
            'pm.by({nn.Linear: 1, "head": 2})  # as the key of a dict: a class, or a path',
        ],
    )


def _has_hash(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


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


class Module(Record, metaclass=ModuleMeta):
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
        schema = type(self).__record__
        self = with_new_containers(self)
        made = schema.rebuild(self, replace_values(self, changes), is_given=True, decide=True)
        before = dict(made.__stored__)
        for check in schema.checks:
            if isinstance(check, FieldCheck):
                check.check_copy(made, self)
            else:
                check(made)
        return as_changed(made, before)

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
            return hash((tuple(leaves), treedef))
        except TypeError as error:
            raise ArgumentError(_unhashable_text(self)) from error

    __reduce__, __deepcopy__ = reduced, deep_copied

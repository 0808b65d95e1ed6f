"""Law of construction: an instance of a Module class has the fields of the same dataclass.

Hierarchies of classes are made twice, as Modules and as plain dataclasses. They have generated and
custom `__init__`s, which call those of their bases before and after their own assignments. They
also have mixins, defaults, class attributes instead of fields, properties, abstract attributes,
keyword-only fields and `__post_init__`s.
"""

import dataclasses
import inspect
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import example, given, settings

import pytreemod as pm
from pytreemod.errors import FieldError
from tests.helpers.laws import law

NAMES = ("a", "b", "c")
PROPERTY = "p"


class FieldSpec(NamedTuple):
    """How a class declares a field."""

    default: int | None
    init: bool
    kw_only: bool


class Step(NamedTuple):
    """A statement of a custom `__init__`: assign to a field, or call the `__init__` of a base.

    The base is given by its number among the bases; None means `super()`.
    """

    sets: str | None
    base: int | None
    optional: bool


class ClassSpec(NamedTuple):
    """The content of a class's body; its bases are counted back from it."""

    bases: tuple[int, ...]
    is_mixin: bool
    fields: dict[str, FieldSpec]
    attributes: dict[str, int]
    is_abstract: bool
    has_property: bool
    init: tuple[Step, ...] | None
    sets_rest: bool
    post_init: str | None


field_specs = st.builds(
    FieldSpec,
    default=st.one_of(st.none(), st.integers(10, 99), st.integers(10, 99)),
    init=st.sampled_from([True, True, True, False]),
    kw_only=st.booleans(),
)
steps = st.one_of(
    st.builds(Step, st.sampled_from(NAMES), st.none(), st.just(False)),
    st.builds(Step, st.none(), st.one_of(st.none(), st.integers(0, 2)), st.booleans()),
)
rarely = st.sampled_from([True, *[False] * 5])
class_specs = st.builds(
    ClassSpec,
    bases=st.sampled_from([(0,), (0,), (0,), (0, 1), (1, 0), (1,), (0, 2), ()]),
    is_mixin=rarely,
    fields=st.dictionaries(st.sampled_from(NAMES), field_specs, max_size=2),
    attributes=st.one_of(
        st.just({}), st.dictionaries(st.sampled_from(NAMES), st.integers(100, 199), max_size=2)
    ),
    is_abstract=rarely,
    has_property=rarely,
    init=st.one_of(st.none(), st.lists(steps, max_size=4).map(tuple)),
    sets_rest=rarely.map(lambda rare: not rare),
    post_init=st.one_of(st.none(), st.none(), st.sampled_from(NAMES)),
)


def own_init(cls_of: list[type], spec: ClassSpec, number: int, names: set[str]) -> Any:
    """An `__init__` that does the steps of `spec`; `cls_of` will hold the class."""

    def __init__(self: Any) -> None:
        cls = cls_of[0]
        for i, step in enumerate(spec.init or ()):
            if step.sets is not None:
                if step.sets in names:
                    setattr(self, step.sets, 1000 * number + i)
                continue
            bases = cls.__bases__
            if step.base is None or step.base >= len(bases):
                init: Any = super(cls, self).__init__
            else:
                init = bases[step.base].__init__.__get__(self)
            init(**arguments(init, step.optional, 10_000 * number + 10 * i))
        for name in sorted(names) if spec.sets_rest else ():
            if not hasattr(self, name):
                setattr(self, name, -1000 * number)

    return __init__


def arguments(init: Any, optional: bool, start: int) -> dict[str, int]:
    """Values for the parameters of an `__init__`; if `optional`, also for those with defaults."""
    given = [
        p.name
        for p in inspect.signature(init).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and (optional or p.default is p.empty)
    ]
    return {name: start + i for i, name in enumerate(given)}


def inherits_own_init(bases: tuple[type, ...]) -> bool:
    """Whether the `__init__` that a class would inherit was written by hand."""
    order = type("Probe", bases, {}).__mro__ if bases else ()
    found = (vars(base)["__init__"] for base in order if "__init__" in vars(base))
    return hasattr(next(found, None), "is_own")


def body(spec: ClassSpec, number: int, bases: tuple[type, ...], as_module: bool) -> Any:
    """A class body, and whether its `__init__` is its own or inherited from one with its own."""
    make = pm.field if as_module else dataclasses.field
    namespace: dict[str, Any] = {**spec.attributes, "__module__": __name__}
    annotations: dict[str, Any] = {}
    if not spec.is_mixin:
        for name, field in spec.fields.items():
            options = {} if field.default is None else {"default": field.default}
            namespace[name] = make(init=field.init, kw_only=field.kw_only, **options)
            annotations[name] = object
        if spec.is_abstract and as_module:
            annotations[PROPERTY] = pm.AbstractVar[object]
        namespace["is_abstract"] = spec.is_abstract
    if spec.has_property and not (spec.is_abstract and not spec.is_mixin):
        namespace[PROPERTY] = property(lambda self: f"property {number}")
    names = set(annotations) - {PROPERTY}
    names |= {f.name for base in bases if dataclasses.is_dataclass(base) for f in fields(base)}
    cls_of: list[type] = []
    is_own = spec.init is not None or inherits_own_init(bases)
    if spec.init is not None:
        namespace["__init__"] = own_init(cls_of, spec, number, names)
        namespace["__init__"].is_own = True
    elif not spec.is_mixin and not is_own and spec.post_init in names:
        namespace["__post_init__"] = lambda self: setattr(self, spec.post_init, -number)
    namespace["__annotations__"] = annotations
    return namespace, cls_of, is_own


def fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a dataclass."""
    return dataclasses.fields(cls)


def make_class(spec: ClassSpec, number: int, classes: list[type], as_module: bool) -> type:
    """The class of a hierarchy with this number, below some of those before it."""
    bases = tuple(classes[-1 - i] for i in spec.bases if i < len(classes))
    if spec.is_mixin:
        bases = tuple(base for base in bases if not dataclasses.is_dataclass(base))
    namespace, cls_of, is_own = body(spec, number, bases, as_module)
    name = f"C{number}"
    if spec.is_mixin:
        cls = type(name, bases, namespace)
    elif as_module:
        whole = bases if any(issubclass(b, pm.Module) for b in bases) else (*bases, pm.Module)
        cls = type(pm.Module)(name, whole, namespace)
    else:
        cls = dataclasses.dataclass(init=not is_own, eq=False)(type(name, bases, namespace))
    cls_of.append(cls)
    return cls


REFUSED = "refused"


def outcomes(specs: list[ClassSpec], as_module: bool) -> list[Any]:
    """The fields of the instances of each class, or that it, or its instances, are refused."""
    classes: list[type] = []
    found: list[Any] = []
    for number, spec in enumerate(specs, 1):
        try:
            cls = make_class(spec, number, classes, as_module)
        except FieldError as error:
            # Refused earlier, for an error that a dataclass shows only in an instance.
            return [*found, "at once" if "does not know of it" in str(error) else REFUSED]
        except TypeError:
            return [*found, REFUSED]
        classes.append(cls)
        if not spec.is_mixin:
            found += [instance(cls, optional) for optional in (False, True)]
    return found


def instance(cls: Any, optional: bool) -> Any:
    """The fields of an instance, and its property."""
    try:
        made = cls(**arguments(cls.__init__.__get__(object()), optional, 1))
        if not isinstance(made, pm.Module) and is_unmet(cls):
            return REFUSED
        held = {f.name: getattr(made, f.name) for f in fields(cls)}
        if isinstance(made, pm.Module):
            for same in (made, jax.tree.map(lambda leaf: leaf, made)):
                assert vars(same) == held
        return held | {PROPERTY: getattr(made, PROPERTY, None)}
    except (TypeError, AttributeError):  # Also our errors of fields.
        return REFUSED


def is_unmet(cls: type) -> bool:
    """Whether an abstract attribute is missing in a plain class."""
    declared = any(vars(base).get("is_abstract") for base in cls.__mro__)
    return vars(cls)["is_abstract"] or (declared and not hasattr(cls, PROPERTY))


EMPTY = ClassSpec((0,), False, {}, {}, False, False, None, False, None)
PARENT = EMPTY._replace(fields={"a": FieldSpec(10, True, False), "b": FieldSpec(20, False, False)})
SUPER = Step(None, None, False)
ALL = Step(None, None, True)
BEFORE = tuple(Step(name, None, False) for name in NAMES)
CHILD = EMPTY._replace(fields={"c": FieldSpec(30, True, False)})


@pytest.mark.slow
@settings(law, max_examples=250)
@example([PARENT, CHILD._replace(init=(*BEFORE, SUPER))])
@example([PARENT, CHILD._replace(init=(*BEFORE, ALL))])
@example([PARENT, CHILD._replace(init=(ALL, *BEFORE))])
@example(
    [
        PARENT,
        CHILD._replace(bases=()),
        EMPTY._replace(bases=(0, 1), init=(SUPER, Step(None, 1, True))),
    ]
)
@example([PARENT._replace(init=()), EMPTY._replace(attributes={"a": 100, "b": 101})])
@given(specs=st.lists(class_specs, min_size=2, max_size=4))
def test_a_module_holds_what_the_same_dataclass_holds(specs):
    """fields(Module(...)) == fields(dataclass(...)), or both are refused."""
    ours, plain = outcomes(specs, True), outcomes(specs, False)
    if ours[-1:] == ["at once"]:
        ours.pop()
        plain = plain[: len(ours)]
    assert ours == plain

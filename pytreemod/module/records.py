"""Frozen instances: what a Module is before it is a dataclass or a pytree.

Owns how fields are stored (in the instance's dict, beside its layout), and what happens to an
assignment, before and after the instance is finished.
"""

from typing import Any

from pytreemod.errors import FieldError, FrozenError, describe, explain
from pytreemod.module.methods import BoundMethod
from pytreemod.module.schema import LAYOUT, Schema
from pytreemod.tree.pending import PENDING

# What Python's machinery assigns to instances without asking.
_PASSED = frozenset({"__orig_class__"})


class Record:
    """Base of Modules: assignable while it is being built, frozen from then on."""

    __record__: Schema

    def __setattr__(self, name: str, value: Any) -> None:
        values = self.__dict__
        if LAYOUT in values or PENDING in values:
            if name in _PASSED:
                values[name] = value
                return
            refuse_assignment(self, name, value)
        if name not in self.__record__.fields and name not in _PASSED:
            refuse_undeclared(self, name)
        if type(value) is BoundMethod and value.__self__ is self:
            refuse_own_method(self, name, value)
        values[name] = value

    def __delattr__(self, name: str) -> None:
        cls = type(self).__qualname__
        raise FrozenError(
            explain(
                f"{cls}.{name}",
                "no deletion, for a Module is frozen",
                f"del on {name!r}",
                cure=["make a new one without the value:", f"model = model.replace({name}=None)"],
            )
        )


set_fields = vars(Record)["__dict__"].__set__
"""Gives a record its dict: `set_fields(record, {...})`, past `__setattr__`."""

_new = object.__new__


def make_record(cls: type, values: dict[str, Any]) -> Any:
    """An instance of `cls` with this dict; nothing else runs."""
    made = _new(cls)
    set_fields(made, values)
    return made


def refuse_assignment(node: Any, name: str, value: Any) -> None:
    """Raise the error for an assignment to a finished Module."""
    cls = type(node).__qualname__
    raise FrozenError(
        explain(
            f"{cls}.{name}",
            "no assignment, for a Module is frozen",
            f"cannot assign to field {name!r} the value {describe(value)}",
            cure=[
                "make a new one; inside a larger model, name the place:",
                f"model = model.replace({name}=new)",
                f"model = pm.tree_at(lambda m: m.path.to.{name}, model, new)",
            ],
        )
    )


def refuse_undeclared(node: Any, name: str) -> None:
    """Raise the error for an attribute that no field declares."""
    cls = type(node).__qualname__
    fields = ", ".join(type(node).__record__.fields) or "none"
    raise FrozenError(
        explain(
            f"{cls}.{name}",
            f"a declared field ({fields})",
            f"an undeclared attribute {name!r}",
            cure=[
                "declare it in the class body:",
                f"class {cls}(pm.Module):",
                f"    {name}: jax.Array",
            ],
        )
    )


def refuse_own_method(node: Any, name: str, value: BoundMethod) -> None:
    """Raise the error for a method of an instance assigned to that instance's field."""
    cls = type(node).__qualname__
    raise FieldError(
        explain(
            f"{cls}.{name}",
            "a value that does not contain the instance itself",
            f"its own method {value.__name__!r}: Cannot assign methods in __init__",
            cure=[
                "a tree cannot contain itself; write a method that calls it:",
                f"def {name}(self, *args):",
                f"    return self.{value.__name__}(*args)",
            ],
        )
    )

"""`with_precision`: a model whose chosen Modules store, and compute with, chosen dtypes.

The arrays of the model are cast once, to the dtype of the parameters. And the methods of each
Module are wrapped (`transform.interception.surrounded_calls`), so that the Module runs with arrays
of the dtype of the computation: layers read that dtype, and need not know about it. Because the
casts are differentiated through, gradients have the dtype of the parameters.

Nested Modules of one precision are a region. Arrays are cast where the region is entered, and
results stay in the dtype of the computation until the region is left, as in code written by hand.
A Module's rule says whether it is inside a region that was entered. The rule is configuration, so a
compiled function cannot mistake a call inside the region for one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.reading import evaluate_each, is_computed
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.state.tokens import is_token
from pytreemod.state.values import State
from pytreemod.training.dtype_policies import Precision, as_precision
from pytreemod.transform.interception.chosen_modules import Path, choose_values, rebuilt
from pytreemod.transform.interception.surrounded_calls import (
    AbstractCallRule,
    CallSite,
    has_method,
    own_rules,
    with_own_rules,
)
from pytreemod.tree.nodes import children_of, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, by
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.surgery import with_children
from pytreemod.typing import class_of, jtu

_T = TypeVar("_T")


def with_precision(model: _T, precision: Any, methods: str | Sequence[str] = ()) -> _T:
    """Give chosen Modules the dtypes in which they are stored, compute, and give their results.

    Works for any Module, ours or yours, as it is. A Module that is chosen is meant with all that is
    inside of it, but for Modules inside that are chosen themselves: the innermost wins, so that a
    `LayerNorm` may compute in float32 in the middle of bfloat16. Of a
    [`Precision`][pytreemod.Precision],

    - `params` is the dtype to which the floating arrays are cast, here and now;
    - `compute` is that to which these and the floating arrays in the arguments are cast where
      `__call__` is entered, or another method that is named;
    - `output` is that to which the floating arrays in the result are cast, where the outermost of
      Modules of one precision is left. What such Modules give to each other is in `compute`. A
      Module that gives itself back, as a net that carries its State does, has its arrays in
      `params` again, and those that it did not change as they were.

    Gradients arrive in `params`, for that is what is differentiated. State (running statistics, for
    instance), keys, integers, complex numbers and fields that are declared as
    [`buffer`][pytreemod.buffer] are left as they are. A computed leaf is stored in `params`; its
    value is computed in that, and then cast. Where an array is tied to another, the path where it
    is decides how it is stored, and the Module that reads it how it is used.

    A precision is configuration of the model, printed behind the outermost Modules that have it:
    transforms, `tree_at`, copies, pickles and files keep
    it. What is loaded `like` a model computes as that does, whatever the file says.

    **Laws.** `with_precision(with_precision(m, p), q)` equals `with_precision(m, q)`, if `p` stores
    what is lost by no cast. With None every Module is of its own class again; the arrays stay as
    they were cast. The casts in a compiled program are those of code that is written by hand.

    Args:
        model: a model, or any tree that holds some.
        precision: a [`Precision`][pytreemod.Precision], a dtype, or text for one, as in
            `"params=float32,compute=bfloat16,output=float32"` or `"bfloat16"`; or
            [`by`][pytreemod.by] with one for each selector. A selector chooses Modules: a class
            means its instances, a path that of the Module itself, and `...` all that nothing else
            chooses. None leaves alone, or takes away what was given before.
        methods: names of further methods at which a Module is entered, beside `__call__`.

    Returns:
        A new tree.

    Raises:
        ArgumentError: `precision` is none of these.
        SpecError: a path chooses no Module, an array has no precision, or no method has the name;
            or arrays belong to a Module without any such method, so that nothing would cast them.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> keys = jax.random.split(jax.random.key(0))
        >>> layers = [nn.Linear(4, 8, key=keys[0]), nn.LayerNorm(8), nn.Linear(8, 2, key=keys[1])]
        >>> mixed = "params=float32,compute=bfloat16,output=float32"
        >>> model = pm.with_precision(
        ...     nn.Sequential(layers), pm.by({nn.LayerNorm: "float32", ...: mixed})
        ... )
        >>> out, seen = pm.capture(model, "layers.*")(jnp.ones(4))
        >>> out.dtype, [y.dtype.name for y in seen.values()]
        (dtype('float32'), ['bfloat16', 'float32', 'bfloat16'])
        >>> model.layers[0].weight.dtype
        dtype('float32')

    Source:
        The policies of jmp, https://github.com/google-deepmind/jmp.
    """
    refuse_unfinished("with_precision", model)
    where = "with_precision(precision)"
    bare = rebuilt(with_new_containers(model), _without)
    names = ("__call__", *_names_of(methods))
    if precision is None:
        return bare
    rule = precision if isinstance(precision, By) else by({...: precision})
    rule = By([(selector, as_precision(where, value)) for selector, value in rule.items])
    rest = [value for selector, value in rule.items if selector == _ALL]
    special = By([(selector, value) for selector, value in rule.items if selector != _ALL])
    chosen = choose_values(where, special, bare, _is_offered)
    giving = _Giving(chosen, names)
    made = giving.visit(bare, (), _Here(rest[0] if rest else _UNDECIDED, None))
    giving.check(where)
    return made


def _names_of(methods: Any) -> Sequence[str]:
    are_several = isinstance(methods, Sequence) and not isinstance(methods, str)
    names = cast("Sequence[Any]", methods if are_several else [methods])
    if not all(isinstance(name, str) for name in names):
        hint = ["write, for instance", 'pm.with_precision(model, "bfloat16", ["encode", "decode"])']
        expected = "the names of methods"
        raise ArgumentError("with_precision(methods)", expected, describe(methods), hint=hint)
    return names


_ALL = as_selector(...)

# Under what name files have it. No identifier, so that no field can bear it.
PRECISION = "<precision>"


def precisions_of(node: Any) -> dict[str, Precision | None]:
    """The precisions that a Module was given, by the names of the methods; empty if none."""
    return {name: rule.precision for name, rule in own_rules(node, _Casting).items()}


def with_precisions(node: Any, precisions: Mapping[str, Precision | None]) -> Any:
    """A Module with other precisions; its arrays stay.

    Args:
        node: the Module.
        precisions: by the names of the methods.

    Raises:
        SpecError: it has no such method.
    """
    missing = [name for name in precisions if not has_method(node, name)]
    if missing:
        _refuse_methods(missing)
    rules = {name: _Casting(precision) for name, precision in precisions.items()}
    return with_own_rules(node, _Casting, rules)


def _is_offered(node: Any) -> bool:
    return not is_token(node) and not is_computed(node)


def _without(node: Any, path: Path) -> Any:
    return with_own_rules(node, _Casting, {}) if own_rules(node, _Casting) else node


# ---- giving


class _Undecided:
    """The precision of a Module that no selector has chosen."""


_UNDECIDED: Any = _Undecided()


class _Here(NamedTuple):
    """The precision at a path of the model, and the precision that casts its arrays."""

    precision: Any
    # That of the innermost Module above that has a method at which it is entered.
    entered: Any


class _Giving:
    """One walk over a model that casts what is stored, and puts rules around methods."""

    def __init__(self, chosen: dict[Path, Any], methods: Sequence[str]):
        self.chosen, self.methods = chosen, methods
        self.seen: set[str] = set()
        self.undecided: list[str] = []
        self.uncast: list[str] = []

    def visit(self, node: Any, path: Path, here: _Here) -> Any:
        """The tree with its rules; what is inside is done first."""
        if _has_floats(node):
            return self._store(node, path, here)
        if _is_left_alone(node):
            return node
        precision = self.chosen.get(path, here.precision)
        found = self._methods_of(node)
        is_entered = bool(found) and precision is not _UNDECIDED
        # Within another, one that is left alone must say so.
        is_ruled = is_entered and (precision is not None or here.entered is not None)
        # A Module without a method at which it is entered is a part of the one around it.
        inside = _Here(precision, precision if is_entered else here.entered)
        node = _with_parts(node, lambda child, key: self.visit(child, (*path, key), inside))
        rules = dict.fromkeys(found, _Casting(precision))
        return with_own_rules(node, _Casting, rules) if is_ruled else node

    def _methods_of(self, node: Any) -> list[str]:
        if not isinstance(node, Module) or is_computed(node):
            return []
        found = [name for name in self.methods if has_method(node, name)]
        self.seen.update(found)
        return found

    def _store(self, array: Any, path: Path, here: _Here) -> Any:
        precision = here.precision
        if precision is _UNDECIDED:
            self.undecided.append(path_text(path))
            return array
        is_stored = precision is None or precision.params == precision.compute
        # What no method casts on the way in must be stored as it is computed with.
        if precision != here.entered and not (is_stored and here.entered is None):
            self.uncast.append(path_text(path))
        return array if precision is None else _as_dtype(array, precision.params)

    def check(self, where: str) -> None:
        """Refuse what was found on the way.

        Raises:
            SpecError: there is something.
        """
        # Without the first, `__call__`, which is the default.
        missing = [name for name in self.methods[1:] if name not in self.seen]
        if missing:
            _refuse_methods(missing)
        if self.undecided:
            raise SpecError(
                where,
                "a precision for every floating array",
                f"none for {len(self.undecided)}",
                places=self.undecided,
                hint=["give the rest a default, which may be None:", "pm.by({..., ...: None})"],
            )
        if self.uncast:
            raise SpecError(
                where,
                "arrays of Modules that have a method at which they are cast",
                "some in a Module that has none, or in none at all",
                places=self.uncast,
                hint=[
                    "name the method by which the Module is used, or choose one around it:",
                    'pm.with_precision(model, precision, methods="encode")',
                ],
            )


# ---- around a call


class _Casting(AbstractCallRule):
    """Casts what goes into a Module, and what comes out of it.

    Fields:
        precision: None for a Module that is left alone in the middle of others that are not
        is_inside: whether the Module is part of one of the same precision that has been entered
    """

    precision: Precision | None = field(static=True)
    is_inside: bool = field(default=False, static=True)
    # It is the same for all layers of a Stack.
    uses_layer: ClassVar[bool] = False

    def shown(self) -> str:
        """The precision, as `with_precision` takes it."""
        precision = self.precision
        if precision is None:
            return " in no precision"
        parts = [f"{role}={getattr(precision, role)}" for role in ("params", "compute", "output")]
        is_one = precision.params == precision.compute == precision.output
        return f" in {precision.params if is_one else ','.join(parts)}"

    def entering(self, module: Any) -> Any:
        """The Module with its arrays as they are computed with."""
        if self.precision is None:
            return module
        return _Cast(self.precision, self.precision.compute, is_inside=True).visit(module)

    def leaving(self, called: Any, entered: Any, out: Any) -> Any:
        """What the method gave, in which parts of the Module are as they were before."""
        if self.precision is None or self.is_inside:
            return out
        return _Restored(self.precision, _originals(called, entered)).visit(out, is_part=False)

    def around(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: CallSite,
    ) -> Any:
        """Make the call, with arguments to compute with."""
        precision = self.precision
        if precision is None:
            return call(*args, **kwargs)
        given = _Cast(precision, precision.compute)
        out = call(
            *(given.visit(arg) for arg in args),
            **{name: given.visit(arg) for name, arg in kwargs.items()},
        )
        # One part of a region hands the next one what that computes with.
        dtype = precision.compute if self.is_inside else precision.output
        return _Cast(precision, dtype).visit(out)


class _Cast(NamedTuple):
    """Casts the floating arrays of a tree, but for Modules in it that have another precision.

    Args:
        precision: that of the Module that is called.
        dtype: to which.
        is_inside: what the rules of Modules that have this precision are to say; None if Modules
            with a precision are to be left as they are.
    """

    precision: Precision
    dtype: str
    is_inside: bool | None = None

    def visit(self, node: Any) -> Any:
        """The tree with its arrays cast."""
        if _has_floats(node):
            return _as_dtype(node, self.dtype)
        if _is_left_alone(node):
            return node
        rules = own_rules(node, _Casting)
        is_other = any(rule.precision != self.precision for rule in rules.values())
        if is_other or (rules and self.is_inside is None):
            return node
        if is_computed(node):
            # By its value: what a weight is computed from may need to be more precise than it.
            return self.visit(evaluate_each(node, class_of(node).__qualname__))
        node = _with_parts(node, lambda child, key: self.visit(child))
        return _with_rules(node, self.precision, bool(self.is_inside)) if rules else node


class _Restored(NamedTuple):
    """Brings what comes out of a region back to what is stored.

    A net that carries its State gives itself back: to cast its arrays once more would leave them
    rounded.

    Args:
        precision: that of the region.
        originals: what was stored, by the identity of what was made of it for the call.
    """

    precision: Precision
    originals: dict[int, Any]

    def visit(self, node: Any, is_part: bool) -> Any:
        """The tree, where `is_part` says whether it is inside of a Module of the region."""
        if is_part and id(node) in self.originals:
            return self.originals[id(node)]
        if _has_floats(node):
            return _as_dtype(node, self.precision.params) if is_part else node
        if _is_left_alone(node):
            return node
        rules = own_rules(node, _Casting)
        if any(rule.precision != self.precision for rule in rules.values()):
            return node
        is_part = is_part or bool(rules)
        node = _with_parts(node, lambda child, key: self.visit(child, is_part))
        return _with_rules(node, self.precision, is_inside=False) if rules else node


def _with_rules(node: Any, precision: Precision, is_inside: bool) -> Any:
    rules = dict.fromkeys(own_rules(node, _Casting), _Casting(precision, is_inside))
    return with_own_rules(node, _Casting, rules)


def _originals(called: Any, entered: Any) -> dict[int, Any]:
    """What was stored, by the identity of what is computed with."""
    if called is entered:
        return {}
    # By identity: two arrays at different paths may be equal.
    old, new = (jtu.tree_leaves(one, is_leaf=_is_whole) for one in (called, entered))
    return {id(each): stored for stored, each in zip(old, new, strict=True)}


def _is_whole(node: Any) -> bool:
    return is_computed(node) or _is_left_alone(node)


# ---- arrays


def _is_left_alone(node: Any) -> bool:
    """Whether nothing inside is cast: what belongs to State has the dtype that it began with."""
    return is_token(node) or isinstance(node, State)


def _with_parts(node: Any, visit: Callable[[Any, Any], Any]) -> Any:
    """A node with what `visit` makes of each child, and its key; without its buffers.

    Buffers by its class: that a part of a model is not trained, and was given the role, is no
    reason to compute with it otherwise.
    """
    record, children = record_of(node), children_of(node) or []
    parts = [
        child if record is not None and record.role(key.name) == "buffer" else visit(child, key)
        for key, child in children
    ]
    return with_children(node, children, parts)


def _has_floats(leaf: Any) -> bool:
    is_shaped = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    return is_shaped and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _as_dtype(array: Any, dtype: str) -> Any:
    if array.dtype == jnp.dtype(dtype):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=jnp.dtype(dtype))
    return array.astype(dtype)


# ---- refusals


def _refuse_methods(missing: Sequence[str]) -> NoReturn:
    raise SpecError(
        "with_precision(methods)",
        "names of methods of Modules in the model",
        ", ".join(map(repr, missing)),
    )

"""`with_precision`: a model whose chosen Modules store, and compute with, chosen dtypes.

The arrays of the model are cast once, to the dtype of the parameters. And the methods of each
Module are wrapped (`transform.call_rules`), so that the Module runs with arrays
of the dtype of the computation: layers read that dtype, and need not know about it. Because the
casts are differentiated through, gradients have the dtype of the parameters.

Nested Modules of one precision are a region. Arrays are cast where the region is entered, and
results stay in the dtype of the computation until the region is left, as in code written by hand.
A Module's rule says whether it is inside a region that was entered. The rule is configuration, so a
compiled function cannot mistake a call inside the region for one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.reading import evaluate_each, is_computed
from pytreemod.state.tokens import is_token
from pytreemod.state.values import State
from pytreemod.training.dtype_policies import Precision, as_precision
from pytreemod.transform.call_rules import (
    CallRule,
    explain_none,
    has_method,
    is_rules,
    offered,
    path_unwrapped,
    rebuilt,
    refuse_unmatched_modules,
    rules_of,
    with_rules,
)
from pytreemod.tree.nodes import children_of, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, by, decide, refuse_shadowed
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.surgery import with_children
from pytreemod.typing import KeyPath, class_of, jtu

_T = TypeVar("_T")


def with_precision(model: _T, precision: Any, methods: str | Sequence[str] = ()) -> _T:
    """Choose the dtypes in which Modules are stored, compute, and return their results.

    Works for any Module, ours or yours, unchanged. Choosing a Module includes everything inside
    it, except for Modules inside that are chosen themselves: the innermost wins, so that a
    `LayerNorm` may compute in float32 in the middle of bfloat16. In a
    [`Precision`][pytreemod.Precision],

    - `params` is the dtype to which the floating arrays are cast, immediately;
    - `compute` is the dtype to which these and the floating arrays in the arguments are cast when
      `__call__`, or another named method, is called;
    - `output` is the dtype to which the floating arrays in the result are cast, when the outermost
      of Modules of one precision returns. Inside, such Modules exchange arrays in `compute`. If a
      Module returns itself, as a net with its State does, its arrays are in
      `params` again, and the unchanged ones are the original arrays.

    Gradients are in `params`, because the stored arrays are differentiated. State (running
    statistics, for instance), keys, integers, complex numbers and fields declared as
    [`buffer`][pytreemod.buffer] are unchanged. A computed leaf is stored in `params`; its
    value is computed in that, and then cast. For a tied array, the path of the source
    decides how it is stored, and the Module that reads it how it is used.

    A precision is configuration of the model, printed behind the outermost Modules that have it.
    Transforms, `tree_at`, copies, pickles and files preserve it. A model that is
    loaded `like` another one computes as that does, whatever the file says.

    **Laws.** `with_precision(with_precision(m, p), q)` equals `with_precision(m, q)`, if `p` stores
    arrays without loss. With None, every Module has its own class again; the arrays stay in the
    dtype that they were cast to. The casts in a compiled program are those of code written by hand.

    Args:
        model: a model, or any tree that contains some.
        precision: a [`Precision`][pytreemod.Precision], a dtype, or a string for one, as in
            `"params=float32,compute=bfloat16,output=float32"` or `"bfloat16"`; or
            [`by`][pytreemod.by] with one for each selector. A selector picks Modules: a class
            picks its instances, a path the Module at it, and `...` all Modules that no other entry
            picks. None changes nothing, or removes the present precision.
        methods: names of further methods at which arrays are cast, beside `__call__`.

    Returns:
        A new tree.

    Raises:
        ArgumentError: if `precision` is none of these.
        SpecError: if an entry picks no Module, or none before others do; an array has no
            precision; or no method has the name. Or arrays belong to a Module without any such
            method, so that they would not be cast.

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
    where = "with_precision(precision)"
    bare = rebuilt(with_new_containers(model), _without)
    names = ("__call__", *_names_of(methods))
    if precision is None:
        return bare
    rule = precision if isinstance(precision, By) else by({...: precision})
    rule = By([(selector, as_precision(where, value)) for selector, value in rule.items])
    rest = [value for selector, value in rule.items if selector == _ALL]
    special = By([(selector, value) for selector, value in rule.items if selector != _ALL])
    chosen = _chosen(where, special, bare)
    giving = _Giving(chosen, names)
    made = giving.visit(bare, (), _Here(rest[0] if rest else _UNDECIDED, None))
    giving.check(where)
    return made


def _names_of(methods: Any) -> Sequence[str]:
    are_several = isinstance(methods, Sequence) and not isinstance(methods, str)
    names = cast("Sequence[Any]", methods if are_several else [methods])
    if not all(isinstance(name, str) for name in names):
        hint = ["for example:", 'pm.with_precision(model, "bfloat16", ["encode", "decode"])']
        expected = "the names of methods"
        raise ArgumentError("with_precision(methods)", expected, describe(methods), hint=hint)
    return names


_ALL = as_selector(...)


def precisions_of(node: Any) -> dict[str, Precision | None]:
    """Return the precisions of a Module, by the names of the methods; empty if there are none."""
    return {name: rule.precision for name, rule in rules_of(node, _Casting).items()}


def _chosen(where: str, rule: By, tree: Any) -> dict[KeyPath, Any]:
    """Return the values that a rule has for Modules themselves, by their paths.

    Args:
        where: the name of the caller, for errors.
        rule: from selectors to values; the first selector that picks a Module gives its value.
        tree: a model, or any tree that contains some.

    Raises:
        SpecError: if an entry picks none, or none that earlier entries leave.
    """
    (prefix, inner), places = path_unwrapped(tree), offered(tree, _is_offered)
    picks: list[list[bool]] = []
    for selector in rule.selectors:
        refuse_unmatched_modules(where, selector, places)
        picks.append(selector.pick(places, inner, None))
        if not any(picks[-1]):
            raise SpecError(explain_none(where, repr(selector), places))
    entries, shadowed = decide(picks, len(places))
    refuse_shadowed(where, rule.items, entries, shadowed, places)
    pairs = zip(places, entries, strict=True)
    return {(*prefix, *p.path): rule.items[i][1] for p, i in pairs if i is not None}


def _is_offered(node: Any) -> bool:
    return not is_token(node) and not is_computed(node)


def _without(node: Any, path: KeyPath) -> Any:
    return with_rules(node, _Casting, {}) if rules_of(node, _Casting) else node


# ---- giving


class _Undecided:
    """The precision of a Module that no selector picks."""


_UNDECIDED: Any = _Undecided()


class _Here(NamedTuple):
    """The precision at a path of the model, and the precision that casts its arrays."""

    precision: Any
    # That of the innermost Module above with a method at which arrays are cast.
    entered: Any


class _Giving:
    """One walk over a model that casts stored arrays, and puts rules around methods."""

    def __init__(self, chosen: dict[KeyPath, Any], methods: Sequence[str]):
        self.chosen, self.methods = chosen, methods
        self.seen: set[str] = set()
        self.undecided: list[str] = []
        self.uncast: list[str] = []

    def visit(self, node: Any, path: KeyPath, here: _Here) -> Any:
        """Return the tree with its rules, made from the inside out."""
        if _has_floats(node):
            return self._store(node, path, here)
        if _is_left_alone(node):
            return node
        precision = self.chosen.get(path, here.precision)
        found = self._methods_of(node)
        is_entered = bool(found) and precision is not _UNDECIDED
        # Inside another one, a Module without a precision needs a rule.
        is_ruled = is_entered and (precision is not None or here.entered is not None)
        # A Module without a method at which arrays are cast is part of the one around it.
        inside = _Here(precision, precision if is_entered else here.entered)
        node = _with_parts(node, lambda child, key: self.visit(child, (*path, key), inside))
        rules = dict.fromkeys(found, _Casting(precision))
        return with_rules(node, _Casting, rules) if is_ruled else node

    def _methods_of(self, node: Any) -> list[str]:
        if not isinstance(node, Module) or is_computed(node):
            return []
        found = [name for name in self.methods if has_method(node, name)]
        self.seen.update(found)
        return found

    def _store(self, array: Any, path: KeyPath, here: _Here) -> Any:
        precision = here.precision
        if precision is _UNDECIDED:
            self.undecided.append(path_text(path))
            return array
        is_stored = precision is None or precision.params == precision.compute
        # An array that no method casts must be stored in the dtype of the computation.
        if precision != here.entered and not (is_stored and here.entered is None):
            self.uncast.append(path_text(path))
        return array if precision is None else _as_dtype(array, precision.params)

    def check(self, where: str) -> None:
        """Refuse the problems that were found.

        Raises:
            SpecError: if there is one.
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
                at=self.undecided,
                hint=["add a default, which may be None:", "pm.by({..., ...: None})"],
            )
        if self.uncast:
            raise SpecError(
                where,
                "arrays of Modules with a method that casts them",
                "arrays in other Modules, or outside any Module",
                at=self.uncast,
                hint=[
                    "name the method of the Module that you call, or choose a surrounding Module:",
                    'pm.with_precision(model, precision, methods="encode")',
                ],
            )


# ---- around a call


class _Casting(CallRule):
    """Casts the arrays of a Module, its arguments and its results.

    Fields:
        precision: None for a Module without a precision inside others that have one
        is_inside: whether the Module is part of one of the same precision that has been entered
    """

    precision: Precision | None = field(static=True)
    is_inside: bool = field(default=False, static=True)

    def shown(self) -> str:
        """Return the precision, as `with_precision` takes it."""
        precision = self.precision
        if precision is None:
            return " in no precision"
        parts = [f"{role}={getattr(precision, role)}" for role in ("params", "compute", "output")]
        is_one = precision.params == precision.compute == precision.output
        return f" in {precision.params if is_one else ','.join(parts)}"

    def around(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Make the call, in the dtype of the computation."""
        precision = self.precision
        if precision is None:
            return call(module, *args, **kwargs)
        given = _Cast(precision, precision.compute)
        entered = _Cast(precision, precision.compute, is_inside=True).visit(module)
        out = call(
            entered,
            *(given.visit(arg) for arg in args),
            **{name: given.visit(arg) for name, arg in kwargs.items()},
        )
        if self.is_inside:
            # The parts of a region exchange arrays in the dtype of the computation.
            return given.visit(out)
        out = _Restored(precision, _originals(module, entered)).visit(out, is_part=False)
        return _Cast(precision, precision.output).visit(out)


class _Cast(NamedTuple):
    """Casts the floating arrays of a tree, except for Modules in it that have another precision.

    Args:
        precision: that of the Module that is called.
        dtype: to cast to.
        is_inside: the value for the rules of Modules of this precision; None to leave Modules
            with a precision unchanged.
    """

    precision: Precision
    dtype: str
    is_inside: bool | None = None

    def visit(self, node: Any) -> Any:
        """Return the tree with its arrays cast."""
        if _has_floats(node):
            return _as_dtype(node, self.dtype)
        if _is_left_alone(node):
            return node
        rules = rules_of(node, _Casting)
        is_other = any(rule.precision != self.precision for rule in rules.values())
        if is_other or (rules and self.is_inside is None):
            return node
        if is_computed(node):
            # Cast the value: the arrays that it is computed from may need more precision.
            return self.visit(evaluate_each(node, class_of(node).__qualname__))
        node = _with_parts(node, lambda child, key: self.visit(child))
        return _with_rules(node, self.precision, bool(self.is_inside)) if rules else node


class _Restored(NamedTuple):
    """Casts the results of a region back to the stored dtypes.

    A net with its State returns itself: casting its arrays once more would leave them
    rounded.

    Args:
        precision: that of the region.
        originals: the stored arrays, by the identity of those made from them for the call.
    """

    precision: Precision
    originals: dict[int, Any]

    def visit(self, node: Any, is_part: bool) -> Any:
        """Return the tree, where `is_part` says whether it is inside of a Module of the region."""
        if is_part and id(node) in self.originals:
            return self.originals[id(node)]
        if _has_floats(node):
            return _as_dtype(node, self.precision.params) if is_part else node
        if _is_left_alone(node):
            return node
        rules = rules_of(node, _Casting)
        if any(rule.precision != self.precision for rule in rules.values()):
            return node
        is_part = is_part or bool(rules)
        node = _with_parts(node, lambda child, key: self.visit(child, is_part))
        return _with_rules(node, self.precision, is_inside=False) if rules else node


def _with_rules(node: Any, precision: Precision, is_inside: bool) -> Any:
    rules = dict.fromkeys(rules_of(node, _Casting), _Casting(precision, is_inside))
    return with_rules(node, _Casting, rules)


def _originals(called: Any, entered: Any) -> dict[int, Any]:
    """Return the stored arrays, by the identity of those that are computed with."""
    if called is entered:
        return {}
    # By identity: two arrays at different paths may be equal.
    old, new = (jtu.tree_leaves(one, is_leaf=_is_whole) for one in (called, entered))
    return {id(each): stored for stored, each in zip(old, new, strict=True)}


def _is_whole(node: Any) -> bool:
    return is_computed(node) or _is_left_alone(node)


# ---- arrays


def _is_left_alone(node: Any) -> bool:
    """Whether nothing inside is cast: parts of a State keep their first dtype, rules their own."""
    return is_token(node) or isinstance(node, State) or is_rules(node)


def _with_parts(node: Any, visit: Callable[[Any, Any], Any]) -> Any:
    """Apply `visit` to each child of a node and its key; without its buffers.

    The class decides about buffers: a part of a model that is frozen by a role still computes in
    the same dtype.
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

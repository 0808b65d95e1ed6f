"""`intervene`: change the results of chosen Modules, while a function runs.

The dual of `capture`: a rule around the calls of the chosen Modules
(`transform.interception.surrounded_calls`) passes their results to a function, and goes on with
its result. The inputs of the functions are data: `values`, one for each call, and the arrays of a
`Partial`. Values enter compiled code as captured ones leave it (`transform.boundary.supplying`).
"""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.debug.capturing import without_state
from pytreemod.debug.same_code import SameCode
from pytreemod.errors import ArgumentError, StructureError, describe
from pytreemod.module.partials import Partial
from pytreemod.transform.boundary.sowing import Label, note
from pytreemod.transform.boundary.supplying import (
    call_supplied,
    is_planned,
    next_level,
    not_counted,
    planned,
    take,
    whole,
)
from pytreemod.transform.boundary.wrapping import Transformed, check_callable
from pytreemod.transform.interception.chosen_modules import Path, choose_first
from pytreemod.transform.interception.surrounded_calls import (
    AbstractCallRule,
    CallSite,
    has_method,
    put_around,
    released,
    surrounding,
)
from pytreemod.tree.differences import aval_of, compare, is_value
from pytreemod.tree.effects import is_state
from pytreemod.tree.kinds import are_one
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By
from pytreemod.tree.selecting import Selector
from pytreemod.tree.snapshots import Structure, structure_of
from pytreemod.typing import PyTree, jtu

_P = ParamSpec("_P")
_R = TypeVar("_R")


def intervene(
    fn: Callable[_P, _R],
    by: Any,
    *,
    values: Mapping[str, PyTree] | None = None,
    inputs: bool = False,
) -> Callable[_P, _R]:
    """Call a function, and change the results, or the arguments, of chosen submodules in it.

    For ablation, steering, and patching from another run. Works through every filtered transform,
    inside and outside of it, and in a [`Stack`][pytreemod.nn.Stack]. A function that needs neither
    `value` nor a number may be used in transforms of plain JAX, too.

    The inputs of the functions are data: in `values`, or as the arrays of a
    [`Partial`][pytreemod.Partial], which may be traced. So another patch of the same shapes needs
    no new program, and neither does a `filter_vmap` over the number of the layer. Lambdas are
    compared by their code and the variables that they capture, so that making the same one again
    needs no new program. One that captures an array differs each time: pass the array as data.

    Interventions may be nested: the outer one sees the changes of the inner one, and so does a
    [`capture`][pytreemod.capture] around it.

    **Law.** With `lambda out, at, value: out`, it equals `fn`; and so it does with
    `lambda out, at, value: value` and the values that `capture` has seen in the same call.

    Args:
        fn: the function, which may be a Module, or a method of one.
        by: [`by`][pytreemod.by] with a function for each choice of Modules in the arguments (and in
            `fn`); the first that picks a Module applies to it. None leaves them unchanged. It is
            called as `f(out, at, value)`. Its result replaces `out`, with the same structure,
            shapes and dtypes. For a layer that returns a State, too, `out` is without it. `at` is
            the location of the call: `at.path`; `at.call`, the number of earlier calls of that
            Module; `at.layer` in a `Stack` (`at.layers` in several); `at.member` in an `Ensemble`;
            `at.step` in `filter_scan` or an `RNN`. They count from 0, may be traced, and are None
            elsewhere.
        values: the `value` for calls, by the names that `capture` gives to the results of these
            Modules. Each is a tree of arrays: along the first axes, an entry for each layer,
            member or step, as in captured values. In other calls `value` is None.
        inputs: whether the functions take, and return, the `(args, kwargs)` of the call, instead
            of its result.

    Returns:
        A function of the same arguments that returns the result of `fn`.

    Raises:
        ArgumentError: if `fn` or a function is not callable, or `by` is not a rule. Or `values` has
            a name that was not chosen, or a function asks for the truth of a traced number.
        SpecError: if a selector picks no Module in the arguments, or none before others do.
        StructureError: if a function returns another structure than that of its argument.
        ShapeError: if a value does not have an entry for each member.
        CaptureError: if a value, an array of a `Partial`, or the number of a step would have to
            enter a transform that accepts none.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> net = nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        >>> x, other = jnp.ones(2), jnp.zeros(2)
        >>> without = pm.intervene(net, pm.by({"layers[1]": lambda out, at, value: 0 * out}))
        >>> bool(without(x) == net.layers[2](jax.nn.relu(jnp.zeros(8))))
        True
        >>> out, seen = pm.capture(net, "layers[0]")(other)
        >>> patch = pm.by({"layers[0]": lambda out, at, value: value})
        >>> bool(pm.intervene(net, patch, values=seen)(x) == net(other))
        True
    """
    check_callable("intervene", fn, "fn")
    if not isinstance(by, By):
        hint = ["choose the Modules:", 'pm.by({"blocks.*.attention": f})']
        raise ArgumentError("intervene(by)", "a rule made by pm.by", describe(by), hint=hint)
    fns = tuple(_as_function(selector, f) for selector, f in by.items)
    for selector, f in by.items:
        _check_parameters(f"intervene(by: {selector!r})", f)
    selectors = tuple(selector for selector, _ in by.items)
    given = None if values is None else _as_arrays(values)
    return cast("Any", _Intervened(fn, _Options(selectors, inputs), fns, given))


def _as_function(selector: Selector, fn: Any) -> Any:
    """Return a function whose arrays are data; it equals another one that does the same."""
    if fn is None:
        return None
    where = f"intervene(by: {selector!r})"
    check_callable(where, fn, "f")
    if type(fn) is Partial:
        return Partial(_as_function(selector, fn.func), *fn.args, **fn.keywords)
    if jtu.tree_structure(fn) != jtu.tree_structure(0):
        return fn
    try:
        return SameCode(fn)
    except TypeError as error:
        hint = ["arrays are data:", "pm.Partial(lambda array, out, at, value: out + array, array)"]
        raise ArgumentError(where, "a function with a hash", describe(fn), hint=hint) from error


def _check_parameters(where: str, fn: Any) -> None:
    """Refuse a function that does not take three arguments, before anything is traced."""
    if fn is None:
        return
    inner, args, named = fn, (), {}
    if type(fn) is Partial:
        inner, args, named = fn.func, fn.args, fn.keywords
    try:
        signature = inspect.signature(inner)
    except (TypeError, ValueError):
        return  # A callable without a signature.
    try:
        signature.bind(*args, None, None, None, **named)
    except TypeError as error:
        hint = ["it is called with three arguments; value is None without values=:"]
        hint += ["lambda out, at, value: 0 * out"]
        got = f"parameters {signature}"
        raise ArgumentError(where, "a function of (out, at, value)", got, hint=hint) from error


def _as_arrays(values: Any) -> dict[str, PyTree]:
    if not isinstance(values, Mapping):
        hint = [
            "pass the values that capture returns:",
            "out, seen = pm.capture(fn, selector)(*args)",
        ]
        raise ArgumentError("intervene(values)", "a dict by name", describe(values), hint=hint)
    named = dict(cast("Mapping[str, PyTree]", values))
    wrong = [
        f"{name}: {describe(leaf)}"
        for name, value in named.items()
        for leaf in jtu.tree_leaves(value)
        if not is_array(leaf)
    ]
    if wrong:
        raise ArgumentError("intervene(values)", "arrays", "others", at=wrong)
    return jtu.tree_map(_as_jax, named)


def _as_jax(array: Any) -> Any:
    return jnp.asarray(array) if isinstance(array, np.ndarray) else array


# ---- the rule around a Module


class _Intervening(AbstractCallRule):
    """Passes the arguments or the result of a Module to a function, and goes on with its result."""

    level: int
    # The arrays of the function.
    data: Label
    # The function without its arrays.
    fn: Structure
    has_value: bool
    inputs: bool

    def around(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: CallSite,
    ) -> Any:
        """Make the call."""
        label = Label(self.level, where.path)
        if is_planned():
            out = call(*args, **kwargs)
            if self.has_value:
                note(label, [])
            return out
        value = take(label) if self.has_value else None
        if self.inputs:
            args, kwargs = self.changed(where, (args, kwargs), value)
            return call(*args, **kwargs)
        out = call(*args, **kwargs)
        # State is left out, and added again.
        leaves, treedef = jtu.tree_flatten(out, is_leaf=is_state)
        new = iter(jtu.tree_leaves(self.changed(where, without_state(out), value)))
        return treedef.unflatten([leaf if is_state(leaf) else next(new) for leaf in leaves])

    def changed(self, where: CallSite, old: Any, value: Any) -> Any:
        """Return the result of the function, which is refused if its form differs."""
        arrays = whole(self.data) if self.fn.count else ()
        try:
            # Transforms in it do not accept values.
            with not_counted():
                new = self.fn.assemble(arrays)(old, where, value)
        except jax.errors.TracerBoolConversionError as error:
            raise ArgumentError(
                f"intervene: the function for {where.path}",
                "a choice between arrays, such as jnp.where",
                "an if on a traced number of a layer, member or step",
                hint=["for example:", "jnp.where(at.layer == 2, 0, out)"],
            ) from error
        found = compare(old, new, _fits)
        if found or jtu.tree_structure(old) != jtu.tree_structure(new):
            what = "the arguments, as (args, kwargs)" if self.inputs else "the output"
            name = "arguments" if self.inputs else "out"
            raise StructureError(
                f"intervene: the function for {where.path}",
                f"{what}, with its structure, shapes and dtypes unchanged",
                f"{len(found)} change{'s' * (len(found) > 1)}" if found else "another structure",
                at=[each.line(name) for each in found],
                hint=_hint(found),
            )
        return jtu.tree_map(_in_type_of, old, new)


def _fits(old: Any, new: Any) -> bool:
    if not is_array(old):
        return are_one(old, new)
    a, b = aval_of(old), aval_of(new)
    return is_array(new) and a.shape == b.shape and a.dtype == b.dtype


def _in_type_of(old: Any, new: Any) -> Any:
    # Weak types may change; but a strong type must stay strong, for a loop's carry.
    is_weak = is_array(new) and jax.typeof(new).weak_type and not jax.typeof(old).weak_type
    return jax.lax.convert_element_type(new, new.dtype) if is_weak else new


def _hint(found: Sequence[Any]) -> Sequence[str]:
    if found and all(each.of_dtypes for each in found):
        dtype = aval_of(found[0].old).dtype.name
        return ["cast what it returns:", f"new.astype(jnp.{dtype})"]
    if found and any(is_value(each.new) and not is_array(each.new) for each in found):
        return ["return an array of that shape:", "jnp.zeros_like(out)"]
    return ["to change nothing, return it:", "return out"]


# ---- the call


class _Options(NamedTuple):
    selectors: tuple[Selector, ...]
    inputs: bool


class _Intervened(Transformed, has_data=True):
    """A function under `intervene`; a pytree of it, of the other functions, and of the values."""

    __slots__ = ("fns", "values")

    options: _Options

    transform_name = "intervene"

    def __init__(self, fn: Any, options: _Options, fns: tuple[Any, ...], values: Any):
        super().__init__(fn, options)
        self.fns = fns
        self.values = values

    # With arrays in it, it equals itself alone.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and the others in it."""
        level, values = next_level(), self.values
        with surrounding() as ring_level:
            trees = [self.fn, *args, *kwargs.values()]
            trees, data, names = self._surrounded(trees, level, ring_level)
            fn, *rest = trees
            rest, named = rest[: len(args)], dict(zip(kwargs, rest[len(args) :], strict=True))
            labels: Sequence[Label] = ()
            supplied: list[Any] = []
            # While another plan is made, nothing is changed, and there is nothing to plan.
            if values is not None and not is_planned():
                plan = planned(fn, rest, named).at(level)
                _refuse_unknown(values, plan.names(), names)
                labels, supplied = plan.labels, [values.get(name) for name in plan.names()]
            out = call_supplied(fn, rest, named, labels, supplied, data)
            return released(out, ring_level)

    def _surrounded(
        self, trees: list[Any], level: int, ring_level: int
    ) -> tuple[list[Any], dict[Label, list[Any]], list[str]]:
        """The trees with rules around their Modules; the inputs of the rules; and the names."""
        wanted = {_path_of(name) for name in self.values or ()}
        data: dict[Label, list[Any]] = {}
        around: list[tuple[list[dict[Path, str]], Callable[[str], _Intervening]]] = []
        rule = By([*zip(self.options.selectors, self.fns, strict=True)])
        # All entries choose in the original trees.
        every = choose_first("intervene", rule, trees, _is_callable)
        for i, (chosen, (selector, fn)) in enumerate(zip(every, rule.items, strict=True)):
            if fn is None:
                continue
            arrays, structure = structure_of(*jtu.tree_flatten(fn))
            label = Label(level, f"arrays of the function for {selector!r}", (i,))
            if arrays:
                data[label] = arrays
            make = ft.partial(_Intervening, level, label, structure, inputs=self.options.inputs)
            around.append((chosen, lambda name, make=make: make(has_value=name in wanted)))
        for chosen, rule_for in around:
            trees = put_around(trees, chosen, rule_for, level=ring_level)
        names = [name for chosen, _ in around for one in chosen for name in one.values()]
        return trees, data, names


def _is_callable(node: Any) -> bool:
    return has_method(node, "__call__")


def _path_of(name: str) -> str:
    """Return the path of a Module in the name of a call: the name without `#2`."""
    path, mark, number = name.rpartition("#")
    return path if mark and number.isdigit() else name


def _refuse_unknown(values: Mapping[str, Any], calls: list[str], names: list[str]) -> None:
    unknown = [name for name in values if name not in calls]
    if unknown:
        raise ArgumentError(
            "intervene(values)",
            "names of calls of the Modules that by picks",
            f"{len(unknown)} unknown name{'s' * (len(unknown) > 1)}",
            at=unknown,
            hint=[f"by picks {', '.join(sorted(set(names))[:5])}; pass only their values:"]
            + [f"values={{{sorted(names)[0]!r}: seen[{sorted(names)[0]!r}]}}"] * bool(names),
        )


def _flatten(node: _Intervened) -> tuple[tuple[Any, ...], Any]:
    return (node.fn, node.fns, node.values), node.options


def _flatten_with_keys(node: _Intervened) -> tuple[tuple[Any, ...], Any]:
    keys = map(jtu.GetAttrKey, ("__wrapped__", "by", "values"))
    children, options = _flatten(node)
    return tuple(zip(keys, children, strict=True)), options


def _unflatten(options: Any, children: Any) -> _Intervened:
    fn, fns, values = children
    return _Intervened(fn, options, fns, values)


jtu.register_pytree_with_keys(_Intervened, _flatten_with_keys, _unflatten, _flatten)

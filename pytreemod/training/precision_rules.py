"""`with_precision`: a model whose chosen Modules store, and compute with, chosen dtypes.

The arrays of the model are cast once, to the dtype of the parameters. And the calls of each chosen
Module are wrapped (`transform.call_rules`), so that it, and all that is inside, runs with arrays
of the dtype of the computation: layers read that dtype, and need not know about it. Because the
casts are differentiated through, gradients have the dtype of the parameters.

A Module with a rule, and what is inside it, are a region. Where a region is entered, its arrays and
the arguments are cast, and where it is left, the result: to its output, or, inside of another
region, to the dtype in which that one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.reading import evaluate_each, is_computed
from pytreemod.state.tokens import is_token
from pytreemod.state.values import State
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
from pytreemod.tree.nodes import schema_of, with_children, with_new_containers
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract
from pytreemod.tree.prefixes import By, by, first_of
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.traces import context_value, trace_context
from pytreemod.typing import KeyPath, class_of, jtu

_T = TypeVar("_T")

_SHORT: dict[Any, str] = {"bf16": "bfloat16"} | {
    f"{f}{n}": f"float{n}" for f in ("f", "fp") for n in (16, 32, 64)
}


class Precision(Module):
    """Three dtypes: of the parameters, of the computation, and of the outputs.

    Write it as `Precision("float32", "bfloat16", "float32")`, or in
    [`with_precision`][pytreemod.with_precision] as a string: `"params=float32,compute=bfloat16"`,
    or one dtype for all three, `"bfloat16"`. Short names are `bf16`, `f16`, `f32` and `f64`.

    Fields:
        params: of the arrays in the model, and so of their gradients
        compute: of these arrays, and of arguments, while a method runs
        output: of the method's results

    Args:
        params: a floating dtype, or its name.
        compute: the same; `params` if None.
        output: the same; `compute` if None.

    Raises:
        ArgumentError: if one is not a floating dtype.

    Examples:
        >>> import pytreemod as pm
        >>> pm.Precision("f32", "bf16")
        Precision(compute='bfloat16', output='bfloat16')

    Source:
        The policies of jmp, https://github.com/google-deepmind/jmp.
    """

    params: str = field(static=True)
    compute: str = field(static=True)
    output: str = field(static=True)

    def __init__(self, params: Any = "float32", compute: Any = None, output: Any = None):
        self.params = _name_of(params)
        self.compute = self.params if compute is None else _name_of(compute)
        self.output = self.compute if output is None else _name_of(output)


def _name_of(dtype: Any) -> str:
    # JAX warns of 64 bits that it does not have.
    found = jnp.zeros((), _SHORT.get(dtype, dtype)).dtype
    if not jnp.issubdtype(found, jnp.floating):
        raise ArgumentError(f"with_precision: {describe(dtype)} is no floating dtype")
    return found.name


def _as_precision(spec: Any) -> Precision | None:
    if spec is None or isinstance(spec, Precision):
        return spec
    if not isinstance(spec, str) or "=" not in spec:
        return Precision(spec)
    pairs = [part.partition("=") for part in spec.split(",")]
    return Precision(**{role.strip(): name.strip() for role, _, name in pairs})


def with_precision(model: _T, precision: Any, methods: str | Sequence[str] = ()) -> _T:
    """Choose the dtypes in which Modules are stored, compute, and return their results.

    Works for any Module, ours or yours, unchanged. Choosing a Module includes everything inside
    it, except for Modules inside that are chosen themselves: the innermost wins, so that a
    `LayerNorm` may compute in float32 in the middle of bfloat16. In a
    [`Precision`][pytreemod.Precision],

    - `params` is the dtype to which the floating arrays are cast, immediately;
    - `compute` is the dtype to which these and the floating arrays in the arguments are cast when
      `__call__`, or another named method, is called;
    - `output` is the dtype to which the floating arrays in the result are cast. Inside another
      chosen Module it is the dtype in which that one computes. If a Module returns itself, as a net
      with its State does, its arrays are in `params` again, and the unchanged ones are the original
      arrays.

    Gradients are in `params`, because the stored arrays are differentiated. State (running
    statistics, for instance), keys, integers, complex numbers and fields declared as
    [`buffer`][pytreemod.buffer] are unchanged. A computed leaf is stored in `params`; its value is
    computed in that, and then cast. For a tied array, the path of the source decides how it is
    stored, and the Module that reads it how it is used. A part that you take out of a chosen Module
    computes in the dtype that it is stored in, unless it is chosen, too.

    A precision is configuration of the model, printed behind the Modules that have it. Transforms,
    `tree_at`, copies, pickles and files preserve it.

    **Laws.** `with_precision(with_precision(m, p), q)` equals `with_precision(m, q)`, if `p` stores
    arrays without loss. The casts in a compiled program are those of code written by hand.

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
        (dtype('float32'), ['bfloat16', 'bfloat16', 'bfloat16'])
        >>> model.layers[0].weight.dtype
        dtype('float32')

    Source:
        The policies of jmp, https://github.com/google-deepmind/jmp.
    """
    bare = rebuilt(with_new_containers(model), lambda node, path: _with_rule(node, None))
    if precision is None:
        return bare
    given = precision if isinstance(precision, By) else by({...: precision})
    items = [(selector, _as_precision(value)) for selector, value in given.items]
    rest = [value for selector, value in items if selector == _ALL]
    chosen = _chosen([item for item in items if item[0] != _ALL], bare)
    names = ("__call__", *([methods] if isinstance(methods, str) else methods))
    seen: set[str] = set()

    def visit(node: Any, path: KeyPath, want: Any, entered: Any) -> Any:
        """Cast the arrays of a tree to be stored, and put rules around methods, inside out."""
        if _has_floats(node):
            return node if want is None else _as_dtype(node, _stored(path, want, entered))
        if _is_left_alone(node):
            return node
        want = chosen.get(path, want)
        is_called = isinstance(node, Module) and not is_computed(node)
        found = [name for name in names if has_method(node, name)] if is_called else []
        seen.update(found)
        is_region = bool(found) and want is not _UNDECIDED and want != entered
        inside = want if is_region else entered
        node = _with_parts(node, lambda key, child: visit(child, (*path, key), want, inside))
        return _with_rule(node, _Casting(want), found) if is_region else node

    made = visit(bare, (), rest[0] if rest else _UNDECIDED, None)
    if {*names[1:]} - seen:
        raise SpecError(f"with_precision: no method is named {min({*names[1:]} - seen)!r}")
    return made


def _stored(path: KeyPath, want: Any, entered: Any) -> str:
    """Return the dtype in which an array is stored.

    Raises:
        SpecError: if it has none, or nothing would cast the array to that of the computation.
    """
    at = [path_text(path)]
    if want is _UNDECIDED:
        fact = "with_precision: an array without a precision"
        raise SpecError(fact, at=at, hint="pm.by({..., ...: None})")
    if want != entered and want.params != want.compute:
        hint = 'pm.with_precision(model, precision, methods="encode")'
        raise SpecError("with_precision: no method casts this array", at=at, hint=hint)
    return want.params


_ALL = as_selector(...)
_UNDECIDED: Any = object()


def precisions_of(node: Any) -> dict[str, Precision | None]:
    """Return the precisions of a Module, by the names of the methods; empty if there are none."""
    return {name: rule.precision for name, rule in rules_of(node, _Casting).items()}


def _chosen(items: list[tuple[Any, Any]], tree: Any) -> dict[KeyPath, Any]:
    """Return the values of the Modules that selectors pick, by path; the first selector wins."""
    where = "with_precision"
    (prefix, inner), places = path_unwrapped(tree), offered(tree, _is_offered)
    picks: list[list[bool]] = []
    for selector, _ in items:
        refuse_unmatched_modules(where, selector, places)
        picks.append(selector.pick(places, inner, None))
        if not any(picks[-1]):
            raise SpecError(explain_none(where, repr(selector), places))
    pairs = zip(places, first_of(picks, len(places)), strict=True)
    return {(*prefix, *p.path): items[i][1] for p, i in pairs if i is not None}


def _is_offered(node: Any) -> bool:
    return not is_token(node) and not is_computed(node)


# ---- around a call


class _Casting(CallRule):
    """Casts the arrays of a Module, its arguments and its results.

    Fields:
        precision: None for a Module without a precision inside others that have one
    """

    precision: Precision | None = field(static=True)

    def shown(self) -> str:
        """Return the precision, as `with_precision` takes it."""
        p = self.precision
        if p is None:
            return " in no precision"
        is_one = p.params == p.compute == p.output
        text = f"params={p.params},compute={p.compute},output={p.output}"
        return f" in {p.params if is_one else text}"

    def around(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Make the call, in the dtype of the computation."""
        p, around = self.precision, context_value(_REGION)
        if p is None:
            with trace_context(_REGION, None):
                out = call(module, *args, **kwargs)
            return out if around is None else _cast(out, around)
        entered = _with_parts(module, lambda _, child: _cast(child, p.compute))
        args, kwargs = _cast((args, kwargs), p.compute)
        with trace_context(_REGION, p.compute):
            out = call(entered, *args, **kwargs)
        return _cast(_with_stored(out, module, entered), around or p.output)


# The dtype in which the Module that is running computes; programs of others are traced apart.
_REGION = "precision"


def _with_rule(node: Any, rule: _Casting | None, methods: Sequence[str] = ()) -> Any:
    """Return a Module with this rule around methods, or around those that have one."""
    found = methods or rules_of(node, _Casting)
    rules = {} if rule is None else dict.fromkeys(found, rule)
    return with_rules(node, _Casting, rules) if found else node


def _cast(node: Any, dtype: str) -> Any:
    """Cast the floating arrays of a tree, except for Modules in it that have a precision."""
    if _has_floats(node):
        return _as_dtype(node, dtype)
    if _is_left_alone(node) or rules_of(node, _Casting):
        return node
    if is_computed(node):
        # The arrays that it is computed from may need more precision.
        return _cast(evaluate_each(node, class_of(node).__qualname__), dtype)
    return _with_parts(node, lambda _, child: _cast(child, dtype))


def _with_stored(out: Any, module: Any, entered: Any) -> Any:
    """Return a result with the stored arrays again in the Modules in it.

    A net with its State returns itself: casting its arrays once more would leave them rounded. New
    arrays of a Module with a precision are stored as that says.
    """
    # By identity: two arrays at different paths may be equal.
    leaves = (jtu.tree_leaves(one, is_leaf=_is_whole) for one in (module, entered))
    stored = {id(new): old for old, new in zip(*leaves, strict=True)}

    def restored(node: Any, is_part: bool, params: str | None) -> Any:
        if is_part and id(node) in stored:
            return stored[id(node)]
        if _has_floats(node):
            return node if params is None else _as_dtype(node, params)
        if _is_left_alone(node):
            return node
        for rule in rules_of(node, _Casting).values():
            params = rule.precision and rule.precision.params
        inside = is_part or isinstance(node, Module)
        return _with_parts(node, lambda _, child: restored(child, inside, params))

    return restored(out, False, None)


def _is_whole(node: Any) -> bool:
    return is_computed(node) or _is_left_alone(node)


# ---- arrays


def _is_left_alone(node: Any) -> bool:
    """Whether nothing inside is cast: parts of a State keep their first dtype, rules their own."""
    return is_token(node) or isinstance(node, State) or is_rules(node)


def _with_parts(node: Any, visit: Callable[[Any, Any], Any]) -> Any:
    """Apply `visit` to each key and child of a node; without its buffers.

    The class decides about buffers: a part of a model that is frozen by a role still computes in
    the same dtype.
    """
    schema = schema_of(node)

    def visited(key: Any, child: Any) -> Any:
        is_buffer = schema is not None and schema.role(key.name) == "buffer"
        return child if is_buffer else visit(key, child)

    return with_children(node, visited)


def _has_floats(leaf: Any) -> bool:
    return is_abstract(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _as_dtype(array: Any, dtype: str) -> Any:
    if array.dtype == jnp.dtype(dtype):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=jnp.dtype(dtype))
    return array.astype(dtype)

"""Derivatives that the user writes: custom rules for functions of any trees.

JAX's custom rules take lists of arrays. A call is divided into arrays and structure. The rule gets
trees that are assembled from JAX's arrays, and returns trees, whose derivatives are taken in order
(`tangents`). JAX traces function and rule separately, and both must return the same structure. The
structure of the first one that runs is stored, and compared with the other's (`_Agreement`).

The rule decides which arguments have a derivative. A derivative by anything else would be zero, and
wrong. It is refused during the trace, by path.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, DerivativeError, RuleError, warn
from pytreemod.transform.boundary.packing import pack, unpack
from pytreemod.transform.boundary.signatures import positional_names
from pytreemod.transform.boundary.sowing import call_tracked
from pytreemod.transform.boundary.wrapping import (
    Transformed,
    argument_name,
    check_callable,
    function_name,
)
from pytreemod.transform.derivatives.chosen_leaves import as_derivatives
from pytreemod.transform.derivatives.results import pair_of
from pytreemod.transform.derivatives.tangents import beside, is_zero
from pytreemod.transform.host.failures import raises_checks
from pytreemod.tree.differences import compare
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.typing import PyTree, jtu

# The options of these two are their rules. Each definition replaces them all, so programs
# compiled with other rules compare unequal and are not used again.


class _JvpRules(NamedTuple):
    def_jvp: Callable[..., Any] | None = None


class _VjpRules(NamedTuple):
    def_fwd: Callable[..., Any] | None = None
    def_bwd: Callable[..., Any] | None = None


def _define(custom: Transformed, name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    check_callable(f"{name} of {function_name(custom.fn)}", rule)
    # Replaced, not changed: they are part of the structure by which programs are found.
    custom.options = custom.options._replace(**{name: rule})
    return rule


def _rule(custom: Transformed, name: str, signature: str) -> Callable[..., Any]:
    """Return the rule of that name.

    Raises:
        RuleError: if it is not defined yet.
    """
    found = getattr(custom.options, name)
    if found is None:
        called = function_name(custom.fn)
        raise RuleError(
            f"{custom.transform_name} of {called}",
            f"{name} before the first call",
            "none",
            hint=["define the rule:", f"@{called}.{name}", f"def {signature}: ..."],
        )
    return found


# ---- older spellings, whose rules get zeros where ours get None


def _warn_of(custom: Transformed, older: str, newer: Sequence[str]) -> None:
    called = function_name(custom.fn)
    warn(
        DeprecationWarning,
        f"{custom.transform_name} of {called}",
        "the newer spelling of its rules",
        f"{older}, which is deprecated",
        hint=["write, with None instead of zeros:", *(s.format(called=called) for s in newer)],
    )


def _with_zeros(tree: PyTree, derivative: PyTree) -> PyTree:
    def fill(leaf: Any, value: Any) -> Any:
        return jnp.zeros_like(leaf) if value is None and is_inexact_array(leaf) else value

    return as_derivatives(jtu.tree_map(fill, tree, derivative), jtu.tree_structure(tree))


def _older_jvp(rule: Callable[..., Any], primals: Any, tangents: Any, **kwargs: Any) -> Any:
    return rule(primals, _with_zeros(primals, tangents), **kwargs)


def _older_forward(
    rule: Callable[..., Any], perturbed: PyTree, /, *args: Any, **kwargs: Any
) -> Any:
    out, residuals = rule(*args, **kwargs)
    return out, (out, residuals)


def _older_backward(
    rule: Callable[..., Any],
    saved: Any,
    grad_out: PyTree,
    perturbed: PyTree,
    /,
    *args: Any,
    **kwargs: Any,
) -> PyTree:
    out, residuals = saved
    return rule(residuals, _with_zeros(out, grad_out), *args, **kwargs)


class _Agreement:
    """The result on which a custom function and its rule must agree, without its arrays."""

    def __init__(self, where: str):
        self.where = where
        self.structure: Structure | None = None
        self.structs: list[Any] = []

    def pack(self, result: PyTree, tangents: Sequence[Any] = ()) -> dict[Any, list[Any]]:
        """Pack a result.

        Args:
            result: the value that the function or its rule returned.
            tangents: the tangents of its leaves, if any; a number with a tangent becomes an array.

        Raises:
            DerivativeError: if the result is not like an earlier one.
        """
        if tangents:
            leaves, treedef = jtu.tree_flatten(result)
            pairs = zip(leaves, tangents, strict=True)
            # A rule may return a number with a tangent, but JAX has tangents of arrays only.
            result = treedef.unflatten([x if t is None else _as_array(x) for x, t in pairs])
        arrays, structure = divide(result)
        structs = [jax.ShapeDtypeStruct(x.shape, jnp.result_type(x)) for x in arrays]
        if self.structure is None:
            # Whichever runs first: JAX may trace only the rule, or both.
            self.structure, self.structs = structure, structs
        elif self.structs != structs or not self.structure.matches(structure):
            found = compare(self.structure.assemble(self.structs), structure.assemble(structs))
            places = [each.line("result", "{1}, where the function has {0}") for each in found]
            raise DerivativeError(self.where, "the function's own result", "another", at=places)
        return pack(result)


def _as_array(value: Any) -> Any:
    # Outside compiled functions, JAX passes Python numbers unchanged.
    return value if is_array(value) else jnp.asarray(value)


def _paths(tree: PyTree, root: str) -> list[str]:
    """Return the paths of a tree of flags or tangents that have one."""
    found = jtu.tree_leaves_with_path(tree)
    return [path_text(path, root) for path, leaf in found if leaf is not None and leaf is not False]


def _refuse_derivatives(
    custom: Transformed, expected: str, of_fn: PyTree, by_name: dict[str, PyTree], hint: str
) -> None:
    """Raise the error for a derivative by something that must be constant, if there is one."""
    called = function_name(custom.fn)
    locs = _paths(of_fn, called)
    locs += [loc for name, flags in by_name.items() for loc in _paths(flags, name)]
    if locs:
        where, got = f"{custom.transform_name} of {called}", "other derivatives"
        hints = [f"{hint}, or stop its gradient:", "jax.lax.stop_gradient(x)"]
        raise DerivativeError(where, expected, got, at=locs, hint=hints)


class _CustomJvp(Transformed):
    __slots__ = ()

    transform_name = "filter_custom_jvp"

    def def_jvp(self, fn_jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Define the derivative: `fn_jvp(primals, tangents, **kwargs) -> (out, tangent_out)`.

        `primals` is the tuple of positional arguments. `tangents` has the same structure, with None
        for zeros and for everything that is not a floating array. `tangent_out` has the structure
        of `out`, with None in the same sense; None may replace a whole subtree.
        """
        return _define(self, "def_jvp", fn_jvp)

    def defjvp(self, fn_jvp: Callable[..., Any]) -> None:
        """Older spelling of `def_jvp`: every floating array has a tangent, perhaps of zeros."""
        check_callable(f"defjvp of {function_name(self.fn)}", fn_jvp, "fn_jvp")
        _warn_of(self, "defjvp", ["@{called}.def_jvp", "def fn_jvp(primals, tangents): ..."])
        self.def_jvp(ft.partial(_older_jvp, fn_jvp))

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        rule = _rule(self, "def_jvp", "rule(primals, tangents)")
        arrays, structure = divide((self.fn, args, kwargs))
        agreement = _Agreement(f"def_jvp of {function_name(self.fn)}")

        def run(values: list[Any]) -> Any:
            return agreement.pack(call_tracked(*structure.assemble(values)))

        def run_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            _, args, kwargs = structure.assemble([_as_array(x) for x in primals[0]])
            given = [None if is_zero(t) else _as_array(t) for t in tangents[0]]
            tangents = as_derivatives(structure.place(given), structure.treedef)
            of_fn, of_args, of_kwargs = tangents
            expected = "derivatives by positional arguments only"
            _refuse_derivatives(self, expected, of_fn, of_kwargs, "pass it by position")
            result = rule(args, of_args, **kwargs)
            out, tangent_out = pair_of(
                result, agreement.where, "out, tangent_out", error=DerivativeError
            )
            return _with_tangents(agreement, out, tangent_out)

        run.__name__ = run.__qualname__ = function_name(self.fn)
        custom = jax.custom_jvp(run)
        custom.defjvp(run_rule, symbolic_zeros=True)
        return unpack(custom(arrays))


def _with_tangents(agreement: _Agreement, out: PyTree, tangent_out: PyTree) -> tuple[Any, Any]:
    """Return the result of a rule as JAX wants it: packed, and a tangent for each array."""
    expected, root = "a tangent like out", "tangent_out"
    found = beside(out, tangent_out, where=agreement.where, expected=expected, root=root)
    packed = agreement.pack(out, found)
    ((plan, arrays),) = packed.items()
    leaves = jtu.tree_leaves(out)
    tangents = [t for x, t in zip(leaves, found, strict=True) if t is not None or is_array(x)]
    pairs = zip(arrays, tangents, strict=True)
    return packed, {plan: [_zero(x, symbolic_zeros=True) if t is None else t for x, t in pairs]}


_zero: Any = jax.custom_derivatives.zero_from_primal  # pyright: ignore[reportUnknownVariableType]  (typed in part)


class _CustomVjp(Transformed):
    __slots__ = ()

    transform_name = "filter_custom_vjp"

    def def_fwd(self, fn_fwd: Callable[..., Any]) -> Callable[..., Any]:
        """Define the forward pass.

        `fn_fwd(perturbed, vjp_arg, *args, **kwargs) -> (out, residuals)`. `perturbed` has the
        structure of `vjp_arg`, with True where a gradient is needed. `residuals` is any tree, for
        the backward pass.
        """
        return _define(self, "def_fwd", fn_fwd)

    def def_bwd(self, fn_bwd: Callable[..., Any]) -> Callable[..., Any]:
        """Define the backward pass.

        `fn_bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs) -> grad_vjp_arg`.
        `grad_out` has the structure of the result, with None for zeros and for everything that is
        not a floating array. The rule returns a tree with the structure of `vjp_arg`, with None in
        the same sense.
        """
        return _define(self, "def_bwd", fn_bwd)

    def defvjp(self, fn_fwd: Callable[..., Any], fn_bwd: Callable[..., Any]) -> None:
        """Older spelling of `def_fwd` and `def_bwd`, both at once.

        The rules do not get `perturbed`, and every floating array of the result has a gradient,
        perhaps of zeros: `fn_fwd(vjp_arg, *args, **kwargs) -> (out, residuals)`,
        `fn_bwd(residuals, grad_out, vjp_arg, *args, **kwargs) -> grad_vjp_arg`.
        """
        for argument, rule in (("fn_fwd", fn_fwd), ("fn_bwd", fn_bwd)):
            check_callable(f"defvjp of {function_name(self.fn)}", rule, argument)
        newer = [
            "@{called}.def_fwd",
            "def fn_fwd(perturbed, vjp_arg, *args): ...",
            "@{called}.def_bwd",
            "def fn_bwd(residuals, grad_out, perturbed, vjp_arg, *args): ...",
        ]
        _warn_of(self, "defvjp", newer)
        self.def_fwd(ft.partial(_older_forward, fn_fwd))
        self.def_bwd(ft.partial(_older_backward, fn_bwd))

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        forward = _rule(self, "def_fwd", "fwd(perturbed, vjp_arg, *args)")
        backward = _rule(self, "def_bwd", "bwd(residuals, grad_out, perturbed, vjp_arg, *args)")
        if not args:
            self._refuse_no_argument(kwargs)
        # Two lists, because JAX reports for each whether it is differentiated; the second must not
        # be.
        first, vjp_arg = divide(args[0])
        others, rest = divide((self.fn, args[1:], kwargs))
        call = _VjpCall(self, vjp_arg, rest, forward, backward)

        def run(first: list[Any], others: list[Any]) -> Any:
            return call.run(first, others)

        run.__name__ = run.__qualname__ = function_name(self.fn)
        custom: Any = jax.custom_vjp(run)  # pyright: ignore[reportUnknownVariableType]  (typed in part)
        custom.defvjp(call.run_forward, call.run_backward, symbolic_zeros=True)
        return unpack(custom(first, others))

    def _refuse_no_argument(self, kwargs: dict[str, Any]) -> None:
        name = argument_name(positional_names(self.fn), 0)
        called = function_name(self.fn)
        raise ArgumentError(
            f"filter_custom_vjp of {called}",
            f"argument 0 ({name}), which is differentiated, by position",
            f"{name!r} by keyword" if name in kwargs else "no positional arguments",
            hint=["pass it first, without its name:", f"{called}({name}, ...)"],
        )


class _Pass:
    """The part of a forward pass's residuals that is not arrays. Compared by identity."""

    __slots__ = ("perturbed", "residuals")

    def __init__(self, perturbed: PyTree, residuals: Structure):
        self.perturbed = perturbed
        self.residuals = residuals


class _VjpCall:
    """One call of a function with a custom backward pass, as JAX wants it: lists of arrays."""

    def __init__(
        self,
        custom: _CustomVjp,
        vjp_arg: Structure,
        rest: Structure,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
    ):
        self.custom = custom
        self.vjp_arg = vjp_arg
        self.rest = rest
        self.forward = forward
        self.backward = backward
        self.agreement = _Agreement(f"def_fwd of {function_name(custom.fn)}")

    def run(self, first: list[Any], others: list[Any]) -> Any:
        """Return the function itself."""
        fn, args, kwargs = self.rest.assemble(others)
        args = self.vjp_arg.assemble(first), *args
        return self.agreement.pack(call_tracked(fn, args, kwargs))

    def run_forward(self, first: list[Any], others: list[Any]) -> tuple[Any, Any]:
        """Return the function, with the residuals for the backward pass."""
        firsts = [_as_array(x.value) for x in first]
        seconds = [_as_array(x.value) for x in others]
        self._refuse_others(_perturbed(others, seconds))
        flags = self.vjp_arg.place(_perturbed(first, firsts), rest=False)
        perturbed = as_derivatives(flags, self.vjp_arg.treedef)
        vjp_arg = self.vjp_arg.assemble(firsts)
        _, args, kwargs = self.rest.assemble(seconds)
        result = self.forward(perturbed, vjp_arg, *args, **kwargs)
        out, residuals = pair_of(
            result, self.agreement.where, "out, residuals", error=DerivativeError
        )
        packed = self.agreement.pack(out)
        arrays, structure = divide(residuals)
        # As the key of a dict, it is part of JAX's record of this forward pass. There may be
        # several passes, each with other residuals.
        return packed, {_Pass(perturbed, structure): (firsts, seconds, arrays)}

    def run_backward(self, residue: Any, packed: Any) -> tuple[Any, Any]:
        """Return the cotangents of the first argument, from those of the packed result."""
        ((forward, (firsts, seconds, arrays)),) = residue.items()
        (cotangents,) = packed.values()
        structure = self.agreement.structure
        assert structure is not None, "the forward pass comes first"
        given = [None if is_zero(ct) else ct for ct in cotangents]
        grad_out = as_derivatives(structure.place(given), structure.treedef)
        vjp_arg = self.vjp_arg.assemble(firsts)
        _, args, kwargs = self.rest.assemble(seconds)
        residuals = forward.residuals.assemble(arrays)
        gradient = self.backward(residuals, grad_out, forward.perturbed, vjp_arg, *args, **kwargs)
        found = beside(
            vjp_arg,
            gradient,
            where=f"def_bwd of {function_name(self.custom.fn)}",
            expected="a gradient like the first argument",
            root="gradient",
            strict=False,
        )
        # None for all others, which JAX treats as zeros: the forward pass has refused them.
        return [found[i] for i in self.vjp_arg.positions or ()], None

    def _refuse_others(self, flags: list[bool]) -> None:
        of_fn, of_args, of_kwargs = self.rest.place(flags)
        names = positional_names(self.custom.fn)
        by_name = {argument_name(names, i): flag for i, flag in enumerate(of_args, start=1)}
        expected = f"derivatives by its first argument ({argument_name(names, 0)}) only"
        hint = "put it into the first argument"
        _refuse_derivatives(self.custom, expected, of_fn, by_name | of_kwargs, hint)


def _perturbed(primals: list[Any], values: list[Any]) -> list[bool]:
    """Return which of the values that JAX passes to a forward pass need a gradient."""
    pairs = zip(primals, values, strict=True)
    return [bool(primal.perturbed) and is_inexact_array(value) for primal, value in pairs]


def filter_custom_jvp(fn: Callable[..., Any]) -> Any:
    """Return a function with a derivative of your own: `jax.custom_jvp` for functions of any trees.

    Positional arguments can be differentiated. Keywords, and the arrays of `fn` itself, are
    constant.

    **Law.** A call returns the result of `fn`; its derivatives are those of the rule.

    Args:
        fn: the function.

    Returns:
        A function of the same signature, with a method `def_jvp` that takes the rule:
        `rule(primals, tangents, **kwargs) -> (out, tangent_out)`. A tangent is None if it is zero
        or if its primal is not a floating array, both in the arguments and in the result of the
        rule.

    Raises:
        ArgumentError: if `fn` is not callable.
        RuleError: if it is called before the rule is defined.
        DerivativeError: if the rule does not return a pair, if a tangent has another structure,
            shape or dtype than its primal, or if a keyword is differentiated. The error names
            the paths.

    Examples:
        >>> @filter_custom_jvp
        ... def power(x, n):
        ...     return x**n
        >>> @power.def_jvp
        ... def power_jvp(primals, tangents):
        ...     (x, n), (dx, _) = primals, tangents
        ...     return x**n, None if dx is None else 100.0 * dx
        >>> jax.grad(power)(2.0, 3)
        Array(100., dtype=float32, weak_type=True)
    """
    check_callable("filter_custom_jvp", fn)
    return _CustomJvp(fn, _JvpRules())


def filter_custom_vjp(fn: Callable[..., Any]) -> Any:
    """A function with a backward pass of your own: `jax.custom_vjp` for functions of any trees.

    The first argument is differentiated; everything else is constant. To differentiate several
    values, put them into one tuple.

    Two methods of the result take the rules:

    - `def_fwd`: `rule(perturbed, vjp_arg, *args, **kwargs) -> (out, residuals)`, where `perturbed`
      is a tree like `vjp_arg` that says which leaves need a gradient;
    - `def_bwd`: `rule(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)`, which returns the
      gradient: a tree like `vjp_arg`.

    A gradient is None if it is zero or if its leaf is not a floating array, both in the arguments
    and in the results of the rules. `residuals` may be any tree.

    **Law.** A call returns the result of `fn`; its gradients are those of the two rules.

    Args:
        fn: the function, `fn(vjp_arg, *args, **kwargs)`.

    Returns:
        A function of the same signature, with the methods `def_fwd` and `def_bwd`.

    Raises:
        ArgumentError: if `fn` is not callable, or is called without a positional argument.
        RuleError: if it is called before both rules are defined.
        DerivativeError: if `def_fwd` does not return a pair, if the gradient has another structure,
            shape or dtype than the first argument, or if anything except the first argument is
            differentiated. The error names the paths.

    Examples:
        >>> @filter_custom_vjp
        ... def clipped(x, limit):
        ...     return x
        >>> @clipped.def_fwd
        ... def clipped_fwd(perturbed, x, limit):
        ...     return x, None
        >>> @clipped.def_bwd
        ... def clipped_bwd(residuals, grad_out, perturbed, x, limit):
        ...     return jnp.clip(grad_out, -limit, limit)
        >>> jax.grad(lambda x: 10.0 * clipped(x, 1.0))(3.0)
        Array(1., dtype=float32, weak_type=True)
    """
    check_callable("filter_custom_vjp", fn)
    return _CustomVjp(fn, _VjpRules())

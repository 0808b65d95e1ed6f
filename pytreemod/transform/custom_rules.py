"""Derivatives that the user writes: custom rules for functions of any trees.

A call is divided into arrays and structure. The rule gets trees that are assembled from JAX's
arrays, and returns trees, whose derivatives are taken in order. The rule decides which arguments
have a derivative. A derivative by anything else would be zero, and wrong: it is refused during the
trace, by path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, StateError
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.transform.chosen_leaves import as_derivatives
from pytreemod.transform.gradients import pair_of
from pytreemod.transform.packing import pack, unpack
from pytreemod.transform.sowing import tracked
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.tree.tangents import is_zero, match_derivative
from pytreemod.typing import PyTree, jtu, untyped_jax


class _Rules(NamedTuple):
    def_jvp: Callable[..., Any] | None = None
    def_fwd: Callable[..., Any] | None = None
    def_bwd: Callable[..., Any] | None = None


class _Custom(Transformed):
    __slots__ = ()

    options: _Rules

    def _define(self, name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        check_callable(f"{name} of {function_name(self.fn)}", rule)
        # Replaced, not changed: they are part of the structure by which programs are found.
        self.options = self.options._replace(**{name: rule})
        return rule

    def _rule(self, name: str) -> Callable[..., Any]:
        found = getattr(self.options, name)
        if found is None:
            called = function_name(self.fn)
            fact = f"{self.transform_name} of {called}: there is no rule yet"
            raise StateError(fact, hint=f"@{called}.{name}")
        return found

    def _refuse(self, flags: dict[str, PyTree]) -> None:
        """Refuse a derivative by something that must be constant: it would be zero, and wrong."""
        at = [
            path_text(path, name)
            for name, tree in flags.items()
            for path, flag in jtu.tree_leaves_with_path(tree)
            if flag is not None and flag is not False
        ]
        if at:
            where = f"{self.transform_name} of {function_name(self.fn)}"
            fact = f"{where}: there is no rule for a derivative by this"
            raise ArgumentError(fact, at=at, hint="jax.lax.stop_gradient(x)")


def _as_array(value: Any) -> Any:
    # Outside compiled functions, JAX passes Python numbers unchanged.
    return value if is_array(value) else jnp.asarray(value)


class _CustomJvp(_Custom):
    __slots__ = ()

    transform_name = "filter_custom_jvp"

    def def_jvp(self, fn_jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Define the derivative: `fn_jvp(primals, tangents, **kwargs) -> (out, tangent_out)`.

        `primals` is the tuple of positional arguments. `tangents` has the same structure, with None
        for zeros and for everything that is not a floating array. `tangent_out` has the structure
        of `out`, with None in the same sense; None may replace a whole subtree.
        """
        return self._define("def_jvp", fn_jvp)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        rule, name = self._rule("def_jvp"), function_name(self.fn)
        arrays, structure = divide((self.fn, args, kwargs))

        def run(values: list[Any]) -> Any:
            fn, args, kwargs = structure.assemble(values)
            return pack(tracked(fn)(*args, **kwargs))

        def run_rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            _, args, kwargs = structure.assemble([_as_array(x) for x in primals[0]])
            given = [None if is_zero(t) else _as_array(t) for t in tangents[0]]
            of_fn, of_args, of_kwargs = as_derivatives(structure.place(given))
            self._refuse({name: of_fn, **of_kwargs})
            where = f"def_jvp of {name}"
            out, tangent_out = pair_of(rule(args, of_args, **kwargs), where, "out, tangent_out")
            found = match_derivative(out, tangent_out, where, "tangent_out")
            leaves, treedef = jtu.tree_flatten(out)
            pairs = list(zip(leaves, found, strict=True))
            # A rule may return a number with a tangent, but JAX has tangents of arrays only.
            out = treedef.unflatten([x if t is None else _as_array(x) for x, t in pairs])
            packed = pack(out)
            ((plan, arrays),) = packed.items()
            tangents = [t for x, t in pairs if t is not None or is_array(x)]
            return packed, {plan: list(map(_tangent, arrays, tangents))}

        run.__name__ = run.__qualname__ = name
        custom: Any = jax.custom_jvp(run)
        custom.defjvp(run_rule, symbolic_zeros=True)
        return unpack(custom(arrays))


def _tangent(array: Any, tangent: Any) -> Any:
    if tangent is not None:
        return _as_array(tangent)
    return untyped_jax.custom_derivatives.zero_from_primal(array, symbolic_zeros=True)


class _Saved:
    """What a forward pass stores beside arrays: part of JAX's record, as the key of a dict."""

    def __init__(self, out: Structure, perturbed: PyTree, residuals: Structure):
        self.out, self.perturbed, self.residuals = out, perturbed, residuals


class _CustomVjp(_Custom):
    __slots__ = ()

    transform_name = "filter_custom_vjp"

    def def_fwd(self, fn_fwd: Callable[..., Any]) -> Callable[..., Any]:
        """Define the forward pass.

        `fn_fwd(perturbed, vjp_arg, *args, **kwargs) -> (out, residuals)`. `perturbed` has the
        structure of `vjp_arg`, with True where a gradient is needed. `residuals` is any tree, for
        the backward pass.
        """
        return self._define("def_fwd", fn_fwd)

    def def_bwd(self, fn_bwd: Callable[..., Any]) -> Callable[..., Any]:
        """Define the backward pass.

        `fn_bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs) -> grad_vjp_arg`.
        `grad_out` has the structure of the result, with None for zeros and for everything that is
        not a floating array. The rule returns a tree with the structure of `vjp_arg`, with None in
        the same sense.
        """
        return self._define("def_bwd", fn_bwd)

    def __call__(self, vjp_arg: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        forward, backward = self._rule("def_fwd"), self._rule("def_bwd")
        name, parameters = function_name(self.fn), Parameters.of(self.fn)
        # Two lists, because JAX reports for each whether it is differentiated; only the first may.
        first, own = divide(vjp_arg)
        others, rest = divide((self.fn, args, kwargs))

        def run(first: list[Any], others: list[Any]) -> Any:
            fn, args, kwargs = rest.assemble(others)
            return pack(tracked(fn)(own.assemble(first), *args, **kwargs))

        def run_forward(first: list[Any], others: list[Any]) -> Any:
            values, seconds = ([_as_array(x.value) for x in xs] for xs in (first, others))
            of_fn, of_args, of_kwargs = rest.place(_perturbed(others, seconds))
            by_name = {parameters.name(i): flags for i, flags in enumerate(of_args, 1)}
            self._refuse({name: of_fn, **by_name, **of_kwargs})
            flags = own.place(_perturbed(first, values), rest=False)
            perturbed = as_derivatives(flags)
            _, args, kwargs = rest.assemble(seconds)
            result = forward(perturbed, own.assemble(values), *args, **kwargs)
            out, residuals = pair_of(result, f"def_fwd of {name}", "out, residuals")
            arrays, structure = divide(residuals)
            saved = _Saved(divide(out)[1], perturbed, structure)
            return pack(out), {saved: (values, seconds, arrays)}

        def run_backward(stored: Any, packed: Any) -> Any:
            ((saved, (values, seconds, arrays)),) = stored.items()
            (cotangents,) = packed.values()
            given = [None if is_zero(cotangent) else cotangent for cotangent in cotangents]
            grad_out = as_derivatives(saved.out.place(given))
            vjp_arg, residuals = own.assemble(values), saved.residuals.assemble(arrays)
            _, args, kwargs = rest.assemble(seconds)
            gradient = backward(residuals, grad_out, saved.perturbed, vjp_arg, *args, **kwargs)
            where = f"def_bwd of {name}"
            found = match_derivative(vjp_arg, gradient, where, "gradient", strict=False)
            # None for all others, which JAX treats as zeros: the forward pass has refused them.
            return [found[i] for i in own.positions or ()], None

        run.__name__ = run.__qualname__ = name
        custom: Any = untyped_jax.custom_vjp(run)
        custom.defvjp(run_forward, run_backward, symbolic_zeros=True)
        return unpack(custom(first, others))


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
        ArgumentError: if `fn` is not callable, the rule does not return a pair, or a keyword is
            differentiated.
        StateError: if it is called before the rule is defined.
        StructureError: if a tangent has another structure, shape or dtype than its primal; the
            error names the paths.

    Examples:
        >>> import jax
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
    return _CustomJvp(fn, _Rules())


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
        ArgumentError: if `fn` is not callable, `def_fwd` does not return a pair, or anything
            except the first argument is differentiated.
        StateError: if it is called before both rules are defined.
        StructureError: if the gradient has another structure, shape or dtype than the first
            argument; the error names the paths.

    Examples:
        >>> import jax, jax.numpy as jnp
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
    return _CustomVjp(fn, _Rules())

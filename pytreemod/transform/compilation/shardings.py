"""Shardings of the arguments and results of a jitted function: `in_shardings`, `out_shardings`.

`jax.jit` needs a tree of shardings for the arguments. The structure of a call gives this tree. It
also needs one for the result, whose structure is unknown before the trace. The result is therefore
returned in groups, one for each sharding that the spec can name (see `packing`). So the function is
traced once, and nothing is added to its program. Only the result of a *function* in the spec is
unknown beforehand. It becomes a sharding constraint at the end of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.boundary.packing import Grouped, group, pack
from pytreemod.transform.boundary.sowing import WithCollected
from pytreemod.transform.compilation.donation import count_arrays
from pytreemod.transform.compilation.placements import (
    PLACEMENTS,
    SpecOption,
    as_sharding,
    check_placements,
    constrain,
    convert_values,
    explain_placements,
    is_function,
    is_placement,
    placement_terms,
    spec_text,
    stops,
)
from pytreemod.transform.interception.argument_specs import (
    Assigned,
    Terms,
    assign,
    assign_arguments,
    named_arguments,
    values_in,
)
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By
from pytreemod.typing import PyTree, Tracer, jtu

_IN = "filter_jit(in_shardings)"
_OUT = "filter_jit(out_shardings)"
_TERMS = Terms(_IN, stops, None, "in_shardings", "sharding", "keeps its sharding")


class ArgumentPlacements(SpecOption):
    """The shardings of the arguments of a jitted function."""

    __slots__ = ()

    @property
    def is_structural(self) -> bool:
        """Whether its rules give the same for all calls with one key (see `Selector`)."""
        rules = [x for x in jtu.tree_leaves(self.spec, is_leaf=stops) if isinstance(x, By)]
        return all(selector.is_structural() for rule in rules for selector in rule.selectors)

    def assign(
        self,
        names: tuple[str, ...],
        known: Collection[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Assigned]:
        """Return the value of the spec for each array of a call, in order.

        Raises:
            SpecError, ArgumentError: if the spec does not fit the arguments.
        """
        arguments = named_arguments(names, args, kwargs)
        return assign_arguments(self.spec, arguments, len(args), known, _TERMS)

    def explain(self, assigned: Sequence[Assigned], error: Exception) -> None:
        """Raise a better error if an argument cannot have its sharding."""
        converted = convert_values(assigned, as_sharding, _IN, PLACEMENTS)
        explain_placements(converted, _IN, error)
        elsewhere = [
            f"{place}: {_sharding_text(array.sharding)}, to be {_sharding_text(value)}"
            for place, array, value in converted
            if _is_elsewhere(array, value)
        ]
        if elsewhere and "Sharding passed to" in str(error):
            raise ArgumentError(
                _IN,
                "arguments that are not on other devices",
                f"{len(elsewhere)} that are",
                at=elsewhere,
                hint=["move them first:", "x = pm.filter_shard(x, sharding)"],
            ) from error


def _is_elsewhere(array: Any, value: Any) -> bool:
    # An array that is not committed moves wherever the program needs it.
    if value is None or isinstance(array, Tracer) or not getattr(array, "committed", False):
        return False
    if isinstance(value, PartitionSpec):
        if not isinstance(array.sharding, NamedSharding):
            return True
        value = NamedSharding(array.sharding.mesh, value)
    sharding = getattr(value, "sharding", value)
    return not sharding.is_equivalent_to(array.sharding, array.ndim)


def _sharding_text(sharding: Any) -> str:
    spec = sharding if isinstance(sharding, PartitionSpec) else getattr(sharding, "spec", None)
    return describe(sharding) if spec is None else spec_text(spec)


def argument_shardings(assigned: Sequence[Assigned], arrays: Sequence[Any]) -> list[Any]:
    """The shardings of a call's arrays; functions in the spec are called with these arrays."""
    asked = [Assigned(a.place, array, a.value) for a, array in zip(assigned, arrays, strict=True)]
    return [value for _, _, value in convert_values(asked, as_sharding, _IN, PLACEMENTS)]


class Asking:
    """A jitted function whose `in_shardings` depend on its arrays: each call evaluates them.

    One key finds it for any shapes, so it has one function of JAX for each set of shardings.
    """

    def __init__(
        self, jit: Callable[[Any], Any], shardings_of: Callable[[tuple[list[Any], ...]], Any]
    ):
        self.jit = jit
        self.shardings_of = shardings_of
        self.jitted: dict[Any, Any] = {}

    def find(self, arguments: tuple[list[Any], ...]) -> Any:
        """Return the function for these arrays."""
        shardings = self.shardings_of(arguments)
        # JAX needs the shardings when it gets the function, not when the function is called.
        token = tuple(tuple[Any, ...](some) for some in shardings)
        if token not in self.jitted:
            self.jitted[token] = self.jit(shardings)
        return self.jitted[token]

    def __call__(self, *arguments: list[Any]) -> Any:
        """Call the function, as `jax.jit`'s does."""
        return self.find(arguments)(*arguments)

    def lower(self, *arguments: list[Any]) -> Any:
        """Lower the function, as `jax.jit`'s does."""
        return self.find(arguments).lower(*arguments)

    def trace(self, *arguments: list[Any]) -> Any:
        """Trace the function, as `jax.jit`'s does."""
        return self.find(arguments).trace(*arguments)

    def eval_shape(self, *arguments: list[Any]) -> Any:
        """Return the shapes of the result, as `jax.jit`'s gives them."""
        return self.find(arguments).eval_shape(*arguments)


class ResultPlacements(SpecOption):
    """The shardings of the results of a jitted function."""

    __slots__ = ("prefix", "treatments")

    def __init__(self, spec: Any):
        super().__init__(spec)
        self.treatments: list[Any] | None = None
        if is_placement(spec):
            self.prefix = as_sharding(spec)
            return
        known = [value for value in values_in(spec, stops) if is_placement(value)]
        self.treatments = [None, *(as_sharding(value) for value in known if value is not None)]
        self.prefix = Grouped(None, self.treatments)

    def pack(self, result: PyTree) -> Any:
        """Pack a traced result in the groups of `prefix`.

        Raises:
            ShapeError, SpecError: if the spec does not fit the result.
        """
        own = result.result if type(result) is WithCollected else result
        assigned = assign(self.spec, own, "result", placement_terms(_OUT))
        converted = convert_values(assigned, as_sharding, _OUT, PLACEMENTS)
        check_placements(converted, _OUT)
        if self.treatments is None:
            # One sharding for the entire result applies to captured values, too.
            return pack(result)
        values: list[Any] = [value for _, _, value in converted]
        if type(result) is WithCollected:
            values += [None] * count_arrays(result.collected)
        late = [value not in self.treatments for value in values]
        if any(late):
            leaves, treedef = jtu.tree_flatten(result)
            asked = iter(zip(values, late, strict=True))
            # JAX did not get these: they keep their shardings, and are constrained inside the
            # program.
            result = treedef.unflatten(
                [_constrained(x, asked) if is_array(x) else x for x in leaves]
            )
        positions = [
            0 if n else self.treatments.index(v) for v, n in zip(values, late, strict=True)
        ]
        return group(result, positions, len(self.treatments))


def _constrained(array: Any, asked: Any) -> Any:
    value, late = next(asked)
    return constrain(array, value) if late else array


def has_functions(assigned: Sequence[Assigned]) -> bool:
    """Whether a spec contains functions, which must be called with each array."""
    return any(is_function(value) for _, _, value in assigned)

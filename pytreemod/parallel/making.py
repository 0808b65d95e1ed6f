"""`make_sharded`: a model that is made in parts, each on its device.

A model too large for the memory of one device cannot be made first and split afterwards. So its
constructor is traced for shapes and names, and the rules give the sharding of each leaf. Then the
constructor is compiled with these shardings for its results: each device computes its part of each
array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from pytreemod.errors import ArgumentError, describe
from pytreemod.parallel.tree_specs import shardings_for
from pytreemod.transform.boundary.wrapping import check_callable, function_name
from pytreemod.transform.compilation.abstract_calls import filter_make_jaxpr
from pytreemod.transform.compilation.axis_rules import check_is_mesh, mesh_axes
from pytreemod.transform.compilation.jit import filter_jit
from pytreemod.transform.compilation.stages import Lowered
from pytreemod.tree.partitioning import combine
from pytreemod.tree.paths import path_text, step_name
from pytreemod.tree.predicates import is_abstract
from pytreemod.tree.traces import is_tracing
from pytreemod.typing import PyTree, Tracer, jtu

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ShardedMaker(Generic[_P, _T]):
    """A function that makes a model in parts: the result of `make_sharded`."""

    def __init__(self, make: Callable[_P, _T], mesh: Mesh | AbstractMesh, rules: Any):
        self.make, self.mesh, self.rules = make, mesh, rules

    def __repr__(self) -> str:
        return f"<make_sharded of {function_name(self.make)}>"

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Make the model.

        Raises:
            ArgumentError: if the mesh is abstract, or an argument is on other devices.
        """
        self._check_devices(args, kwargs)
        return self._compiled(args, kwargs)(*args, **kwargs)

    def lower(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace and lower for these arguments, without running; as `filter_jit(make).lower`."""
        return self._compiled(args, kwargs).lower(*args, **kwargs)

    def eval_shape(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The model with a `jax.ShapeDtypeStruct` for each array, including its sharding."""
        model, where = self._described(args, kwargs)

        def with_sharding(leaf: Any, sharding: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            weak = bool(leaf.weak_type)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

        return jtu.tree_map(with_sharding, model, where)

    def _compiled(self, args: Any, kwargs: Any) -> Any:
        where = self._described(args, kwargs)[1]
        # Compiled once: it is found by `make`, the shardings and the options, by value.
        return filter_jit(self.make, out_shardings=where, **self._options())

    def _options(self) -> dict[str, Any]:
        # By default the compiler for the CPU starts all leaves at once. The temporaries of twelve
        # layers were 14 shards; with these options they are 3. Inside a larger program JAX allows
        # no options.
        if is_tracing() or isinstance(self.mesh, AbstractMesh):
            return {}
        is_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return {"compiler_options": _ONE_BY_ONE} if is_cpu else {}

    def _check_devices(self, args: Any, kwargs: Any) -> None:
        name = f"make_sharded({function_name(self.make)})"
        if is_tracing():
            return
        if isinstance(self.mesh, AbstractMesh):
            hint = ["look at its shapes and shardings:", "make.eval_shape(...)"]
            raise ArgumentError(name, "a mesh of devices", "an abstract one", hint=hint)
        devices = {*self.mesh.devices.flat}
        leaves = jtu.tree_leaves_with_path((args, kwargs))
        elsewhere = [
            f"{path_text(path[2:], _argument(path))}: {describe(leaf)}"
            for path, leaf in leaves
            if isinstance(leaf, jax.Array) and leaf.committed and leaf.devices() != devices
        ]
        if elsewhere:
            raise ArgumentError(
                name,
                "arguments that were put on no other devices",
                f"{len(elsewhere)} that were",
                at=elsewhere,
                hint=["put them on the mesh:", "jax.device_put(key, NamedSharding(mesh, P()))"],
            )

    def _described(self, args: Any, kwargs: Any) -> tuple[Any, PyTree]:
        """The model with shapes for arrays, and its shardings."""
        try:
            jaxpr, arrays, rest = filter_make_jaxpr(self.make)(*args, **kwargs)
        except _READING as error:
            raise ArgumentError(
                f"make_sharded({function_name(self.make)})",
                "a constructor that reads no values of arrays",
                "one that does: they are not known yet where it is traced",
                hint=[
                    "give it what it reads as numbers, not as an array, or make the model first:",
                    "pm.filter_shard(model, pm.shardings(model, mesh, rules))",
                ],
            ) from error
        model = combine(arrays, rest)
        where = shardings_for("make_sharded", model, self.mesh, self.rules)
        _refuse_constants(self.make, jaxpr, model, where)
        return model, where


def make_sharded(
    make: Callable[_P, _T], mesh: Mesh | AbstractMesh, rules: Any
) -> ShardedMaker[_P, _T]:
    """Make a model in parts: each device computes its own part of each array.

    For models too large for the memory of one device. No device has all of an array, unless the
    rules leave it replicated. The numbers are those of `filter_jit(make)`, bit for bit, with JAX's
    default random numbers.

    `make` is traced twice, for the names of its axes and for the program. So it must be a function
    that `jax.jit` accepts: it cannot read values of arrays, for instance to convert them to NumPy
    or to write a file. With State: `make_sharded(nn.make_with_state(Net), mesh, rules)`. You may
    call the result inside other compiled functions.

    An initializer works in parts if its formula does. `jax.nn.initializers.orthogonal` does not:
    on each device its decomposition takes several times the memory of the unsplit array.

    To fill a model from a file, you need not compute any numbers:
    `pm.load(path, make_sharded(Net, mesh, rules).eval_shape(key=key))`. Each device gets its parts;
    the host reads one array at a time.

    Args:
        make: a class, or a function that makes any tree.
        mesh: the mesh.
        rules: as for [`partition_specs`][pytreemod.partition_specs].

    Returns:
        A function of the arguments of `make`. It has `lower`, as
        [`filter_jit`][pytreemod.filter_jit] has, and `eval_shape`, which returns the model with a
        `jax.ShapeDtypeStruct` and a sharding for each array.

    Raises:
        ArgumentError: if `make` is not callable, or `mesh` is not a mesh. When called: if `make`
            reads values of arrays, or returns an array that it did not compute and the rules split.
        ShapeError, SpecError: when called: as [`shardings`][pytreemod.shardings].

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
        >>> rules = pm.AxisRules({"out_features": "fsdp"})
        >>> make = pm.make_sharded(pm.nn.Linear, mesh, rules)
        >>> linear = make(4, 8, key=jax.random.key(0))
        >>> linear.weight.sharding.spec
        P('fsdp', None)
        >>> linear == pm.nn.Linear(4, 8, key=jax.random.key(0))
        True
    """
    check_callable("make_sharded", make, "make")
    check_is_mesh("make_sharded", mesh)
    return ShardedMaker(make, mesh, rules)


def _argument(path: tuple[Any, ...]) -> str:
    """The name of an argument, from its path in `(args, kwargs)`."""
    return step_name(path[1]) if path[0].idx else f"args[{path[1].idx}]"


class _CompilerOptions(dict[str, str]):
    """Options with a hash, as a part of a key."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  (a dict has none)
        return hash(frozenset(self.items()))


# The compilers of JAX before 0.9.2 do not know the first option.
_ONE_BY_ONE = (
    _CompilerOptions(xla_cpu_scheduler_type="CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
    if jax.__version_info__ >= (0, 9, 2)
    else _CompilerOptions(xla_cpu_enable_concurrency_optimized_scheduler="False")
)

# ---- refusals

_READING = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors of JAX for code that reads the values of a traced array."""


def _refuse_constants(make: Any, jaxpr: Any, model: PyTree, where: PyTree) -> None:
    """Refuse leaves that must be split, but would be replicated constants of the program."""
    results = iter(jaxpr.jaxpr.outvars)
    constant = _Constants(jaxpr)
    leaves = jtu.tree_leaves_with_path(model)
    found = [
        f"{path_text(path)}: {describe(leaf)}"
        for (path, leaf), sharding in zip(leaves, jtu.tree_leaves(where), strict=True)
        # All arrays, in the order of the program's results.
        if is_abstract(leaf) and constant.is_behind(next(results), leaf.size)
        if any(mesh_axes(entry) for entry in sharding.spec)
    ]
    if found:
        raise ArgumentError(
            f"make_sharded({function_name(make)})",
            "arrays that the constructor computes",
            f"{len(found)} that were there before, whole",
            at=found,
            hint=[
                "move those afterwards; of a file, read the parts alone:",
                "pm.load(path, pm.make_sharded(make, mesh, rules).eval_shape(...))",
            ],
        )


class _Constants:
    """The arrays that are constants of a program."""

    def __init__(self, jaxpr: Any):
        self._known = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        self._made = {var: eqn for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}

    def is_behind(self, result: Any, size: int) -> bool:
        """Whether a result of this size is such an array, perhaps converted or copied."""
        # A literal has a value, and no hash.
        while not hasattr(result, "val") and result in self._made:
            inputs = list(_variables(self._made[result].invars))
            if len(inputs) != 1:
                return False
            (result,) = inputs
        value = result.val if hasattr(result, "val") else self._known.get(result)
        return not isinstance(value, Tracer) and getattr(value, "size", 0) >= max(size, 2)


def _variables(inputs: Any) -> Iterator[Any]:
    return (each for each in inputs if not hasattr(each, "val"))

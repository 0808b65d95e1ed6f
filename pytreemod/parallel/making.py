"""`make_sharded`: a model that is made in parts, each on its device.

A model too large for the memory of one device cannot be made first and split afterwards. So its
constructor is traced for shapes and names, and the rules give the sharding of each leaf. Then the
constructor is compiled with these shardings for its results: each device computes its part of each
array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from pytreemod.parallel.tree_specs import shardings
from pytreemod.transform.abstract_calls import filter_eval_shape
from pytreemod.transform.arguments import function_name
from pytreemod.transform.axis_rules import check_is_mesh
from pytreemod.transform.jit import Lowered, filter_jit
from pytreemod.transform.wrapping import check_callable
from pytreemod.typing import PyTree, jtu

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ShardedMaker(Generic[_P, _T]):
    """A function that makes a model in parts: the result of `make_sharded`."""

    def __init__(self, make: Callable[_P, _T], mesh: Mesh | AbstractMesh, rules: Any):
        self.make, self.mesh, self.rules = make, mesh, rules

    def __repr__(self) -> str:
        return f"<make_sharded of {function_name(self.make)}>"

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Make the model."""
        return self._jitted(args, kwargs)(*args, **kwargs)

    def lower(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace and lower for these arguments, without running; as `filter_jit(make).lower`."""
        return self._jitted(args, kwargs).lower(*args, **kwargs)

    def eval_shape(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The model with a `jax.ShapeDtypeStruct` for each array, including its sharding."""
        model, where = self._described(args, kwargs)

        def with_sharding(leaf: Any, sharding: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            weak = bool(leaf.weak_type)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

        return jtu.tree_map(with_sharding, model, where)

    def _jitted(self, args: Any, kwargs: Any) -> Any:
        # Compiled once: it is found by `make` and the shardings, by value.
        return filter_jit(self.make, out_shardings=self._described(args, kwargs)[1])

    def _described(self, args: Any, kwargs: Any) -> tuple[PyTree, PyTree]:
        """The model with shapes for arrays, and its shardings."""
        model = filter_eval_shape(self.make, *args, **kwargs)
        return model, shardings(model, self.mesh, self.rules)


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
        ArgumentError: if `make` is not callable, or `mesh` is not a mesh.
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

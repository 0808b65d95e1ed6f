"""`sharding_table`: each device's part of each leaf, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from pytreemod.module.naming_axes import AxisNames
from pytreemod.parallel.tree_specs import rows_of
from pytreemod.transform.axis_rules import check_is_mesh, mesh_axes
from pytreemod.tree.paths import path_text
from pytreemod.tree.printing import aligned
from pytreemod.typing import PyTree


class ShardingRow(NamedTuple):
    """A leaf in a table of shardings.

    Attributes:
        path: the path of the leaf.
        shape: the shape of the entire array.
        names: the names of its axes; None for an axis without one.
        spec: how it is split.
        bytes: its bytes on each device.
    """

    path: str
    shape: tuple[int, ...]
    names: AxisNames
    spec: PartitionSpec
    bytes: int


@dataclass(frozen=True)
class ShardingTable:
    """The result of [`sharding_table`][pytreemod.sharding_table]; prints as a table.

    Attributes:
        rows: one for each leaf that is an array.
        bytes: the bytes on each device, in total.
        bytes_whole: the bytes of all arrays, if they were on one device.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> types = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=types)
        >>> table = pm.sharding_table(pm.nn.LayerNorm(4), mesh, pm.AxisRules({}))
        >>> table.rows[0].path, table.rows[0].bytes, table.bytes
        ('weight', 16, 32)
    """

    rows: tuple[ShardingRow, ...]
    bytes: int
    bytes_whole: int

    def __str__(self) -> str:
        lines = [["path", "shape", "names", "spec", "bytes/device"]]
        for row in self.rows:
            shown = " ".join(name or "_" for name in row.names)
            shape = ",".join(map(str, row.shape))
            lines.append([row.path, f"[{shape}]", shown, _spec_text(row.spec), f"{row.bytes:,}"])
        end = f"{self.bytes:,} bytes on each device, of {self.bytes_whole:,}"
        return "\n".join([*aligned(lines, "<<<<>"), end])

    __repr__ = __str__


def sharding_table(tree: PyTree, mesh: Mesh | AbstractMesh, rules: Any) -> ShardingTable:
    """Return each device's part of each array: path, shape, names of axes, spec, bytes.

    Abstract: it moves nothing, and accepts `ShapeDtypeStruct`s. So you can inspect a model too
    large for any of your machines.

    Args:
        tree: as for [`partition_specs`][pytreemod.partition_specs].
        mesh: as for [`shardings`][pytreemod.shardings].
        rules: as for `partition_specs`.

    Returns:
        A value that prints as a table.

    Raises:
        ArgumentError, ShapeError, SpecError: as [`shardings`][pytreemod.shardings].

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> types = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.sharding.AbstractMesh((4,), ("tensor",), axis_types=types)
        >>> linear = pm.nn.Linear(4, 8, key=jax.random.key(0))
        >>> pm.sharding_table(linear, mesh, pm.AxisRules({"out_features": "tensor"}))
        path    shape  names                     spec            bytes/device
        weight  [8,4]  out_features in_features  ('tensor', None)          32
        bias    [8]    out_features              ('tensor',)                8
        40 bytes on each device, of 160
    """
    check_is_mesh("sharding_table", mesh)
    sizes: dict[Any, int] = dict(mesh.shape)
    rows: list[ShardingRow] = []
    whole = 0
    for loc, names, spec in rows_of(tree, rules, sizes):
        leaf = loc.leaf
        if not hasattr(leaf, "dtype"):
            continue
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        parts = math.prod(sizes[axis] for entry in spec for axis in mesh_axes(entry))
        own = path_text(loc.path), tuple(leaf.shape), names, spec, size // parts
        rows.append(ShardingRow(*own))
        whole += size
    return ShardingTable(tuple(rows), sum(row.bytes for row in rows), whole)


def _spec_text(spec: PartitionSpec) -> str:
    return repr(tuple(spec)) if any(entry is not None for entry in spec) else "replicated"

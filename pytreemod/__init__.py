"""pytreemod: a module library for JAX in which a model is a value.

This is the front door: it re-exports the public names of the rooms (`tree`, `module`,
`transform`, `state`, `nn`), and owns nothing. Names that many programs do not need (layers, files,
computed leaves and ties, debugging) are loaded on first use: `_LATER` says
where each name is.
"""

import typing as _typing
from importlib import import_module as _import_module
from sys import modules as _modules

from pytreemod.errors import CheckError as CheckError
from pytreemod.errors import FieldWarning as FieldWarning
from pytreemod.errors import FileError as FileError
from pytreemod.errors import LostUpdateWarning as LostUpdateWarning
from pytreemod.errors import PytreemodError as PytreemodError
from pytreemod.errors import SharedParameterWarning as SharedParameterWarning
from pytreemod.errors import SharedStreamWarning as SharedStreamWarning
from pytreemod.module.classes import Module as Module
from pytreemod.module.classes import StrictConfig as StrictConfig
from pytreemod.module.fields import AbstractClassVar as AbstractClassVar
from pytreemod.module.fields import AbstractVar as AbstractVar
from pytreemod.module.fields import buffer as buffer
from pytreemod.module.fields import field as field
from pytreemod.module.fields import static_field as static_field
from pytreemod.module.methods import BoundMethod as BoundMethod
from pytreemod.module.partials import Partial as Partial
from pytreemod.module.partials import module_update_wrapper as module_update_wrapper
from pytreemod.module.roles import with_role as with_role
from pytreemod.state.key_sources import init_keys as init_keys
from pytreemod.state.making import make_with_state as make_with_state
from pytreemod.state.tokens import RngStream as RngStream
from pytreemod.state.tokens import StateIndex as StateIndex
from pytreemod.state.values import State as State
from pytreemod.transform.abstract_calls import filter_closure_convert as filter_closure_convert
from pytreemod.transform.abstract_calls import filter_eval_shape as filter_eval_shape
from pytreemod.transform.abstract_calls import filter_make_jaxpr as filter_make_jaxpr
from pytreemod.transform.axes import if_array as if_array
from pytreemod.transform.axis_rules import AxisRules as AxisRules
from pytreemod.transform.axis_rules import use_rules as use_rules
from pytreemod.transform.branches import filter_cond as filter_cond
from pytreemod.transform.branches import filter_switch as filter_switch
from pytreemod.transform.callbacks import filter_io_callback as filter_io_callback
from pytreemod.transform.callbacks import filter_pure_callback as filter_pure_callback
from pytreemod.transform.checkify import filter_checkify as filter_checkify
from pytreemod.transform.checkpoints import filter_checkpoint as filter_checkpoint
from pytreemod.transform.custom_rules import filter_custom_jvp as filter_custom_jvp
from pytreemod.transform.custom_rules import filter_custom_vjp as filter_custom_vjp
from pytreemod.transform.enumerations import Enumeration as Enumeration
from pytreemod.transform.gradients import filter_grad as filter_grad
from pytreemod.transform.gradients import filter_value_and_grad as filter_value_and_grad
from pytreemod.transform.gradients import trainable as trainable
from pytreemod.transform.jacobians import filter_hessian as filter_hessian
from pytreemod.transform.jacobians import filter_jacfwd as filter_jacfwd
from pytreemod.transform.jacobians import filter_jacrev as filter_jacrev
from pytreemod.transform.jit import clear_caches as clear_caches
from pytreemod.transform.jit import filter_jit as filter_jit
from pytreemod.transform.linear_maps import filter_jvp as filter_jvp
from pytreemod.transform.linear_maps import filter_linearize as filter_linearize
from pytreemod.transform.linear_maps import filter_vjp as filter_vjp
from pytreemod.transform.loops import filter_fori_loop as filter_fori_loop
from pytreemod.transform.loops import filter_while_loop as filter_while_loop
from pytreemod.transform.placements import filter_shard as filter_shard
from pytreemod.transform.pmap import filter_pmap as filter_pmap
from pytreemod.transform.runtime_checks import branched_error_if as branched_error_if
from pytreemod.transform.runtime_checks import error_if as error_if
from pytreemod.transform.scans import filter_associative_scan as filter_associative_scan
from pytreemod.transform.scans import filter_map as filter_map
from pytreemod.transform.scans import filter_scan as filter_scan
from pytreemod.transform.shard_map import filter_shard_map as filter_shard_map
from pytreemod.transform.sowing import sow as sow
from pytreemod.transform.vmap import filter_vmap as filter_vmap
from pytreemod.tree import selectors as selectors
from pytreemod.tree.comparison import tree_equal as tree_equal
from pytreemod.tree.comparison import tree_flatten_one_level as tree_flatten_one_level
from pytreemod.tree.members import layer_axes as layer_axes
from pytreemod.tree.partitioning import combine as combine
from pytreemod.tree.partitioning import filter as filter
from pytreemod.tree.partitioning import partition as partition
from pytreemod.tree.predicates import is_array as is_array
from pytreemod.tree.predicates import is_array_like as is_array_like
from pytreemod.tree.predicates import is_inexact_array as is_inexact_array
from pytreemod.tree.predicates import is_inexact_array_like as is_inexact_array_like
from pytreemod.tree.prefixes import by as by
from pytreemod.tree.printing import tree_pformat as tree_pformat
from pytreemod.tree.printing import tree_pprint as tree_pprint
from pytreemod.tree.selecting import Selector as Selector
from pytreemod.tree.selectors import matrices as matrices
from pytreemod.tree.sharing import tree_check as tree_check
from pytreemod.tree.stacking import stack as stack
from pytreemod.tree.stacking import unstack as unstack
from pytreemod.tree.surgery import tree_at as tree_at
from pytreemod.tree.tangents import apply_updates as apply_updates
from pytreemod.version import __version__ as __version__

# Names that differ from those of their modules.
select = selectors
EquinoxRuntimeError = CheckError
EquinoxTracetimeError = CheckError

_LATER = {
    "all_finite": "pytreemod.training.loss_scaling:all_finite",
    "axis_names": "pytreemod.module.naming_axes:axis_names",
    "capture": "pytreemod.transform.capturing:capture",
    "Computed": "pytreemod.module.computed_leaves:Computed",
    "computed": "pytreemod.module.computed_leaves:computed",
    "Checkpoints": "pytreemod.io.checkpoints:Checkpoints",
    "constraints": "pytreemod.training.constraints:",
    "debug": "pytreemod.debug:",
    "diff": "pytreemod.io.differing:diff",
    "Diff": "pytreemod.io.differing:Diff",
    "default_deserialise_filter_spec": "pytreemod.io.equinox_files:default_deserialise_filter_spec",
    "default_serialise_filter_spec": "pytreemod.io.equinox_files:default_serialise_filter_spec",
    "from_named": "pytreemod.tree.naming:from_named",
    "from_torch": "pytreemod.io.torch_states:from_torch",
    "inference_mode": "pytreemod.nn.modes:inference_mode",
    "intervene": "pytreemod.transform.capturing:intervene",
    "load": "pytreemod.io.loading:load",
    "LossScale": "pytreemod.training.loss_scaling:LossScale",
    "LoadReport": "pytreemod.io.loading:LoadReport",
    "lora": "pytreemod.training.low_rank:lora",
    "make_sharded": "pytreemod.parallel.making:make_sharded",
    "materialize": "pytreemod.nn.lazy:materialize",
    "map_parameters": "pytreemod.training.mapped_parameters:map_parameters",
    "named_leaves": "pytreemod.tree.naming:named_leaves",
    "nn": "pytreemod.nn:",
    "Optimizer": "pytreemod.training.optimizers:Optimizer",
    "param_count": "pytreemod.debug.summaries:param_count",
    "partition_specs": "pytreemod.parallel.tree_specs:partition_specs",
    "per_layer": "pytreemod.training.per_layer:per_layer",
    "per_member": "pytreemod.training.per_layer:per_member",
    "Precision": "pytreemod.training.precision_rules:Precision",
    "quantize": "pytreemod.training.quantization:quantize",
    "read_metadata": "pytreemod.io.saving:read_metadata",
    "resolve": "pytreemod.module.resolving:resolve",
    "save": "pytreemod.io.saving:save",
    "select_tree": "pytreemod.training.loss_scaling:select_tree",
    "ShardingTable": "pytreemod.parallel.sharding_tables:ShardingTable",
    "sharding_table": "pytreemod.parallel.sharding_tables:sharding_table",
    "shardings": "pytreemod.parallel.tree_specs:shardings",
    "stateful": "pytreemod.nn.stateful_models:stateful",
    "summary": "pytreemod.debug.summaries:summary",
    "testing": "pytreemod.debug.testing:",
    "tie": "pytreemod.module.ties:tie",
    "to_torch": "pytreemod.io.torch_states:to_torch",
    "tree_deserialise_leaves": "pytreemod.io.equinox_files:tree_deserialise_leaves",
    "tree_inference": "pytreemod.nn.modes:inference_mode",
    "tree_serialise_leaves": "pytreemod.io.equinox_files:tree_serialise_leaves",
    "untie": "pytreemod.module.ties:untie",
    "with_axis_names": "pytreemod.module.naming_axes:with_axis_names",
    "with_mode": "pytreemod.nn.modes:with_mode",
    "with_precision": "pytreemod.training.precision_rules:with_precision",
}

# For type checkers alone: importing these here would load everything in `_LATER`.
if _typing.TYPE_CHECKING:
    from pytreemod import debug as debug
    from pytreemod import nn as nn
    from pytreemod.debug import testing as testing
    from pytreemod.debug.summaries import param_count as param_count
    from pytreemod.debug.summaries import summary as summary
    from pytreemod.io.checkpoints import Checkpoints as Checkpoints
    from pytreemod.io.differing import Diff as Diff
    from pytreemod.io.differing import diff as diff
    from pytreemod.io.equinox_files import (
        default_deserialise_filter_spec as default_deserialise_filter_spec,
    )
    from pytreemod.io.equinox_files import (
        default_serialise_filter_spec as default_serialise_filter_spec,
    )
    from pytreemod.io.equinox_files import tree_deserialise_leaves as tree_deserialise_leaves
    from pytreemod.io.equinox_files import tree_serialise_leaves as tree_serialise_leaves
    from pytreemod.io.loading import LoadReport as LoadReport
    from pytreemod.io.loading import load as load
    from pytreemod.io.saving import read_metadata as read_metadata
    from pytreemod.io.saving import save as save
    from pytreemod.io.torch_states import from_torch as from_torch
    from pytreemod.io.torch_states import to_torch as to_torch
    from pytreemod.module.computed_leaves import Computed as Computed
    from pytreemod.module.computed_leaves import computed as computed
    from pytreemod.module.naming_axes import axis_names as axis_names
    from pytreemod.module.naming_axes import with_axis_names as with_axis_names
    from pytreemod.module.resolving import resolve as resolve
    from pytreemod.module.ties import tie as tie
    from pytreemod.module.ties import untie as untie
    from pytreemod.nn.lazy import materialize as materialize
    from pytreemod.nn.modes import inference_mode as inference_mode
    from pytreemod.nn.modes import with_mode as with_mode
    from pytreemod.nn.stateful_models import stateful as stateful
    from pytreemod.parallel.making import make_sharded as make_sharded
    from pytreemod.parallel.sharding_tables import ShardingTable as ShardingTable
    from pytreemod.parallel.sharding_tables import sharding_table as sharding_table
    from pytreemod.parallel.tree_specs import partition_specs as partition_specs
    from pytreemod.parallel.tree_specs import shardings as shardings
    from pytreemod.training import constraints as constraints
    from pytreemod.training.loss_scaling import LossScale as LossScale
    from pytreemod.training.loss_scaling import all_finite as all_finite
    from pytreemod.training.loss_scaling import select_tree as select_tree
    from pytreemod.training.low_rank import lora as lora
    from pytreemod.training.mapped_parameters import map_parameters as map_parameters
    from pytreemod.training.optimizers import Optimizer as Optimizer
    from pytreemod.training.per_layer import per_layer as per_layer
    from pytreemod.training.per_layer import per_member as per_member
    from pytreemod.training.precision_rules import Precision as Precision
    from pytreemod.training.precision_rules import with_precision as with_precision
    from pytreemod.training.quantization import quantize as quantize
    from pytreemod.transform.capturing import capture as capture
    from pytreemod.transform.capturing import intervene as intervene
    from pytreemod.tree.naming import from_named as from_named
    from pytreemod.tree.naming import named_leaves as named_leaves

    tree_inference = inference_mode
else:
    # Hidden from type checkers, which would otherwise accept every missing name.
    def __getattr__(name: str) -> object:
        if name not in _LATER:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=_modules[__name__])
        room, _, attribute = _LATER[name].partition(":")
        found = _import_module(room)
        globals()[name] = found = getattr(found, attribute) if attribute else found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})

    __all__ = [*(name for name in globals() if not name.startswith("_")), *_LATER]

"""pytreemod: a module library for JAX in which a model is a value.

This is the front door: it finds the public names of the rooms, and owns nothing. What most programs
use is imported here. Everything else is loaded when it is first asked for: `_LATER` says which file
has it. Type checkers read `__init__.pyi`, which `python3 tasks.py stub` makes of this file.
"""

# Imported for those who import from here.
# pyright: reportUnusedImport=false, reportUnsupportedDunderAll=false

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from pytreemod.errors import CheckError, PytreemodError
from pytreemod.module.classes import Module, StrictConfig
from pytreemod.module.fields import AbstractClassVar, AbstractVar, buffer, field, static_field
from pytreemod.other_words import no_such_name as _no_such_name
from pytreemod.transform.gradients import filter_grad, filter_value_and_grad, trainable
from pytreemod.transform.jit import clear_caches, filter_jit
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.prefixes import by, combine, filter, partition
from pytreemod.tree.surgery import tree_at
from pytreemod.version import __version__

EquinoxRuntimeError = CheckError
EquinoxTracetimeError = CheckError

_PARTS = ("constraints", "debug", "nn", "select", "testing")
_LATER = {
    "debug.summaries": "param_count summary",
    "errors": "FieldWarning FileError LostUpdateWarning SharedParameterWarning SharedStreamWarning",
    "io.checkpoints": "Checkpoints",
    "io.differing": "Diff diff",
    "io.equinox_files": "default_deserialise_filter_spec default_serialise_filter_spec "
    "tree_deserialise_leaves tree_serialise_leaves",
    "io.loading": "LoadReport load",
    "io.saving": "read_metadata save",
    "io.torch_states": "from_torch to_torch",
    "module.computed_leaves": "Computed computed",
    "module.methods": "BoundMethod",
    "module.naming_axes": "axis_names with_axis_names",
    "module.partials": "Partial module_update_wrapper",
    "module.roles": "with_role",
    "module.ties": "resolve tie untie",
    "nn.lazy": "materialize",
    "nn.modes": "inference_mode tree_inference with_mode",
    "nn.stateful_models": "stateful",
    "parallel.making": "make_sharded",
    "parallel.sharding_tables": "ShardingTable sharding_table",
    "parallel.tree_specs": "partition_specs shardings",
    "state.key_sources": "init_keys",
    "state.making": "make_with_state",
    "state.tokens": "RngStream StateIndex",
    "state.values": "State",
    "training.loss_scaling": "LossScale all_finite select_tree",
    "training.low_rank": "lora",
    "training.mapped_parameters": "map_parameters",
    "training.optimizers": "Optimizer",
    "training.per_layer": "per_layer per_member",
    "training.precision_rules": "Precision with_precision",
    "training.quantization": "quantize",
    "transform.abstract_calls": "filter_closure_convert filter_eval_shape filter_make_jaxpr",
    "transform.axes": "if_array",
    "transform.axis_rules": "AxisRules use_rules",
    "transform.branches": "filter_cond filter_switch",
    "transform.callbacks": "filter_io_callback filter_pure_callback",
    "transform.capturing": "capture intervene",
    "transform.checkify": "filter_checkify",
    "transform.checkpoints": "filter_checkpoint",
    "transform.custom_rules": "filter_custom_jvp filter_custom_vjp",
    "transform.enumerations": "Enumeration",
    "transform.jacobians": "filter_hessian filter_jacfwd filter_jacrev",
    "transform.linear_maps": "filter_jvp filter_linearize filter_vjp",
    "transform.loops": "filter_fori_loop filter_while_loop",
    "transform.placements": "filter_shard",
    "transform.pmap": "filter_pmap",
    "transform.runtime_checks": "branched_error_if error_if",
    "transform.scans": "filter_associative_scan filter_map filter_scan",
    "transform.shard_map": "filter_shard_map",
    "transform.sowing": "sow",
    "tree.comparison": "tree_equal tree_flatten_one_level",
    "tree.members": "layer_axes",
    "tree.paths": "from_named named_leaves",
    "tree.predicates": "is_array is_array_like is_inexact_array is_inexact_array_like",
    "tree.printing": "tree_pformat tree_pprint",
    "tree.selecting": "Selector",
    "tree.selectors": "matrices",
    "tree.sharing": "tree_check",
    "tree.stacking": "stack unstack",
    "tree.tangents": "apply_updates",
}
_FILES = {name: file for file, names in _LATER.items() for name in names.split()}
# Without the rooms, which Python puts here as it imports them.
_NOW = [name for name, value in globals().items() if not isinstance(value, _ModuleType)]
__all__ = sorted([*(name for name in _NOW if name[0] != "_"), *_PARTS, *_FILES])


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return _import_module(f"pytreemod.{name}")
    if name not in _FILES:
        raise _no_such_name(__name__, name)
    globals()[name] = found = getattr(_import_module(f"pytreemod.{_FILES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return __all__

"""pytreemod: a module library for JAX in which a model is a value.

This is the front door: it re-exports what users need from the rooms (`tree`, `module`,
`transform`, `state`, `nn`), and owns nothing.
"""

from pytreemod import debug as debug
from pytreemod import nn as nn
from pytreemod.debug.capturing import capture as capture
from pytreemod.errors import CheckError as CheckError
from pytreemod.errors import LostUpdateWarning as LostUpdateWarning
from pytreemod.errors import PytreemodError as PytreemodError
from pytreemod.errors import SharedParameterWarning as SharedParameterWarning
from pytreemod.module.classes import Module as Module
from pytreemod.module.fields import AbstractClassVar as AbstractClassVar
from pytreemod.module.fields import AbstractVar as AbstractVar
from pytreemod.module.fields import buffer as buffer
from pytreemod.module.fields import field as field
from pytreemod.module.fields import static_field as static_field
from pytreemod.module.methods import BoundMethod as BoundMethod
from pytreemod.module.partials import Partial as Partial
from pytreemod.module.partials import module_update_wrapper as module_update_wrapper
from pytreemod.nn import inference_mode as inference_mode
from pytreemod.nn import stateful as stateful
from pytreemod.nn import with_mode as with_mode
from pytreemod.state.key_sources import init_keys as init_keys
from pytreemod.state.making import make_with_state as make_with_state
from pytreemod.state.tokens import RngStream as RngStream
from pytreemod.state.tokens import StateIndex as StateIndex
from pytreemod.state.values import State as State
from pytreemod.transform.branching import filter_cond as filter_cond
from pytreemod.transform.branching import filter_switch as filter_switch
from pytreemod.transform.calling_back import filter_io_callback as filter_io_callback
from pytreemod.transform.calling_back import filter_pure_callback as filter_pure_callback
from pytreemod.transform.checking import branched_error_if as branched_error_if
from pytreemod.transform.checking import error_if as error_if
from pytreemod.transform.custom_rules import filter_custom_jvp as filter_custom_jvp
from pytreemod.transform.custom_rules import filter_custom_vjp as filter_custom_vjp
from pytreemod.transform.device_mapping import filter_pmap as filter_pmap
from pytreemod.transform.differentiating import filter_grad as filter_grad
from pytreemod.transform.differentiating import filter_value_and_grad as filter_value_and_grad
from pytreemod.transform.differentiating import trainable as trainable
from pytreemod.transform.distributing import filter_shard_map as filter_shard_map
from pytreemod.transform.enumerating import Enumeration as Enumeration
from pytreemod.transform.functional_checks import filter_checkify as filter_checkify
from pytreemod.transform.jacobian_matrices import filter_hessian as filter_hessian
from pytreemod.transform.jacobian_matrices import filter_jacfwd as filter_jacfwd
from pytreemod.transform.jacobian_matrices import filter_jacrev as filter_jacrev
from pytreemod.transform.jitting import clear_caches as clear_caches
from pytreemod.transform.jitting import filter_jit as filter_jit
from pytreemod.transform.linearizing import filter_jvp as filter_jvp
from pytreemod.transform.linearizing import filter_linearize as filter_linearize
from pytreemod.transform.linearizing import filter_vjp as filter_vjp
from pytreemod.transform.looping import filter_associative_scan as filter_associative_scan
from pytreemod.transform.looping import filter_fori_loop as filter_fori_loop
from pytreemod.transform.looping import filter_map as filter_map
from pytreemod.transform.looping import filter_scan as filter_scan
from pytreemod.transform.looping import filter_while_loop as filter_while_loop
from pytreemod.transform.mapping import filter_vmap as filter_vmap
from pytreemod.transform.mapping import if_array as if_array
from pytreemod.transform.placing import filter_shard as filter_shard
from pytreemod.transform.rematerializing import filter_checkpoint as filter_checkpoint
from pytreemod.transform.shaping import filter_closure_convert as filter_closure_convert
from pytreemod.transform.shaping import filter_eval_shape as filter_eval_shape
from pytreemod.transform.shaping import filter_make_jaxpr as filter_make_jaxpr
from pytreemod.transform.sowing import sow as sow
from pytreemod.transform.stacking import stack as stack
from pytreemod.transform.stacking import unstack as unstack
from pytreemod.tree import selectors as selectors
from pytreemod.tree.comparison import tree_check as tree_check
from pytreemod.tree.comparison import tree_equal as tree_equal
from pytreemod.tree.comparison import tree_flatten_one_level as tree_flatten_one_level
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
from pytreemod.tree.surgery import tree_at as tree_at
from pytreemod.tree.updating import apply_updates as apply_updates

# Names that differ from those of what they name.
select = selectors
tree_inference = inference_mode
EquinoxRuntimeError = CheckError
__version__ = "0.1.0"

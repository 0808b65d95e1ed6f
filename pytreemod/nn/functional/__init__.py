"""The numerics of the layers, as pure functions of arrays.

Owns: formulas, without Modules. Keys and statistics are arguments, and new statistics are results.
Every function accepts leading batch axes. May import errors, and the checks of
`pytreemod.nn.arguments`.
"""

from pytreemod.nn.functional.activation_functions import prelu as prelu
from pytreemod.nn.functional.adaptive_windows import adaptive_pool as adaptive_pool
from pytreemod.nn.functional.attention import attention_mask as attention_mask
from pytreemod.nn.functional.attention import attention_weights as attention_weights
from pytreemod.nn.functional.attention import dot_product_attention as dot_product_attention
from pytreemod.nn.functional.attention import weighted_values as weighted_values
from pytreemod.nn.functional.convolution import conv as conv
from pytreemod.nn.functional.dropout_masks import dropout as dropout
from pytreemod.nn.functional.embeddings import embedding as embedding
from pytreemod.nn.functional.kv_caches import empty_cache as empty_cache
from pytreemod.nn.functional.kv_caches import extend_cache as extend_cache
from pytreemod.nn.functional.linear_functions import einsum as einsum
from pytreemod.nn.functional.linear_functions import linear as linear
from pytreemod.nn.functional.linear_functions import linear_general as linear_general
from pytreemod.nn.functional.linear_functions import scale as scale
from pytreemod.nn.functional.normalization import batch_norm as batch_norm
from pytreemod.nn.functional.normalization import batch_statistics as batch_statistics
from pytreemod.nn.functional.normalization import group_norm as group_norm
from pytreemod.nn.functional.normalization import instance_norm as instance_norm
from pytreemod.nn.functional.normalization import layer_norm as layer_norm
from pytreemod.nn.functional.normalization import moving_average as moving_average
from pytreemod.nn.functional.normalization import normalize_batch as normalize_batch
from pytreemod.nn.functional.normalization import rms_norm as rms_norm
from pytreemod.nn.functional.normalization import update_running as update_running
from pytreemod.nn.functional.pooling import avg_pool as avg_pool
from pytreemod.nn.functional.pooling import max_pool as max_pool
from pytreemod.nn.functional.pooling import pool as pool
from pytreemod.nn.functional.recurrent_cells import gru_cell as gru_cell
from pytreemod.nn.functional.recurrent_cells import lstm_cell as lstm_cell
from pytreemod.nn.functional.recurrent_cells import simple_cell as simple_cell
from pytreemod.nn.functional.recurrent_sequences import flip_sequences as flip_sequences
from pytreemod.nn.functional.rotary_embeddings import rotary_angles as rotary_angles
from pytreemod.nn.functional.rotary_embeddings import rotary_embedding as rotary_embedding
from pytreemod.nn.functional.rotary_embeddings import rotary_tables as rotary_tables
from pytreemod.nn.functional.rotary_embeddings import rotate_half as rotate_half
from pytreemod.nn.functional.spectral_normalization import (
    divide_by_spectral_norm as divide_by_spectral_norm,
)
from pytreemod.nn.functional.spectral_normalization import power_iteration as power_iteration
from pytreemod.nn.functional.transposed_convolution import conv_transpose as conv_transpose
from pytreemod.nn.functional.weight_normalization import norm_except as norm_except
from pytreemod.nn.functional.weight_normalization import weight_norm as weight_norm

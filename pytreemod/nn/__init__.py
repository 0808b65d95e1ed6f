"""Layers: Modules that have arrays, and read like their formulas.

Owns: the layers, under Equinox's names. The leaves of a layer are arrays; sizes, flags and
functions are configuration. A layer that knows how many axes an example has accepts leading batch
axes. The axes that it uses, of its input and of its own arrays, are always checked. May import
errors, tree, module, state and transform. No layer changes anything in place: keys and State are
arguments, and new State is a result.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from pytreemod.nn.activations import PReLU as PReLU
from pytreemod.nn.attention import MultiheadAttention as MultiheadAttention
from pytreemod.nn.attention import reset_cache as reset_cache
from pytreemod.nn.base import StatefulLayer as StatefulLayer
from pytreemod.nn.base import check_shape as check_shape
from pytreemod.nn.base import initial_bias as initial_bias
from pytreemod.nn.base import initial_weight as initial_weight
from pytreemod.nn.base import layer_call as layer_call
from pytreemod.nn.base import split_key as split_key
from pytreemod.nn.batch_normalization import BatchNorm as BatchNorm
from pytreemod.nn.convolution import Conv as Conv
from pytreemod.nn.convolution import Conv1d as Conv1d
from pytreemod.nn.convolution import Conv2d as Conv2d
from pytreemod.nn.convolution import Conv3d as Conv3d
from pytreemod.nn.convolution import ConvTranspose as ConvTranspose
from pytreemod.nn.convolution import ConvTranspose1d as ConvTranspose1d
from pytreemod.nn.convolution import ConvTranspose2d as ConvTranspose2d
from pytreemod.nn.convolution import ConvTranspose3d as ConvTranspose3d
from pytreemod.nn.dropout import Dropout as Dropout
from pytreemod.nn.embedding import Embedding as Embedding
from pytreemod.nn.lazy import Lazy as Lazy
from pytreemod.nn.linear import Einsum as Einsum
from pytreemod.nn.linear import Linear as Linear
from pytreemod.nn.linear import LinearGeneral as LinearGeneral
from pytreemod.nn.mlp import MLP as MLP
from pytreemod.nn.modes import inference_mode as inference_mode
from pytreemod.nn.modes import with_mode as with_mode
from pytreemod.nn.normalization import GroupNorm as GroupNorm
from pytreemod.nn.normalization import InstanceNorm as InstanceNorm
from pytreemod.nn.normalization import LayerNorm as LayerNorm
from pytreemod.nn.normalization import RMSNorm as RMSNorm
from pytreemod.nn.pooling import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from pytreemod.nn.pooling import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from pytreemod.nn.pooling import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from pytreemod.nn.pooling import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from pytreemod.nn.pooling import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from pytreemod.nn.pooling import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from pytreemod.nn.pooling import AdaptivePool as AdaptivePool
from pytreemod.nn.pooling import AvgPool1d as AvgPool1d
from pytreemod.nn.pooling import AvgPool2d as AvgPool2d
from pytreemod.nn.pooling import AvgPool3d as AvgPool3d
from pytreemod.nn.pooling import MaxPool1d as MaxPool1d
from pytreemod.nn.pooling import MaxPool2d as MaxPool2d
from pytreemod.nn.pooling import MaxPool3d as MaxPool3d
from pytreemod.nn.pooling import Pool as Pool
from pytreemod.nn.recurrent import RNN as RNN
from pytreemod.nn.recurrent import Bidirectional as Bidirectional
from pytreemod.nn.recurrent import GRUCell as GRUCell
from pytreemod.nn.recurrent import LSTMCell as LSTMCell
from pytreemod.nn.recurrent import RNNCellBase as RNNCellBase
from pytreemod.nn.recurrent import SimpleCell as SimpleCell
from pytreemod.nn.rotary import RotaryPositionalEmbedding as RotaryPositionalEmbedding
from pytreemod.nn.sequential import Identity as Identity
from pytreemod.nn.sequential import Lambda as Lambda
from pytreemod.nn.sequential import Sequential as Sequential
from pytreemod.nn.sharing import Shared as Shared
from pytreemod.nn.spectral_normalization import SpectralNorm as SpectralNorm
from pytreemod.nn.stacked_layers import Ensemble as Ensemble
from pytreemod.nn.stacked_layers import Stack as Stack
from pytreemod.nn.stateful_models import Stateful as Stateful
from pytreemod.nn.stateful_models import stateful as stateful
from pytreemod.nn.weight_normalization import WeightNorm as WeightNorm
from pytreemod.other_words import no_such_name as _no_such_name
from pytreemod.state.making import delete_init_state as delete_init_state
from pytreemod.state.making import make_with_state as make_with_state
from pytreemod.state.tokens import RngStream as RngStream
from pytreemod.state.tokens import StateIndex as StateIndex
from pytreemod.state.values import State as State

# Hidden from type checkers, which would otherwise accept every missing name.
if not _TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise _no_such_name(__name__, name)

    def __dir__() -> list[str]:
        found = {name for name, value in globals().items() if callable(value)}
        return sorted(name for name in found if not name.startswith("_"))

"""What arguments are called in other libraries: looked up where Python has refused a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from pytreemod.errors import ArgumentError, explain

OURS: dict[str, tuple[str, ...]] = {
    "bias": ("use_bias",),
    "rngs": ("key",),
    "rng": ("key",),
    "num_features": ("input_size", "channels", "shape"),
    "normalized_shape": ("shape",),
    "features": ("out_features", "out_channels", "embedding_size"),
    "units": ("out_features",),
    "input_dim": ("num_embeddings", "in_features"),
    "embedding_dim": ("embedding_size",),
    "embed_dim": ("query_size", "embedding_size"),
    "kdim": ("key_size",),
    "vdim": ("value_size",),
    "dropout": ("dropout_p",),
    "rate": ("p", "dropout_p"),
    "epsilon": ("eps",),
    "affine": ("channelwise_affine",),
    "training": ("inference",),
    "use_running_average": ("inference",),
    "deterministic": ("inference",),
    "decode": ("cache_size",),
    "strides": ("stride",),
    "param_dtype": ("dtype",),
    "kernel_init": ("weight_init",),
}
"""By what PyTorch, Flax or Keras say, what is said here."""


def refuse_other_words(cls: type, given: Iterable[str], error: TypeError) -> None:
    """Say how an argument is called here, if that is why Python refused a call of a class.

    Args:
        cls: what was called.
        given: the names of the arguments.
        error: Python's.

    Raises:
        ArgumentError: an argument has another name here.
    """
    text = str(error)
    for word in given:
        if word in OURS and f"unexpected keyword argument '{word}'" in text:
            names = inspect.signature(cls.__init__).parameters
            ours = [name for name in OURS[word] if name in names and word not in names]
            if ours:
                where, expected = f"{cls.__name__}({word})", f"the argument {ours[0]}"
                cure = ("It has another name here:", f"{cls.__name__}(..., {ours[0]}=...)")
                raise ArgumentError(explain(where, expected, word, cure=cure)) from error

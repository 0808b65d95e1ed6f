"""What arguments are called in other libraries: looked up where Python has refused a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

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
    "train": ("inference",),
    "use_running_average": ("inference",),
    "attn_mask": ("mask",),
    "key_padding_mask": ("mask",),
    "deterministic": ("inference",),
    "decode": ("cache_size",),
    "strides": ("stride",),
    "param_dtype": ("dtype",),
    "kernel_init": ("weight_init",),
}
"""By what PyTorch, Flax or Keras say, what is said here."""


_OPPOSITE = frozenset({"training", "train"})
_MODE = ("A model has its mode, not the call:", "model = nn.inference_mode(model)")
_HEARD = "True is where to look here, and what is added to the weights is a bias:"
_CURES: dict[str, tuple[str, ...]] = {
    "attn_mask": (_HEARD, "mask=~attn_mask", "bias=attn_mask"),
    "key_padding_mask": (_HEARD, "mask=~key_padding_mask[:, None, None, :]"),
}
"""Where the values differ as well."""


def refuse_other_words(
    call: Callable[..., Any], owner: str, given: Iterable[str], error: TypeError
) -> None:
    """Say how an argument is called here, if that is why Python refused a call.

    Args:
        call: the function that was called.
        owner: the name of its class.
        given: the names of the arguments.
        error: Python's.

    Raises:
        ArgumentError: an argument has another name here.
    """
    text = str(error)
    for word in given:
        if word in OURS and f"unexpected keyword argument '{word}'" in text:
            names = inspect.signature(call).parameters
            if word in names:
                continue
            ours = next((name for name in OURS[word] if name in names), None)
            if ours is None and "inference" in OURS[word]:
                raise _refusal(owner, word, "no mode in a call", _MODE) from error
            if ours is not None:
                cure = _CURES.get(word, ("It has another name here:", f"{ours}=..."))
                if word in _OPPOSITE:
                    cure = ("It says the opposite here:", f"{ours}=not {word}")
                raise _refusal(owner, word, f"{ours}=", cure) from error


def _refusal(owner: str, word: str, expected: str, cure: tuple[str, ...]) -> ArgumentError:
    return ArgumentError(explain(f"{owner}({word})", expected, f"{word}=", cure=cure))

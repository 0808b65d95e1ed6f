"""Words of other libraries, and what to write here instead.

Whoever comes from PyTorch, Flax or Keras writes `model.eval()`, `nn.Dense` or `rngs=` in the first
hour. Python's own error says that there is no such name. A note below it says what there is.
"""

from __future__ import annotations

import re
import sys
from typing import TypeVar

import jax

_E = TypeVar("_E", bound=Exception)

_TABLE = {
    "pm.inference_mode(model)": "eval deterministic",
    "pm.inference_mode(model, False)": "train",
    "params, rest = pm.trainable(model)": "parameters",
    "pm.to_torch(model)": "state_dict",
    'pm.with_role(model, selector, "buffer")': "freeze",
    "grads = pm.filter_grad(loss)(model, x)": "grad",
    "opt = pm.Optimizer(rule).init(model)": "fit",
    "pm.filter_jit(function)": "compile jit",
    "pm.filter_vmap(function)": "vmap",
    "a field, such as `weight: jax.Array`": "Param Parameter",
    "key=jax.random.key(0)": "rngs Rngs",
    "nn.Linear": "Dense",
    "nn.Embedding": "Embed",
    "nn.BatchNorm": "BatchNorm1d BatchNorm2d",
    "use_bias=": "bias",
    "out_features=": "features units",
    "weight_init=": "kernel_init",
}
_WORDS = {word: code for code, words in _TABLE.items() for word in words.split()}


def with_word(error: _E, word: str) -> _E:
    """Add to an error what is written here instead of a word of another library.

    Examples:
        >>> with_word(TypeError("unexpected keyword argument 'rngs'"), "rngs").__notes__
        ['In pytreemod: key=jax.random.key(0)']
    """
    note = f"In pytreemod: {_WORDS.get(word)}"
    # A constructor that calls another one passes its error on.
    if word in _WORDS and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def no_such_name(module: str, name: str) -> AttributeError:
    """Return Python's error for a name that a module does not have."""
    message = f"module {module!r} has no attribute {name!r}"
    error = AttributeError(message, name=name, obj=sys.modules[module])
    if name[0] != "_" and hasattr(jax.nn, name.lower()):
        error.add_note(f"In pytreemod: jax.nn.{name.lower()}")
    return with_word(error, name)


def explain_argument(error: TypeError) -> None:
    """Add a note to the error of a constructor that does not know a keyword."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    with_word(error, found[1] if found else "")

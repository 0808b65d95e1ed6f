"""The names that other libraries use: for arguments, members of Modules, layers.

They are looked up only after Python has found nothing, so that programs without such mistakes pay
nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from pytreemod.errors import ArgumentError, MissingNameError, RngError
from pytreemod.tree.pending import Waiting, has_attribute

OURS: dict[str, tuple[str, ...]] = {
    "bias": (
        "use_bias",
        "use_query_bias",
        "use_key_bias",
        "use_value_bias",
        "use_output_bias",
    ),
    "rngs": ("key",),
    "rng": ("key",),
    "num_features": ("input_size", "channels", "shape"),
    "normalized_shape": ("shape",),
    "num_channels": ("channels",),
    "num_groups": ("groups",),
    "in_features": ("input_size", "in_size", "query_size", "in_channels"),
    "out_features": ("hidden_size", "out_size", "output_size", "out_channels"),
    "hidden_size": ("width_size",),
    "num_layers": ("depth",),
    "filters": ("out_channels",),
    "features": ("out_features", "out_channels", "embedding_size"),
    "units": ("out_features",),
    "input_dim": ("num_embeddings", "in_features"),
    "embedding_dim": ("embedding_size",),
    "vocab_size": ("num_embeddings",),
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
    "dropout_rate": ("dropout_p",),
    "dropout_rng": ("key",),
    "decode": ("cache_size", "state"),
    "strides": ("stride",),
    "param_dtype": ("dtype",),
    "kernel_init": ("weight_init",),
    "kernel_initializer": ("weight_init",),
    "embedding_init": ("weight_init",),
}
"""Names of arguments in PyTorch, Flax or Keras, and their names here."""


_OPPOSITE = frozenset({"training", "train"})
_MODE = ("The mode is set on the model, not in the call:", "model = pm.inference_mode(model)")
_HEARD = "True means attend; numbers added to the attention logits are a bias:"
_HINTS: dict[str, tuple[str, ...]] = {
    "attn_mask": (_HEARD, "mask=~attn_mask", "bias=attn_mask"),
    "key_padding_mask": (_HEARD, "mask=~key_padding_mask[:, None, None, :]"),
    "decode": (
        "Create the layer with a cache, and pass its State to each call:",
        "cache_size=128",
        "state=state",
    ),
}
"""Arguments with other values as well."""

_LEAVE_OUT = ("The weights are not returned; leave it out:", "out = layer(query, key_, value)")
_NOT_HERE: dict[str, tuple[str, ...]] = {
    "need_weights": _LEAVE_OUT,
    "average_attn_weights": _LEAVE_OUT,
    "batch_first": ("Batch axes come first here; leave it out:", "out = layer(x)"),
    "inplace": ("Arrays never change in place; leave it out:", "y = layer(x)"),
    "device": (
        "Create the layer, and then a copy on the device:",
        "layer = jax.device_put(layer, device)",
    ),
}
"""Arguments that no layer here has."""

OTHER_MEMBERS: dict[str, tuple[str, ...]] = {
    "eval": ("Create a copy in inference mode:", "model = pm.inference_mode(model)"),
    "train": ("Create a copy in training mode:", "model = pm.inference_mode(model, False)"),
    "parameters": (
        "Gradients and optimizers take the model itself; for only the parameters, write:",
        "params, others = pm.trainable(model)",
    ),
    "named_parameters": ("List the arrays by path:", "arrays = pm.named_leaves(model)"),
    "state_dict": (
        "Save a file, or convert to PyTorch:",
        'pm.save("model.safetensors", model)',
        "state_dict = pm.to_torch(model)",
    ),
    "load_state_dict": (
        "Load a file, or convert from PyTorch; both return a new model:",
        'model = pm.load("model.safetensors", model)',
        "model = pm.from_torch(model, state_dict)",
    ),
    "to": (
        "Create a copy on a device, or in another precision:",
        "model = jax.device_put(model, device)",
        'model = pm.with_precision(model, "bfloat16")',
    ),
    "cuda": (
        "Create a copy on the device:",
        'model = jax.device_put(model, jax.devices("cuda")[0])',
    ),
    "cpu": ("Create a copy on the device:", 'model = jax.device_put(model, jax.devices("cpu")[0])'),
    "zero_grad": (
        "Gradients are values; nothing accumulates them:",
        "grads = pm.filter_grad(loss)(model, x)",
    ),
    "requires_grad_": (
        "Choose the leaves when you take the gradient:",
        'grads = pm.filter_grad(loss, wrt="head.**")(model, x)',
    ),
    "register_buffer": ("Declare a field in the class:", "mean: jax.Array = pm.buffer()"),
    "apply": (
        "A model contains its parameters; call it, or replace layers in it:",
        "y = model(x)",
        "model = pm.tree_at(nn.Linear, model, replace_fn=function)",
    ),
    "fit": (
        "Write the loop yourself; its step is:",
        "grads = pm.filter_grad(loss)(model, x, y)",
        "model, opt = opt.update(model, grads)",
    ),
    "compile": (
        "A model has no optimizer and no loss; compile a training step:",
        "opt = pm.Optimizer(optax.adam(1e-3)).init(model)",
        "step = pm.filter_jit(step)",
    ),
    "predict": ("Call the model:", "y = model(x)"),
    "summary": ("Use the function:", "pm.summary(model, x)"),
    "init": (
        "A model has its parameters when it is created:",
        "model = nn.Linear(3, 4, key=jax.random.key(0))",
    ),
}
"""Attributes of models of PyTorch and Flax, and code to write instead."""

_FILTERS = "The transform for trees with non-array leaves has another name:"
_TREE = "A model is a pytree; pass it to JAX directly:"
_FUNCTIONS = "Wrap a function to use it as a layer:"
_LOSSES = "Use a loss function of optax:"
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "Module": ("It is in the package, not in nn:", "pm.Module"),
    "Parameter": ("Declare a field with an array:", "weight: jax.Array"),
    "Param": ("Declare a field with an array:", "weight: jax.Array"),
    "Variable": ("Declare a field that is not trained:", "mean: jax.Array = pm.buffer()"),
    "Buffer": ("Declare a field that is not trained:", "mean: jax.Array = pm.buffer()"),
    "BatchStat": (
        "Declare a token; a State has the values that calls change:",
        "mean: pm.StateIndex",
    ),
    "Rngs": ("Pass random keys to the layers:", "keys = pm.init_keys(jax.random.key(0))"),
    "compact": ("Declare layers as fields, and create them in __init__:", "layer: nn.Linear"),
    "ModuleList": ("Use a list as a field:", "layers: list[nn.Linear]"),
    "ModuleDict": ("Use a dict as a field:", "layers: dict[str, nn.Linear]"),
    "List": ("Use a list as a field:", "layers: list[nn.Linear]"),
    "Dict": ("Use a dict as a field:", "layers: dict[str, nn.Linear]"),
    "Dense": ("It has another name here:", "nn.Linear(3, 4, key=jax.random.key(0))"),
    "Embed": ("It has another name here:", "nn.Embedding(3, 4, key=jax.random.key(0))"),
    "MultiHeadAttention": (
        "It has another name here:",
        "nn.MultiheadAttention(2, 4, key=jax.random.key(0))",
    ),
    "BatchNorm1d": ("One class supports inputs of any rank:", "nn.BatchNorm(3)"),
    "BatchNorm2d": ("One class supports inputs of any rank:", "nn.BatchNorm(3)"),
    "BatchNorm3d": ("One class supports inputs of any rank:", "nn.BatchNorm(3)"),
    "LSTM": ("Run a cell over the steps:", "nn.RNN(nn.LSTMCell(3, 4, key=jax.random.key(0)))"),
    "GRU": ("Run a cell over the steps:", "nn.RNN(nn.GRUCell(3, 4, key=jax.random.key(0)))"),
    "jit": (_FILTERS, "pm.filter_jit(f)"),
    "grad": (_FILTERS, "pm.filter_grad(loss)"),
    "value_and_grad": (_FILTERS, "pm.filter_value_and_grad(loss)"),
    "vmap": (_FILTERS, "pm.filter_vmap(f)"),
    "pmap": (_FILTERS, "pm.filter_pmap(f)"),
    "scan": (_FILTERS, "pm.filter_scan(f, init, xs)"),
    "cond": (_FILTERS, "pm.filter_cond(pred, f, g, x)"),
    "remat": (_FILTERS, "pm.filter_checkpoint(f)"),
    "split": (_TREE, "leaves, structure = jax.tree.flatten(model)"),
    "merge": (_TREE, "model = jax.tree.unflatten(structure, leaves)"),
    "no_grad": ("Only the derivatives that you ask for are computed:", "y = model(x)"),
    "ReLU": (_FUNCTIONS, "nn.Lambda(jax.nn.relu)"),
    "GELU": (_FUNCTIONS, "nn.Lambda(jax.nn.gelu)"),
    "SiLU": (_FUNCTIONS, "nn.Lambda(jax.nn.silu)"),
    "Tanh": (_FUNCTIONS, "nn.Lambda(jnp.tanh)"),
    "Sigmoid": (_FUNCTIONS, "nn.Lambda(jax.nn.sigmoid)"),
    "Softmax": (_FUNCTIONS, "nn.Lambda(jax.nn.softmax)"),
    "Flatten": (_FUNCTIONS, "nn.Lambda(jnp.ravel)"),
    "MSELoss": (_LOSSES, "optax.squared_error(predictions, targets)"),
    "CrossEntropyLoss": (
        _LOSSES,
        "optax.softmax_cross_entropy_with_integer_labels(logits, labels)",
    ),
}
"""Top-level names of `torch.nn` and Flax, and code to write instead."""


class OtherMember(Waiting):
    """An attribute of `Module` that raises an error for a name that other libraries use.

    This is not a `__getattr__`, with which reading every attribute takes longer on Python 3.11.
    Every other attribute of the name is found first: a field, a definition in a subclass or in a
    base after `Module`, a `__getattr__`. `hasattr`, `dataclasses` and `dir` do not find it. A
    runtime-checkable Protocol looks into classes only, and does find it.
    """

    __slots__ = ("home",)

    def __init__(self, name: str, home: type):
        super().__init__(name)
        self.home = home

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # Earlier bases have been searched, or `super()` skips them.
        bases = owner.__mro__
        return self.without(instance, owner, bases[bases.index(self.home) + 1 :])

    def missing(self, instance: Any, owner: type) -> AttributeError:
        """Return the error, with a hint."""
        where, hint = f"{owner.__qualname__}.{self.name}", OTHER_MEMBERS[self.name]
        return MissingNameError(where, "an attribute", _GOT, hint=hint)


_KEY = ("Pass a random key:", "key=jax.random.key(0)")
_GOT = "a name that only other libraries have"


def add_other_members(home: type) -> None:
    """Let a class, and its subclasses, answer to names of other libraries that they lack."""
    for name in OTHER_MEMBERS:
        type.__setattr__(home, name, OtherMember(name, home))


def without_other_members(cls: Any, names: Iterable[str]) -> list[str]:
    """Return the names in `dir` of a class or its instance that really exist."""
    fields = cls.__record__.fields
    return [n for n in names if n not in OTHER_MEMBERS or n in fields or has_attribute(cls, n)]


def refuse_name(package: str, name: str) -> NoReturn:
    """Raise Python's error for a missing name of a package, or one with a hint.

    Args:
        package: its name.
        name: the missing name.

    Raises:
        AttributeError: always.

    Examples:
        >>> refuse_name("pytreemod.nn", "Module")
        Traceback (most recent call last):
        pytreemod.errors.MissingNameError: pytreemod.nn.Module: expected an attribute, got a name \
that only other libraries have.
          It is in the package, not in nn:
              pm.Module
    """
    if name in OTHER_NAMES:
        where = f"{package}.{name}"
        raise MissingNameError(where, "an attribute", _GOT, hint=OTHER_NAMES[name])
    message = f"module {package!r} has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=sys.modules[package])


def refuse_other_words(
    call: Callable[..., Any], owner: str, given: Iterable[str], error: TypeError
) -> None:
    """Raise a hint for an argument that has another name here, or is misspelled.

    Args:
        call: the function that was called.
        owner: the name of its class.
        given: the names of the arguments.
        error: the error that Python raised.

    Raises:
        ArgumentError: if an argument has another name here, or is misspelled.
        RngError: if only the random key is missing.
    """
    text = str(error)
    if text == f"{call.__qualname__}() missing 1 required keyword-only argument: 'key'":
        raise RngError(f"{owner}(key)", "a random key", "none", hint=_KEY) from error
    for word in given:
        if f"unexpected keyword argument '{word}'" not in text:
            continue
        names = inspect.signature(call).parameters
        if word in _NOT_HERE and word not in names:
            raise _refusal(owner, word, "its own arguments", _NOT_HERE[word]) from error
        if word in OURS and word not in names:
            ours = [name for name in OURS[word] if name in names]
            if not ours and "inference" in OURS[word]:
                raise _refusal(owner, word, "a call without a mode", _MODE) from error
            if ours:
                heading = "It has another name here:" if len(ours) == 1 else "It is split here:"
                hint = _HINTS.get(word, (heading, *(f"{name}=..." for name in ours)))
                if word in _OPPOSITE:
                    hint = ("The argument here has the opposite meaning:", f"{ours[0]}=not {word}")
                expected = ", ".join(f"{name}=" for name in ours)
                raise _refusal(owner, word, expected, hint) from error
        meant = get_close_matches(word, names.keys() - {*given}, n=1)
        if meant and word not in names:
            # Python 3.13 gives this hint itself.
            hint = ("did you mean", f"{meant[0]}=...")
            raise _refusal(owner, word, "its own arguments", hint) from error


def _refusal(owner: str, word: str, expected: str, hint: tuple[str, ...]) -> ArgumentError:
    return ArgumentError(f"{owner}({word})", expected, f"{word}=", hint=hint)

"""Switching a whole model between training and inference."""

from collections.abc import Iterator
from typing import Any, TypeVar

from pytreemod.nn.checking import check_flag
from pytreemod.tree.nodes import children_of, record_of
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import jtu

Tree = TypeVar("Tree")

FLAG = "inference"


def inference_mode(pytree: Tree, value: bool = True) -> Tree:
    """Set every field named `inference`, anywhere in a tree of Modules.

    `Dropout` and `BatchNorm` have such a field; Modules of your own may have one too, as
    configuration or as data.

    Args:
        pytree: a model, or any tree that holds some.
        value: True for inference, False for training.

    Returns:
        A new tree. The arrays in it are the same.

    Raises:
        ArgumentError: value is neither True nor False.

    Examples:
        >>> from pytreemod import nn
        >>> nn.inference_mode([nn.Dropout(0.5)])
        [Dropout(p=0.5, inference=True)]
    """
    value = check_flag("inference_mode(value)", value)
    changes = [(path, value) for path in _flags(pytree, ())]
    return replace_at(pytree, changes) if changes else pytree


def _flags(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The key path of every field of that name, outermost first, none inside another."""
    record, flag = record_of(node), jtu.GetAttrKey(FLAG)
    has_flag = record is not None and FLAG in record.names(node)
    if has_flag:
        yield (*path, flag)
    for key, child in children_of(node) or ():
        if not (has_flag and key == flag):
            yield from _flags(child, (*path, key))

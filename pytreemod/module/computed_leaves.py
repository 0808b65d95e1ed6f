"""`Computed`: a field's value that reads as an array, and is computed from other arrays.

How the attribute reads as the array is described in [`reading`][pytreemod.module.reading].
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pytreemod.module.classes import Module
from pytreemod.module.reading import evaluate, is_computed
from pytreemod.typing import class_of


class Computed(Module, is_abstract=True):
    """A field's value that reads as an array, and is computed from its own arrays.

    Use it for a low-rank update, a normalized or masked weight, or a positive number whose
    logarithm is trained: subclass it, and define `value`. Put it into a field of any Module, and
    **the attribute reads as the array**: `layer.weight` is the result of `value()`, under every
    transform and for functions that insist on a `jax.Array`. The *tree* contains the computed leaf
    with its own fields, so gradients, optimizers, selectors, `tree_at` and files see the arrays
    that it is computed from: `"weight.a"`.

    **Where it is read.** In the field of a Module. In a list or a dict, where no attribute is
    read, use operators (`w @ x`, `w + 1`) and `jnp.asarray(w.value())`; `lax` does not accept it.

    **Laws.** Reading never changes the tree. [`resolve`][pytreemod.resolve] of a model reads as
    the model does. A model without computed leaves has no extra cost.

    **Refused.** A computed leaf remembers the ranks of its arrays when it was made. Reading it on
    several models at once (made by `filter_vmap`) raises an error instead of broadcasting.

    **Gradients** have the structure of the model. `grads.weight`, computed from gradients, would
    mean nothing, and raises an error for the results of `filter_grad`. (Trees that other functions
    made of them, such as the moments of an optimizer, cannot be distinguished from models.) Look at
    the leaves: `pm.named_leaves(grads)["weight.a"]`.

    Raises:
        FieldError: if `value()` does not return an array.
        ShapeError: when the attribute is read: if its arrays have other ranks than when it was
            made, or are derivatives.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class LowRank(pm.Computed):
        ...     base: jax.Array
        ...     a: jax.Array = pm.field(role="lora")
        ...     b: jax.Array = pm.field(role="lora")
        ...     def value(self):
        ...         return self.base + self.b @ self.a
        >>> linear = pm.nn.Linear(3, 2, key=jax.random.key(0))
        >>> low = LowRank(linear.weight, jnp.ones((1, 3)), jnp.zeros((2, 1)))
        >>> adapted = linear.replace(weight=low)
        >>> adapted.weight.shape, isinstance(adapted.weight, jax.Array)
        ((2, 3), True)
        >>> adapted(jnp.ones(3)).shape
        (2,)
        >>> sorted(pm.named_leaves(adapted))
        ['bias', 'weight.a', 'weight.b', 'weight.base']

    Source:
        The idea of a parameter that is a function of others: PyTorch's
        `torch.nn.utils.parametrize`, and `flax.linen.map_variables`.
    """

    __computes__: ClassVar[bool] = True

    @abstractmethod
    def value(self) -> Any:
        """Return the array, computed from the fields."""

    def __jax_array__(self) -> Any:
        return evaluate(self, class_of(self).__qualname__)


def _operator(name: str, is_reflected: bool) -> Callable[..., Any]:
    apply: Callable[..., Any] = getattr(operator, name)

    def operate(*operands: Any) -> Any:
        values = [x.__jax_array__() if is_computed(x) else x for x in operands]
        return apply(*(reversed(values) if is_reflected else values))

    return operate


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
for _name in (*_BINARY, "neg", "pos", "abs", "getitem", "lt", "le", "gt", "ge"):
    setattr(Computed, f"__{_name}__", _operator(f"__{_name}__", False))
for _name in _BINARY:
    setattr(Computed, f"__r{_name}__", _operator(f"__{_name}__", True))


class Function(Computed):
    """The class of the leaves that `computed` returns."""

    fn: Callable[..., Any]
    trees: tuple[Any, ...]

    def value(self) -> Any:
        """Return the result of the function."""
        return self.fn(*self.trees)


def computed(fn: Callable[..., Any], *trees: Any) -> Any:
    """Make a computed leaf that reads as `fn(*trees)`.

    Args:
        fn: returns an array. A function is configuration; a Module may have its own parameters.
        *trees: its arguments: arrays, Modules, containers of them.

    Returns:
        A [`Computed`][pytreemod.Computed], to use instead of the array. Its fields are
        `fn` and `trees`.

    Raises:
        FieldError: if `fn` does not return an array.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(2, 2, key=jax.random.key(0))
        >>> mask = jnp.asarray([[1.0, 0.0], [0.0, 1.0]])
        >>> pruned = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, mask))
        >>> bool((pruned.weight == linear.weight * mask).all())
        True
    """
    return Function(fn, trees)

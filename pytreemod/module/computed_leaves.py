"""`Computed`: a value of a field that reads as an array, and is computed from arrays.

How the attribute reads as the array is described in [`reading`][pytreemod.module.reading].
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.classes import Module
from pytreemod.module.reading import evaluate, is_computed
from pytreemod.typing import class_of


class Computed(Module, is_abstract=True):
    """A value of a field that reads as an array, and is computed from arrays of its own.

    A low-rank update, a weight that is normalised or masked, a positive number whose logarithm is
    trained: subclass it, and write `value`. Put into a field of any Module, ours or yours, **the
    attribute reads as the array**: `layer.weight` is what `value()` gives, under every transform
    and for functions that insist on a `jax.Array`. The *tree* has the computed leaf with its own
    fields, so gradients, optimizers, selectors, `tree_at` and files see what the array is
    computed from: `"weight.a"`.

    **Where it is read.** In the field of a Module. In a list or a dict, where no attribute is
    read, operators (`w @ x`, `w + 1`) and `jnp.asarray(w.value())` do; `lax` does not take it.

    **Laws.** Reading never changes the tree. [`resolve`][pytreemod.resolve] of a model reads as
    the model does. A model that holds none costs what it cost.

    **Refused.** A computed leaf remembers the shapes of what it was made of, and that of its value.
    Read on several models as one (made by `filter_vmap`), or of the wrong rank, it is an error, not
    another broadcast. `value()` is to return an array of the shape that it had when it was made.

    **Gradients** have the form of the model. Computed of gradients, `grads.weight` would mean
    nothing, and is refused where `filter_grad` gave them. (Trees that other functions made of them,
    such as the moments of an optimizer, cannot be distinguished from models.) Look at the leaves:
    `pm.named_leaves(grads)["weight.a"]`.

    Raises:
        FieldError: `value()` gives no array.
        ShapeError: where the attribute is read: it is made of other shapes than it was, or its
            value has another shape.

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
        """The array, computed from the fields."""

    def __value_shape__(self) -> tuple[int, ...] | None:
        """The shape of the value, where it is known without tracing `value`."""
        return None

    def __jax_array__(self) -> Any:
        return evaluate(self, class_of(self).__qualname__)


def _operator(name: str) -> Callable[..., Any]:
    apply: Callable[..., Any] = getattr(operator, name)

    def forwards(self: Computed, *others: Any) -> Any:
        return apply(self.__jax_array__(), *map(_as_value, others))

    return forwards


def _reflected(name: str) -> Callable[..., Any]:
    apply: Callable[..., Any] = getattr(operator, name)

    def backwards(self: Computed, other: Any) -> Any:
        return apply(other, self.__jax_array__())

    return backwards


def _as_value(value: Any) -> Any:
    return value.__jax_array__() if is_computed(value) else value


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
for _name in (*_BINARY, "neg", "pos", "abs", "getitem", "lt", "le", "gt", "ge"):
    setattr(Computed, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _BINARY:
    setattr(Computed, f"__r{_name}__", _reflected(f"__{_name}__"))


class Function(Computed):
    """What `computed` makes."""

    fn: Callable[..., Any]
    trees: tuple[Any, ...]

    def value(self) -> Any:
        """What the function gives."""
        return self.fn(*self.trees)


def computed(fn: Callable[..., Any], *trees: Any) -> Any:
    """A computed leaf for the occasion: it reads as `fn(*trees)`.

    Args:
        fn: gives an array. A function is configuration; a Module may hold parameters of its own.
        *trees: what it is computed from: arrays, Modules, containers of them.

    Returns:
        A [`Computed`][pytreemod.Computed], to be put where the array would stand. Its fields are
        `fn` and `trees`.

    Raises:
        ArgumentError: `fn` cannot be called.
        FieldError: `fn` gives no array.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(2, 2, key=jax.random.key(0))
        >>> mask = jnp.asarray([[1.0, 0.0], [0.0, 1.0]])
        >>> pruned = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, mask))
        >>> bool((pruned.weight == linear.weight * mask).all())
        True
    """
    if not callable(fn):
        raise ArgumentError("computed(fn)", "a function of arrays", describe(fn))
    return Function(fn, trees)

"""Low-rank updates: `lora` adds one to each chosen matrix.

The matrix becomes a *computed leaf*, so that no layer has to know of it: reading the attribute
gives the sum. A role decides what to train, as everywhere.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.fields import field
from pytreemod.module.reading import is_computed, shape_of_one
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.streams import hashes_of
from pytreemod.training.automatic_axes import with_automatic_axes
from pytreemod.training.mapped_parameters import Parameter, replace_parameters
from pytreemod.tree.paths import step_names
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.selecting import as_selector
from pytreemod.typing import jtu

_M = TypeVar("_M")


class LowRank(Computed):
    r"""A matrix with a low-rank update: $W_0 + \frac{\alpha}{r} B A$.

    [`lora`][pytreemod.lora] replaces a matrix with this.
    """

    base: Inexact[Array, "m n"]
    a: Inexact[Array, "r n"] = field(role="lora")
    b: Inexact[Array, "m r"] = field(role="lora")
    scale: float = field(static=True)

    def value(self) -> Array:
        """Return the sum."""
        # On a mesh, of the factors each device has the part that it needs.
        product = with_automatic_axes(jnp.matmul, self.b, self.a, like=lambda: self.base)
        return self.base + self.scale * product

    def __part_axis_names__(self, names: Any) -> dict[str, Any]:
        return {"a": (None, names[1]), "b": (names[0], None)}


def lora(
    model: _M, selector: Any, rank: int = 8, *, key: KeyLike, alpha: float | None = None
) -> _M:
    r"""Add low-rank updates to chosen matrices, to be trained instead of them.

    Each matrix $W$ (m, n) becomes $W_0 + \frac{\alpha}{r} B A$, with `base` (m, n), `a` (r, n) and
    `b` (m, r) at its path: `"weight.a"`. The attribute reads as the sum. `a` and `b` have the role
    `"lora"`, so that `wrt=pm.select.role("lora")` trains them alone.
    [`pm.resolve`][pytreemod.resolve] merges the trained update into the matrix.

    **First values.** `b` is zero, so that each matrix reads as before. `a` is normal with variance
    1 / n. Each has its own key, folded from the path: choosing more matrices, or adding layers,
    does not change the numbers of the others.

    **Adapted leaves** are the floating arrays of two axes among the chosen leaves; others are
    unchanged. In a `Stack`, each layer's matrix has its own update. A computed leaf that reads as a
    matrix becomes the base unchanged. If a path is tied to a matrix, both read as the sum.

    Args:
        model: any tree. For models that were made at once by a map, map `lora` over them.
        selector: picks the matrices: a path (`"blocks.*.attention.**.weight"`), a class
            (`pm.nn.Linear`), a selector. Of a tie, pick the source.
        rank: of the update, >= 1.
        key: a random key; see above.
        alpha: the update is multiplied by `alpha / rank`; by 1 if None. With it, you can change
            `rank` without another learning rate.

    Returns:
        A new model; all other leaves are shared with the old one.

    Raises:
        ArgumentError: if rank is not a positive integer.
        SpecError: if there is no matrix among the chosen leaves, or one that already has an update.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> mlp = pm.nn.MLP(64, 10, 32, 2, key=jax.random.key(0))
        >>> adapted = pm.lora(mlp, "layers.*.weight", 4, key=jax.random.key(1))
        >>> bool((adapted.layers[0].weight == mlp.layers[0].weight).all())
        True
        >>> trained, _ = pm.trainable(adapted, wrt=pm.select.role("lora"))
        >>> [name for name in pm.named_leaves(trained) if "0" in name]
        ['layers.0.weight.a', 'layers.0.weight.b']
        >>> pm.resolve(adapted).layers[0]
        Linear(weight=f32[32,64], bias=f32[32], in_features=64, out_features=32)

    Source:
        Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
        https://arxiv.org/abs/2106.09685, section 4.1.
    """
    if not isinstance(rank, int) or rank < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("lora(rank)", "an integer of at least 1", describe(rank))
    scale = 1.0 if alpha is None else float(alpha) / rank
    seed = next(key) if isinstance(key, InitKeys) else key

    def adapt(base: Any, key: Any) -> LowRank:
        # The base may be a computed leaf, which is no matrix until it is read: its shape suffices.
        like: Any = jax.eval_shape(base.value) if is_computed(base) else base
        (m, n), dtype = like.shape, like.dtype
        # One factor is zero, so that the model computes the same as before at first.
        a = jax.random.normal(key, (rank, n), dtype) * max(n, 1) ** -0.5
        return LowRank(base, a, jnp.zeros((m, rank), dtype), scale)

    def make(one: Parameter) -> Any:
        if not _is_matrix(one):
            return None
        if isinstance(one.node, LowRank):
            hint = f"model = pm.resolve(model, {one.text()!r})"
            raise SpecError(f"lora: {one.text()} has an update already", hint=hint)
        (number,) = hashes_of([".".join(step_names(one.path))])
        own = jax.random.fold_in(seed, number)
        sizes = np.shape(jtu.tree_leaves(one.node)[0])[: one.axes]
        return one.map(adapt, jax.random.split(own, sizes) if sizes else own)

    picks = as_selector(selector).mask(model)
    return replace_parameters(f"lora: {selector!r}", model, picks, make)


def _is_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix in each layer."""
    node = parameter.node
    if is_computed(node):
        return len(shape_of_one(node) or ()) == 2
    return is_inexact_array(node) and node.ndim == 2 + parameter.axes

"""Low-rank updates: `lora` adds one to each chosen matrix.

The matrix becomes a *computed leaf*, so that no layer has to know of it: reading the attribute
    gives
the sum. A role decides what to train, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Inexact

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.fields import field
from pytreemod.module.reading import is_computed, made_of
from pytreemod.module.ties import Tied
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.streams import check_seed, hashes_of
from pytreemod.training.chosen_parameters import Parameter, choose_parameters
from pytreemod.tree.nodes import Location, locations
from pytreemod.tree.paths import path_text, pattern_text, plain_name, some_of
from pytreemod.tree.predicates import as_number, is_inexact_array
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.selecting import Selector, as_selector
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import Tracer, untyped_jax

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
        base = self.base
        if AxisType.Explicit in jax.typeof(base).sharding.mesh.axis_types:
            return base + self.scale * _sharded_product(self.b, self.a, base)
        return base + self.scale * (self.b @ self.a)

    def __part_axis_names__(self, names: Any) -> dict[str, Any]:
        return {"a": (None, names[1]), "b": (names[0], None)}


def _sharded_product(b: Array, a: Array, base: Array) -> Array:
    """The update, split as the matrix is: of its factors each device has the part that it needs."""
    is_traced = isinstance(base, Tracer)
    to = cast("NamedSharding", jax.typeof(base).sharding if is_traced else base.sharding)
    rows, columns = (*to.spec, None, None)[:2]
    b, a = (
        cast(
            "Array",
            untyped_jax.sharding.reshard(factor, NamedSharding(to.mesh, PartitionSpec(*spec))),
        )
        for factor, spec in ((b, (rows, None)), (a, (None, columns)))
    )
    return jnp.matmul(b, a, out_sharding=to)


def lora(
    model: _M, selector: Any, rank: int = 8, *, key: KeyLike, alpha: float | None = None
) -> _M:
    r"""Add low-rank updates to chosen matrices, to be trained instead of them.

    Each matrix $W$ (m, n) becomes $W_0 + \frac{\alpha}{r} B A$, with `base` (m, n), `a` (r, n) and
    `b` (m, r) at its path: `"weight.a"`. The attribute reads as the sum. `a` and `b` have the role
    `"lora"`, so that `wrt=pm.select.role("lora")` trains them alone, and the base does not change
    by a bit. [`pm.resolve`][pytreemod.resolve] merges the trained update into the matrix.

    **First values.** `b` is zero, so that each matrix reads as before, number for number. `a` is
    normal with variance 1 / n. Each has its own key, folded from the path: choosing
    more matrices, or adding layers, does not change the numbers of the others.

    **Adapted leaves** are the matrices among the chosen leaves: floating arrays of two axes. In a
    `Stack`, each layer's matrix has its own update. Other chosen leaves are
    unchanged: biases, convolutions. A computed leaf that reads as a matrix becomes the
    base unchanged. If a path is tied to a matrix, both read as the sum.

    Args:
        model: any tree. For models that were made at once by a map, map `lora` over them.
        selector: picks the matrices: a path (`"blocks.*.attention.**.weight"`), a class
            (`pm.nn.Linear`), a selector.
        rank: of the update, >= 1.
        key: a random key; see above.
        alpha: the update is multiplied by `alpha / rank`; by 1 if None. With it, you can change
            `rank` without another learning rate.

    Returns:
        A new model; all other leaves are shared with the old one.

    Raises:
        ArgumentError: if rank or alpha is invalid.
        RngError: if key is not a random key.
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
    scale = 1.0 if alpha is None else _check_alpha(alpha) / rank
    seed = next(key) if isinstance(key, InitKeys) else key
    check_seed("lora(key)", seed)
    chosen = as_selector(selector)
    model = with_new_containers(model)
    parameters = choose_parameters(model, chosen)
    matrices = [parameter for parameter in parameters if _is_matrix(parameter)]
    if not matrices:
        _refuse_none(model, chosen, parameters)
    adapted = [path_text(one.path) for one in matrices if isinstance(one.node, LowRank)]
    if adapted:
        raise SpecError(
            "lora(selector)",
            "matrices without an update",
            "matrices with an update",
            at=adapted,
            hint=["merge the update first:", f"model = pm.resolve(model, {adapted[0]!r})"],
        )
    # One by one: taking many keys out of one array would compile a longer program.
    names = hashes_of([plain_name(one.path) for one in matrices])
    keys = [jax.random.fold_in(seed, number) for number in names]
    pairs = zip(matrices, keys, strict=True)
    return replace_at(model, [(one.path, _adapted(one, rank, scale, k)) for one, k in pairs])


def _is_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix in each layer."""
    node = parameter.node
    if is_computed(node):
        shape = made_of(node).shape
        return shape is not None and len(shape) == 2
    return is_inexact_array(node) and node.ndim == 2 + parameter.members


def _adapted(parameter: Parameter, rank: int, scale: float, key: Any) -> Any:
    def adapt(base: Any, key: Any) -> LowRank:
        # The base may be a computed leaf, which is no matrix until it is read: its shape suffices.
        like: Any = jax.eval_shape(base.value) if is_computed(base) else base
        (m, n), dtype = like.shape, like.dtype
        # One factor is zero, so that the model computes the same as before at first.
        a = jax.random.normal(key, (rank, n), dtype) * max(n, 1) ** -0.5
        return LowRank(base, a, jnp.zeros((m, rank), dtype), scale)

    sizes = parameter.sizes()
    keys = jax.random.split(key, sizes) if sizes else key
    return parameter.each(adapt)(parameter.node, keys)


# ---- refusals


def _check_alpha(alpha: Any) -> float:
    number = as_number(alpha)
    if number is None or not 0 < number < math.inf:
        raise ArgumentError("lora(alpha)", "a number > 0, or None", describe(alpha))
    return float(number)


def _refuse_none(model: Any, selector: Selector, parameters: Sequence[Parameter]) -> NoReturn:
    """Raise the error for a selector that picks no matrix."""
    locs = list(locations(model, _is_tied))
    chosen = zip(locs, selector.mask(model, _is_tied), strict=True)
    tied = [loc for loc, hit in chosen if hit and _is_tied(loc.leaf)]
    shown = [f"{pattern_text(one.path)}: {describe(one.node)}" for one in parameters]
    shown += [f"{pattern_text(loc.path)}: tied to {_source_of(loc)}" for loc in tied]
    known = [
        pattern_text(one.path)
        for one in choose_parameters(model, as_selector(...))
        if _is_matrix(one)
    ]
    hint = [f"Matrices of the model are: {some_of(known)}." if known else "The model has none."]
    if tied:
        code = f"pm.lora(model, {_source_of(tied[0])!r}, key=key)"
        hint = ["adapt the source of the tie, which both paths read:", code]
    got = "none among the chosen leaves" if shown else "nothing"
    raise SpecError("lora(selector)", "some matrices", got, at=shown, hint=hint)


def _is_tied(node: Any) -> bool:
    return isinstance(node, Tied)


def _source_of(loc: Location) -> str:
    """Return the source of a tie, as a path from the root of the model."""
    # The tie's own path begins at the node that has it.
    keeper = path_text(loc.path[: len(loc.path) - loc.leaf.depth])
    to = loc.leaf.to
    if len(loc.path) == loc.leaf.depth:
        return to
    return keeper + to if to.startswith("[") else f"{keeper}.{to}"

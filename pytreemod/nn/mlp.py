"""The multilayer perceptron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.array_shapes import ArrayShapes
from pytreemod.module.classes import Module
from pytreemod.module.field_kinds import assign_fields, flag, size
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_dtype,
    check_last_axis,
    divide_key,
    function,
    mapped_hint,
    named,
)
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.explicit_meshes import entries, resharded
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.linear import Linear
from pytreemod.nn.members.resharding import gathered
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.transform.scans import filter_scan
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.nodes import record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.split_arrays import explicit_mesh, sharded_as
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import AnyArray, jtu


def identity(x: Array) -> Array:
    """Return x: the default `final_activation` of an `MLP`."""
    return x


_ACTIVATION = function(
    "a function or a Module", "Pass the function itself:", "activation=jax.nn.relu"
)


class MLP(Module):
    r"""A multilayer perceptron: `depth` hidden layers of equal width, then an output layer.

    Computes $x \leftarrow \phi(W_i x + b_i)$ for each hidden layer, then
    $y = \phi_{out}(W x + b)$.

    Shapes:
        x: (..., in_size); (...) if in_size="scalar"
        return: (..., out_size); (...) if out_size="scalar"

    An activation that is a function gets the whole array. An activation that is a tree (a Module, a
    `Partial`, a bound method of a Module) can have parameters. It is copied for each neuron of each
    hidden layer, and each copy gets the one number of its neuron.

    Fields:
        layers: depth + 1 `Linear` layers; with scan=True three, of which the second one contains
            all layers between the first and the last, stacked on a leading axis
        activation: configuration if a function; otherwise its arrays have two leading axes,
            (depth, width_size)
        final_activation: the same, with one leading axis (out_size,), or none for "scalar"

    Args:
        in_size: size of the input's last axis, >= 0, or "scalar"; None if it follows from x
            ([`materialize`][pytreemod.materialize]).
        out_size: size of the output's last axis, >= 0, or "scalar".
        width_size: size of each hidden layer, >= 0.
        depth: number of hidden layers, >= 0; with 0 there is only the output layer.
        activation: applied after each hidden layer: a function, or a Module that is copied.
        final_activation: the same for the output layer.
        use_bias: whether hidden layers have a bias.
        use_final_bias: whether the output layer has one.
        dtype: of all weights and biases; JAX's default float if None.
        scan: whether to store the layers between the first and the last as one, and apply them by
            a scan. A deep network then compiles as fast as a shallow one.
        key: used once, for the initial weights and biases.
        weight_init: passed on to every `Linear`.
        bias_init: passed on to every `Linear`.

    State and randomness: none.

    Raises:
        ArgumentError: if a size is negative or not an integer, or another argument is invalid.
        RngError: if key is not a random key.
        ShapeError: if the last axis of x does not have in_size entries, or an activation does not
            have a copy for each neuron.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> mlp = nn.MLP(2, 1, width_size=8, depth=3, key=jax.random.key(0))
        >>> mlp(jnp.ones((5, 2))).shape, len(mlp.layers)
        ((5, 1), 4)

        With a learned activation:

        >>> import pytreemod as pm
        >>> class Slope(pm.Module):
        ...     factor: jax.Array
        ...     def __call__(self, x):
        ...         return jnp.where(x > 0, x, self.factor * x)
        >>> mlp = nn.MLP(2, 1, 8, 3, Slope(jnp.asarray(0.1)), key=jax.random.key(0))
        >>> mlp.activation.factor.shape
        (3, 8)

    Source:
        Initial values as in `Linear`.
    """

    layers: tuple[Linear, ...]
    activation: Callable[..., Any] = field(accepts=_ACTIVATION)
    final_activation: Callable[..., Any] = field(accepts=_ACTIVATION)
    use_bias: bool = flag()
    use_final_bias: bool = flag()
    in_size: int | Literal["scalar"] = size(scalar=True)
    out_size: int | Literal["scalar"] = size(scalar=True)
    width_size: int = size()
    depth: int = size()
    # A default, although __init__ sets it: a value equal to its default is not printed.
    scan: bool = flag(default=False)

    @sizes_follow(in_size=lambda x: x.shape[-1])
    def __init__(
        self,
        in_size: int | Literal["scalar"] | None,
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        activation: Callable[..., Any] = jax.nn.relu,
        final_activation: Callable[..., Any] = identity,
        use_bias: bool = True,
        use_final_bias: bool = True,
        dtype: Any = None,
        *,
        scan: bool = False,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        assign_fields(self, in_size=in_size)
        self.out_size, self.width_size, self.depth = out_size, width_size, depth
        self.use_bias, self.use_final_bias, self.scan = use_bias, use_final_bias, scan
        dtype = check_dtype(named(self, "dtype"), dtype)
        self.activation = _copied(activation, self.depth, self.width_size)
        outputs = () if self.out_size == "scalar" else (self.out_size,)
        self.final_activation = _copied(final_activation, *outputs)

        def make(n_in: Any, n_out: Any, bias: bool, key: KeyLike) -> Linear:
            return Linear(
                n_in, n_out, bias, dtype, key=key, weight_init=weight_init, bias_init=bias_init
            )

        def make_inner(key: Any) -> Linear:
            return make(self.width_size, self.width_size, self.use_bias, key)

        # One key for each layer, scanned or not: `scan` does not change the numbers.
        keys = divide_key(named(self, "key"), key, self.depth + 1)
        layers: list[Linear] = []
        if self.depth > 0:
            layers = [make(self.in_size, self.width_size, self.use_bias, keys[0])]
            if self.scan:
                if isinstance(key, InitKeys):
                    inner = key.take(depth - 1)
                else:
                    # The same keys as an array, to map over.
                    inner = jax.random.split(key, self.depth + 1)[1:depth]
                layers.append(filter_vmap(make_inner)(inner))
            else:
                layers += [make_inner(inner) for inner in keys[1:depth]]
        n_in = self.width_size if layers else self.in_size
        self.layers = (*layers, make(n_in, self.out_size, self.use_final_bias, keys[self.depth]))

    def __stacked__(self) -> tuple[str, ...]:
        # For code that needs the arrays of each layer, not the stack.
        return ("layers[1]",) if self.scan and self.depth > 0 else ()

    def __check_init__(self) -> None:
        _check_layers(self)

    def __array_shapes__(self) -> ArrayShapes:
        # `_check_layers` checks the weights, and how many there are.
        last = len(self.layers) - 1
        n_out = 1 if self.out_size == "scalar" else self.out_size
        shapes: ArrayShapes = {
            f"layers.{number}.bias": (self.width_size,) if self.use_bias else None
            for number in range(last)
        }
        return {**shapes, f"layers.{last}.bias": (n_out,) if self.use_final_bias else None}

    @ignores_key
    @in_scope("pm.nn.MLP")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the layers one after the other; `key` is ignored."""
        del key
        where = Title(self, "in_size", "out_size", "width_size", "depth")
        # Checked before the layers run, so that errors name the network, not a layer, and an
        # activation does not fail inside a scan.
        _check_copies(where, "activation", self.depth, self.width_size)
        if self.out_size != "scalar":
            _check_copies(where, "final_activation", self.out_size)
        if self.in_size != "scalar":
            check_last_axis(where, check_array(where, x), self.in_size, "in_size")
        if self.scan and self.depth > 0:
            first, inner, last = self.layers
            x = _activated(_at(self.activation, 0), first(x))
            rest = _at(self.activation, slice(1, None))
            x, _ = filter_scan(_step, x, gathered((inner, rest)), length=self.depth - 1)
        else:
            *hidden, last = self.layers
            for number, layer in enumerate(hidden):
                x = _activated(_at(self.activation, number), layer(x))
        return _activated(self.final_activation, last(x), self.out_size != "scalar")


def _step(x: Array, each: tuple[Linear, Callable[..., Any]]) -> tuple[Array, None]:
    """Return one step of the scan: a hidden layer and its activation."""
    layer, activation = each
    return sharded_as(_activated(activation, layer(x)), x), None


def _is_plain(activation: Any) -> bool:
    """Whether an activation is a function, and so has no parameters."""
    return jtu.all_leaves([activation])


def _copied(activation: Callable[..., Any], *sizes: int) -> Callable[..., Any]:
    """Copy an activation that has parameters for each entry of some leading axes."""
    if _is_plain(activation):
        return activation
    # From the inside out: the axis that is mapped last becomes the first.
    for count in reversed(sizes):
        activation = filter_vmap(_given, in_axes=None, axis_size=count)(activation)
    return activation


def _given(value: Any) -> Any:
    return value


def _at(activation: Callable[..., Any], index: int | slice) -> Callable[..., Any]:
    """Pick the copies for one layer, or for some of them."""
    if _is_plain(activation):
        return activation

    def pick(leaf: Any) -> Any:
        return leaf[index] if is_array(leaf) else leaf

    return jtu.tree_map(pick, activation)


def _activated(activation: Callable[..., Any], x: Array, by_neuron: bool = True) -> Array:
    """Apply a function to all of x, or each copy of a Module to each number of its neuron.

    Every call of a copy gets one number, however many examples there are: it may branch on it.
    """
    if _is_plain(activation):
        return activation(x)
    call: Callable[..., Any] = _call
    examples = x.ndim
    if by_neuron:
        activation = _split_by_neuron(activation, x)
        call, examples = filter_vmap(call), x.ndim - 1
    # The remaining axes are axes of examples, which share the copies.
    for _ in range(examples):
        call = filter_vmap(call, in_axes=(None, 0))
    return call(activation, x)


def _split_by_neuron(activation: Callable[..., Any], x: Array) -> Callable[..., Any]:
    """Shard the copies like the neurons, on a mesh with explicit axes."""
    mesh = explicit_mesh(x)
    if mesh is None:
        return activation

    def split(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        return resharded(leaf, mesh, (entries(x)[-1], *((),) * (leaf.ndim - 1)))

    return jtu.tree_map(split, activation)


def _call(activation: Callable[..., Any], x: Array) -> Array:
    return activation(x)


def _check_copies(where: Title, name: str, *sizes: int) -> None:
    """Refuse an activation that was set later, without a copy for each neuron."""
    activation = getattr(where.layer, name)
    if _is_plain(activation):
        return
    count = len(sizes)
    wrong = [
        (path_text(path, name), leaf)
        for path, leaf in jtu.tree_leaves_with_path(activation)
        if is_array(leaf) and leaf.shape[:count] != sizes
    ]
    if not wrong:
        return
    hint: Sequence[str] = (
        "The constructor copies an activation for each neuron; to replace it, copy it yourself:",
        f"copies = jax.tree.map(lambda a: jnp.broadcast_to(a, {sizes} + a.shape), activation)",
        f"mlp = mlp.replace({name}=copies)",
    )
    expected = f"{name} with a copy for each neuron, on leading axes {sizes}"
    got = f"{len(wrong)} array{'s' * (len(wrong) > 1)} without one"
    if all(leaf.shape[1 : 1 + count] == sizes for _, leaf in wrong):
        hint = mapped_hint(where.layer)
    places = [f"{path}: {describe(leaf)}" for path, leaf in wrong]
    raise ShapeError(where, expected, got, at=places, hint=hint)


def _check_layers(mlp: MLP) -> None:
    """Refuse configuration that does not match the layers."""
    depth, scan = len(mlp.layers) - 1, mlp.scan
    if depth > 0:
        # A layer whose weight is not an array was put there on purpose, and is not checked. A
        # computed weight is not read: in several networks stored as one, it cannot be.
        weights: list[Any] = [
            stored(layer, "weight", None) if record_of(layer) is not None else None
            for layer in mlp.layers
        ]
        first, second, last = *weights[:2], weights[-1]
        if is_array(first) and is_array(second):
            # Compared with both ends: a layer that members share lacks their axis.
            scan = second.ndim > max(first.ndim, getattr(last, "ndim", 0))
            depth = second.shape[-3] + 1 if scan else depth
        elif scan:
            depth = mlp.depth
    found: dict[str, Any] = {
        "scan": scan,
        "depth": depth,
        "in_size": getattr(mlp.layers[0], "in_features", mlp.in_size),
        "out_size": getattr(mlp.layers[-1], "out_features", mlp.out_size),
    }
    if depth > 0:
        found["width_size"] = getattr(mlp.layers[-1], "in_features", mlp.width_size)
    for name, value in found.items():
        given = getattr(mlp, name)
        if given != value:
            expected = f"{value!r}, the value for which its layers were made"
            hint = ("Create another network:", f"MLP(..., {name}={given!r}, key=key)")
            raise ArgumentError(named(mlp, name), expected, describe(given), hint=hint)

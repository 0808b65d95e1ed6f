"""`stateful`: a model and its State as one value, for code that need not know which have State."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pytreemod.errors import ArgumentError, StateError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import buffer
from pytreemod.nn.base import output_and_state
from pytreemod.state.making import make_with_state
from pytreemod.state.tokens import RngStream, is_moved, tokens_of
from pytreemod.state.values import State
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text

_M = TypeVar("_M")
_B = TypeVar("_B", bound="Stateful[Any]")


class Stateful(Module, Generic[_M]):
    """A model and its State in one value, called as `out, net = net(x)`.

    **Form.** A Module of two fields: `model` is trained like any other, and `state` is a buffer,
    which `filter_grad` does not differentiate.

    **Make.** With [`stateful`][pytreemod.nn.stateful].

    **Use.** `out, net = net(x)` calls the model with its State, if it has any, and returns the
    output and the new net. Use `apply` to call another method. A call that changes State uses up
    the net, as it uses up a State: a second call would lose the changes. The same is true if a
    function under `filter_jit` returns the new net. A call that fails, or changes no State, leaves
    the net unchanged. If something fails after the call, `restored` returns the old net.

    **Law.** `net(x)` is `out, stateful(model, state)` where `out, state = model(x, state=state)`;
    both compile to the same programs.

    Fields:
        model: the model
        state: its State

    Raises:
        StateError: if a used net was called.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> net = pm.stateful(pm.nn.BatchNorm(2))
        >>> out, net = net(jnp.asarray([[1.0, 10.0], [3.0, 30.0]]))
        >>> out.round(2).tolist()
        [[-1.0, -1.0], [1.0, 1.0]]
    """

    model: _M
    # Running statistics and keys are not trained.
    state: State = buffer()

    # An update that a transform does not return is an error, not a mere warning.
    __keeps_state__ = True

    def __call__(self: _B, /, *args: Any, **kwargs: Any) -> tuple[Any, _B]:
        """Call the model.

        Args:
            *args: for the model.
            **kwargs: for the model; `state` is added.

        Returns:
            The output of the model, and the new net.
        """
        return self._run(self.model, args, kwargs)

    def apply(self: _B, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, _B]:
        """Call a function of the model, such as another method than `__call__`.

        Args:
            fn: called as `fn(model, *args, **kwargs, state=state)`, without `state` if the model
                has none; returns `(out, state)`, or `out`, like the model's own call.
            *args: for `fn`.
            **kwargs: for `fn`.

        Returns:
            `out`, and the new net.

        Raises:
            StateError: if the net was used.

        Examples:
            >>> import jax.numpy as jnp
            >>> import pytreemod as pm
            >>> class Coder(pm.Module):
            ...     norm: pm.nn.BatchNorm
            ...     def encode(self, x, state):
            ...         return self.norm(x, state)
            >>> net = pm.stateful(Coder(pm.nn.BatchNorm(2)))
            >>> code, net = net.apply(Coder.encode, jnp.ones((3, 2)))
        """
        return self._run(fn, (self.model, *args), kwargs)

    def seed(self: _B, key: Any) -> _B:
        """Give every random stream of the model a new key; see `State.seed`."""
        return self.replace(state=self._newest().seed(key))

    def split(self: _B, n: int, select: Any = None) -> _B:
        """Make a net for `n` members; see `State.split`."""
        return self.replace(state=self._newest().split(n, select))

    def join(self: _B) -> _B:
        """Undo `split` for the random streams; a net without streams is unchanged."""
        state = self._newest()
        # Code for ensembles need not check whether there are streams.
        return self.replace(state=state.join()) if RngStream in state.__token_types__() else self

    def restored(self: _B) -> _B:
        """Return the net from before the call that used it up; see `State.restored`."""
        return self.replace(state=self.state.restored())

    def _run(
        self: _B, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, _B]:
        # A separate State for the call: if it fails half-way, this one is still valid.
        own = self._newest().substate(self.model)
        # A model without State is called without it, so that the same code works.
        if not own.__token_types__() and not _requires_state(fn):
            return fn(*args, **kwargs), self
        out, new = output_and_state(fn, fn(*args, **kwargs, state=own))
        if new is own:
            # Raises if it was used up: then another State has the values.
            new.substate(())
            return out, self
        return out, self.replace(state=self.state.update(new))

    def _newest(self) -> State:
        """Return the State, if it was not used up."""
        if not self.state.__usable__():
            fact = "a call has already replaced this net; its State would lose an update"
            hint = (
                "use the new net:",
                "out, net = net(x)",
                "net = net.restored()  # if it is lost",
            )
            raise StateError(fact, hint=hint)
        return self.state


def stateful(model: _M, state: State | None = None, /) -> Stateful[_M]:
    """Combine a model and its State, so that code which calls and trains it need not know of State.

    The same code works for models with State, with random streams, and with neither. If you add a
    `BatchNorm` to a model, its training code does not change.

    Args:
        model: any tree that is callable, or has methods. It gets its State by the keyword `state`,
            and returns `(out, state)`, as all layers do; a model without State is called without.
        state: the State; if left out, it is made from the initial values of a new model.

    Returns:
        A `Stateful`.

    Raises:
        ArgumentError: if `model` is no Module or container.
        StateError: if `state` was used, or is missing although the model was made with one.
        StateError: if `state` belongs to another model.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> layers = [pm.nn.Linear(2, 3, key=jax.random.key(0)), pm.nn.BatchNorm(3)]
        >>> net = pm.stateful(pm.nn.Sequential(layers))
        >>> def loss(net, x):
        ...     out, net = net(x)
        ...     return jnp.mean(out**2), net
        >>> grads, net = pm.filter_grad(loss, has_aux=True)(net, jnp.ones((4, 2)))

        With a model that was made together with its State:

        >>> net = pm.stateful(*pm.make_with_state(pm.nn.BatchNorm)(2))
    """
    if not is_node(model):
        raise ArgumentError("stateful(model)", "a model", describe(model))
    if state is not None:
        state.substate(model)  # Raises if it belongs to another model.
        return Stateful(model, state)
    gone = [path_text(path) for path, token in tokens_of(model) if is_moved(token)]
    if gone:
        fact = "stateful: the model was made with a State, which is missing"
        raise StateError(fact, at=gone, hint="net = pm.stateful(model, state)")
    return Stateful(*make_with_state(lambda: model)())


def _requires_state(fn: Callable[..., Any]) -> bool:
    """Whether a function requires a State, even one without values."""
    try:
        found = inspect.signature(fn).parameters.get("state")
    except ValueError:  # some functions of C have no signature
        return False
    return found is not None and found.default is inspect.Parameter.empty

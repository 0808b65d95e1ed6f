"""A model and its State as one value, for code that need not know which layers have State."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pytreemod.errors import ArgumentError, StateError, describe, explain, with_article
from pytreemod.module.classes import Module
from pytreemod.module.fields import buffer
from pytreemod.nn.calling import ABSENT, Absence, Absent
from pytreemod.state.making import make_with_state
from pytreemod.state.tokens import RngStream, is_moved, tokens_of
from pytreemod.state.values import State
from pytreemod.transform.gradients import pair_of
from pytreemod.tree.paths import path_text
from pytreemod.typing import class_of, jtu

_M = TypeVar("_M")
_B = TypeVar("_B", bound="Stateful[Any]")

MODEL, STATE = "model", "state"


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

    **Laws.** `net(x)` is `out, stateful(model, state)` where `out, state = model(x, state=state)`,
    and both compile to the same programs.

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
        if not callable(self.model):
            kind = type(self.model).__qualname__
            hint = ("call a method of the model:", f"out, net = net.apply({kind}.method, x)")
            expected = "a model that can be called"
            raise ArgumentError("net(...)", expected, with_article(kind), hint=hint)
        return self._run("net(...)", self.model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes. An instance under construction has no model yet.
        model = None if name.startswith("_") or name in (MODEL, STATE) else self.model
        if hasattr(model, name):
            raise AttributeError(_of_model(name, model), name=name, obj=self)
        # For the error.
        return object.__getattribute__(self, name)

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
        if not callable(fn):
            raise ArgumentError("net.apply(fn)", "a function", describe(fn))
        if getattr(fn, "__self__", None) is self.model:
            name = f"{type(self.model).__qualname__}.{fn.__name__}"
            hint = ("the net passes its model itself:", f"out, net = net.apply({name}, x)")
            expected = "a function of the model"
            raise ArgumentError("net.apply(fn)", expected, f"its method {name}", hint=hint)
        return self._run("net.apply(...)", fn, (self.model, *args), kwargs)

    def seed(self: _B, key: Any) -> _B:
        """Give every random stream of the model a new key; see `State.seed`.

        Args:
            key: one random key, or the result of `init_keys`.

        Returns:
            The new net.

        Raises:
            RngError: if `key` is not a random key.
            StateError: if the net was used.
        """
        return self.replace(state=self._newest("net.seed").seed(key))

    def split(self: _B, n: int, select: Any = None) -> _B:
        """Make a net for `n` members; see `State.split`.

        Args:
            n: number of members.
            select: a selector over the State; all random streams by default.

        Returns:
            The new net.

        Raises:
            ArgumentError: if `n` is not a count.
            RngError: if a chosen stream was not seeded, or is split already.
            StateError: if the net was used.
        """
        return self.replace(state=self._newest("net.split").split(n, select))

    def join(self: _B) -> _B:
        """Undo `split` for the random streams; see `State.join`.

        Returns:
            The new net. A net without streams is unchanged.

        Raises:
            StateError: if the net was used, or its streams were not split.
        """
        state = self._newest("net.join")
        # Code for ensembles need not check whether there are streams.
        has_streams = RngStream in state.__child_kinds__()
        return self.replace(state=state.join()) if has_streams else self

    def restored(self: _B) -> _B:
        """Return the net from before the call that used it up; see `State.restored`.

        Returns:
            A net that can be called again.
        """
        return self.replace(state=self.state.restored())

    def _run(
        self: _B, where: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, _B]:
        if STATE in kwargs or any(isinstance(arg, State) for arg in args):
            hint = ("the net has a State, and passes it to the model:", "out, net = net(x)")
            raise ArgumentError(where, "no State among the arguments", "a State", hint=hint)
        state = self._newest(where)
        # A separate State for the call: if it fails half-way, this one is still valid.
        own = state.substate(self.model)
        # A model without State is called without it, so that the same code works.
        if not own.__child_kinds__() and not _requires_state(fn):
            return fn(*args, **kwargs), self
        try:
            result = fn(*args, **kwargs, state=own)
        except TypeError as error:
            # It accepts a State, so the error is from the user's own code.
            if _takes_state(fn):
                raise
            name = fn.__qualname__ if hasattr(fn, "__qualname__") else type(fn).__qualname__
            own = getattr(fn, "__name__", "__call__")
            hint = (
                "take the State, pass it to the layers that need it, and return it; or call "
                "the model:",
                f"def {own}(self, x, state):",
                "    x, state = self.norm(x, state)",
                "    return x, state",
                "out = net.model(x)" if own == "__call__" else f"out = net.model.{own}(x)",
            )
            expected = f"a parameter called state in {name}"
            places = [path_text(path) for path, _ in tokens_of(self.model)]
            got = "none, although the model has State"
            raise ArgumentError(where, expected, got, at=places, hint=hint) from error
        out, new = _parted(where, result, own)
        return out, self if new is own else self.replace(state=state.update(new))

    def _newest(self, where: str) -> State:
        """Return the State, if it was not used up."""
        if not self.state.__usable__():
            hint = (
                "use the State that was returned; the old one would lose an update:",
                "out, net = net(x)",
                "net = net.restored()  # if a later call failed and the result is lost",
            )
            expected, got = "the newest net", "one that a call has already replaced"
            raise StateError(where, expected, got, hint=hint)
        return self.state


def stateful(model: _M, state: State | Absent = ABSENT, /) -> Stateful[_M]:
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
        ArgumentError: if `model` is not a model, or `state` not a State.
        StateError: if `state` was used, or is missing although the model was made with one.
        TokenError: if `state` belongs to another model.

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
    _check_model(model)
    if isinstance(state, Absence):
        _refuse_made(model)
        return Stateful(*make_with_state(lambda: model)())
    if not isinstance(state, State):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("stateful(state)", "a State", describe(state))
    state.substate(model)  # Raises if it belongs to another model.
    return Stateful(model, state)


def _check_model(model: Any) -> None:
    pair = class_of(model) is tuple and any(isinstance(part, State) for part in model)
    if not pair and not isinstance(model, (type, State)) and not jtu.all_leaves([model]):
        return
    lines = (
        ["model and State are two arguments:", "pm.stateful(*pm.make_with_state(Model)(...))"]
        if pair
        else ["create the model first:", "net = pm.stateful(Model(...))"]
    )
    got = "both in a tuple" if pair else describe(model)
    raise ArgumentError("stateful(model)", "a model", got, hint=lines)


def _refuse_made(model: Any) -> None:
    """Refuse a model without State whose initial values went into a State."""
    gone = [path_text(path) for path, token in tokens_of(model) if is_moved(token)]
    if gone:
        raise StateError(
            "stateful(model)",
            "the model and the State that it was made with",
            "only the model",
            at=gone,
            hint=["pass both:", "net = pm.stateful(model, state)"],
        )


def _parameter(fn: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter of a function that takes the keyword `state`, if there is one.

    Raises:
        ValueError: if the function has no signature.
    """
    parameters = inspect.signature(fn).parameters
    found = parameters.get(STATE)
    if found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY:
        return found
    return next((p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def _requires_state(fn: Callable[..., Any]) -> bool:
    """Whether a function requires a State, even one without values."""
    # Some C functions have no signature; then a call shows which arguments they take.
    try:
        found = _parameter(fn)
    except ValueError:
        return False
    return found is not None and found.name == STATE and found.default is inspect.Parameter.empty


def _takes_state(fn: Callable[..., Any]) -> bool:
    try:
        return _parameter(fn) is not None
    except ValueError:
        return True


def _parted(where: str, result: Any, own: State) -> tuple[Any, State]:
    """Split the result of a model that was called with the State `own`.

    Raises:
        ArgumentError: if it is not a pair of an output and a State.
        StateError: if the State was replaced, and its successor is lost.
    """
    pair = "out, state"
    out, new = pair_of(result, where, pair)
    if not isinstance(new, State):
        got, hint = f"{describe(new)} as the second", ["return it last:", f"return {pair}"]
        raise ArgumentError(where, f"a pair ({pair})", got, hint=hint)
    if new is own:
        # Raises if it was used up: then another State has the values.
        new.substate(())
    return out, new


def _of_model(name: str, model: Any) -> str:
    found = getattr(model, name)
    hint = ["read it from the model:", f"net.model.{name}"]
    if getattr(found, "__self__", None) is model:
        hint = [
            "call it with apply, or on the model if it needs no State:",
            f"out, net = net.apply({type(model).__qualname__}.{name}, x)",
            f"out = net.model.{name}(x)",
        ]
    got = f"an attribute of its model, {with_article(type(model).__qualname__)}"
    return explain(f"net.{name}", "an attribute of the net", got, hint=hint)

"""A script with classes of every style, which are pickled by value: see test_pickling.py."""

from __future__ import annotations

import abc
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import cloudpickle
import jax
import jax.numpy as jnp

import pytreemod as pm

T = TypeVar("T")


class Scales:
    def scaled(self, x):
        return self.weight * x


class Base(Scales, pm.Module, Generic[T]):
    weight: jax.Array = pm.field(converter=jnp.asarray)

    @abc.abstractmethod
    def rule(self, x): ...

    def __call__(self, x):
        return self.rule(self.scaled(x))


class Written(Base[int]):
    size: int = pm.field(static=True, default=3)
    mean: Any = pm.buffer(default=1.0)
    parts: list = pm.field(default_factory=lambda: [2.0])
    activation: Callable = jnp.tanh
    F: Callable = jnp.sin

    def rule(self, x):
        return self.activation(x) + self.F(self.mean * self.size) + self.parts[0]

    @pm.filter_jit
    def jitted(self, x):
        return self(x)

    @jax.jit
    def plainly(self, x):
        return self(x)

    @property
    def again(self):
        return type(self)(self.weight)


class Own(pm.Module):
    inner: Any
    kind: str = pm.field(static=True)
    doubled: Any

    def __init__(self, inner):
        self.inner, self.kind = inner, "own"
        self.set_more()

    def set_more(self):
        self.doubled = self.inner

    def __check_init__(self):
        if not hasattr(self.inner, "shape") and type(self.inner) is not Written:
            raise ValueError("checked")

    def of_example(self, x):
        return EXAMPLE.inner(x)


class Sub(Own):
    extra: Any = None

    @property
    def doubled(self):
        return 2 * self.inner

    def set_more(self):
        self.extra = 3.0


class Posted(pm.Module):
    x: Any
    y: Any = pm.field(init=False)

    def __post_init__(self):
        self.y = 2 * self.x


class Layer(pm.nn.Linear):
    name: str = "layer"


class Plain(pm.Module):
    a: jax.Array
    n: int = pm.field(static=True, default=2)

    def early(self):
        return EARLY.a


EARLY = Plain(jnp.ones(2))  # Pickled with its class, before that has any fields.
EXAMPLE = Own(Written(jnp.ones(2)))


@pm.filter_jit
def step(model, x):
    return model(x), jax.tree.map(lambda leaf: 2 * leaf, model)


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__


def results(found):
    """Numbers, texts, and whether what was sent is of the classes here."""
    x = jnp.ones(2)
    made = Written(x, size=2)
    grads = pm.filter_grad(lambda m: m(x).sum())(made)
    values = [
        *(found["written"](x), found["jitted"](x), found["method"](x), found["layer"](x)),
        *(made.plainly(x), made.jitted(x), made.scaled(x), made.again(x), step(made, x)),
        *(EXAMPLE.of_example(x), EXAMPLE.doubled(x), Sub(x).extra, Sub(x).doubled, Posted(x).y),
        *(grads.weight, made.replace(weight=[3.0]).weight, Plain(x).early()),
        *(EARLY, jax.tree.map(lambda leaf: 3 * leaf, EARLY)),
    ]
    texts = [
        *(repr(made), repr(found["sub"]), found["layer"].name, str(grads.mean)),
        str([error_of(lambda: Own("wrong")), error_of(lambda: Base(x))]),
        str([(f.name, f.init) for f in dataclasses.fields(Sub)]),
        str(hash(made.scaled) is not None),
    ]
    same = [
        type(found["written"]) is Written,
        found["written"] == Written(x),
        *(
            jax.tree.structure(sent) == jax.tree.structure(here)
            for sent, here in (
                (EARLY, Plain(x)),
                (found["written"], Written(x)),
                (EXAMPLE, Own(Written(x))),
                (found["sub"], Sub(x)),
            )
        ),
    ]
    return [[float(jnp.sum(leaf)) for leaf in jax.tree.leaves(values)], texts, same]


if __name__ == "__main__":
    written = Written(jnp.ones(2))
    found = {
        "written": written,
        "jitted": written.jitted,
        "method": Own(written).of_example,
        "layer": Layer(2, 2, key=jax.random.key(0)),
        "sub": Sub(jnp.ones(2)),
        "results": results,
    }
    with open(sys.argv[1], "wb") as file:
        file.write(cloudpickle.dumps(found))
    print(json.dumps(results(found)))

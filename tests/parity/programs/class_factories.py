"""Classes made at run time: factories, type(), loops over names, nested classes, decorators."""

import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


def register(table):
    def decorate(cls):
        table[cls.__name__] = cls
        cls.registered = True
        return cls

    return decorate


TABLE: dict[str, type] = {}


def activation(name, fn):
    @register(TABLE)
    class Activation(eqx.Module):
        gain: Any = 1.0

        def __call__(self, x):
            return self.gain * fn(x)

    Activation.__name__ = Activation.__qualname__ = name
    TABLE[name] = TABLE.pop("Activation")
    return Activation


def record(name, **annotations):
    namespace = {"__annotations__": annotations, "total": lambda self: sum(jax.tree.leaves(self))}
    return types.new_class(name, (eqx.Module,), exec_body=lambda ns: ns.update(namespace))


Tanh = activation("Tanh", jnp.tanh)
Sine = activation("Sine", jnp.sin)


class Outer(eqx.Module):
    class Config(eqx.Module):
        width: int = eqx.field(static=True, default=2)

        class Inner(eqx.Module):
            deep: jax.Array

    config: Config = Config()
    inner: Config.Inner = eqx.field(default_factory=lambda: Outer.Config.Inner(jnp.ones(1)))


def main():
    point = record("Point", x=jax.Array, y=jax.Array)
    p = point(jnp.array(1.0), y=jnp.array(2.0))
    total = jax.jit(point.total)(p)
    stack = [TABLE[name](2.0) for name in sorted(TABLE)]
    value = eqx.filter_jit(lambda fs, x: [f(x) for f in fs])(stack, jnp.array(0.5))
    dynamic = type("Dynamic", (Tanh,), {"__call__": lambda self, x: x, "__module__": __name__})
    return (
        total,
        value,
        sorted(TABLE),
        Tanh.registered,
        Outer(),
        repr(p),
        dynamic()(1),
        Outer.Config.__qualname__,
    )

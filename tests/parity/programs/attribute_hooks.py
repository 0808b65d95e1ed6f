"""Properties with setters, __getattr__, __dir__, class attributes, descriptors, refusals."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Describe:
    """A descriptor that knows its name."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        return (
            f"{owner.__name__}.{self.name}" if instance is None else (self.name, instance.x.shape)
        )


class Vector(eqx.Module):
    x: jax.Array
    described = Describe()
    __array_priority__ = 100
    names = ("first", "second")

    @property
    def norm(self):
        return jnp.sqrt(jnp.sum(self.x**2))

    @norm.setter
    def norm(self, value):
        raise AttributeError("norm is computed")

    def __getattr__(self, name):
        if name in type(self).names:
            return self.x[type(self).names.index(name)]
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __dir__(self):
        return [*super().__dir__(), *self.names]

    def __matmul__(self, other):
        return self.x @ other.x

    def __neg__(self):
        return Vector(-self.x)

    def __bool__(self):
        return False


def outcome(call):
    try:
        return call()
    except (AttributeError, TypeError) as error:
        return type(error).__mro__[-3].__name__, isinstance(error, AttributeError)


def main():
    v = Vector(jnp.array([3.0, 4.0]))
    return [
        v.norm,
        v.first,
        v.second,
        Vector.described,
        v.described,
        v @ v,
        -v,
        bool(v),
        outcome(lambda: v.third),
        outcome(lambda: setattr(v, "x", 1)),
        outcome(lambda: setattr(v, "new", 1)),
        outcome(lambda: setattr(v, "norm", 1)),
        "first" in dir(v),
        hasattr(v, "third"),
        getattr(v, "third", None),
        eqx.filter_jit(lambda v: v.second * 2)(v),
        Vector.names,
        jax.tree.map(jnp.negative, v).first,
    ]

"""Output options as a tree of Modules with callables, and terms that hold terms."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu


def save_y(t, y, args):
    return y


class SubSaveAt(eqx.Module):
    t1: bool = False
    ts: Union[None, jax.Array, Sequence[float]] = None
    fn: Callable = save_y

    def __check_init__(self):
        if not self.t1 and self.ts is None:
            raise ValueError("Empty saveat -- nothing will be saved.")


class SaveAt(eqx.Module):
    subs: Any = None

    def __init__(self, *, t1=False, ts=None, fn=save_y, subs=None):
        self.subs = subs if subs is not None else SubSaveAt(t1=t1, ts=ts, fn=fn)


class Term(eqx.Module):
    vector_field: Callable
    control: Callable[[float, float], float] = operator.sub

    def __call__(self, t0, t1, y, args):
        return self.vector_field(t0, y, args) * self.control(t1, t0)


class MultiTerm(eqx.Module):
    terms: tuple[Term, ...]

    def __init__(self, *terms):
        self.terms = terms

    def __call__(self, t0, t1, y, args):
        return sum(term(t0, t1, y, args) for term in self.terms)


@eqx.filter_jit
def integrate(term, y0, args, saveat, n=8):
    ts = jnp.linspace(0.0, 1.0, n + 1)

    def body(y, span):
        y_next = y + term(span[0], span[1], y, args)
        return y_next, y_next

    _, path = jax.lax.scan(body, y0, (ts[:-1], ts[1:]))
    path = jnp.concatenate([y0[None], path])

    def save(sub):
        at = jnp.asarray([1.0] if sub.ts is None else sub.ts)
        value = jax.vmap(lambda t: path[jnp.argmin(jnp.abs(ts - t))])(at)
        return jax.vmap(lambda t, y: sub.fn(t, y, args))(at, value)

    return jtu.tree_map(save, saveat.subs, is_leaf=lambda x: isinstance(x, SubSaveAt))


def main():
    mlp = eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jax.random.PRNGKey(0))
    term = MultiTerm(Term(lambda t, y, args: mlp(y)), Term(lambda t, y, args: -args * y))
    saveat = SaveAt(
        subs={
            "end": SubSaveAt(t1=True),
            "norm": [
                SubSaveAt(ts=jnp.array([0.25, 0.5]), fn=lambda t, y, args: jnp.linalg.norm(y) + t)
            ],
        }
    )
    try:
        SaveAt()
    except ValueError as error:
        refused = str(error)
    out = integrate(term, jnp.ones(2), jnp.array(0.3), saveat)
    plain = integrate(Term(lambda t, y, args: -y), jnp.ones(2), None, SaveAt(ts=[0.5, 1.0]))
    return out, plain, refused

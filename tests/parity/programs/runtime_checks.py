"""Checks that live in compiled code: error_if, branched ones, under vmap and grad, and passing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

REASONS = ("x is nan", "x is infinite")


class Account(eqx.Module):
    balance: jax.Array
    limit: float = 0.0

    def withdraw(self, amount):
        left = self.balance - amount
        left = eqx.error_if(left, left < self.limit, "not enough money")
        return eqx.tree_at(lambda a: a.balance, self, left)


@eqx.filter_jit
def classify(x):
    index = jnp.where(jnp.isnan(x), 0, 1)
    bad = jnp.isnan(x) | jnp.isinf(x)
    return eqx.branched_error_if({"x": x, "name": "kept"}, bad, index, list(REASONS))


def message(call):
    try:
        jax.block_until_ready(eqx.filter(call(), eqx.is_array))
    except Exception as error:
        known = ["not enough money", *REASONS, "eager"]
        return next(text for text in known if text in str(error))
    return "passed"


def main():
    account = Account(jnp.array(10.0))
    withdraw = eqx.filter_jit(Account.withdraw)
    many = eqx.filter_jit(eqx.filter_vmap(Account.withdraw, in_axes=(None, 0)))
    gradient = jax.grad(lambda x: withdraw(account, x).balance)(2.0)
    return [
        withdraw(account, 3.0).balance,
        message(lambda: withdraw(account, 11.0)),
        many(account, jnp.array([1.0, 2.0])).balance,
        message(lambda: many(account, jnp.array([1.0, 20.0]))),
        gradient,
        message(lambda: classify(jnp.array(jnp.nan))),
        message(lambda: classify(jnp.array(jnp.inf))),
        classify(jnp.array(1.0)),
        message(lambda: eqx.error_if(jnp.ones(2), np.array([False, True]), "eager")),
        eqx.error_if(jnp.ones(2), False, "eager"),
    ]

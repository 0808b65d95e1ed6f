"""debug.count_flops: operations of a program, against XLA's own count and against hand counts."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from tests.helpers.trees import ramp

KEY = jax.random.key(0)


def count(fn, *args):
    return pm.debug.count_flops(jax.make_jaxpr(fn)(*args))


def xla_count(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


CONV = nn.Conv2d(4, 8, 3, groups=2, key=KEY)
TRANSPOSED = nn.ConvTranspose2d(2, 3, 3, stride=2, key=KEY)
MLP = nn.MLP(16, 4, 32, 2, key=KEY)

PROGRAMS = {
    "matmul": (jnp.dot, (ramp(8, 16), ramp(16, 32))),
    "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (ramp(2, 3, 4), ramp(2, 4, 5))),
    "grouped convolution": (lambda x: CONV(x), (ramp(4, 8, 8),)),
    "mlp": (lambda x: MLP(x), (ramp(8, 16),)),
    "checkpointed": (jax.checkpoint(lambda x: MLP(x)), (ramp(8, 16),)),
    "gradient": (jax.grad(lambda x: jnp.sum(MLP(x))), (ramp(8, 16),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_without_loops_take_what_xla_says(name):
    """XLA counts a loop's body once, so its count is correct without loops."""
    fn, args = PROGRAMS[name]
    # It leaves out unused operations: of a gradient, the end of the forward pass.
    assert count(fn, *args).total == pytest.approx(xla_count(fn, *args), rel=0.1)


def test_loops_count_their_steps():
    stack = nn.Stack(lambda key: nn.Linear(4, 4, key=key), 24, key=KEY)
    x = ramp(2, 4)
    one = count(lambda x: stack[0](x), x).total

    assert one == 2 * 2 * 4 * 4 + 2 * 4
    assert count(lambda x: stack(x), x).total == 24 * one
    assert count(lambda x: jax.lax.fori_loop(0, 5, lambda i, c: c @ c, x), ramp(3, 3)).total == 270


def test_a_loop_of_unknown_length_counts_one_step():
    def square(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 5, lambda c: c @ c, x)

    found = count(square, ramp(3, 3))
    assert found.total == found.steps[0] == 2 * 27 + 9 + 1


def test_of_branches_the_most_expensive_one_counts():
    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    # The comparison, too.
    assert count(either, ramp(3, 3)).total == 54 + 1


def test_a_transposed_convolution_multiplies_no_zeros():
    x = ramp(2, 5, 5)
    total = count(lambda x: TRANSPOSED(x), x).total
    # Each element of the input meets each tap of each output channel; then the bias.
    taps, bias = 2 * 2 * 25 * 9 * 3, 3 * 11 * 11
    assert total == pytest.approx(taps + bias, rel=0.25)


def test_moving_data_and_counting_integers_is_free():
    assert count(lambda x: jnp.transpose(x).reshape(-1)[::2], ramp(4, 4)).total == 0
    assert count(lambda n: n * n + 1, jnp.arange(8)).total == 0


def test_a_function_is_no_jaxpr():
    with pytest.raises(ArgumentError, match=r"a jaxpr, got the function .*\n.*\n.*make_jaxpr"):
        pm.debug.count_flops(jnp.tanh)

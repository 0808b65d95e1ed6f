"""A language model with a recurrent cell, as in "From PyTorch to JAX" by Sabrina J. Mielke (2020).

    python examples/lstm_language_model.py
    python examples/lstm_language_model.py --cell GRU
    python examples/lstm_language_model.py --head own

Her point was that JAX can differentiate only values, and that turning a model into a value takes a
lot of code: functions that take each class apart and put it together again. Here every instance of
a class is a value, so only the model itself is left to write.

There are two cells: one written by hand, as she wrote it, and `nn.LSTMCell`. Both print her
numbers: JAX draws others from the same keys since then, but has an option for the old ones.

Her model compares with the embeddings of all tokens to predict the next one: it reads and writes
with the same matrix. A tie, outside of the model, says so; `--head own` does without.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pytreemod as pm
from pytreemod import nn

VOCABULARY = 43
SIZE = 17
TEXT = (4, 8, 15, 16, 23, 42)
# How many tokens at a time; the state of the cell is passed on, but no gradient flows back.
AT_ONCE = 3
EPOCHS = 101
LEARNING_RATE = 0.1

Tokens = Int[Array, " length"]
Vector = Float[Array, " size"]


# --- the cell by hand -----------------------------------------------------------------------------


class CellByHand(nn.RNNCellBase):
    """A long short-term memory, made of nothing but arrays."""

    weight_ih: Float[Array, "gates size"]
    weight_hh: Float[Array, "gates size"]
    bias: Float[Array, " gates"]

    def __init__(self, input_size: int, hidden_size: int, *, key: Any = None):
        del key
        self.weight_ih = jnp.zeros((4 * hidden_size, input_size))
        self.weight_hh = jnp.zeros((4 * hidden_size, hidden_size))
        self.bias = jnp.zeros(4 * hidden_size)

    def __call__(self, input: Vector, hidden: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
        """Take one step: from (h, c) to the next."""
        h, c = hidden
        ifgo = self.weight_ih @ input + self.weight_hh @ h + self.bias
        i, f, g, o = jnp.split(ifgo, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def initialize_carry(self, input_shape: Sequence[int], dtype: Any = None) -> Any:
        """Return zeros."""
        zeros = jnp.zeros((*input_shape[:-1], self.weight_hh.shape[1]), dtype)
        return zeros, zeros

    def output_of(self, carry: Any) -> Any:
        """Return the first of both."""
        return carry[0]


# To replace the cell, change this one line: the model works with any of them.
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "by-hand": CellByHand,
    "LSTM": nn.LSTMCell,
    "GRU": nn.GRUCell,
}


# --- the model ------------------------------------------------------------------------------------


class LanguageModel(pm.Module):
    """Predicts the next token: the one whose row is most similar to the output of the cell."""

    cell: nn.RNNCellBase
    embeddings: Float[Array, "vocabulary size"]
    c_0: Vector
    head: Float[Array, "vocabulary size"]

    def start(self) -> Any:
        """Return the state of the cell before the first token: it is learned, too."""
        zeros, treedef = jax.tree.flatten(self.cell.initialize_carry(self.c_0.shape))
        return treedef.unflatten([jnp.tanh(self.c_0), self.c_0][: len(zeros)])

    def scores(self, carry: Any) -> Float[Array, " vocabulary"]:
        """Return the score of every token as the next one."""
        return self.head @ self.cell.output_of(carry)

    def loss(self, tokens: Tokens, carry: Any) -> tuple[Float[Array, ""], Any]:
        """Return the summed surprise at the tokens, and the new state of the cell."""

        def read(carry: Any, token: Int[Array, ""]) -> tuple[Any, Float[Array, ""]]:
            surprise = -jax.nn.log_softmax(self.scores(carry))[token]
            return self.cell(self.embeddings[token], carry), surprise

        carry, surprises = pm.filter_scan(read, carry, tokens)
        return jnp.sum(surprises), carry

    @pm.filter_jit
    def sample(self) -> Tokens:
        """Return six tokens, each the most likely one."""

        def write(carry: Any, _: None) -> tuple[Any, Int[Array, ""]]:
            token = jnp.argmax(self.scores(carry))
            return self.cell(self.embeddings[token], carry), token

        return pm.filter_scan(write, self.start(), length=len(TEXT))[1]


# --- her first numbers ----------------------------------------------------------------------------


def fixed_keys() -> tuple[Array, Array, Array]:
    """Return keys for the embeddings and both matrices of the cell, as in her part on pytrees."""
    embeddings, weight_ih, weight_hh = (jax.random.PRNGKey(seed) for seed in (123, 1234, 4321))
    return embeddings, weight_ih, weight_hh


def chained_keys() -> tuple[Array, Array, Array]:
    """Return keys that are each split off the one before, as in her part on purified modules."""
    key, found = jax.random.PRNGKey(0), []
    for _ in range(3):
        one, key = jax.random.split(key)
        found.append(one)
    return found[0], found[1], found[2]


KEYS = {"fixed": fixed_keys, "chained": chained_keys}


def make_model(cell: str, keys: str, head: str = "tied") -> LanguageModel:
    """Make an untrained model: uniform matrices, and zeros; a tied head is the embeddings."""
    # Since 2024 JAX draws other numbers from a key, except with this option.
    with jax.threefry_partitionable(False):
        for_embeddings, *for_cell = KEYS[keys]()
        rest: Iterator[Array] = iter(for_cell)

        def first(leaf: Array) -> Array:
            return jax.random.uniform(next(rest), leaf.shape) if leaf.ndim == 2 else 0 * leaf

        made = jax.tree.map(first, CELLS[cell](SIZE, SIZE, key=jax.random.key(0)))
        embeddings = jax.random.uniform(for_embeddings, (VOCABULARY, SIZE))
    model = LanguageModel(made, embeddings, jnp.zeros(SIZE), head=jnp.array(embeddings))
    # One matrix from now on, with one gradient: the sum of those of reading and writing.
    return pm.tie(model, "head", to="embeddings") if head == "tied" else model


# --- training -------------------------------------------------------------------------------------


@pm.filter_jit
def step(model: LanguageModel, tokens: Tokens, carry: Any) -> tuple[LanguageModel, Array, Any]:
    """Take one step of gradient descent; without a carry at the start of the text."""

    def loss_fn(model: LanguageModel) -> tuple[Array, Any]:
        # In here, so that the initial state has a gradient.
        return model.loss(tokens, model.start() if carry is None else carry)

    (loss, carry), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(model)
    model = jax.tree.map(lambda leaf, grad: leaf - LEARNING_RATE * grad, model, grads)
    return model, loss, carry


class Run(NamedTuple):
    """The results of a training."""

    before: list[int]
    losses: list[float]
    after: list[int]


def train(model: LanguageModel) -> Run:
    """Memorize the text; return the loss of every fiftieth epoch."""
    text, losses = jnp.array(TEXT), []
    before = model.sample().tolist()
    for epoch in range(EPOCHS):
        total, carry = 0.0, None
        for start in range(0, len(TEXT), AT_ONCE):
            model, loss, carry = step(model, text[start : start + AT_ONCE], carry)
            total += loss
        if epoch % 50 == 0:
            losses.append(float(total))
    return Run(before, losses, model.sample().tolist())


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Train with the chosen cells, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", choices=CELLS, action="append", help="by-hand and LSTM if none")
    parser.add_argument("--keys", choices=KEYS, default="fixed", help="keys of the first numbers")
    parser.add_argument("--head", choices=("tied", "own"), default="tied", help="what writes")
    options = parser.parse_args(arguments)
    runs = []
    for cell in options.cell or ["by-hand", "LSTM"]:
        model = make_model(cell, options.keys, options.head)
        print(f"cell {cell}, {options.keys} keys, {options.head} head")
        print(f"  {sum(leaf.size for leaf in jax.tree.leaves(model)):,} numbers to train")
        run = train(model)
        print(f"  sample before: {run.before}")
        print("  losses: " + ", ".join(f"{loss:.5f}" for loss in run.losses))
        print(f"  sample after: {run.after}")
        runs.append(run)
    return runs


if __name__ == "__main__":
    main()

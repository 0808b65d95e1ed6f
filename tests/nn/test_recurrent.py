"""`GRUCell`, `LSTMCell`, `SimpleCell`; `RNN` and `Bidirectional`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.meshes import EXPLICIT, MESH, P, on
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)
GRU = nn.GRUCell(3, 2, key=KEY)
LSTM = nn.LSTMCell(3, 2, key=jax.random.key(1))
CELLS = [nn.GRUCell, nn.LSTMCell, nn.SimpleCell]
every_cell = pytest.mark.parametrize("make", CELLS, ids=lambda make: make.__name__)

# ---- cells


@every_cell
def test_initializers_draw_each_gate(make):
    """With the sizes of one gate: as one matrix an orthogonal one would be so for none of them."""
    seen = []

    def start(key, shape, dtype):
        seen.append(shape)
        return jax.random.normal(key, shape, dtype)

    options = {"weight_init": start, "bias_init": start}
    orthogonal = jax.nn.initializers.orthogonal()
    cell = make(3, 4, key=KEY, recurrent_weight_init=orthogonal, **options)

    assert set(seen) == {(3, 4), (4,)}
    for matrix in np.split(np.asarray(cell.weight_hh), len(cell.weight_hh) // 4):
        assert_close(matrix @ matrix.T, np.eye(4))
    parts = np.split(np.asarray(cell.weight_ih), len(cell.weight_ih) // 4)
    assert len({part.tobytes() for part in parts}) == len(parts)


def test_a_simple_cell_starts_as_in_flax():
    """LeCun's spread, an orthogonal matrix, and zeros."""
    cell = nn.SimpleCell(100, 50, key=KEY)

    assert abs(float(jnp.std(cell.weight_ih)) - 0.1) < 0.005
    assert_close(cell.weight_hh @ cell.weight_hh.T, np.eye(50), atol=1e-5)
    assert cell.bias.tolist() == [0] * 50


@every_cell
def test_weights_do_not_depend_on_the_biases(make):
    """And all have the dtype that was asked for."""
    biased, plain = (make(3, 2, flag, jnp.bfloat16, key=KEY) for flag in (True, False))

    assert {leaf.dtype.name for leaf in jax.tree.leaves(biased)} == {"bfloat16"}
    assert (biased.weight_ih == plain.weight_ih).all()
    assert (biased.weight_hh == plain.weight_hh).all()
    assert len(jax.tree.leaves(plain)) == 2


@every_cell
def test_the_first_carry_is_of_zeros_and_keeps_its_dtype(make):
    """With the batch axes of the input, in the dtype that a step gives."""
    cell, x = make(3, 2, key=KEY, dtype=jnp.bfloat16), jnp.ones((5, 3), jnp.float32)

    for dtype in (None, jnp.float32):
        with jax.numpy_dtype_promotion("standard"):
            carry = cell.initialize_carry(x.shape, dtype)
            after = cell(x if dtype else x.astype(jnp.bfloat16), carry)
        assert jax.tree.map(jax.typeof, carry) == jax.tree.map(jax.typeof, after)
        assert not any(leaf.any() for leaf in jax.tree.leaves(carry))


def test_a_simple_step_may_have_another_activation_and_add_the_hidden_state():
    """h' = phi(W x + U h + h), where phi may be learned."""
    options = {"use_bias": False, "residual": True, "key": KEY}
    cell = nn.SimpleCell(3, 2, activation=jnp.sin, **options)
    x, hidden = wave(4, 3), wave(4, 2)

    out = cell(jnp.asarray(x), jnp.asarray(hidden))

    assert_close(out, np.sin(x @ cell.weight_ih.T + hidden @ cell.weight_hh.T + hidden))
    learned = nn.SimpleCell(3, 2, activation=nn.Linear(2, 2, key=KEY), **options)
    assert len(jax.tree.leaves(learned)) == 4


# ---- over time


class Total(nn.RNNCellBase):
    """A sum over time, whose steps can be read off."""

    def __call__(self, input, hidden):
        return input + hidden

    def initialize_carry(self, input_shape, dtype=None):
        return jnp.zeros(input_shape, dtype)


class Noisy(Total):
    def __call__(self, input, hidden, *, key=None):
        return input + hidden + (0.0 if key is None else jax.random.normal(key, hidden.shape))


def by_loops(cell, x, lengths, reverse=False, keep_order=False):
    """The expected output of an RNN for (batch, time, features), by loops."""
    outputs, carries = [], []
    for row, length in zip(x, lengths, strict=True):
        order = [*range(len(row))]
        order[:length] = order[:length][:: -1 if reverse else 1]
        carry = cell.initialize_carry(row.shape[-1:], row.dtype)
        found = []
        for step, now in enumerate(order):
            carry = cell(row[now], carry) if step < length else carry
            found.append(cell.output_of(carry))
        if reverse and keep_order:
            found = [found[now] for now in order]
        outputs.append(jnp.stack(found))
        carries.append(carry)
    return jax.tree.map(lambda *rows: jnp.stack(rows), *carries), jnp.stack(outputs)


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"reverse": True, "keep_order": True}])
@pytest.mark.parametrize("lengths", [None, [4, 1, 0]], ids=["full", "short"])
def test_an_rnn_is_a_loop(lengths, options):
    """Over every sequence for itself: outputs, also past the ends, and last carries."""
    x = jnp.asarray(wave(3, 4, 3))
    given = None if lengths is None else jnp.array(lengths)
    rnn = nn.RNN(LSTM, return_carry=True, **options)
    expected = by_loops(LSTM, x, lengths or [4] * 3, **options)

    carry, outputs = jax.jit(rnn.__call__)(x, seq_lengths=given)

    jax.tree.map(assert_close, (carry, outputs), expected)
    time_first = nn.RNN(LSTM, time_major=True, unroll=2, **options)
    found = time_first(jnp.moveaxis(x, 1, 0), seq_lengths=given)
    assert_close(found, jnp.moveaxis(outputs, 1, 0))


def test_a_cell_of_random_numbers_has_a_key_for_each_step():
    """Others in each step; none is made without a key, or for a cell that takes none."""
    x = jnp.zeros((4, 1))
    noise = jnp.diff(nn.RNN(Noisy())(x, key=KEY)[:, 0])
    both = nn.Bidirectional(nn.RNN(Noisy()), nn.RNN(Noisy()))(x, key=KEY)

    assert len(set(noise.tolist())) == 3
    assert not np.allclose(both[:, 0], both[::-1, 1])
    steps = np.diff(both[:, 0])[:-1], -np.diff(both[:, 1])[1:]  # Of the same inputs.
    assert not np.isclose(*steps).any()
    assert nn.RNN(Noisy())(x).tolist() == nn.RNN(Total())(x, key=KEY).tolist() == [[0]] * 4


def test_outputs_of_both_directions_are_merged_by_a_function():
    """Its options count, not those of the RNNs; each direction has its own first carry."""
    x = jnp.asarray(wave(3, 4, 3))
    rnns = nn.RNN(GRU, reverse=True), nn.RNN(GRU, time_major=True)
    added = nn.Bidirectional(*rnns, merge_fn=jnp.add, time_major=True)

    forward = nn.RNN(GRU, time_major=True)(x)
    backward = nn.RNN(GRU, time_major=True, reverse=True, keep_order=True)(x)
    assert_close(added(x), forward + backward)
    joined = nn.Bidirectional(*rnns, time_major=True)(x)
    assert_close(joined, jnp.concatenate([forward, backward], -1))
    carries, _ = added.replace(return_carry=True)(x, initial_carry=(jnp.ones((4, 2)), None))
    assert_close(carries[1], backward[0])
    begun = nn.RNN(GRU, time_major=True, return_carry=True)(x, initial_carry=jnp.ones((4, 2)))
    assert_close(carries[0], begun[0])


def test_lengths_beyond_the_end_are_the_end():
    """And negative ones are zero: compiled code cannot refuse them."""
    rnn, x = nn.RNN(GRU, return_carry=True, reverse=True), jnp.asarray(wave(2, 4, 3))

    jax.tree.map(assert_close, rnn(x, seq_lengths=jnp.array([7, 4])), rnn(x))
    none, less = (rnn(x, seq_lengths=jnp.array([4, n])) for n in (0, -3))
    jax.tree.map(assert_close, less, none)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8])
@pytest.mark.sampled
def test_lengths_may_be_of_any_integers(dtype):
    """Steps were counted in their dtype, in which 300 is 44: the carry ran on."""
    x, lengths = jnp.ones((2, 300, 1)), jnp.array([100, 3])
    rnn = nn.Bidirectional(nn.RNN(Total()), nn.RNN(Total()), return_carry=True)

    found = rnn(x, seq_lengths=lengths.astype(dtype))

    jax.tree.map(assert_close, found, rnn(x, seq_lengths=lengths))
    assert_close(found[1][0, -1, 0], 100)


@pytest.mark.parametrize(
    ("filled", "options"),
    [(1.0, {"return_carry": True}), (np.nan, {}), (np.inf, {"reverse": True})],
)
def test_nothing_comes_from_past_the_end(options, filled):
    """The carry ran on there and overflowed: the loss was right, its gradient NaN."""
    cell = nn.SimpleCell(1, 1, activation=jax.nn.relu, use_bias=False, key=KEY)
    cell = cell.replace(weight_ih=jnp.ones((1, 1)), weight_hh=jnp.full((1, 1), 3.0))
    lengths = jnp.array([2, 3])
    here = np.arange(100) < np.array([[2], [3]])
    x = jnp.asarray(np.where(here, 1.0, filled)[..., None], jnp.float32)

    def loss(both):
        rnn, x = both
        found = rnn(x, seq_lengths=lengths)
        # 1 + 3, and 1 + 3 + 9 from the last step, wherever it is.
        return jnp.sum(found[0] if rnn.return_carry else found[:, -1])

    value, (grads, of_x) = pm.filter_value_and_grad(loss)((nn.RNN(cell, **options), x))

    assert_close(value, 17)
    assert_close(grads.cell.weight_ih, [[17]])
    # 1, and 1 + 2 * 3.
    assert_close(grads.cell.weight_hh, [[8]])
    assert_close(of_x[..., 0].sum(1), [4, 13])
    assert not np.asarray(of_x)[~here].any()


@pytest.mark.parametrize("kind", ["mixed", "narrow"])
@pytest.mark.sampled
def test_gradients_over_many_steps_are_added_up_in_float32(kind):
    """In bfloat16, the dtype of the cell, each sum stopped after some 300 steps."""
    cell = nn.SimpleCell(2, 2, key=KEY)
    x = jnp.ones((600, 2))

    def loss(rnn, x):
        return jnp.sum(rnn(x).astype(jnp.float32))

    expected = pm.filter_grad(loss)(nn.RNN(cell), x).cell.bias
    if kind == "mixed":
        rnn = pm.with_precision(nn.RNN(cell), "params=float32,compute=bfloat16,output=float32")
    else:
        rnn, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (nn.RNN(cell), x))
    found = pm.filter_grad(loss)(rnn, x).cell.bias

    assert found.dtype == (jnp.float32 if kind == "mixed" else jnp.bfloat16)
    assert_close(found.astype(jnp.float32), expected, rtol=0, atol=0.02 * float(expected.max()))


def test_each_device_runs_over_its_part_of_a_batch():
    """The initial zeros are replicated over devices, but the carry of a step is not."""
    x, lengths = jnp.asarray(wave(4, 3, 3)), jnp.array([1, 2, 0, 3])

    for given in (None, lengths):
        call = pm.filter_shard_map(
            lambda rnn, x, n: rnn(x, seq_lengths=n),
            mesh=MESH,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P("data"),
        )
        assert_close(call(nn.RNN(LSTM), x, given), nn.RNN(LSTM)(x, seq_lengths=given))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.sampled
def test_lengths_of_a_batch_that_is_split_over_devices(reverse):
    """The same as on one device, where the axis of the mesh is explicit, and no mesh in context."""
    rnn = nn.RNN(LSTM, reverse=reverse, return_carry=True)
    x, lengths = wave(4, 3, 3), jnp.array([3, 1, 0, 2])
    by_batch = on("data", mesh=EXPLICIT)

    def loss(rnn, x, lengths):
        carry, y = rnn(x, seq_lengths=lengths)
        return jnp.sum(jnp.sin(y)) + jnp.sum(carry[1]), y

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    found = step(rnn, jax.device_put(x, by_batch), jax.device_put(lengths, by_batch))

    assert found[0][1].sharding.spec == P("data", None, None)
    jax.tree.map(assert_close, found, step(rnn, jnp.asarray(x), lengths))

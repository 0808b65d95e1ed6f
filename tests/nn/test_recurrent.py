"""`RNN` and `Bidirectional`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, StructureError
from tests.nn.numbers_to_compare import assert_close, wave

KEYS = jax.random.split(jax.random.key(0), 4)
GRU = nn.GRUCell(3, 2, key=KEYS[0])
LSTM = nn.LSTMCell(3, 2, key=KEYS[1])
LENGTHS = np.array([4, 1, 0])


class Total(nn.RNNCellBase):
    """A sum over time, whose steps can be read off."""

    def __call__(self, input, hidden):
        return input + hidden

    def initialize_carry(self, input_shape, dtype=None):
        return jnp.zeros(input_shape, dtype)


class Noisy(Total):
    """One that draws random numbers."""

    def __call__(self, input, hidden, *, key=None):
        return input + hidden + (0.0 if key is None else jax.random.normal(key, hidden.shape))


def by_loops(cell, x, lengths, reverse, keep_order):
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


@pytest.mark.parametrize("time_major", [False, True], ids=["time after", "time first"])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"reverse": True, "keep_order": True}])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "short"])
@pytest.mark.sampled
def test_an_rnn_is_a_loop(lengths, options, time_major):
    """Over every sequence for itself: outputs, also past the ends, and last carries."""
    x = jnp.asarray(wave(3, 4, 3))
    run = jax.jit(
        nn.RNN(LSTM, time_major=time_major, **options).__call__, static_argnames="return_carry"
    )
    given = jnp.moveaxis(x, 1, 0) if time_major else x

    carry, outputs = run(given, seq_lengths=lengths, return_carry=True)

    known = {"reverse": False, "keep_order": False} | options
    expected = by_loops(LSTM, x, [4] * 3 if lengths is None else lengths, **known)
    outputs = jnp.moveaxis(outputs, 0, 1) if time_major else outputs
    jax.tree.map(assert_close, (carry, outputs), expected)
    assert_close(
        run(given, seq_lengths=lengths), jnp.moveaxis(outputs, 1, 0) if time_major else outputs
    )


def test_a_call_may_say_otherwise():
    """Each option of a call overrides the constructor's, which is not lost."""
    x = jnp.asarray(wave(3, 4, 3))
    names = ("time_major", "return_carry", "reverse", "keep_order")
    options = dict.fromkeys(names, True)
    made, called = nn.RNN(GRU, **options)(x), nn.RNN(GRU)(x, **options)
    undone = nn.RNN(GRU, **options)(x, **dict.fromkeys(names, False))

    jax.tree.map(assert_close, made, called)
    assert_close(undone, nn.RNN(GRU)(x))
    assert_close(nn.RNN(GRU, unroll=2)(x), nn.RNN(GRU)(x))


def test_a_cell_of_random_numbers_has_a_key_for_each_step():
    """Others in each step; none is made without a key, or for a cell that takes none."""
    x, key = jnp.zeros((4, 1)), KEYS[0]
    noise = jnp.diff(nn.RNN(Noisy())(x, key=key)[:, 0])
    rnn = nn.Bidirectional(nn.RNN(Noisy()), nn.RNN(Noisy()))
    both = rnn(x, key=key)

    assert len(set(noise.tolist())) == 3
    assert not np.allclose(both[:, 0], both[::-1, 1])
    assert nn.RNN(Noisy())(x).tolist() == nn.RNN(Total())(x, key=key).tolist() == [[0]] * 4


def test_outputs_are_put_together_as_one_says():
    """By any function of both; and time may come first there, too."""
    rnns = nn.RNN(GRU, reverse=True), nn.RNN(GRU, time_major=True)
    x = jnp.asarray(wave(3, 4, 3))
    added = nn.Bidirectional(*rnns, merge_fn=jnp.add, time_major=True)

    forward = nn.RNN(GRU, time_major=True)(x)
    backward = nn.RNN(GRU, time_major=True)(x, reverse=True, keep_order=True)
    assert_close(added(x), forward + backward)
    carries, _ = added(x, initial_carry=(jnp.ones((4, 2)), None), return_carry=True)
    assert_close(carries[1], backward[0])
    assert not np.allclose(carries[0], forward[-1])


def test_lengths_beyond_the_end_that_nobody_knows_yet_are_the_end():
    """While tracing they cannot be refused."""
    rnn, x = nn.RNN(GRU, return_carry=True, reverse=True), jnp.asarray(wave(2, 4, 3))

    found = pm.filter_jit(lambda lengths: rnn(x, seq_lengths=lengths))(jnp.array([7, 4]))

    jax.tree.map(assert_close, found, rnn(x))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8])
@pytest.mark.parametrize(
    "wrap", [nn.RNN, lambda cell: nn.Bidirectional(nn.RNN(cell), nn.RNN(cell))]
)
@pytest.mark.sampled
def test_lengths_may_be_of_any_integers(wrap, dtype):
    """Steps were counted in their dtype, in which 300 is 44: the carry ran on."""
    x, lengths = jnp.ones((2, 300, 1)), jnp.array([100, 3])

    rnn = wrap(Total())

    found = rnn(x, seq_lengths=lengths.astype(dtype), return_carry=True)
    jax.tree.map(assert_close, found, rnn(x, seq_lengths=lengths, return_carry=True))
    assert_close(found[1][0, -1, 0], 100)


@pytest.mark.parametrize(
    ("filled", "options"),
    [(1.0, {"return_carry": True}), (np.nan, {}), (np.inf, {"reverse": True})],
)
@pytest.mark.sampled
def test_nothing_comes_from_past_the_end(options, filled):
    """The carry ran on there and overflowed: the loss was right, its gradient NaN."""
    cell = nn.SimpleCell(1, 1, activation=jax.nn.relu, use_bias=False, key=KEYS[0])
    cell = pm.tree_at(
        lambda cell: (cell.weight_ih, cell.weight_hh),
        cell,
        (jnp.ones((1, 1)), jnp.full((1, 1), 3.0)),
    )
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
    # 1, and 1 + 2 * 3.
    assert_close(grads.cell.weight_hh, [[8]])
    assert_close(of_x[..., 0].sum(1), [4, 13])
    assert not np.asarray(of_x)[~here].any()


@pytest.mark.parametrize("kind", ["mixed", "narrow"])
@pytest.mark.sampled
def test_gradients_over_many_steps_are_added_up_in_wide_numbers(kind):
    """In bfloat16, the dtype of the cell, each sum stopped after some 300 steps."""
    cell = nn.SimpleCell(2, 2, key=KEYS[0])
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


@pytest.mark.parametrize("lengths", [None, [1, 2, 0, 3]])
@pytest.mark.sampled
def test_each_device_runs_over_its_part_of_a_batch(key, lengths):
    """The initial zeros are replicated over devices, but the carry of a step is not."""
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
    rnn = nn.RNN(nn.LSTMCell(2, 2, key=key))
    x = jnp.asarray(wave(4, 3, 2))
    lengths = None if lengths is None else jnp.asarray(lengths)

    call = pm.filter_shard_map(
        lambda rnn, x, n: rnn(x, seq_lengths=n),
        mesh=mesh,
        in_specs=(P(), P("d"), P("d")),
        out_specs=P("d"),
    )

    assert_close(call(rnn, x, lengths), rnn(x, seq_lengths=lengths))


@pytest.mark.parametrize("reverse", [False, True])
def test_lengths_of_a_batch_that_is_split_over_devices(reverse):
    """The same as on one device, where the axis of the mesh is explicit, and no mesh in context."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    rnn = nn.RNN(nn.LSTMCell(3, 2, key=jax.random.key(0)), reverse=reverse)
    x, lengths = wave(4, 3, 3), jnp.array([3, 1, 0, 2])
    by_batch = NamedSharding(mesh, P("data"))

    def loss(rnn, x, lengths):
        carry, y = rnn(x, seq_lengths=lengths, return_carry=True)
        return jnp.sum(jnp.sin(y)) + jnp.sum(carry[1]), y

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    found = step(rnn, jax.device_put(x, by_batch), jax.device_put(lengths, by_batch))

    assert found[0][1].sharding.spec == P("data", None, None)
    jax.tree.map(assert_close, found, step(rnn, jnp.asarray(x), lengths))


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"seq_lengths": [4, 5, 0]}, ArgumentError, "seq_lengths"),
        ({"seq_lengths": [4, 2]}, ShapeError, "seq_lengths"),
        ({"initial_carry": jnp.ones(2)}, ShapeError, "hidden"),
        ({"initial_carry": jnp.zeros((3, 2), jnp.bfloat16)}, StructureError, "bfloat16"),
    ],
)
def test_what_does_not_fit_a_batch_is_refused(options, error, word):
    """It would broadcast; or the carry would change its dtype at the first step."""
    options = jax.tree.map(jnp.asarray, options, is_leaf=lambda x: isinstance(x, list))

    with pytest.raises(error, match=word), jax.numpy_dtype_promotion("standard"):
        nn.RNN(GRU)(jnp.ones((3, 4, 3)), **options)

"""`GRUCell`, `LSTMCell`, `SimpleCell`: their initial arrays, and the inputs that they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)
CELLS = [nn.GRUCell, nn.LSTMCell, nn.SimpleCell]
every_cell = pytest.mark.parametrize("make", CELLS, ids=lambda make: make.__name__)


@every_cell
def test_first_weights_by_initializers_are_drawn_for_each_gate(make):
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
    assert (cell.activation, cell.residual) == (jnp.tanh, False)


@every_cell
@pytest.mark.slow
def test_weights_are_the_same_without_biases(make):
    """And in the dtype that was asked for."""
    with_bias, without = (make(3, 2, flag, jnp.bfloat16, key=KEY) for flag in (True, False))

    assert {leaf.dtype.name for leaf in jax.tree.leaves(with_bias)} == {"bfloat16"}
    assert (with_bias.weight_ih == without.weight_ih).all()
    assert (with_bias.weight_hh == without.weight_hh).all()
    assert len(jax.tree.leaves(without)) == 2


@every_cell
@pytest.mark.sampled
def test_the_first_carry_is_of_zeros_and_keeps_its_dtype(make):
    """With the batch axes of the input, in the dtype that a step gives."""
    cell, x = make(3, 2, key=KEY, dtype=jnp.bfloat16), jnp.ones((5, 3), jnp.float32)

    for dtype in (None, jnp.float32):
        with jax.numpy_dtype_promotion("standard"):
            carry = cell.initialize_carry(x.shape, dtype)
            after = cell(x if dtype else x.astype(jnp.bfloat16), carry)
        assert jax.tree.map(jnp.shape, carry) == jax.tree.map(jnp.shape, after)
        assert jax.tree.map(jnp.result_type, carry) == jax.tree.map(jnp.result_type, after)
        assert not any(leaf.any() for leaf in jax.tree.leaves(carry))


@every_cell
@pytest.mark.slow
def test_the_hint_of_cells_as_one_hints(make):
    """The code in the hint gives each cell its carry; so does the hint for one map too many."""
    layer = make(3, 2, key=KEY)
    layers = pm.filter_vmap(lambda key: make(3, 2, key=key))(jax.random.split(KEY, 4))
    xs = jnp.asarray(wave(4, 3))
    hiddens = layer.initialize_carry(xs.shape)

    with pytest.raises(ShapeError, match=r"^\w+\(input_size=3, (.|\n)*map over them") as several:
        layers(xs[0], hiddens)
    with pytest.raises(ShapeError, match=r"expected weight_ih (.|\n)*leaves it unmapped") as single:
        layer.replace(weight_ih=layer.weight_ih[0])(xs[0], hiddens)

    given = {"pm": pm, "layer": layer, "layers": layers, "xs": xs, "hiddens": hiddens}
    given["nn"] = nn
    one, other = str(several.value).split("\n")[-2:]
    unmapped = str(single.value).rpartition("\n")[2]
    members = pm.unstack(layers)
    for code, cells in ((one, members), (other, members), (unmapped, [layer] * 4)):
        found = eval(code.strip(), given)
        expected = [cell(xs[i], pm.unstack(hiddens)[i]) for i, cell in enumerate(cells)]
        jax.tree.map(assert_close, found, pm.stack(expected))


def test_an_activation_may_be_learnt():
    """It is a part of the cell then."""
    cell = nn.SimpleCell(3, 4, activation=nn.Linear(4, 4, key=KEY), key=KEY)

    assert len(jax.tree.leaves(cell)) == 5
    assert cell(jnp.asarray(wave(3)), jnp.zeros(4)).shape == (4,)


test_refusals = refusals(globals())

"""Models from and to PyTorch's state dicts: the same numbers on both sides."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import from_torch, nn, to_torch
from pytreemod.errors import (
    ArgumentError,
    FileError,
    FileMissingError,
    StateError,
    StructureError,
)
from tests.helpers.comparing import assert_same
from tests.helpers.trees import affine, ramp
from tests.nn.catalogue import CATALOGUE, flatten
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)

every_layer = pytest.mark.parametrize(
    "entry",
    # Pools have no arrays.
    [entry for entry in CATALOGUE if "Pool" not in entry.name],
    ids=lambda entry: entry.name,
)


def make_network(key):
    """The counterpart of `torch_network`, layer for layer."""
    one, two = jax.random.split(key)
    return nn.Sequential(
        [
            nn.Conv2d(1, 2, 3, key=one),
            nn.BatchNorm(2, momentum=0.9),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2, 2),
            nn.Lambda(flatten),
            nn.Linear(8, 3, key=two),
        ]
    )


def network(seed=0, make=make_network):
    """A model and its State."""
    return pm.make_with_state(make)(jax.random.key(seed))


def torch_network(torch):
    """A convolutional network, trained for a few steps."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.BatchNorm2d(2),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 3),
    )
    for _ in range(3):
        train_step(torch, net)
    return net


def train_step(torch, net):
    """One step of gradient descent; the output that it saw."""
    out = net(torch.tensor(wave(4, 1, 6, 6)))
    (out**2).mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return out


def as_tensors(torch, arrays):
    """Arrays as PyTorch's load_state_dict takes them."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# ---- a network with running statistics


@pytest.mark.slow
def test_a_network_saved_by_pytorch_gives_the_same(torch, tmp_path):
    """From a safetensors file: in inference mode, in training, and the statistics afterwards."""
    files = pytest.importorskip("safetensors.torch", reason="reads what PyTorch has written")
    arrays = pytest.importorskip("safetensors.numpy", reason="reads what PyTorch has written")
    theirs = torch_network(torch)
    files.save_file(theirs.state_dict(), tmp_path / "net.safetensors")
    model, state = network()
    tensors = arrays.load_file(tmp_path / "net.safetensors")
    model, state = from_torch(model, tensors, state=state)
    x = wave(4, 1, 6, 6)

    theirs.eval()
    out, state = pm.inference_mode(model)(jnp.asarray(x), state)
    assert_close(out, theirs(torch.tensor(x)))
    theirs.train()
    out, state = model(jnp.asarray(x), state)
    assert_close(out, theirs(torch.tensor(x)))
    for name, array in to_torch(model, state).items():
        assert_close(array, theirs.state_dict()[name])
    assert np.ptp(to_torch(model, state)["1.running_mean"]) > 0


def test_there_and_back_bit_for_bit(torch):
    """to_torch(from_torch(d)) == d, but for the count of batches; PyTorch takes it, strictly."""
    theirs = torch_network(torch).state_dict()
    model, state = network()
    arrays = to_torch(*from_torch(model, theirs, state=state))
    wanted = {name: value for name, value in theirs.items() if "num_batches" not in name}

    assert_same(arrays, {name: value.numpy() for name, value in wanted.items()})
    other = torch_network(torch)
    assert (
        str(other.load_state_dict(as_tensors(torch, arrays))) == "<All keys matched successfully>"
    )


def test_a_net_brings_its_state_along(torch):
    """The result of `stateful` is loaded and written as one model; the old one is used up."""
    theirs = torch_network(torch).state_dict()
    net = pm.stateful(make_network(jax.random.key(0)))
    new = from_torch(net, theirs)

    model, state = network()
    assert_same(to_torch(new), to_torch(*from_torch(model, theirs, state=state)))
    with pytest.raises(StateError, match="State"):
        to_torch(net)


# ---- every layer


@pytest.mark.sampled
@every_layer
def test_every_layer_there_and_back(entry):
    """from_torch(other, to_torch(model, state), state=...) gives the model and its State."""
    model, state = entry.build(seed=0)
    other, other_state = entry.build(seed=3)
    made, made_state = from_torch(other, to_torch(model, state), state=other_state)

    assert_same(made, model)
    assert_same(to_torch(made, made_state), to_torch(model, state))
    assert_same(made_state.restored().fill(made), state.restored().fill(model))


def spectral(torch, layer):
    """PyTorch's current spectral norm."""
    return torch.nn.utils.parametrizations.spectral_norm(layer)


def weight_normed(torch, layer, dim=0):
    """PyTorch's current weight norm."""
    return torch.nn.utils.parametrizations.weight_norm(layer, dim=dim)


def attention(*, bias):
    """PyTorch's attention, of a sequence to itself."""

    def make(torch):
        class Attending(torch.nn.MultiheadAttention):
            def forward(self, x):
                return super().forward(x, x, x)[0]

        return Attending(4, 2, bias=bias, batch_first=True)

    return make


def attends(*, bias):
    """Ours."""
    biases = {f"use_{name}_bias": bias for name in ("query", "key", "value", "output")}
    return ft.partial(nn.MultiheadAttention, 2, 4, **biases)


def with_spectral_norm(make):
    """A layer of ours with its weight normalized."""
    return lambda key: nn.SpectralNorm(make(key=key), "weight", key=key)


LAYERS = {
    "Linear": (lambda torch: torch.nn.Linear(3, 4), ft.partial(nn.Linear, 3, 4)),
    "Linear without bias": (
        lambda torch: torch.nn.Linear(3, 4, bias=False),
        ft.partial(nn.Linear, 3, 4, False),
    ),
    "Conv1d": (lambda torch: torch.nn.Conv1d(2, 4, 3), ft.partial(nn.Conv1d, 2, 4, 3)),
    "Conv2d in groups": (
        lambda torch: torch.nn.Conv2d(2, 4, (3, 2), groups=2),
        ft.partial(nn.Conv2d, 2, 4, (3, 2), groups=2),
    ),
    "Conv3d": (lambda torch: torch.nn.Conv3d(1, 2, 2), ft.partial(nn.Conv3d, 1, 2, 2)),
    "ConvTranspose1d": (
        lambda torch: torch.nn.ConvTranspose1d(2, 4, 3, 2, 1, 1),
        ft.partial(nn.ConvTranspose1d, 2, 4, 3, 2, 1, 1),
    ),
    "ConvTranspose2d in groups": (
        lambda torch: torch.nn.ConvTranspose2d(4, 6, (3, 2), 2, (1, 0), groups=2, dilation=2),
        ft.partial(
            nn.ConvTranspose2d, 4, 6, (3, 2), 2, padding=((1, 1), (0, 0)), groups=2, dilation=2
        ),
    ),
    "ConvTranspose3d": (
        lambda torch: torch.nn.ConvTranspose3d(1, 2, 2, bias=False),
        ft.partial(nn.ConvTranspose3d, 1, 2, 2, use_bias=False),
    ),
    "PReLU": (lambda torch: torch.nn.PReLU(), lambda key: nn.PReLU()),
    "PReLU for each channel": (
        lambda torch: torch.nn.PReLU(4),
        lambda key: nn.PReLU(jnp.full((4, 1), 0.1)),
    ),
    "RMSNorm": (
        lambda torch: torch.nn.RMSNorm((2, 3), eps=1e-5),
        lambda key: nn.RMSNorm((2, 3), use_bias=False),
    ),
    "InstanceNorm": (
        lambda torch: torch.nn.InstanceNorm1d(4, affine=True),
        lambda key: nn.InstanceNorm(4, channelwise_affine=True),
    ),
    "LayerNorm": (lambda torch: torch.nn.LayerNorm((2, 3)), lambda key: nn.LayerNorm((2, 3))),
    "GroupNorm": (lambda torch: torch.nn.GroupNorm(2, 4), lambda key: nn.GroupNorm(2, 4)),
    "BatchNorm": (lambda torch: torch.nn.BatchNorm1d(3), lambda key: nn.BatchNorm(3)),
    "BatchNorm alone": (
        lambda torch: torch.nn.BatchNorm1d(3, affine=False),
        lambda key: nn.BatchNorm(3, channelwise_affine=False),
    ),
    "Embedding": (lambda torch: torch.nn.Embedding(5, 2), ft.partial(nn.Embedding, 5, 2)),
    "MultiheadAttention": (attention(bias=True), attends(bias=True)),
    "MultiheadAttention without bias": (attention(bias=False), attends(bias=False)),
    "WeightNorm of Linear": (
        lambda torch: weight_normed(torch, torch.nn.Linear(3, 4)),
        lambda key: nn.WeightNorm(nn.Linear(3, 4, key=key)),
    ),
    "WeightNorm of Conv2d, along its inputs": (
        lambda torch: weight_normed(torch, torch.nn.Conv2d(2, 4, 3), dim=1),
        lambda key: nn.WeightNorm(nn.Conv2d(2, 4, 3, key=key), axis=1),
    ),
    "WeightNorm of ConvTranspose1d": (
        lambda torch: weight_normed(torch, torch.nn.ConvTranspose1d(2, 4, 3), dim=1),
        lambda key: nn.WeightNorm(nn.ConvTranspose1d(2, 4, 3, key=key)),
    ),
    "WeightNorm of Conv1d, whole": (
        lambda torch: weight_normed(torch, torch.nn.Conv1d(2, 4, 3), dim=None),
        lambda key: nn.WeightNorm(nn.Conv1d(2, 4, 3, key=key), axis=None),
    ),
    "SpectralNorm of Linear": (
        lambda torch: spectral(torch, torch.nn.Linear(3, 4)),
        with_spectral_norm(ft.partial(nn.Linear, 3, 4)),
    ),
    "SpectralNorm of Conv2d": (
        lambda torch: spectral(torch, torch.nn.Conv2d(2, 4, 3)),
        with_spectral_norm(ft.partial(nn.Conv2d, 2, 4, 3)),
    ),
}
"""Layers with a counterpart in PyTorch: theirs, and ours."""

INPUTS = {
    "Conv1d": (2, 5),
    "Conv2d": (2, 5, 5),
    "Conv3d": (1, 3, 3, 3),
    "ConvTranspose1d": (2, 5),
    "ConvTranspose2d": (4, 3, 2),
    "ConvTranspose3d": (1, 2, 1, 2),
    "InstanceNorm": (4, 3),
    "LayerNorm": (2, 3),
    "PReLU": (4, 3),
    "RMSNorm": (2, 3),
    "MultiheadAttention": (5, 4),
}


def input_for(name):
    """An input that the layer takes, with a batch axis in front."""
    if name == "Embedding":
        return np.array([[3, 0], [1, 4]])
    kind = name.rpartition("of ")[2].partition(" ")[0].strip(",")
    sizes = {"Linear": (3,), "BatchNorm": (3,), "GroupNorm": (4, 3), **INPUTS}
    return wave(4, *sizes[kind])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_pytorchs_do(torch, name):
    """PyTorch's numbers in our layer give its outputs, and ours in PyTorch's as well."""
    theirs, make = LAYERS[name][0](torch), LAYERS[name][1]
    layer, state = pm.make_with_state(lambda key: make(key=key))(jax.random.key(0))
    x = input_for(name)

    def output(layer, state):
        layer = pm.inference_mode(layer)
        if isinstance(layer, nn.StatefulLayer) and layer.is_stateful():
            return layer(jnp.asarray(x), state)[0]
        return jax.vmap(layer)(jnp.asarray(x))

    theirs.eval()
    ours = to_torch(layer, state)
    loaded = from_torch(layer, theirs.state_dict(), state=state.restored())
    assert_close(output(*loaded), theirs(torch.tensor(x)))
    theirs.load_state_dict(as_tensors(torch, ours))
    assert_close(output(layer, state), theirs(torch.tensor(x)))


CELLS = {
    "GRUCell": (lambda torch, bias: torch.nn.GRUCell(3, 2, bias), nn.GRUCell),
    "LSTMCell": (lambda torch, bias: torch.nn.LSTMCell(3, 2, bias), nn.LSTMCell),
    "RNNCell": (lambda torch, bias: torch.nn.RNNCell(3, 2, bias), nn.SimpleCell),
}


@pytest.mark.parametrize("use_bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("name", CELLS)
def test_cells_compute_what_pytorchs_do(torch, name, use_bias):
    """Two biases there are one here, except within a GRU's reset gate."""
    theirs, cell = CELLS[name][0](torch, use_bias), CELLS[name][1](3, 2, use_bias, key=KEY)
    x, hidden = wave(4, 3), tuple(wave(2, 4, 2, phase=1))
    hidden = hidden if name == "LSTMCell" else hidden[0]

    def assert_same_steps(ours):
        expected = theirs(torch.tensor(x), jax.tree.map(torch.tensor, hidden))
        found = ours(jnp.asarray(x), jax.tree.map(jnp.asarray, hidden))
        jax.tree.map(assert_close, found, expected)

    assert_same_steps(from_torch(cell, theirs.state_dict()))
    theirs.load_state_dict(as_tensors(torch, to_torch(cell)))
    assert_same_steps(cell)
    assert_same(from_torch(cell, to_torch(cell)), cell)


def test_cells_as_one_are_a_list_there():
    """Each with its two biases."""
    stack = nn.Stack(ft.partial(nn.GRUCell, 3, 2), 2, key=KEY)
    arrays = to_torch(stack)

    assert sorted(arrays)[:4] == ["0.bias_hh", "0.bias_ih", "0.weight_hh", "0.weight_ih"]
    assert len(arrays) == 8
    assert arrays["1.bias_hh"].tolist() == [0, 0, 0, 0, *stack.layer.bias_n[1].tolist()]
    assert_same(from_torch(stack, arrays), stack)


def test_attention_that_is_not_packed(torch):
    """Of inputs of several sizes, PyTorch has the weights one by one."""
    theirs = torch.nn.MultiheadAttention(4, 2, kdim=6, vdim=3, batch_first=True).eval()
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    layer = nn.MultiheadAttention(2, 4, 6, 3, **biases, key=jax.random.key(0))
    given = [wave(2, 5, size) for size in (4, 6, 3)]

    assert {*to_torch(layer)} == {*theirs.state_dict()}
    loaded = from_torch(layer, theirs.state_dict())
    assert_close(loaded(*map(jnp.asarray, given)), theirs(*map(torch.tensor, given))[0])


def test_a_transposed_convolution_has_pytorchs_axes():
    """(inputs, outputs of a group, taps in reverse), where each group has its own inputs."""
    layer = nn.ConvTranspose1d(4, 6, 3, groups=2, key=KEY)
    theirs = to_torch(layer)["weight"]

    assert theirs.shape == (4, 3, 3)
    assert theirs[3, 2, 0] == layer.weight[5, 1, 2]


def test_layers_as_one_are_a_list_there(torch):
    """A Stack is a list of layers in PyTorch; so are the inner layers of a scanning MLP."""
    stack = nn.Stack(ft.partial(nn.Linear, 3, 3), 2, key=jax.random.key(0))
    mlp = nn.MLP(3, 2, 4, 3, scan=True, key=jax.random.key(0))
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    plain = nn.MLP(3, 2, 4, 3, key=jax.random.key(0))

    loaded = from_torch(stack, theirs.state_dict())
    assert_close(loaded(jnp.asarray(wave(3))), theirs(torch.tensor(wave(3))))
    assert_same(to_torch(from_torch(mlp, to_torch(plain))), to_torch(plain))


def test_a_stack_of_stateful_layers_has_each_ones_statistics():
    """Running statistics, too, are one for each layer."""

    def make(key):
        return nn.Stack(lambda: nn.BatchNorm(2), 3)

    model, state = network(make=make)
    names = [f"{i}.{part}" for i in range(3) for part in ("weight", "bias")]
    names += [f"{i}.running_{part}" for i in range(3) for part in ("mean", "var")]
    arrays = {name: wave(2) + np.float32(i) for i, name in enumerate(names)}

    assert {*to_torch(model, state)} == {*names}
    made = to_torch(*from_torch(model, arrays, state=state))
    assert_same({name: made[name] for name in names}, arrays)


def test_members_that_were_made_by_a_map_are_filled_as_they_are():
    """Each with an axis more than a layer has; the State stays one of members."""
    make = jax.vmap(lambda _: pm.make_with_state(nn.BatchNorm)(2))
    model, state = make(ramp(3))
    form = jax.tree.structure(state)
    arrays = {name: wave(3, 2) for name in ("weight", "bias", "running_mean", "running_var")}
    model, state = from_torch(model, arrays, state=state)

    assert_same({name: to_torch(model, state)[name] for name in arrays}, arrays)
    assert jax.tree.structure(state) == form


def test_an_exponential_average_knows_whether_it_began():
    """With mode="ema", the count of batches shows whether the statistics exist."""
    make = ft.partial(nn.BatchNorm, 2, mode="ema")
    model, state = pm.make_with_state(make)()
    arrays = to_torch(model, state)
    assert arrays["num_batches_tracked"] == 0
    arrays["num_batches_tracked"] = np.int64(12)
    model, state = from_torch(model, arrays, state=state)

    assert not state.get(model.ema_first_time_index)
    assert to_torch(model, state)["num_batches_tracked"] == 1


# ---- one array


def test_short_floats_go_both_ways(torch):
    """bfloat16, which NumPy does not know, from a tensor and as integers into one."""
    layer = nn.Linear(3, 4, dtype=jnp.bfloat16, key=jax.random.key(0))
    theirs = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
    loaded = from_torch(layer, theirs.state_dict())
    views = {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        for name, array in to_torch(loaded).items()
    }

    assert loaded.weight.dtype == jnp.bfloat16
    assert all(bool((views[name] == value).all()) for name, value in theirs.state_dict().items())
    theirs.load_state_dict(views)


def test_any_tensor_becomes_an_array(torch):
    """One to be differentiated, transposed, conjugated, of a float with eight bits; and arrays."""
    ones = torch.ones(2, 3, requires_grad=True)
    eight = torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn)
    conjugated = torch.tensor([1 + 2j]).conj()

    def taken(value, shape, dtype=jnp.float32):
        return from_torch({"a": jnp.zeros(shape, dtype)}, {"a": value})["a"].tolist()

    assert taken(ones.T, (3, 2)) == [[1, 1]] * 3
    assert taken(torch.nn.Parameter(torch.ones(2)), (2,)) == [1, 1]
    assert taken(eight, (2,), jnp.float8_e4m3fn) == [0.5, -448.0]
    assert taken(conjugated, (1,), jnp.complex64) == [1 - 2j]
    assert taken(jnp.ones(2), (2,)) == taken(np.ones(2, np.float32), (2,)) == [1, 1]


def test_the_lengths_of_a_weight_norm_are_laid_out_as_its_weight():
    """Also if its axes have another order there; in groups it has no equivalent here."""

    def shapes(groups=1, axis=0, make=nn.ConvTranspose1d):
        layer = nn.WeightNorm(make(4, 6, 3, groups=groups, key=KEY), axis=axis)
        tensors = to_torch(layer)
        assert_same(from_torch(layer, tensors), layer)
        return [tensors[f"parametrizations.weight.original{i}"].shape for i in (0, 1)]

    assert shapes() == [(1, 6, 1), (4, 6, 3)]
    assert shapes(axis=None, groups=2) == [(), (4, 3, 3)]
    assert shapes(make=nn.Conv1d, groups=2) == [(6, 1, 1), (6, 2, 3)]
    with pytest.raises(ArgumentError, match="groups"):
        shapes(groups=2)


@pytest.mark.parametrize(
    ("given", "dtype", "fits"),
    [
        (jnp.bfloat16, jnp.float32, True),
        (np.float16, jnp.float32, True),
        (np.float16, jnp.bfloat16, False),
        (np.float32, jnp.bfloat16, False),
        (np.float64, jnp.float32, False),
        (jnp.float8_e4m3fnuz, jnp.float8_e4m3fn, False),
        (np.float32, jnp.complex64, False),
        (np.float32, jnp.int32, False),
        (np.int64, jnp.int32, True),
        (np.int64, jnp.float32, False),
        (np.bool_, jnp.bool_, True),
        (np.int64, jnp.bool_, False),
    ],
)
def test_a_dtype_is_cast_if_nothing_is_lost(given, dtype, fits):
    """The model's dtype remains, and accepts values in its range; only numbers of one kind."""
    model, arrays = {"a": jnp.zeros(2, dtype)}, {"a": np.ones(2, given)}
    if fits:
        made = from_torch(model, arrays)
        assert made["a"].dtype == dtype
        assert made["a"].tolist() == [1, 1]
        return
    with pytest.raises(StructureError, match="at a"):
        from_torch(model, arrays)


def test_nobody_else_holds_what_comes_out():
    """Arrays are copies, on both sides, and those of PyTorch's may be written to."""
    model, given = {"a": jnp.zeros(2), "b": np.zeros(2, np.float32)}, {"a": wave(2), "b": wave(2)}
    made = from_torch(model, given)
    arrays = to_torch(made)
    for array in (*given.values(), *arrays.values()):
        array += np.float32(1)

    assert isinstance(made["a"], jax.Array)
    assert made["a"].tolist() == made["b"].tolist() == wave(2).tolist()


def test_what_is_no_array_stays():
    """Numbers of Python, keys and text have no counterpart."""
    model = {"a": 1.5, "b": "text", "c": jax.random.key(0), "d": jnp.zeros(2), "e": None}
    made = from_torch(model, {"d": wave(2)})

    assert [*to_torch(model)] == ["d"]
    assert made["d"].tolist() == wave(2).tolist()
    assert all(made[name] is model[name] for name in "abce")


# ---- names


class Counter(pm.Module):
    """A layer with its own value, and a stream."""

    weight: jax.Array
    count: pm.StateIndex
    noise: pm.RngStream

    def __init__(self):
        self.weight = jnp.ones(2)
        self.count = pm.StateIndex({"n": jnp.asarray(0), "sums": [jnp.zeros(2)]})
        self.noise = pm.RngStream()


def test_names_are_paths_without_what_pytorch_does_not_name():
    """A Sequential has no field there, and a value stands where its token is, filled in or not."""
    linear = nn.Linear(2, 2, key=jax.random.key(0))
    model = {"net": nn.Sequential([nn.Identity(), linear]), "parts": [affine(), 1.5, None]}
    assert [*to_torch(model)] == ["net.1.weight", "net.1.bias", "parts.0.weight", "parts.0.bias"]

    model, state = pm.make_with_state(lambda: [Counter()])()
    names = ["0.weight", "0.count.n", "0.count.sums.0"]
    state = state.seed(jax.random.key(0))
    assert [*to_torch(model, state)] == names
    assert [*to_torch(state.fill(model))] == names


@pytest.mark.parametrize("depth", [None, 2])
def test_a_single_number_has_its_axes_here_and_none_there(depth):
    """The length of a whole matrix; of several layers as one, each of which has its own."""

    def make(key):
        def layer(key):
            return nn.WeightNorm(nn.Linear(3, 3, key=key), axis=None)

        return layer(key) if depth is None else nn.Stack(layer, depth, key=key)

    model, like = make(jax.random.key(0)), make(jax.random.key(1))
    tensors = to_torch(model)
    lengths = [tensors[name] for name in tensors if name.endswith("original0")]

    assert [np.shape(length) for length in lengths] == [()] * (depth or 1)
    assert_same(from_torch(like, tensors), model)


# ---- refusals


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"weight": wave(3, 2)}, r"weight: expected f32\[2,3\]"),
        ({"bias": None}, "bias: missing"),
        ({"scale": wave(2)}, "scale: unexpected"),
    ],
    ids=["shape", "missing", "unexpected"],
)
def test_every_array_is_given_and_every_tensor_is_used(changed, word):
    """A parameter would keep its initial numbers else; by name, and nothing is changed."""
    layer = nn.Linear(3, 2, key=KEY)
    given = {**to_torch(layer), **changed}
    given = {name: array for name, array in given.items() if array is not None}
    with pytest.raises(StructureError, match=word):
        from_torch(layer, given)


def test_a_refused_state_is_not_used_up():
    """Errors are found before anything is changed."""
    model, state = network()
    with pytest.raises(StructureError, match="running_mean: missing"):
        from_torch(model, {}, state=state)

    assert to_torch(model, state)


def test_a_tensor_that_two_arrays_are_parts_of_is_told_once():
    """Of a cell's second bias, and of packed matrices of attention."""
    cell = nn.GRUCell(3, 2, key=KEY)
    with pytest.raises(StructureError, match="bias_hh") as caught:
        from_torch(cell, to_torch(cell) | {"bias_hh": np.zeros(5, "f")})
    assert str(caught.value).count("at bias_hh") == 1
    layer = nn.MultiheadAttention(2, 4, key=KEY)
    with pytest.raises(StructureError, match="in_proj_weight") as caught:
        from_torch(layer, to_torch(layer) | {"in_proj_weight": np.zeros((5, 4), "f")})
    assert str(caught.value).count("at in_proj_weight") == 1


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: from_torch({"a": jnp.zeros(1, "int32")}, {"a": np.array([2**40])}), None, "i64"),
        (lambda: to_torch(pm.filter_eval_shape(affine)), None, "weight"),
        (lambda: from_torch(network()[0], {}), StateError, "state_index"),
        (lambda: to_torch(network()[0]), StateError, "state_index"),
        (lambda: to_torch(affine(), affine()), ArgumentError, "State"),
        (lambda: from_torch(affine(), {"model": to_torch(affine())}), ArgumentError, "model"),
    ],
)
def test_values_that_would_be_lost_or_changed_are_refused(call, error, word):
    """Large integers, abstract arrays, statistics without their State, dicts in a dict."""
    with pytest.raises(error or StructureError, match=word):
        call()


class Tied(pm.Module):
    """An embedding, and a head that is tied to it."""

    embed: nn.Embedding
    head: nn.Linear

    def __init__(self, key):
        self.embed = nn.Embedding(4, 3, key=key)
        self.head = nn.Linear(3, 4, key=key)


def test_a_tied_parameter_stands_at_each_of_its_places(key):
    """As in PyTorch; two different tensors are not a tie."""
    model = pm.tie(Tied(key), "head.weight", to="embed.weight")

    named = pm.to_torch(model)
    with pytest.raises(StructureError, match=r"head\.weight"):
        pm.from_torch(model, {**named, "head.weight": named["head.weight"] + 1})

    assert sorted(named) == ["embed.weight", "head.bias", "head.weight"]
    abstract = pm.filter_eval_shape(lambda m: m, model)
    for given in (model, abstract):
        found = pm.from_torch(given, named)
        assert pm.tree_equal(found, model)
        assert found.head.weight is found.embed.weight


def test_a_parameter_that_is_tied_through_a_function(key):
    """The tensor at the path is the result of the function."""

    class Coder(pm.Module):
        one: nn.Linear
        two: nn.Linear

    model = Coder(nn.Linear(3, 2, key=key), nn.Linear(2, 3, key=key))
    model = pm.tie(model, "two.weight", to="one.weight", through=jnp.transpose)

    named = pm.to_torch(model)

    np.testing.assert_array_equal(named["two.weight"], named["one.weight"].T)
    assert pm.tree_equal(pm.from_torch(model, named), model)
    abstract = pm.filter_eval_shape(lambda m: m, model)
    assert pm.tree_equal(pm.from_torch(abstract, named), model)


def test_a_path_is_read_as_it_is_needed(tmp_path):
    """Of a file of safetensors; the error of `load` for such a file names this function."""
    model = nn.Linear(3, 2, key=jax.random.key(0))
    arrays = {"fc.weight": np.ones((2, 3), np.float32), "fc.bias": np.zeros(2, np.float32)}
    unused = {**arrays, "head.weight": np.ones(1000, np.float32)}
    safetensors.numpy.save_file(unused, tmp_path / "net.safetensors")
    mapping = {"fc": "", "head": None}
    expected = pm.from_torch(model, unused, mapping)
    for path in (tmp_path / "net.safetensors", str(tmp_path / "net.safetensors")):
        assert pm.from_torch(model, path, mapping) == expected
    # An unused array is not read: its damage is not noticed here, nor by the size.
    with pytest.raises(StructureError, match=r"fc\.weight: unexpected"):
        pm.from_torch(model, tmp_path / "net.safetensors")
    with pytest.raises(FileMissingError, match=r"missing\.safetensors"):
        pm.from_torch(model, tmp_path / "missing.safetensors")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(FileError, match="safetensors"):
        pm.from_torch(model, tmp_path / "zip")

    norm, state = pm.make_with_state(nn.BatchNorm)(3)
    safetensors.numpy.save_file(pm.to_torch(norm, state), tmp_path / "norm.safetensors")
    loaded = pm.from_torch(norm, tmp_path / "norm.safetensors", state=state)
    assert pm.to_torch(*loaded).keys() == pm.to_torch(norm, loaded[1]).keys()

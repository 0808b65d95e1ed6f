"""Models from and to PyTorch's state dicts: the same numbers on both sides."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import from_torch, nn, to_torch
from pytreemod.errors import ArgumentError, FileError
from tests.helpers.comparing import assert_same
from tests.nn.catalogue import CATALOGUE, flatten
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)
GRU, ATTENTION = nn.GRUCell(2, 3, key=KEY), nn.MultiheadAttention(2, 4, key=KEY)
CHANNELS = nn.PReLU(jnp.full((4, 1), 0.1))


def pair_of(make, seed=0):
    return pm.make_with_state(make)(jax.random.key(seed))


def as_tensors(torch, arrays):
    """Arrays as PyTorch's load_state_dict takes them."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def same(name, *args, **options):
    """A layer that both libraries make with the same arguments."""
    ours = ft.partial(getattr(nn, name), *args, **options)
    return lambda t: getattr(t.nn, name)(*args, **options), ours


def attention(*, has_biases):
    """Attention of a sequence to itself."""

    def theirs(t):
        class Attending(t.nn.MultiheadAttention):
            def forward(self, x):
                return super().forward(x, x, x)[0]

        return Attending(4, 2, batch_first=True, bias=has_biases)

    return theirs, ft.partial(nn.MultiheadAttention, 2, 4, **(BIASES if has_biases else {}))


BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
LAYERS = {
    "Linear": ((3,), *same("Linear", 3, 4)),
    "Linear without bias": ((3,), *same("Linear", 3, 4, False)),
    "Conv1d": ((2, 5), *same("Conv1d", 2, 4, 3)),
    "Conv2d": ((2, 5, 5), *same("Conv2d", 2, 4, (3, 2), groups=2)),
    "Conv3d": ((1, 3, 3, 3), *same("Conv3d", 1, 2, 2)),
    "ConvTranspose1d": ((2, 5), *same("ConvTranspose1d", 2, 4, 3, 2, 1, 1)),
    "ConvTranspose2d": ((4, 3, 2), *same("ConvTranspose2d", 4, 6, 3, 2, groups=2, dilation=2)),
    "ConvTranspose3d": ((1, 2, 1, 2), *same("ConvTranspose3d", 1, 2, 2)),
    "PReLU": ((3,), lambda t: t.nn.PReLU(), lambda key: nn.PReLU()),
    "PReLU for each channel": ((4, 3), lambda t: t.nn.PReLU(4), lambda key: CHANNELS),
    "RMSNorm": (
        (2, 3),
        lambda t: t.nn.RMSNorm((2, 3), eps=1e-5),
        ft.partial(nn.RMSNorm, (2, 3), use_bias=False),
    ),
    "LayerNorm": ((2, 3), *same("LayerNorm", (2, 3))),
    "GroupNorm": ((4, 3), *same("GroupNorm", 2, 4)),
    "InstanceNorm": (
        (4, 3),
        lambda t: t.nn.InstanceNorm1d(4, affine=True),
        ft.partial(nn.InstanceNorm, 4, channelwise_affine=True),
    ),
    "BatchNorm": ((3,), lambda t: t.nn.BatchNorm1d(3), ft.partial(nn.BatchNorm, 3)),
    "Embedding": (None, *same("Embedding", 5, 2)),
    "attention": ((5, 4), *attention(has_biases=True)),
    "attention without biases": ((5, 4), *attention(has_biases=False)),
}
"""Layers with a counterpart in PyTorch: the shape of an input, theirs, and ours."""
CELLS = {"GRUCell": nn.GRUCell, "LSTMCell": nn.LSTMCell, "RNNCell": nn.SimpleCell}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_pytorchs_do(torch, name):
    """PyTorch's numbers in our layer give its outputs, and ours in PyTorch's as well."""
    shape, theirs, make = LAYERS[name]
    theirs, pair = theirs(torch).eval(), pair_of(lambda key: make(key=key))
    x = np.array([[3, 0], [1, 4]]) if shape is None else wave(4, *shape)

    def output(layer, state):
        layer = pm.inference_mode(layer)
        if isinstance(layer, (nn.BatchNorm, nn.Sequential)):
            return layer(jnp.asarray(x), state)[0]
        return jax.vmap(layer)(jnp.asarray(x))

    given = from_torch(pair, theirs.state_dict())
    assert_close(output(*given), theirs(torch.tensor(x)))
    theirs.load_state_dict(as_tensors(torch, to_torch(pair)), strict=True)
    assert_close(output(*pair), theirs(torch.tensor(x)))


@pytest.mark.parametrize("use_bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("name", CELLS)
def test_cells_compute_what_pytorchs_do(torch, name, use_bias):
    """Two biases there are one here, except within a GRU's reset gate."""
    theirs, cell = getattr(torch.nn, name)(3, 2, use_bias), CELLS[name](3, 2, use_bias, key=KEY)
    x, hidden = wave(4, 3), tuple(wave(2, 4, 2, phase=1))
    hidden = hidden if name == "LSTMCell" else hidden[0]

    def assert_same_steps(ours):
        expected = theirs(torch.tensor(x), jax.tree.map(torch.tensor, hidden))
        found = ours(jnp.asarray(x), jax.tree.map(jnp.asarray, hidden))
        jax.tree.map(assert_close, found, expected)

    assert_same_steps(from_torch(cell, theirs.state_dict()))
    theirs.load_state_dict(as_tensors(torch, to_torch(cell)), strict=True)
    assert_same_steps(cell)


def test_attention_that_is_not_packed(torch):
    """Of inputs of several sizes, PyTorch has the weights one by one."""
    theirs = torch.nn.MultiheadAttention(4, 2, kdim=6, vdim=3, batch_first=True).eval()
    layer = nn.MultiheadAttention(2, 4, 6, 3, **BIASES, key=KEY)
    given = [wave(2, 5, size) for size in (4, 6, 3)]

    assert {*to_torch(layer)} == {*theirs.state_dict()}
    loaded = from_torch(layer, theirs.state_dict())
    assert_close(loaded(*map(jnp.asarray, given)), theirs(*map(torch.tensor, given))[0])


def test_a_weight_norm_is_read_by_a_table_of_names(torch):
    """PyTorch names the parts of a parametrized weight by their numbers."""
    theirs = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))
    name = "parametrizations.weight.original"
    parts = {f"{name}0": "weight.g", f"{name}1": "weight.v"}
    layer = nn.WeightNorm(nn.Linear(3, 4, key=KEY))
    layer = from_torch(layer, theirs.state_dict(), parts)
    assert_close(layer(jnp.asarray(wave(3))), theirs(torch.tensor(wave(3))))


def make_network(key):
    one, two = jax.random.split(key)
    conv, linear = nn.Conv2d(1, 2, 3, key=one), nn.Linear(8, 3, key=two)
    rest = [nn.Lambda(jax.nn.relu), nn.MaxPool2d(2, 2), nn.Lambda(flatten), linear]
    return nn.Sequential([conv, nn.BatchNorm(2, momentum=0.9), *rest])


def test_a_trained_network_goes_both_ways(torch):
    """Its outputs in inference and in training, and its running statistics, which go on."""
    them = torch.nn
    rest = [them.ReLU(), them.MaxPool2d(2), them.Flatten(), them.Linear(8, 3)]
    theirs, x = them.Sequential(them.Conv2d(1, 2, 3), them.BatchNorm2d(2), *rest), wave(4, 1, 6, 6)
    for phase in range(3):
        theirs(torch.tensor(wave(4, 1, 6, 6, phase=phase)))
    wanted = {name: y for name, y in theirs.state_dict().items() if "num_batches" not in name}

    model, state = from_torch(pair_of(make_network), theirs.state_dict())
    arrays = to_torch((model, state))
    assert_same(arrays, {name: tensor.numpy() for name, tensor in wanted.items()})
    theirs.load_state_dict(as_tensors(torch, arrays), strict=True)
    out, state = pm.inference_mode(model)(jnp.asarray(x), state)
    assert_close(out, theirs.eval()(torch.tensor(x)))
    out, state = model(jnp.asarray(x), state)
    assert_close(out, theirs.train()(torch.tensor(x)))
    for name, array in to_torch((model, state)).items():
        assert_close(array, theirs.state_dict()[name])


def test_bfloat16_goes_both_ways(torch):
    """From a tensor, and as integers into one, because NumPy has no bfloat16."""
    layer = nn.Linear(3, 4, dtype=jnp.bfloat16, key=KEY)
    theirs = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
    loaded = from_torch(layer, theirs.state_dict())
    views = {n: torch.from_numpy(x.view(np.int16)) for n, x in to_torch(loaded).items()}
    views = {name: view.view(torch.bfloat16) for name, view in views.items()}

    assert loaded.weight.dtype == jnp.bfloat16
    assert all(bool((views[name] == value).all()) for name, value in theirs.state_dict().items())
    theirs.load_state_dict(views, strict=True)


def test_any_tensor_becomes_an_array(torch):
    """One to be differentiated, transposed, conjugated, and of a float with eight bits."""
    tensors = {
        "transposed": torch.arange(4.0, requires_grad=True).reshape(2, 2).T,
        "eight": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
        "conjugated": torch.tensor([1 + 2j]).conj(),
    }
    like = {"transposed": jnp.zeros((2, 2)), "eight": jnp.zeros(2, "float8_e4m3fn")}
    found = from_torch(like | {"conjugated": jnp.zeros(1, "complex64")}, tensors)

    assert found["transposed"].tolist() == [[0, 2], [1, 3]]
    assert found["eight"].tolist() == [0.5, -448]
    assert found["conjugated"].tolist() == [1 - 2j]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "entry", [x for x in CATALOGUE if "averages" not in x.name], ids=lambda entry: entry.name
)
def test_every_layer_comes_back(entry):
    """from_torch(pair, to_torch(pair)) == pair, whatever numbers the first pair has."""
    pair, other = entry.build(seed=0), entry.build(seed=3)

    made = from_torch(other, to_torch(pair))

    assert_same(made[0], pair[0])
    assert_same(to_torch(made), to_torch(pair))


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*CELLS, *LAYERS])
def test_layers_of_a_stack_are_as_those_of_a_list(name):
    """Each has its own numbers, and its own values of the State, with all of PyTorch's layouts."""
    make = ft.partial(CELLS[name], 2, 3) if name in CELLS else LAYERS[name][-1]

    def stacked(key):
        return nn.Stack(lambda key: make(key=key), 2, key=key)

    def listed(key):
        return [make(key=each) for each in jax.random.split(key, 2)]

    forms = to_torch(pair_of(stacked))
    given = {name: wave(*x.shape, phase=i) for i, (name, x) in enumerate(forms.items())}
    found, expected = (to_torch(from_torch(pair_of(each), given)) for each in (stacked, listed))
    assert_same(found, expected)
    assert found.keys() == given.keys()


def test_numbers_are_where_pytorch_has_them():
    """As its documentation says: axes of convolutions, rows of gates and heads."""
    conv = nn.ConvTranspose1d(4, 6, 3, groups=2, key=KEY)
    given = to_torch({"net": nn.Sequential([conv, CHANNELS])})
    expected = {"net.0.weight": (4, 3, 3), "net.0.bias": (6,), "net.1.weight": (4,)}
    assert {name: array.shape for name, array in given.items()} == expected
    assert given["net.0.weight"][3, 2, 0] == conv.weight[5, 1, 2]
    bias = {"bias_ih": np.arange(9.0, dtype="f"), "bias_hh": np.arange(0, 90, 10, dtype="f")}
    cell = from_torch(GRU, {"weight_ih": wave(9, 2), "weight_hh": wave(9, 3), **bias})
    assert cell.bias.tolist() == [0, 11, 22, 33, 44, 55, 6, 7, 8]
    assert cell.bias_n.tolist() == [60, 70, 80]
    given = {"in_proj_weight": wave(12, 4), "out_proj.weight": wave(4, 4)}
    assert_same(from_torch(ATTENTION, given).value_proj.weight, jnp.asarray(wave(12, 4)[8:]))
    given = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), wave(3))
    given["running_var"] = 3 * wave(3)
    norm, state = from_torch(pair_of(lambda key: nn.BatchNorm(3)), given)
    assert_same(state.get(norm.state_index), (jnp.asarray(wave(3)), jnp.asarray(3 * wave(3))))


@pytest.mark.parametrize(
    ("given", "dtype"), [("bfloat16", "float32"), ("float64", "bfloat16"), ("int64", "int32")]
)
def test_the_models_dtype_stays(given, dtype):
    """Numbers of one kind are cast to it."""
    made = from_torch({"a": jnp.zeros(2, dtype)}, {"a": np.ones(2, jnp.dtype(given))})
    assert_same(made, {"a": jnp.ones(2, dtype)})


def test_nobody_else_holds_what_comes_out():
    """Arrays are copies on both sides, also if their memory is as JAX wants it."""
    memory = np.zeros(128, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][:8].view(np.float32)
    model, given = {"a": jnp.zeros(2), "b": np.zeros(2, "f")}, {"a": aligned, "b": np.zeros(2, "f")}
    made = from_torch(model, given)
    arrays = to_torch(made)
    for array in (*given.values(), *arrays.values()):
        array += np.float32(1)

    assert_same(made, {"a": jnp.zeros(2), "b": np.zeros(2, "f")})


def test_what_is_no_array_stays():
    """Keys, numbers of Python and text have no counterpart; arrays without values are refused."""
    model = {"a": 1.5, "b": "text", "c": KEY, "d": jnp.zeros(2), "e": None}
    made = from_torch(model, {"d": wave(2)})

    assert [*to_torch(model)] == ["d"]
    assert_same(made, model | {"d": jnp.asarray(wave(2))})
    with pytest.raises(FileError, match="at d: "):
        to_torch(jax.eval_shape(lambda: {"d": wave(2)}))


def test_one_error_lists_all_that_does_not_fit():
    """Missing tensors, unexpected ones, and those of another shape; nothing is changed."""
    layer = nn.Linear(3, 2, key=KEY)
    given = {"0.weight": wave(3, 2), "0.scale": wave(2)}
    for model in ([layer], pair_of(lambda key: [layer])):
        with pytest.raises(FileError, match="tensors do not fit") as caught:
            from_torch(model, given)
        caught.match(r"at 0.weight: expected f32\[2,3\], got f32\[3,2\]")
        caught.match("at 0.bias: missing\n")
        caught.match("at 0.scale: unexpected")


@pytest.mark.parametrize(
    ("model", "name", "tensor"),
    [
        (GRU, "bias_hh", wave(5)),
        (ATTENTION, "in_proj_weight", wave(15, 4)),
        (ATTENTION, "in_proj_weight", wave(5, 4)),
        (nn.ConvTranspose1d(4, 6, 3, groups=2, key=KEY), "weight", wave(5, 3, 3)),
        (nn.ConvTranspose1d(4, 6, 3, key=KEY), "weight", wave(4, 6)),
        (nn.PReLU(), "weight", wave(2)),
        ({"a": jnp.zeros(1, "int32")}, "a", np.array([2**40])),
        ({"a": jnp.zeros(1, "int32")}, "a", wave(1)),
        ({"a": jnp.zeros(1)}, "a", np.array([1])),
    ],
    ids=["bias", "long", "short", "groups", "axes", "slope", "large", "float", "int"],
)
def test_a_tensor_that_does_not_fit_is_never_cut_or_rounded(model, name, tensor):
    """Also if the array here is a part of it, or made of several."""
    with pytest.raises(FileError, match=rf"at .*{name.removeprefix('in_proj_')}"):
        from_torch(model, to_torch(model) | {name: tensor})


def test_statistics_need_their_state():
    """And are those of PyTorch's kind of BatchNorm."""
    norm, state = pair_of(lambda key: nn.BatchNorm(2))
    with pytest.raises(ArgumentError, match=r"pm.to_torch\(\(model, state\)\)"):
        to_torch(norm)
    with pytest.raises(FileError, match=r"running_var: unexpected\n.*\(\(model, state\), st"):
        from_torch(norm, to_torch((norm, state)))
    with pytest.raises(ArgumentError, match="mode='ema'"):
        to_torch(pair_of(lambda key: nn.BatchNorm(2, mode="ema")))


def test_a_table_of_names_maps_theirs_to_those_of_the_model(tmp_path):
    """By pattern; None drops a tensor, a function changes it; from a dict, a file or a folder."""
    model = {"body": nn.Sequential([nn.Linear(2, 2, key=KEY)]), "heads": [jnp.zeros(2)] * 2}
    tensors = {"net.0.weight": wave(2, 2), "net.0.bias": wave(2), "old": wave(1)}
    tensors["both"] = wave(2, 2)
    names = {"net": "body", "old": None, "both": (("heads.0", "heads.1"), list)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")

    for given in (tensors, tmp_path / "model.safetensors", str(tmp_path)):
        made = from_torch(model, given, names)
        assert_same(np.asarray(made["body"].layers[0].weight), wave(2, 2))
        assert_same(np.asarray(made["heads"][1]), wave(2, 2)[1])
        with pytest.raises(ArgumentError, match="layers"):
            from_torch(model, given, names | {"layers": "body"})
        with pytest.raises(FileError, match="old: unexpected"):
            from_torch(model, given, names | {"old": "old"})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        from_torch(model, tmp_path / "nowhere")


class Tied(pm.Module):
    """Three maps with one matrix, once tied to be what it is, and once transposed."""

    embed: nn.Linear
    head: nn.Linear
    back: nn.Linear


def test_a_tied_array_needs_one_of_its_names():
    """to_torch gives all, as PyTorch's load_state_dict demands; different ones are an error."""
    one, two, three = (nn.Linear(3, 3, False, key=key) for key in jax.random.split(KEY, 3))
    model = pm.tie(Tied(one, two, three), "head.weight", to="embed.weight")
    model = pm.tie(model, "back.weight", to="embed.weight", through=jnp.transpose)
    named = to_torch(model)

    assert sorted(named) == ["back.weight", "embed.weight", "head.weight"]
    for like in (model, pm.filter_eval_shape(lambda: model)):
        for dropped in ("back.weight", "embed.weight", "head.weight"):
            given = {name: array for name, array in named.items() if name != dropped}
            assert from_torch(like, given) == model
        for changed in ("back.weight", "head.weight"):
            with pytest.raises(FileError, match=changed.replace(".", r"\.")):
                from_torch(like, named | {changed: named[changed] + 1})

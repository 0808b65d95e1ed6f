"""summary and param_count: describe a model, without running it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError

KEY = jax.random.key(0)
STRUCT = jax.ShapeDtypeStruct


class Block(pm.Module):
    norm: nn.LayerNorm
    mlp: nn.MLP

    def __init__(self, size, *, key):
        self.norm = nn.LayerNorm(size)
        self.mlp = nn.MLP(size, size, 2 * size, 1, key=key)

    def __call__(self, x):
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


class Net(pm.Module):
    embed: nn.Embedding
    blocks: list[Block]
    stack: nn.Stack
    head: nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key, 5)
        self.embed = nn.Embedding(10, 4, key=keys[0])
        self.blocks = [Block(4, key=key) for key in keys[1:3]]
        self.stack = nn.Stack(lambda key: Block(4, key=key), 3, key=keys[3])
        self.head = nn.Linear(4, 10, use_bias=False, key=keys[4])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.stack(x))


NET = Net(key=KEY)
TOKENS = STRUCT((6,), jnp.int32)


def row_of(summary, path):
    (row,) = [row for row in summary.rows if row.path == path]
    return row


def test_the_table():
    assert str(pm.summary(NET, TOKENS)) == TABLE


TABLE = """\
path                               class      output     params  bytes  dtype
<root>                             Net        f32[6,10]     500  2,000
  embed                            Embedding  f32[6,4]       40    160  f32
  2 \N{MULTIPLICATION SIGN} blocks[0]                    Block      f32[6,4]       84    336
    blocks[0].norm                 LayerNorm  f32[4]          8     32  f32
    blocks[0].mlp                  MLP        f32[4]         76    304
      blocks[0].mlp.layers[0]      Linear     f32[8]         40    160  f32
      blocks[0].mlp.layers[1]      Linear     f32[4]         36    144  f32
  stack                            Stack      f32[6,4]      252  1,008
    stack.layer                    3 \N{MULTIPLICATION SIGN} Block  f32[6,4]      252  1,008
      stack.layer.norm             LayerNorm  f32[4]         24     96  f32
      stack.layer.mlp              MLP        f32[4]        228    912
        stack.layer.mlp.layers[0]  Linear     f32[8]        120    480  f32
        stack.layer.mlp.layers[1]  Linear     f32[4]        108    432  f32
  head                             Linear     f32[6,10]      40    160  f32
500 parameters, 2,000 bytes"""


def test_rows_have_what_numpy_counts():
    summary = pm.summary(NET, TOKENS)
    for path, part in [("<root>", NET), ("blocks[1].mlp", NET.blocks[1].mlp), ("stack", NET.stack)]:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(part)]
        row = row_of(summary, path)
        assert row.params == sum(leaf.size for leaf in leaves)
        assert row.bytes == sum(leaf.nbytes for leaf in leaves)
    assert summary.params == row_of(summary, "<root>").params == pm.param_count(NET)
    assert summary.bytes == row_of(summary, "<root>").bytes


def test_shapes_are_those_of_each_call_as_it_is_traced():
    """Under a plain `jax.vmap` inside of the model, where nothing can be captured, too."""
    summary = pm.summary(NET, TOKENS)
    shapes = {row.path: row.shape for row in summary.rows}
    assert shapes["blocks[0]"] == STRUCT((6, 4), jnp.float32)
    assert shapes["blocks[0].mlp.layers[0]"] == STRUCT((8,), jnp.float32)
    assert shapes["stack.layer.norm"] == STRUCT((4,), jnp.float32)
    assert row_of(summary, "stack.layer").layers == 3
    assert row_of(summary, "stack.layer.norm").layers == 1


def test_nothing_runs_and_nothing_is_allocated():
    """It takes shapes alone for the model, too, and can be asked for under a trace."""
    skeleton = pm.filter_eval_shape(lambda: Net(key=KEY))
    with jax.transfer_guard("disallow"):
        abstract = pm.summary(skeleton, TOKENS)
    assert str(abstract) == str(pm.summary(NET, TOKENS))
    found = []
    jax.make_jaxpr(lambda x: found.append(pm.summary(NET, x)))(jnp.zeros(6, int))
    assert str(found[0]) == str(abstract)


def test_a_jitted_part_is_seen_each_time():
    """A trace that was made before calls nothing; each summary makes its own."""
    part = pm.filter_jit(nn.Linear(4, 2, key=KEY))
    model = nn.Sequential([nn.Lambda(lambda x: part(x)), nn.Linear(2, 2, key=KEY)])
    wrapped = nn.Sequential([pm.filter_jit(nn.Linear(4, 2, key=KEY)), nn.Linear(2, 2, key=KEY)])
    for _ in range(2):
        assert row_of(pm.summary(model, jnp.ones(4)), "layers[1]").calls == 1
        assert [row.calls for row in pm.summary(wrapped, jnp.ones(4)).rows] == [1, 1, 1]


def test_columns_for_what_there_is_to_say():
    model = pm.tie(NET, "head.weight", to="embed.weight")
    model = pm.lora(model, "blocks.0.mlp.**.weight", 1, key=KEY)
    mixed = pm.by({nn.LayerNorm: "float32", ...: "params=float32,compute=bfloat16,output=float32"})
    model = pm.with_precision(model, mixed)
    rules = pm.by({nn.LayerNorm: optax.sgd(0.1), "embed": None, ...: optax.adam(0.1)})
    summary = pm.summary(model, TOKENS, opt=pm.Optimizer(rules).init(model))

    assert row_of(summary, "head").ties == ("weight = embed.weight",)
    assert row_of(summary, "head").params == 0
    assert row_of(summary, "blocks[0].mlp.layers[0]").computed == ("weight: LowRank",)
    assert row_of(summary, "blocks[0].mlp.layers[0]").roles == "param, lora"
    assert row_of(summary, "blocks[0].norm").precision == "float32"
    assert row_of(summary, "blocks[0].mlp").precision == ""
    assert row_of(summary, "embed").trained_by == "nothing"
    assert row_of(summary, "blocks[0].norm").trained_by == "select.type(LayerNorm)"
    header = str(summary).split("\n")[0].split()
    assert header[6:] == ["precision", "role", "trained", "by", "notes"]
    assert str(pm.summary(NET)).split("\n")[0].split() == [
        "path",
        "class",
        "params",
        "bytes",
        "dtype",
    ]


def test_state_and_streams_are_listed():
    def make(key):
        return nn.Sequential(
            [nn.Linear(3, 4, key=key), nn.BatchNorm(4), nn.Dropout(stream=pm.RngStream())]
        )

    model, state = nn.make_with_state(make)(KEY)
    state = state.seed(KEY)
    summary = pm.summary(model, STRUCT((5, 3), jnp.float32), state)
    assert row_of(summary, "<root>").shape == STRUCT((5, 4), jnp.float32)
    assert len(summary.state) == len(jax.tree.leaves(state)) == 4
    assert str(summary).split("\n")[-5] == "State"


def test_buffers_are_bytes_and_no_parameters():
    class Scaled(pm.Module):
        weight: jax.Array
        scale: jax.Array = pm.buffer()

    model = Scaled(jnp.ones(3), jnp.ones(5))
    summary = pm.summary(model)
    assert (summary.params, summary.bytes, summary.rows[0].roles) == (3, 32, "param, buffer")
    assert (pm.param_count(model), pm.param_count(model, ...)) == (3, 8)


def test_bytes_on_one_device():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh(
        (len(devices),), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Explicit,)
    )
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    model = jax.device_put(nn.Linear(4, 8, use_bias=False, key=KEY), sharding)
    row = pm.summary(model).rows[0]
    assert row.device_bytes == row.bytes // len(devices)
    assert row.sharding == ("P('data',)" if len(devices) > 1 else "")


def test_an_example_that_does_not_fit_says_where():
    broken = pm.tree_at(lambda m: m.blocks[1].mlp.layers[1], NET, nn.Linear(7, 4, key=KEY))
    with pytest.raises(ShapeError, match=r"(?s)f32\[8\].*at blocks\[1\]\.mlp\.layers\[1\]"):
        pm.summary(broken, TOKENS)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pm.summary(jax.vmap(NET), TOKENS), "function"),
        (lambda: pm.summary(NET, opt=pm.Optimizer(optax.sgd(0.1)).init(NET.head)), "optimizer"),
    ],
    ids=["a transform of JAX hides the model", "an optimizer of another model"],
)
def test_what_would_be_a_wrong_table_is_refused(call, match):
    """Of no Modules, or with the rules of other arrays."""
    with pytest.raises(ArgumentError, match=match):
        call()


def test_param_count_takes_selectors():
    tied = pm.tie(NET, "head.weight", to="embed.weight")
    assert pm.param_count(tied) == pm.param_count(NET) - 40
    assert pm.param_count(NET, nn.LayerNorm) == 5 * 8
    assert pm.param_count(NET, "**.bias") == 5 * (4 + 8 + 4)
    assert pm.param_count(pm.filter_eval_shape(lambda: Net(key=KEY))) == pm.param_count(NET)


@pytest.mark.parametrize("wrap", [pm.filter_jit, pm.filter_vmap, lambda model: model.__call__])
def test_a_wrapped_model_is_the_model(wrap):
    """Paths start at the model, and its calls are seen."""
    mlp = nn.MLP(3, 2, 8, 1, key=KEY)
    opt = pm.Optimizer(optax.sgd(0.1)).init(mlp)
    summary = pm.summary(wrap(mlp), STRUCT((5, 3), jnp.float32), opt=opt)
    assert [row.path for row in summary.rows] == ["<root>", "layers[0]", "layers[1]"]
    assert row_of(summary, "layers[1]").calls == 1


def test_a_model_with_rules_is_the_model():
    """With the shapes that the rules give."""
    changed = pm.intervene(NET, nn.Linear, lambda out: out)
    assert str(pm.summary(changed, TOKENS)) == str(pm.summary(NET, TOKENS))
    wider = pm.intervene(NET, "head", lambda out: jnp.concatenate([out, out], 1))
    assert row_of(pm.summary(wider, TOKENS), "head").shape == STRUCT((6, 20), jnp.float32)


LAYER = nn.Linear(2, 2, key=KEY)


def test_equal_neighbours_are_one_row():
    """Only neighbors in one list, and only if all their parts are equal."""
    layers = [LAYER, LAYER, nn.Linear(2, 3, key=KEY), LAYER]
    lines = str(pm.summary(layers)).split("\n")
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        "2 \N{MULTIPLICATION SIGN} [0]",
        "[2]",
        "[3]",
    ]


def test_depth_ends_the_table_and_no_sum():
    """Rows below are left out, and their parameters are counted."""
    summary = pm.summary(NET, depth=0)
    assert [row.path for row in summary.rows] == ["<root>"]
    assert summary.params == pm.param_count(NET)

"""summary and param_count: describe a model, without running it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError, SpecError

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
    """Each result as it is traced: under a plain `jax.vmap` in the model, too."""
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


def test_equal_layers_of_two_lists_are_two_rows_and_calls_are_counted():
    one = nn.Linear(2, 2, key=KEY)
    lines = str(pm.summary({"a": [one], "b": [one]})).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["a[0]", "b[0]"]
    twice = pm.summary(pm.Partial(lambda m, x: m(m(x)), one), jnp.ones(2))
    assert "f32[2] (1 of 2 calls)" in str(twice)


def test_rows_have_what_numpy_counts():
    summary = pm.summary(NET, TOKENS)
    assert row_of(summary, "blocks[0].mlp.layers[0]").shape == STRUCT((8,), jnp.float32)
    for path, part in [("<root>", NET), ("blocks[1].mlp", NET.blocks[1].mlp), ("stack", NET.stack)]:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(part)]
        row = row_of(summary, path)
        assert row.params == sum(leaf.size for leaf in leaves)
        assert row.bytes == sum(leaf.nbytes for leaf in leaves)
    assert summary.params == row_of(summary, "<root>").params == pm.param_count(NET)
    assert summary.bytes == row_of(summary, "<root>").bytes


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


def test_ties_follow_and_a_tied_array_is_no_part_of_its_row():
    tied = pm.tie(NET, "head.weight", to="embed.weight")
    summary = pm.summary([tied])
    assert summary.ties == ("[0].head.weight = [0].embed.weight",)
    assert row_of(summary, "[0].head").params == 0
    assert str(summary).endswith("460 parameters, 1,840 bytes\ntied: " + summary.ties[0])


class Doubled(pm.Computed):
    half: jax.Array

    def __call__(self):
        return 2 * self.half

    def value(self):
        return self()


def test_a_computed_leaf_is_part_of_its_layer():
    """It has no row of its own, although it is a Module that is called."""
    weight = Doubled(jnp.ones((2, 3)))
    model = pm.tree_at("weight", nn.Linear(3, 2, use_bias=False, key=KEY), weight)
    rows = pm.summary(model, jnp.ones(3)).rows
    assert [(row.path, row.params, row.calls) for row in rows] == [("<root>", 6, 1)]


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
    assert str(summary).split("\n")[-4:] == [f"state: {value}" for value in summary.state]
    assert str(pm.summary(model)).split("\n")[0].split() == HEADER[:2] + HEADER[3:]


HEADER = ["path", "class", "output", "params", "bytes", "dtype"]


def test_buffers_are_bytes_and_no_parameters():
    class Scaled(pm.Module):
        weight: jax.Array
        scale: jax.Array = pm.buffer()

    model = Scaled(jnp.ones(3), jnp.ones(5))
    summary = pm.summary(model)
    assert (summary.params, summary.bytes) == (3, 32)
    assert (pm.param_count(model), pm.param_count(model, ...)) == (3, 8)


def test_an_example_that_does_not_fit_says_where():
    """Once, and of nested Modules the innermost."""
    broken = pm.tree_at(lambda m: m.blocks[1].mlp.layers[1], NET, nn.Linear(7, 4, key=KEY))
    with pytest.raises(ShapeError, match=r"f32\[8\]") as caught:
        pm.summary(broken, TOKENS)
    notes = [note for note in caught.value.__notes__ if "summary" in note]
    assert notes == ["in summary, at blocks[1].mlp.layers[1]"]


def test_a_model_that_is_hidden_is_refused():
    """It would be a table of no Modules."""
    with pytest.raises(SpecError, match="no Module that can be called"):
        pm.summary(jax.vmap(NET), TOKENS)


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
    summary = pm.summary(wrap(mlp), STRUCT((5, 3), jnp.float32))
    assert [row.path for row in summary.rows] == ["<root>", "layers[0]", "layers[1]"]
    assert row_of(summary, "layers[1]").calls == 1


def test_a_model_with_rules_is_the_model():
    changed = pm.intervene(NET, nn.Linear, lambda out: out)
    assert str(pm.summary(changed, TOKENS)) == str(pm.summary(NET, TOKENS))
    wider = pm.intervene(NET, "head", lambda out: jnp.concatenate([out, out], 1))
    assert row_of(pm.summary(wider, TOKENS), "head").shape == STRUCT((6, 20), jnp.float32)


def test_equal_neighbours_are_one_row():
    """Only neighbors in one list, and only if all their parts are equal."""
    layer = nn.Linear(2, 2, key=KEY)
    lines = str(pm.summary([layer, layer, nn.Linear(2, 3, key=KEY), layer])).split("\n")
    found = [line.split("  ")[0] for line in lines[1:-1]]
    assert found == ["2 \N{MULTIPLICATION SIGN} [0]", "[2]", "[3]"]
    # One parameter each, and another class.
    kinds = pm.summary([nn.PReLU(), nn.LayerNorm(1, use_bias=False)])
    assert "\N{MULTIPLICATION SIGN}" not in str(kinds)


def test_depth_ends_the_table_and_no_sum():
    summary = pm.summary(NET, depth=0)
    assert [row.path for row in summary.rows] == ["<root>"]
    assert summary.params == pm.param_count(NET)

"""Trees as text."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from tests.helpers.trees import Affine, Holder, OwnInit, Pair, affine, double, new, ramp


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (affine(), "Affine(weight=f32[2,3], bias=f32[2])"),
        (OwnInit(2), "OwnInit(weight=f32[2], bias=f32[2], size=2)"),
        (
            Holder([1, "a", None, Pair(True, 2j)]),
            "Holder(content=[1, 'a', None, Pair(first=True, second=2j)])",
        ),
        (Holder(jnp.asarray(1)), "Holder(content=weak_i32[])"),
        (Holder(np.ones((2, 1))), "Holder(content=f64[2,1](numpy))"),
        (Holder(jax.random.key(0)), "Holder(content=key<fry>[])"),
        (Holder(Affine), "Holder(content=tests.helpers.trees.Affine)"),
        (Holder(double), "Holder(content=<function double>)"),
        (Holder(pm.filter_jit(double)), "Holder(content=<filter_jit of double>)"),
        ({"a": affine(), "b": ()}, "{'a': Affine(weight=f32[2,3], bias=f32[2]), 'b': ()}"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arrays_are_short_and_fields_are_named(tree, text):
    """A Module prints as its class with its fields; arrays as dtype and shape."""
    assert pm.tree_pformat(tree, width=200) == text


KEY = jax.random.key(0)
TIMES = " \N{MULTIPLICATION SIGN} "


class Scaled(pm.Module):
    weight: jax.Array
    scale: jax.Array = pm.buffer(default_factory=lambda: jnp.ones(2))
    activation: object = jax.nn.relu
    rest: object = None


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (Scaled(ramp(3)), "Scaled(weight=f32[3], scale=f32[2] (buffer))"),
        (
            Scaled(ramp(3), activation=jnp.tanh, rest=[1, {"a": None, "b": ramp(2)}, (1,)]),
            "Scaled(\n  weight=f32[3],\n  scale=f32[2] (buffer),\n  activation=<function tanh>,\n"
            "  rest=[1, {'a': None, 'b': f32[2]}, (1,)]\n)",
        ),
        (
            pm.nn.Linear(2, 3, use_bias=False, key=KEY),
            "Linear(weight=f32[3,2], in_features=2, out_features=3, use_bias=False)",
        ),
        (new(fields={"x": int, "y": int}, y=pm.field(repr=False))(1, 2), "Made(x=1)"),
        # `filter` leaves None instead of an array.
        (pm.filter(affine(), "bias"), "Affine(weight=None, bias=f32[2])"),
        (
            pm.with_role(pm.nn.Linear(2, 3, key=KEY), "bias", "buffer"),
            "Linear(weight=f32[3,2], bias=f32[3] (buffer), in_features=2, out_features=3)",
        ),
        (
            pm.with_precision(Holder([affine(), affine()]), "bfloat16"),
            f"Holder(content=[2{TIMES}Affine(weight=bf16[2,3], bias=bf16[2]) in bfloat16])",
        ),
        (
            Holder((affine(), affine(), Affine(1, None))),
            f"Holder(content=(2{TIMES}Affine(weight=f32[2,3], bias=f32[2]),"
            " Affine(weight=1, bias=None)))",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_repr_says_what_is_no_default(tree, text):
    """None and defaults are left out; repetitions are counted; roles and precision are marked."""
    assert repr(tree) == text


class Model(pm.Module):
    embed: pm.nn.Embedding
    blocks: list[pm.nn.MLP]
    head: pm.nn.Linear

    def __init__(self, key):
        self.embed = pm.nn.Embedding(10, 8, key=key)
        self.blocks = [pm.nn.MLP(8, 8, 16, 1, key=key) for _ in range(3)]
        self.head = pm.nn.Linear(8, 10, use_bias=False, key=key)


def test_real_models_and_optimizers_take_thirty_lines():
    """Equal blocks are counted; ties and computed leaves are named."""
    model = pm.tie(Model(KEY), "head.weight", to="embed.weight")
    opt = pm.Optimizer(optax.adamw(1e-3), before=optax.clip_by_global_norm(1.0)).init(model)
    assert len(repr(model).splitlines()) <= 30
    assert "head=Linear(weight=f32[10,8] tied to embed.weight, in_features=8" in repr(model)
    assert len(repr(opt).splitlines()) <= 30
    assert "mu=Model(" in repr(opt)
    low_rank = pm.lora(model, "blocks.**.weight", 2, key=KEY)
    assert "weight=LowRank(base=f32[16,8], a=f32[2,8] (lora), b=f32[16,2] (lora)" in repr(low_rank)


def test_rules_are_printed_without_addresses():
    rules = pm.by({"bias": None, ...: optax.adam(1e-3)})
    for text in (repr(pm.Optimizer(rules).init(affine())), pm.tree_pformat({"rules": rules})):
        assert " at 0x" not in text
        assert "...: GradientTransformationExtraArgs(" in text
    assert repr(pm.by({"a": 1, ...: jnp.ones(2)})) == "by({select.path('a'): 1, ...: f32[2]})"


def test_a_list_in_itself_is_printed():
    for loop in ([affine()], [1]):
        loop.append(loop)
        assert "<recursive>" in repr(Holder(loop))


def test_options():
    """Structs as arrays, nodes cut short; parity has the rest."""
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)

    assert pm.tree_pformat([struct], struct_as_array=True) == "[f32[2]]"
    assert "ShapeDtypeStruct" in pm.tree_pformat([struct])
    cut = pm.tree_pformat([affine(), 1], truncate_leaf=lambda x: isinstance(x, Affine))
    assert cut == "[Affine(...), 1]"

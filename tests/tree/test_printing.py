"""Trees as text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.trees import (
    Affine,
    Defaults,
    Empty,
    Holder,
    KeywordsOnly,
    OwnInit,
    Pair,
    Static,
    affine,
    double,
    every_module,
    ramp,
)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (affine(), "Affine(weight=f32[2,3], bias=f32[2])"),
        (Empty(), "Empty()"),
        (OwnInit(2), "OwnInit(weight=f32[2], bias=f32[2], size=2)"),
        (
            Holder([1, "a", None, Pair(True, 2j)]),
            "Holder(content=[1, 'a', None, Pair(first=True, second=2j)])",
        ),
        (Holder(jnp.asarray(1)), "Holder(content=weak_i32[])"),
        (Holder(np.ones((2, 1))), "Holder(content=f64[2,1](numpy))"),
        (Holder(jnp.ones(2, jnp.bfloat16)), "Holder(content=bf16[2])"),
        (Holder(jax.random.key(0)), "Holder(content=key<fry>[])"),
        (Holder(jnp.ones(1, bool)), "Holder(content=bool[1])"),
        (Holder(Affine), "Holder(content=tests.helpers.trees.Affine)"),
        (Holder(double), "Holder(content=<function double>)"),
        (Holder(max), "Holder(content=<built-in function max>)"),
        (Holder(pm.filter_jit(double)), "Holder(content=<filter_jit of double>)"),
        ({"a": affine(), "b": ()}, "{'a': Affine(weight=f32[2,3], bias=f32[2]), 'b': ()}"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arrays_are_short_and_fields_are_named(tree, text):
    """A Module prints as its class with its fields; arrays as dtype and shape."""
    assert pm.tree_pformat(tree, width=200) == text


def test_fields_with_their_default_are_left_out():
    """Where a field holds its default there is nothing to say."""
    assert pm.tree_pformat(Defaults(ramp(1))) == "Defaults(weight=f32[1])"
    assert pm.tree_pformat(Static(1, 2)) == "Static(weight=1, size=2)"
    assert pm.tree_pformat(Static(1, 2, "eval")) == "Static(weight=1, size=2, mode='eval')"
    assert (
        pm.tree_pformat(KeywordsOnly(weight=1.0, scale=2.0))
        == "KeywordsOnly(scale=2.0, weight=1.0)"
    )


@every_module
def test_repr_is_the_pretty_printed_tree(make):
    """repr(m) == tree_pformat(m), for every class; str is the same."""
    module = make()

    assert repr(module) == pm.tree_pformat(module) == str(module)
    assert type(module).__name__ in repr(module)


def test_long_trees_are_broken_and_indented():
    """What does not fit into the width is broken, one field a line."""
    text = pm.tree_pformat([affine(), affine()], width=30)

    assert text == (
        "[\n"
        "  Affine(\n"
        "    weight=f32[2,3],\n"
        "    bias=f32[2]\n"
        "  ),\n"
        "  Affine(\n"
        "    weight=f32[2,3],\n"
        "    bias=f32[2]\n"
        "  )\n"
        "]"
    )
    assert (
        pm.tree_pformat([affine()], width=30, indent=4).splitlines()[2]
        == "        weight=f32[2,3],"
    )


def test_options():
    """Values instead of shapes; structs as arrays; nodes cut short."""
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)

    assert "[1., 2.]" in pm.tree_pformat(ramp(2), short_arrays=False)
    assert pm.tree_pformat([struct], struct_as_array=True) == "[f32[2]]"
    assert "ShapeDtypeStruct" in pm.tree_pformat([struct])
    cut = pm.tree_pformat([affine(), 1], truncate_leaf=lambda x: isinstance(x, Affine))
    assert cut == "[Affine(...), 1]"


def test_pprint_prints(capsys):
    """tree_pprint prints what tree_pformat gives."""
    pm.tree_pprint(affine(), width=20)

    assert capsys.readouterr().out == pm.tree_pformat(affine(), width=20) + "\n"


def test_printing_under_a_trace():
    """Traced arrays print as arrays do."""
    seen = []
    jax.make_jaxpr(lambda m: seen.append(repr(m)))(affine())

    assert seen == ["Affine(weight=f32[2,3], bias=f32[2])"]


# It looks at all that NumPy has, and NumPy says of some of it that it will go.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_treescope_shows_modules():
    """The rich display of notebooks needs nothing of ours: fields by name, text or HTML."""
    treescope = pytest.importorskip("treescope", reason="an optional display, which Flax installs")
    text = treescope.render_to_text(OwnInit(2))

    assert text.startswith("OwnInit(\n")
    assert [line.split("=")[0].strip() for line in text.splitlines()[1:-1]] == [
        "weight",
        "bias",
        "size",
    ]
    assert "OwnInit" in treescope.render_to_html(OwnInit(2), compressed=False)

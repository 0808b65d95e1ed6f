"""The hooks of the site: drawings, formulas, the sections of docstrings."""

import importlib
import json
import re
import sys
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.docs.pages import ROOT
from tests.nn.test_explicit_meshes import WAYS
from tests.nn.test_explicit_meshes import table as laid_out_by_tests

HOOKS = ROOT / "docs" / "hooks"


@pytest.fixture
def hook(monkeypatch):
    """Import a hook as MkDocs does, with its folder on the path; its names are gone afterwards."""
    monkeypatch.syspath_prepend(HOOKS)
    for file in HOOKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)

    def imported(name, *needs):
        for package in needs:
            pytest.importorskip(package, reason="the extra `docs` is not installed")
        return importlib.import_module(name)

    yield imported
    for file in HOOKS.glob("*.py"):
        sys.modules.pop(file.stem, None)


def texts(drawing):
    """The texts of a drawing; it is well-formed, or this fails."""
    return [text.text for text in ET.fromstring(drawing).iter("text")]


def test_the_plot_shows_what_was_measured(hook):
    """Each row has the median of each library, as the benchmarks printed it."""
    plot = hook("ratio_plot")
    results = json.loads(plot.RESULTS.read_text(encoding="utf-8"))
    written = texts(plot.draw_ratios())

    for name, label, title in plot.ROWS:
        row = next(row for row in results[name]["rows"] if row["label"] == label)
        start = written.index(title)
        shown = [float(text) for text in written[start + 2 : start + 5]]
        measured = [row[library]["ratio"]["median"] for library in plot.LIBRARIES]
        assert shown == pytest.approx(measured, rel=0.03)
        assert max(measured) <= plot.LAST


def test_the_plot_says_where_it_was_measured(hook):
    """Versions are those of the file."""
    plot = hook("ratio_plot")
    around = json.loads(plot.RESULTS.read_text(encoding="utf-8"))["dispatch"]["surroundings"]
    drawing = plot.draw_ratios()

    assert f"Python {around['python']}, JAX {around['jax']}" in drawing
    assert all(f"{name} {number}" in drawing for name, number in around["versions"].items())


def test_the_drawing_of_a_model_tells_its_parts(hook):
    """Leaves with their shapes, configuration, and what a transform does with both."""
    written = texts(hook("model_drawing").draw_model())

    assert {"MLP", "relu", "f32[8,3]", "arrays", "configuration", "new model"} <= set(written)


def filled(drawing):
    """How many cells are filled in each picture of a drawing."""
    return [
        sum("pm-filled" in cell.get("class", "") for cell in picture.iter("rect"))
        for picture in ET.fromstring(drawing).iter("svg")
    ]


def test_the_drawing_of_norms_is_what_they_do(hook):
    """A number that is changed changes just the filled cells with it, and no other ones."""
    drawings = hook("layer_drawings")
    shape = drawings.EXAMPLES, drawings.CHANNELS, drawings.PLACES
    x = jax.random.normal(jax.random.key(0), shape)
    assert filled(drawings.draw_norms()) == [9, 3, 6, 12]

    for name, (_, is_one) in drawings.NORMS.items():
        layer = eval(name, vars(nn))
        is_whole = isinstance(layer, nn.BatchNorm)

        def run(x, layer=layer, is_whole=is_whole):
            return layer(x, pm.State(layer))[0] if is_whole else jax.vmap(layer)(x)

        # A change of one number moves the mean of all numbers that are normalized with it.
        changed = np.asarray(run(x) != run(x.at[0, 0, 0].add(1.0)))
        assert changed.tolist() == np.vectorize(is_one)(*np.indices(shape)).tolist()


def test_the_drawing_of_convolutions_is_what_they_do(hook):
    """An output depends on the inputs that are filled, and there are as many outputs as cells."""
    drawings = hook("layer_drawings")
    assert filled(drawings.draw_convolutions()) == [4, 4, 4, 4, 4]

    for stride, dilation, padding in drawings.CONVOLUTIONS.values():
        options = {"stride": stride, "dilation": dilation, "padding": padding}
        layer = nn.Conv1d(1, 1, 3, **options, key=jax.random.key(0))
        used = jax.jacobian(layer)(jnp.ones((1, drawings.INPUTS)))[0, :, 0] != 0
        assert len(used) == drawings.outputs_of(stride, dilation, padding)
        seen = [i for i in drawings.seen(1, stride, dilation, padding) if i >= 0]
        assert np.flatnonzero(used[1]).tolist() == seen
    back = nn.ConvTranspose1d(1, 1, 3, stride=2, key=jax.random.key(0))
    made = jax.jacobian(back)(jnp.ones((1, 4)))[0, :, 0, 1]
    assert (len(made), np.flatnonzero(made).tolist()) == (9, [2, 3, 4])


def test_the_drawing_of_masks_is_what_they_are(hook):
    """Cell by cell."""
    drawings = hook("layer_drawings")
    places = jnp.arange(drawings.LENGTH)
    for name, sees in drawings.MASKS.items():
        mask = nn.functional.attention_mask(places, places, **eval(f"dict({name})"))
        assert mask.tolist() == [[sees(q, k) for k in range(6)] for q in range(6)]
    assert filled(drawings.draw_masks()) == [36, 21, 15, 16]


def test_the_drawing_of_pools_is_what_they_do(hook):
    """A result depends on the filled entries; entries filled beside them are padding."""
    drawings = hook("layer_drawings")
    assert filled(drawings.draw_pools()) == [3, 3, 3, 4, 4]

    for name, (results, result, used, padded) in drawings.POOLS.items():
        layer = eval(name, vars(nn))

        def entries_of(i, layer=layer):
            # Falling numbers, then rising ones: each entry of a window is its maximum once.
            x = jnp.arange(float(drawings.ENTRIES))[None]
            return sum(jnp.abs(jax.jacobian(layer)(x * sign)[0, i, 0]) for sign in (1, -1))

        assert layer(jnp.ones((1, drawings.ENTRIES))).shape == (1, results)
        inside = [i for i in used if 0 <= i < drawings.ENTRIES]
        assert np.flatnonzero(entries_of(result)).tolist() == inside
        assert {*used} - {*inside} <= {*padded}


def test_the_drawing_of_recurrent_networks_is_what_they_do(hook):
    """A result depends on the filled inputs, whatever its position in time."""
    drawings = hook("network_drawings")
    cells = [nn.GRUCell(1, 1, key=key) for key in jax.random.split(jax.random.key(0))]
    networks = [
        nn.RNN(cells[0]),
        nn.RNN(cells[0], reverse=True, keep_order=True),
        nn.Bidirectional(*map(nn.RNN, cells)),
    ]
    for network, ways in zip(networks, drawings.DIRECTIONS.values(), strict=True):
        uses = jax.jacobian(network)(jnp.ones((drawings.STEPS, 1)))[..., 0] != 0
        for step, use in enumerate(uses.any(axis=1)):
            assert np.flatnonzero(use).tolist() == drawings.known(step, ways)
    assert filled(drawings.draw_recurrent()) == [3, 4, 5]


def test_the_drawing_of_containers_has_their_layers(hook):
    """The layers of a chain in their order, and the shapes of all weights."""
    drawings = hook("network_drawings")
    key = jax.random.key(0)
    mlp = nn.MLP(3, 2, 8, depth=2, key=key)
    sequential = nn.Sequential(
        [nn.Linear(3, 4, key=key), nn.Lambda(jax.nn.relu), nn.Linear(4, 2, key=key)]
    )
    shapes = {
        name: [shape.removeprefix("f32") for _, shape in layers if shape]
        for name, layers in drawings.CHAINS.items()
    }
    written = {
        "Sequential": [sequential[0].weight, sequential[2].weight],
        "MLP(3, 2, 8, depth=2)": [layer.weight for layer in mlp.layers],
    }
    assert shapes == {
        name: [str(list(weight.shape)).replace(" ", "") for weight in weights]
        for name, weights in written.items()
    }
    several = (
        nn.Stack(lambda key: nn.Linear(3, 3, key=key), 6, key=key),
        nn.Ensemble(lambda key: nn.Linear(3, 2, key=key), 6, key=key),
    )
    for layer, shape in zip(several, (drawings.STACKED, drawings.MEMBERS), strict=True):
        leaves = {str(list(leaf.shape)).replace(" ", "") for leaf in jax.tree.leaves(layer)}
        assert shape.removeprefix("f32") in leaves
    assert texts(drawings.draw_containers()).count("relu") == 2


def test_a_drawing_that_is_not_there_stops_the_build(hook):
    """A misspelled mark does not leave a gap in a page."""
    drawings = hook("drawings", "mkdocs")

    assert "<svg" in drawings.on_page_content("<!-- drawing: model -->")
    with pytest.raises(
        Exception, match=r"no drawing 'modle'; there are .*masks, model, norms, pools"
    ):
        drawings.on_page_content("<!-- drawing: modle -->")


def words(markup):
    """MathML without its tags."""
    return re.sub(r"<[^>]*>", "", markup)


def test_formulas_become_mathml(hook):
    """Indices, exponents, fractions, roots, names and equations below each other."""
    mathml = hook("formulas", "mkdocs").mathml

    assert (
        words(mathml(r"\frac{1}{k} \sum_{j=0}^{k-1} x_{s i + j}")) == "1k∑j=0k\N{MINUS SIGN}1xsi+j"
    )
    assert "<msubsup><mo>∑</mo>" in mathml(r"\sum_{j=0}^{k}")
    assert mathml("x^2") == "<mrow><msup><mi>x</mi><mn>2</mn></msup></mrow>"
    assert "<msqrt><mrow><mi>d</mi></mrow></msqrt>" in mathml(r"\sqrt{d}")
    # Two letters are a product, three are a name.
    assert mathml("Wx + eps") == ("<mrow><mi>W</mi><mi>x</mi><mo>+</mo><mi>eps</mi></mrow>")
    equations = mathml("\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}")
    assert equations.count("<mtr>") == 2
    assert equations.count("<mtd>") == 4


def test_unknown_tex_stops_the_build(hook):
    """No page shows backslashes."""
    with pytest.raises(Exception, match=r"does not know \\oint"):
        hook("formulas", "mkdocs").mathml(r"\oint f")


DOCSTRING = """A layer.

Shapes:
    x: (..., in); (...) if `in` is "scalar"
    return: the axes of x, and
        then (*out)

State and randomness: none. A State
    is handed back.

Source:
    A paper.

Args:
    size: as it is (or not).
"""


def test_own_sections_of_docstrings_become_tables_and_paragraphs(hook):
    """A row for each entry, shapes as code; other text is unchanged."""
    rewritten = hook("reference_sections", "griffe").rewritten(DOCSTRING)

    assert "| Shapes | |\n|---|---|\n" in rewritten
    assert '| `x` | `(..., in)`; `(...)` if `in` is "scalar" |\n' in rewritten
    assert "| `return` | the axes of x, and then `(*out)` |\n" in rewritten
    assert "State and randomness:</span> none. A State\nis handed back." in rewritten
    assert "Source:</span>\nA paper." in rewritten
    assert rewritten.endswith("Args:\n    size: as it is (or not).")


def test_the_settings_of_the_site_are_said_once():
    """Of two lists of hooks the second one alone was read, and the first was lost unseen."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    keys = re.findall(r"^(\w+):", text, re.M)
    assert sorted(keys) == sorted({*keys})


def test_the_table_of_meshes_has_what_the_tests_have_found(hook):
    """Each way of the tests is a column, and each layer is named once."""
    made = hook("mesh_table")
    page = ROOT / "docs" / "reference" / "layers-on-meshes.md"
    shown = made.on_page_markdown(page.read_text(encoding="utf-8"))
    rows = [row.strip("| ").split(" | ") for row in re.findall(r"^\|.*\|$", shown, re.M)]

    assert list(made.WAYS) == list(WAYS)
    assert made.MARK not in shown
    found = {name: cells for name, *cells in rows[2:]}
    for name, cells in laid_out_by_tests().items():
        if len(cells) == 1:
            assert f"`{name}`" in shown
            continue
        assert [re.sub(r"`|\[|\]\(.*", "", cell) for cell in found.pop(name)] == cells
    assert not found

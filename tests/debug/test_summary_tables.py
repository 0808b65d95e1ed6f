"""The forms of a summary: text, Markdown, a diagram, boxes in a notebook."""

import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.debug.summary_tables import Summary, SummaryRow

KEY = jax.random.key(0)
LAYER = nn.Linear(2, 2, key=KEY)
MODEL = {"layers": [LAYER, LAYER, nn.MLP(2, 2, 4, 1, key=KEY)], "out": LAYER}
SUMMARY = pm.summary(MODEL)
LINES = str(SUMMARY).split("\n")
# Characters with a meaning in each format.
ODD = """<script>alert('x')</script>|`"#&"""


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
    summary = pm.summary([MODEL], depth=0)
    assert {row.depth for row in summary.rows} == {0}
    assert summary.params == SUMMARY.params


def test_columns_are_there_where_a_row_says_something():
    row = SummaryRow("a", "A", params=1000, bytes=4000, dtype="f32")
    assert str(Summary((row,), 1000, 4000)).split("\n")[0] == "path  class  params  bytes  dtype"
    ties = Summary((row._replace(ties=("w = b.w",)), row), 1000, 4000)
    assert str(ties).split("\n")[0].endswith("dtype  notes")
    assert str(ties).split("\n")[1].endswith("f32    tied: w = b.w")
    split = Summary((row._replace(sharding="P('x',)", device_bytes=500),), 1000, 4000)
    assert "sharding  bytes/device" in str(split)


def test_markdown_has_the_rows_of_the_text():
    lines = SUMMARY.to_markdown().split("\n")
    assert len(lines) == len(LINES) + 2
    assert {line.replace("\\|", "").count("|") for line in lines[:-2]} == {6}
    assert lines[-1] == LINES[-1]
    odd = pm.summary({ODD: LAYER}).to_markdown().split("\n")[2]
    assert odd.startswith("| ``['<script>")
    assert odd.replace("\\|", "").count("|") == 6


def test_a_diagram_is_a_tree_of_the_rows():
    text = pm.summary([MODEL["layers"][2]]).mermaid()
    assert text.startswith("flowchart TD\n")
    nodes = re.findall(r"^  (m\d+)\[", text, re.M)
    assert re.findall(r"(m\d+) --> (m\d+)", text) == [("m0", "m1"), ("m0", "m2")]
    assert nodes == ["m0", "m1", "m2"]


def test_a_label_of_a_diagram_has_no_html_but_breaks():
    """Mermaid would take `<root>` for an element, and show nothing."""
    text = pm.summary(nn.Sequential([LAYER])).mermaid()
    assert 'm0["#lt;root#gt;: Sequential<br>6 parameters"]' in text
    (label,) = re.findall(r'm0\["([^"]*)"\]', pm.summary({ODD: LAYER}).mermaid())
    assert not re.search(r"[<>&]", label.replace("<br>", ""))


class _Page(HTMLParser):
    """The content of a page, and whether each element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append("/".join(self.open))
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def test_boxes_are_well_formed_and_load_nothing():
    page = _Page(SUMMARY._repr_html_())
    rows = [tag for tag in page.tags if tag.endswith("/summary")]
    assert len(rows) == len(LINES) - 2
    assert {*page.attributes} == {("class", "pm-summary"), ("open", None)}
    depths = [tag.count("details") for tag in rows]
    assert depths == [1, 1, 2, 2, 1]
    # As text, not as elements.
    odd = _Page(pm.summary({ODD: LAYER})._repr_html_())
    assert "script" not in odd.tags
    assert any(ODD.split("|")[1] in text for tag, text in odd.texts if tag == "b")


def test_boxes_read_in_light_and_in_dark_on_wide_and_on_narrow_screens():
    """By their rules: none sets a color or a fixed width, or affects the page around."""
    (css,) = [text for tag, text in _Page(SUMMARY._repr_html_()).texts if tag == "style"]
    assert css.count("{") == css.count("}")
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"@media[^{]*\{", "", css))
    assert len(rules) >= 5
    found = []
    for selector, body in rules:
        assert selector.strip(" }\n").startswith(".pm-summary")
        declarations = [part for part in body.split(";") if part.strip()]
        found += [tuple(map(str.strip, part.split(":"))) for part in declarations]
    assert {len(pair) for pair in found} == {2}
    names = {name for name, _ in found}
    assert not names & {"color", "background", "background-color", "width", "min-width"}
    # The only color is a translucent gray.
    assert re.findall(r"#[0-9a-f]+", css) == ["#8886"]
    assert {("max-width", "100%"), ("overflow-x", "auto"), ("overflow-wrap", "anywhere")} <= {
        *found
    }
    assert "@media (max-width: 480px)" in css


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (None, "None"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "f32[2]"),
        ({"a": (1, [])}, "dict(a=(1, []))"),
    ],
)
def test_any_output_has_a_text(shape, text):
    row = SummaryRow("a", "A", shape=shape, calls=1)
    assert text in str(Summary((row,), 0, 0))

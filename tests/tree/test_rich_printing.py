"""How treescope shows Modules and States."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn

treescope = pytest.importorskip("treescope", reason="an optional display, which Flax installs")
# treescope reads every attribute of NumPy, and NumPy deprecates some of them.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KEY = jax.random.key(0)


class Net(pm.Module):
    first: nn.Linear
    second: nn.Linear
    norm: nn.BatchNorm
    drop: nn.Dropout
    rest: list[jax.Array]

    def __init__(self, key):
        self.first = nn.Linear(2, 2, key=key)
        self.second = nn.Linear(2, 2, key=key)
        self.norm = nn.BatchNorm(2)
        self.drop = nn.Dropout(stream=pm.RngStream())
        self.rest = [jnp.ones(1), jnp.ones(1)]


def lines_of(tree):
    """The text, of which arrays are left out, line by line."""
    with treescope.active_autovisualizer.set_scoped(None):
        return treescope.render_to_text(tree).splitlines()


def line_of(tree, start):
    (line,) = {line.strip() for line in lines_of(tree) if line.strip().startswith(start)}
    return line


def test_fields_roles_ties_and_computed_leaves():
    """Each is told beside its field, in text and in HTML."""
    model, _ = nn.make_with_state(Net)(KEY)
    model = pm.tie(model, "second.weight", to="first.weight")
    model = pm.with_role(pm.with_role(model, "first.bias", "buffer"), "rest.0", "buffer")
    model = pm.lora(model, "first.weight", 1, key=KEY)
    assert "weight=f32[2,2] tied to first.weight," in [line.strip() for line in lines_of(model)]
    assert line_of(model.first, "bias=").endswith(",  # buffer")
    assert line_of(model, "rest=").endswith(",  # 0: buffer")
    # Its fields, and not the computed sum.
    assert line_of(model.first, "weight=").startswith("weight=LowRank(")
    low_rank = pm.lora({"w": jnp.ones((1, 2))}, "w", 1, key=KEY)["w"]
    assert line_of(low_rank, "a=").endswith(",  # lora")
    html = treescope.render_to_html(model, compressed=False)
    assert all(text in html for text in ("tied to first.weight", "# buffer", "LowRank"))
    mixed = pm.with_precision(nn.Linear(2, 2, key=KEY), "bfloat16")
    assert lines_of(mixed)[-1] == ")  # in bfloat16"


def test_tokens_and_their_state():
    """Tokens by their markers, a State by its tokens; a used-up one says by what."""
    model, state = nn.make_with_state(Net)(KEY)
    assert "state_index=StateIndex(marker='norm.state_index'" in line_of(model, "norm=")
    assert "stream=RngStream(marker='drop.stream'" in line_of(model, "drop=")
    shown = lines_of(state)
    assert shown[0] == "State("
    assert any(line.startswith("  norm.state_index=") for line in shown)
    assert any(line.startswith("  drop.stream=Stream(") for line in shown)
    state.set(model.norm.state_index, state.get(model.norm.state_index))
    assert lines_of(state) == ["State(<used up by set(norm.state_index)>)"]

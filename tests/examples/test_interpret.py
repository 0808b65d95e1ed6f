"""Each head and each layer of a tiny language model: the tables are those of surgery."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm

SIZE, DEPTH, HEADS = 8, 2, 2

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(program):
    """An untrained one."""
    make = pm.make_with_state(program.gpt.make_gpt)
    model, _ = make(SIZE, DEPTH, HEADS, 8, key=jax.random.key(0))
    # Scores that are different enough to compare.
    return pm.tree_at(lambda m: m.embed.weight, model, replace_fn=lambda w: 20 * w)


def test_heads_are_cut_as_by_surgery(program, model):
    """Each number is that of a model in which the columns of the head are zero."""
    text = jnp.arange(18).reshape(2, 9) % 7
    found = program.head_effects(model, text)

    whole = program.gpt.measure(model, text)
    for layer, head in np.ndindex(DEPTH, HEADS):

        def cut(weight, layer=layer, head=head):
            return weight.at[layer, :, head * 4 : (head + 1) * 4].set(0)

        without = pm.tree_at(
            lambda m: m.blocks.layer.attention.output_proj.weight, model, replace_fn=cut
        )
        expected = program.gpt.measure(without, text) - whole
        np.testing.assert_allclose(found[layer, head], expected, atol=1e-5)
    assert np.ptp(found) > 1e-4


def test_places_are_patched_as_by_hand(program, model):
    """Each number equals that of the layers in turn, with values of the other prompt."""
    prompt, other = program.as_bytes("abcd"), program.as_bytes("axcd")
    found = program.patch_effects(model, prompt, other)

    @pm.filter_jit
    def scores(tokens, given, layer, place):
        x, seen = model.embed(tokens), []
        for i, block in enumerate(model.blocks):
            x = block(x)
            x = jnp.where((i == layer) & (jnp.arange(4) == place)[:, None], given[i], x)
            seen.append(x)
        return model.head(model.norm(x))[-1], jnp.stack(seen)

    nothing = jnp.zeros((DEPTH, 4, SIZE))
    theirs, seen = scores(other, nothing, -1, -1)
    ours, _ = scores(prompt, nothing, -1, -1)
    for layer, place in np.ndindex(DEPTH, 4):
        way = theirs - ours
        expected = (scores(prompt, seen, layer, place)[0] - ours) @ way / (way @ way)
        np.testing.assert_allclose(found[layer, place], expected, atol=1e-4)
    # From the last layer at the last position comes the full effect; from positions before the
    # difference, none.
    np.testing.assert_allclose(found[-1, -1], 1, atol=1e-5)
    np.testing.assert_allclose(found[:, 0], 0, atol=1e-5)


def test_the_command_prints_pictures(program, model, capsys, monkeypatch, tmp_path):
    """The last layer on top, the prompt below."""
    monkeypatch.setattr(program, "load", lambda options: model)
    monkeypatch.setattr(program, "head_effects", lambda *args: jnp.array([[0.0, 0.1], [0.2, 0.05]]))
    monkeypatch.setattr(program, "patch_effects", lambda *args: jnp.array([[0.0, 1.0], [1.0, 0.5]]))
    words = ["runs", "--prompt", "ab", "--other", "cd"]
    if "matplotlib" in sys.modules:
        words += ["--plot", str(tmp_path / "both.png")]
    program.main(words)
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "bits per byte more without a head, at most 0.200"
    assert lines[1:4] == ["  layer 1 |@:|", "  layer 0 | =|", " " * 11]
    assert lines[5:8] == ["  layer 1 |@=|", "  layer 0 | @|", f"{' ' * 11}ab"]
    with pytest.raises(SystemExit, match="2"):
        program.main(["runs", "--prompt", "a", "--other", "bc"])
    assert "the same number of bytes" in capsys.readouterr().err

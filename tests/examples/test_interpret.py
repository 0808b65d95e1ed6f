"""Each head and each layer of a tiny language model: the tables are those of surgery."""

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


def test_heads_are_cut_as_by_surgery(program, model, monkeypatch):
    """Each number is that of a model in which the columns of the head are zero; in one program."""
    traces, bits = [], program.gpt.bits
    monkeypatch.setattr(program.gpt, "bits", lambda *args: (traces.append(1), bits(*args))[1])
    text = jnp.arange(18).reshape(2, 9) % 7
    found = program.head_effects(model, text)
    # One with all interventions, and one without.
    assert len(traces) == 2

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


def test_patches_are_those_of_a_loop(program, model):
    """Each number is that of layers called one after the other, with one row replaced."""
    prompt, other = jnp.arange(5) % 3, (jnp.arange(5) + 4) % 7
    found = program.patch_effects(model, prompt, other)

    def scores(tokens, replace):
        x, rows = model.embed(tokens), []
        for layer in range(DEPTH):
            x = replace(layer, model.blocks[layer](x))
            rows.append(x)
        return model.head(model.norm(x))[-1], rows

    ours, _ = scores(prompt, lambda layer, x: x)
    theirs, rows = scores(other, lambda layer, x: x)
    for at, place in np.ndindex(DEPTH, len(prompt)):

        def replace(layer, x, at=at, place=place):
            return x.at[place].set(rows[at][place]) if layer == at else x

        way = theirs - ours
        expected = (scores(prompt, replace)[0] - ours) @ way / (way @ way)
        np.testing.assert_allclose(found[at, place], expected, atol=1e-4)
    np.testing.assert_allclose(found[DEPTH - 1, -1], 1, atol=1e-4)

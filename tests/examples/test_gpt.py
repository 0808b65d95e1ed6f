"""The language model learns, goes on from its checkpoint, and writes in one trace."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm


@pytest.mark.slow
def test_it_learns_and_goes_on(program, tmp_path, capsys, monkeypatch):
    """The command, on a short text, and again; in half precision, too."""
    monkeypatch.setattr(program, "topics", {"one": "to be or not to be, " * 40})
    small = ["--size", "8", "--depth", "1", "--heads", "2", "--length", "16", "--write", "4"]
    steps = iter([0, 0, 0, 0, 0, 60, 60, 0, 60])
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: next(steps)))
    # Another test covers writing, which is a separate program.
    monkeypatch.setattr(program, "write", lambda model, state, *rest: (np.zeros((1, 4)), state))
    program.main([str(tmp_path), *small, "--minutes", "1", "--every", "2", "--bfloat16"])
    printed = capsys.readouterr().out
    found = program.main([str(tmp_path), *small, "--minutes", "0"])

    assert "step 4, 0 s: " in printed
    assert "goes on from step 4" in capsys.readouterr().out
    assert found < 8.1


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def test_each_optimizer_takes_a_step(program, name):
    """Muon has the matrices of the blocks, layer by layer; Adam has the others."""
    model, _ = pm.make_with_state(program.make_gpt)(8, 2, 2, 8, key=jax.random.key(0))
    opt = program.make_optimizer(name, model)
    made = program.step(model, opt, jnp.zeros((1, 5), int), jnp.float32)

    assert [opt.labels.count(rule) for rule in (0, 1)] == ([13, 0] if name == "adamw" else [7, 6])
    assert jnp.isfinite(made[2])
    assert jax.tree.structure(made[1]) == jax.tree.structure(opt)


@pytest.mark.slow
def test_what_it_writes_is_the_likeliest_by_the_whole(program):
    """With the caches, in one trace, as by reading everything again for each byte."""
    make = pm.make_with_state(program.make_gpt)
    model, state = make(16, 2, 2, 8, key=jax.random.key(0))
    assert "head.weight" not in pm.named_leaves(model)
    prompt = jnp.asarray([[3, 1, 4], [1, 5, 9]])
    # So cold that nothing is left to chance.
    write = pm.debug.assert_max_traces(program.write, max_traces=1)
    written, state = write(model, state, prompt, 4, 1e-6, jax.random.key(1))
    whole = jnp.concatenate([prompt, written], axis=1)
    scores = pm.filter_jit(lambda model, whole: model(whole))(model, whole)

    np.testing.assert_array_equal(written, scores[:, 2:-1].argmax(-1))

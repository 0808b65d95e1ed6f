"""The ensemble example runs, learns, and trains the same networks in both ways."""

import jax
import numpy as np
import pytest

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/ensemble.py reads scikit-learn's digits")


def test_at_once_and_in_turn_give_the_same_networks(program, monkeypatch):
    """Both learn, classify the test images alike, and have used their streams equally."""
    trained = {}
    ways = {name: getattr(program, name) for name in ("train_together", "train_in_turn")}

    def recorded(name):
        def record(keys, plan):
            trained[name] = ways[name](keys, plan)
            return trained[name]

        return record

    for name in ways:
        monkeypatch.setattr(program, name, recorded(name))
    accuracy = program.main(["--members", "2", "--epochs", "5"])
    images = program.load_data(seed=0)[1].images
    predict = pm.filter_jit(pm.filter_vmap(program.predict, in_axes=(0, None)))
    together, in_turn = (each.nets for each in trained.values())

    assert min(*accuracy.of_each, accuracy.of_vote) >= 0.9
    assert jax.tree.structure(together) == jax.tree.structure(in_turn)
    reads = [np.asarray(predict(nets, images)) for nets in (together, in_turn)]
    assert np.abs(reads[0] - reads[1]).mean() < 1e-4
    for nets in (together, in_turn):
        counts = [a for a in jax.tree.leaves(nets.state) if a.dtype == np.uint32]
        assert [count.tolist() for count in counts] == [[5 * 44, 5 * 44]] * 2

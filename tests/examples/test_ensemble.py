"""The ensemble example runs, learns, and trains the same networks in both ways."""

import contextlib
import io

import jax
import numpy as np
import pytest

import pytreemod as pm

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/ensemble.py reads scikit-learn's digits")


@pytest.fixture(scope="module")
def short_run(program):
    """One run of the command: its output, its result, and its networks."""
    trained = {}

    def recorded(name):
        train = getattr(program, name)

        def record(keys, plan):
            trained[name] = train(keys, plan)
            return trained[name]

        return record

    with pytest.MonkeyPatch.context() as patch:
        for name in ("train_together", "train_in_turn"):
            patch.setattr(program, name, recorded(name))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            accuracy = program.main(["--members", "2", "--epochs", "5"])
    return printed.getvalue(), accuracy, trained["train_together"], trained["train_in_turn"]


def test_short_run_learns(short_run):
    """Five epochs reach 90 % on the test set, for each and for the vote."""
    printed, accuracy, *_ = short_run

    assert f"test accuracy of their vote {accuracy.of_vote:.2%}\n" in printed
    assert accuracy.of_each.shape == (2,)
    assert min(*accuracy.of_each, accuracy.of_vote) >= 0.9


def test_the_times_are_printed(short_run):
    """Of both ways, with compiling apart; and their ratio."""
    printed, _, together, in_turn = short_run

    for how, trained in [("at once", together), ("in turn", in_turn)]:
        times = f"in {trained.seconds:.2f} s, after {trained.compiling:.2f} s of compiling"
        assert f"2 networks trained {how} {times}\n" in printed
    ratio = in_turn.seconds / together.seconds
    assert f"at once is {ratio:.1f} times as fast; with compiling, " in printed


def test_at_once_and_in_turn_give_the_same_networks(program, short_run):
    """They classify the test images alike, and have used their streams equally."""
    _, _, together, in_turn = short_run
    data = program.load_data(seed=0)[1]

    def reads(nets):
        predict = pm.filter_jit(pm.filter_vmap(program.predict, in_axes=(0, None)))
        return np.asarray(predict(nets, data.images))

    together, in_turn = together.nets, in_turn.nets
    assert jax.tree.structure(together) == jax.tree.structure(in_turn)
    assert np.abs(reads(together) - reads(in_turn)).mean() < 1e-4
    for nets in (together, in_turn):
        counts = [a for a in jax.tree.leaves(nets.state) if a.dtype == np.uint32]
        assert [count.tolist() for count in counts] == [[5 * 44, 5 * 44]] * 2


def test_networks_differ(program, short_run):
    """They have learned different functions from the same images."""
    reads = [
        np.asarray(program.predict(net, program.load_data(seed=0)[1].images))
        for net in pm.unstack(short_run[2].nets)
    ]

    assert np.abs(reads[0] - reads[1]).mean() > 1e-3


def test_the_vote_is_of_all(program, monkeypatch):
    """Two unsure networks with one opinion are outvoted by a sure one, and not the other way."""
    opinions = np.zeros((3, 2, 10), np.float32)
    opinions[:2, :, 4], opinions[:2, :, 7] = 0.6, 0.4
    opinions[2, 0, 7], opinions[2, 1, 4] = 1.0, 1.0
    monkeypatch.setattr(program, "predict", lambda net, images: net)

    accuracy = program.test(opinions, program.Split(np.zeros((2, 64)), np.array([7, 4])))

    assert accuracy.of_each.tolist() == [0.5, 0.5, 1.0]
    assert accuracy.of_vote == 1.0


def test_accuracies_are_a_picture(program, tmp_path):
    """`--plot` saves a PNG, on a machine without a display too."""
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    path = tmp_path / "accuracies.png"

    program.plot_accuracies(program.Accuracy(np.array([0.9, 0.95]), 0.97), path)

    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_training_sees_the_same_batches(program):
    """The order depends on the seed alone; an epoch has every image once."""
    data = program.Split(np.arange(12), np.arange(12))
    plan = program.Plan(data, epochs=2, batch_size=4, seed=0)

    first, again, other = (
        np.stack([batch.labels for batch in plan._replace(seed=seed).batches()])
        for seed in (0, 0, 1)
    )

    assert first.tolist() == again.tolist() != other.tolist()
    for epoch in (first[:3], first[3:]):
        assert sorted(epoch.ravel()) == list(range(12))
    assert first[:3].tolist() != first[3:].tolist()

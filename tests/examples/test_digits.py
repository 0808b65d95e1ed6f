"""The digits example runs, learns and repeats itself."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn

pytest.importorskip("sklearn", reason="examples/digits.py reads scikit-learn's digits")
pytest.importorskip("tqdm", reason="examples/digits.py shows tqdm's progress bar")


def test_short_run_learns(program, capsys):
    """Four epochs reach 90 % on the test set, and print a line each."""
    accuracy = program.main(["--epochs", "4"])

    printed = capsys.readouterr().out
    line = r"^epoch +(\d+)   train loss \d\.\d{4}   train accuracy +\d+\.\d\d%$"
    epochs = re.findall(line, printed, re.M)
    assert epochs == ["1", "2", "3", "4"]
    assert f"test accuracy {accuracy:.2%}\n" in printed
    assert accuracy >= 0.9


def test_confusion_matrix_is_a_picture(program, tmp_path):
    """`--plot` saves a PNG, on a machine without a display too."""
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    path = tmp_path / "confusion.png"

    program.plot_confusion(np.array([0, 1, 2, 2]), np.array([0, 1, 2, 1]), path)

    assert path.read_bytes().startswith(b"\x89PNG")


def make_scaled_step(program, optimizer):
    """The example's step, with a factor on the loss; a step that is not finite is skipped."""

    @pm.filter_jit
    def step(model, state, opt_state, scale, images, labels, key):
        def loss_fn(model, state):
            loss, (state, _) = program.loss_fn(model, state, images, labels, key)
            return scale.scale(loss), state

        value_and_grad = pm.filter_value_and_grad(loss_fn, has_aux=True)
        (_, new_state), grads = value_and_grad(model, state)
        grads = scale.unscale(grads)
        finite = pm.all_finite(grads)
        updates, new_opt_state = optimizer.update(
            grads, opt_state, pm.filter(model, pm.is_inexact_array)
        )
        new = pm.apply_updates(model, updates), new_state, new_opt_state
        old = model, state, opt_state
        return *pm.select_tree(finite, new, old), scale.adjust(finite), finite

    return step


def accuracy_with(program, precision, scale, epochs=4):
    """The share of right answers on the test set, and how many steps were skipped."""
    data, test = program.load_data(seed=0)
    model_key, key = jax.random.split(jax.random.key(0))
    rng = np.random.default_rng(0)
    model, state = nn.make_with_state(program.DigitReader)(key=model_key)
    model = pm.with_precision(model, precision)
    optimizer = program.make_optimizer(epochs * (len(data.labels) // 64))
    opt_state = optimizer.init(pm.filter(model, pm.is_inexact_array))
    step = make_scaled_step(program, optimizer)
    skipped = 0
    for _ in range(epochs):
        for images, labels in data.batches(64, rng):
            key, step_key = jax.random.split(key)
            model, state, opt_state, scale, finite = step(
                model, state, opt_state, scale, images, labels, step_key
            )
            skipped += not finite
    predictions = program.predict(nn.inference_mode(model), state, jnp.asarray(test.images))
    return float(np.mean(np.asarray(predictions) == test.labels)), skipped


@pytest.mark.slow
def test_half_precision_is_as_accurate(program):
    """Within 1 %: bfloat16 without, and float16 with a factor that finds its size by skipping."""
    one = pm.LossScale(1.0, period=None)
    exact, _ = accuracy_with(program, None, one)
    bfloat, none_skipped = accuracy_with(program, "params=f32,compute=bf16,output=f32", one)
    scale = pm.LossScale(2.0**24, period=20)
    half, skipped = accuracy_with(program, "params=f32,compute=f16,output=f32", scale)

    assert exact >= 0.95
    assert abs(bfloat - exact) <= 0.01
    assert abs(half - exact) <= 0.01
    assert none_skipped == 0 < skipped


@pytest.mark.slow
def test_same_seed_gives_the_same_numbers(program, capsys):
    """Two runs from one seed print the same and end with the same model, to the last bit."""
    data = program.Split(*(part[:48] for part in program.load_data(seed=0)[0]))

    def numbers():
        trained = program.train(data, epochs=2, batch_size=16, seed=0)
        return capsys.readouterr().out, [np.asarray(leaf) for leaf in jax.tree.leaves(trained)]

    (first, first_leaves), (again, again_leaves) = numbers(), numbers()

    assert first == again
    assert len(first_leaves) == len(again_leaves)
    assert all(map(np.array_equal, first_leaves, again_leaves))


def test_test_set_is_held_out_in_proportion(program):
    """The two sets share no image, together hold them all, and have equal shares of each digit."""
    train, test = program.load_data(seed=0)

    rows = np.concatenate([train.images, test.images]).reshape(1797, 64)
    assert len(np.unique(rows, axis=0)) == 1797
    assert rows.min() == 0
    assert rows.max() == 1
    shares = [np.bincount(part.labels) / len(part.labels) for part in (train, test)]
    np.testing.assert_allclose(*shares, atol=0.005)


def test_another_seed_splits_the_data_otherwise(program):
    """Which images are held out depends on the seed, and on nothing else."""
    labels = [program.load_data(seed)[1].labels.tolist() for seed in (0, 0, 1)]

    assert labels[0] == labels[1]
    assert labels[0] != labels[2]


def test_batches_are_shuffled_and_of_one_size(program):
    """No image occurs twice in an epoch, and an incomplete batch is left out."""
    labels = np.arange(10)
    data = program.Split(labels[:, None] * 2, labels)

    batches = list(data.batches(4, np.random.default_rng(0)))

    seen = np.concatenate([batch.labels for batch in batches])
    assert [len(batch.labels) for batch in batches] == [4, 4]
    assert len(set(seen)) == 8
    assert list(seen) != sorted(seen)
    assert all(np.array_equal(batch.images[:, 0], 2 * batch.labels) for batch in batches)

"""Words of other libraries: Python's own errors, with a note that says what to write."""

import pytest

import pytreemod as pm
from pytreemod import nn


class Net(pm.Module):
    """A layer in a layer."""

    layer: nn.Linear

    def __init__(self, **kwargs):
        self.layer = nn.Linear(2, 3, **kwargs)


WORDS = [
    (lambda: nn.Linear(2, 3, rngs=1), TypeError, ["In pytreemod: key=jax.random.key(0)"]),
    (lambda: Net(bias=False), TypeError, ["In pytreemod: use_bias="]),
    (lambda: nn.Linear(2, 3, word=1), TypeError, []),
    (lambda: nn.Dense, AttributeError, ["In pytreemod: nn.Linear"]),
    (lambda: nn.relu, AttributeError, ["In pytreemod: jax.nn.relu"]),
    (lambda: nn.ReLU, AttributeError, ["In pytreemod: jax.nn.relu"]),
    (lambda: nn.nothing, AttributeError, []),
    (lambda: pm.jit, AttributeError, ["In pytreemod: pm.filter_jit(function)"]),
]


@pytest.mark.parametrize(("use", "error", "notes"), WORDS)
def test_a_word_of_another_library_has_a_note(use, error, notes):
    """Once, also where one constructor calls another; a typo has none."""
    with pytest.raises(error, match=r"has no attribute|unexpected keyword") as caught:
        use()
    assert getattr(caught.value, "__notes__", []) == notes

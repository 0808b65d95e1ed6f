"""What arguments are called in other libraries."""

import inspect

import jax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from pytreemod.module.other_words import OURS

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(2, 2, bias=False, key=KEY), r"Linear\(bias\): .* use_bias=, got bias="),
        (lambda: nn.Conv2d(2, 2, 3, bias=False, key=KEY), r"Conv2d\(bias\): .* use_bias=, got"),
        (lambda: nn.Linear(2, 2, rngs=KEY), r"Linear\(rngs\): expected key=, got rngs="),
        (lambda: nn.BatchNorm(num_features=3), r"BatchNorm\(num_features\): .* input_size=, got"),
        (lambda: nn.Dropout(rate=0.1), r"Dropout\(rate\): expected p=, got rate="),
        (
            lambda: nn.Dropout(0.5, training=True),
            r"Dropout\(training\): .* inference=, got training=.*\n.*\n *inference=not tr",
        ),
        (lambda: nn.BatchNorm(3, use_running_average=True), r"BatchNorm\(use_.* inference=, got"),
        (
            lambda: nn.MultiheadAttention(2, embed_dim=4, key=KEY),
            r"MultiheadAttention\(embed_dim\): .* query_size=, got",
        ),
        (lambda: nn.Embedding(num_embeddings=3, embedding_dim=2, key=KEY), r"embedding_size"),
    ],
)
def test_a_word_of_another_library_is_answered(make, text):
    """By what it is here; as a TypeError, which it was."""
    with pytest.raises(ArgumentError, match=text) as caught:
        make()
    assert isinstance(caught.value, TypeError)


def test_all_else_is_pythons_own_error():
    """A word that is in no library, one inside of a constructor, and a class that lacks ours."""

    class Plain(pm.Module):
        size: int = 1

    class Own(pm.Module):
        size: int

        def __init__(self, size, **options):
            self.size = size
            dict.fromkeys((), **options)

    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'"):
        nn.Linear(2, 2, colour=1, key=KEY)
    with pytest.raises(TypeError, match=r"takes no keyword arguments"):
        Own(2, bias=1)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'bias'"):
        Plain(bias=1)


def test_what_is_said_here_is_said_by_some_layer():
    """So that no cure names what does not exist."""
    words = set()
    for layer in vars(nn).values():
        if isinstance(layer, type):
            for call in (layer.__init__, layer.__call__):
                words |= {*inspect.signature(call).parameters}

    assert {name for names in OURS.values() for name in names} <= words

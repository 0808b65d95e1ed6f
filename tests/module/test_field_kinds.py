"""Sizes, flags and words of layers: checked wherever they come from, and stored as plain values."""

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError

KEY = jax.random.key(0)
CONV = nn.Conv2d(2, 2, 3, key=KEY)
DROPOUT = nn.Dropout(0.5)

BAD = [
    (lambda: nn.Linear(2.0, 2, key=KEY), r"Linear\(in_features\)"),
    (lambda: nn.Linear("2", 2, key=KEY), r"Linear\(in_features\)"),
    (lambda: nn.Linear(2, True, key=KEY), r"Linear\(out_features\)"),
    (lambda: nn.Linear(2, -1, key=KEY), r"Linear\(out_features\)"),
    (lambda: nn.Linear(2, 2, use_bias=1, key=KEY), r"Linear\(use_bias\)"),
    (lambda: CONV.replace(stride=(1, 2, 3)), r"Conv2d\(stride\)"),
    (lambda: CONV.replace(stride={1, 2}), r"Conv2d\(stride\)"),
    (lambda: pm.with_mode([CONV], dilation=0), r"Conv2d\(dilation\)"),
    (lambda: CONV.replace(padding_mode="OTHER"), r"Conv2d\(padding_mode\)"),
    (lambda: nn.Dropout(2.0), r"Dropout\(p\)"),
    (lambda: DROPOUT.replace(p=1j), r"Dropout\(p\)"),
    (lambda: DROPOUT.replace(inference=jnp.ones(2)), r"Dropout\(inference\)"),
    (lambda: nn.LayerNorm(2, eps=-1), r"LayerNorm\(eps\)"),
    # Shapes must be known.
    (lambda: jax.jit(lambda n: nn.Linear(n, 2, key=KEY).weight)(3), r"Linear\(in_features\)"),
]


@pytest.mark.parametrize(("make", "text"), BAD)
def test_a_bad_value_is_refused(make, text):
    """By construction, `replace` and `with_mode`, with the layer and the name."""
    with pytest.raises(ArgumentError, match=text):
        make()


def test_values_of_any_library_become_plain_ones():
    """So that configuration stays hashable, and equal layers are one program."""
    for size in (3, np.int64(3), np.array(3), jnp.array(3)):
        made = nn.Linear(size, 2, key=KEY)
        assert (made.in_features, type(made.in_features)) == (3, int)
    for p in (0.5, np.float32(0.5), jnp.array(0.5)):
        assert type(nn.Dropout(p).p) is float
    assert nn.Dropout(0.5, inference=np.bool_(True)).inference is True
    assert CONV.replace(stride=2).stride == CONV.replace(stride=[2, np.int32(2)]).stride == (2, 2)
    assert CONV.replace(padding_mode="reflect").padding_mode == "REFLECT"


def test_a_class_that_is_pickled_by_value_keeps_its_checks():
    """Of the base's fields."""

    class Local(nn.Dropout):
        pass

    one = cloudpickle.loads(cloudpickle.dumps(Local(0.5)))
    assert one.replace(p=1).p == 1.0
    with pytest.raises(ArgumentError, match=r"Local\(p\)"):
        one.replace(p=2)

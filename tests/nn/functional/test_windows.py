"""How windows lie over axes."""

import pytest

from pytreemod.errors import ArgumentError
from pytreemod.nn.functional.windows import check_padding, cover, extents, resolve_padding
from tests.goldens import refusals
from tests.labels import label


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        (1, ((1, 1), (1, 1))),
        ([1, 2], ((1, 1), (2, 2))),
        (((1, 2), (0, 3)), ((1, 2), (0, 3))),
        ((1, (0, 3)), ((1, 1), (0, 3))),
        ("same", "SAME"),
    ],
    ids=label,
)
def test_the_spellings_of_a_padding(padding, expected):
    """An amount, one for each axis, pairs, a mixture of both, or a word."""
    assert check_padding("f(padding)", padding, 2, words=True) == expected


@pytest.mark.parametrize("padding", [-1, 1.5, (1, 2, 3), ((1, 2, 3), (1, 1)), (1, -2), None, True])
def test_what_is_no_padding(padding):
    """Negative amounts, fractions, wrong counts, None and booleans are refused."""
    with pytest.raises(ArgumentError, match=r"f\(padding\): expected an integer >= 0, 2 of them"):
        check_padding("f(padding)", padding, 2, words=True)


def test_a_dilated_kernel_spans_the_gaps_too():
    """(k - 1) d + 1 positions."""
    assert extents((3, 1, 2), (1, 5, 4)) == (3, 1, 5)


@pytest.mark.parametrize(
    ("size", "stride", "same", "lower"),
    [
        (5, 1, (1, 2), (2, 1)),
        (5, 2, (1, 2), (2, 1)),
        (6, 3, (0, 1), (1, 0)),
        (1, 4, (1, 2), (2, 1)),
    ],
)
def test_same_padding_is_shared_between_both_ends(size, stride, same, lower):
    """Just enough for ceil(size / stride) windows of four; the odd one above, or below."""
    assert resolve_padding("SAME", (size,), (4,), (stride,)) == (same,)
    assert resolve_padding("SAME_LOWER", (size,), (4,), (stride,)) == (lower,)
    assert resolve_padding("VALID", (size,), (4,), (stride,)) == ((0, 0),)


@pytest.mark.parametrize(
    ("size", "window", "stride", "pads", "expected"),
    [
        (7, 2, 2, (0, 0), (0, 1)),
        (8, 2, 2, (0, 0), (0, 0)),
        (7, 2, 2, (1, 1), (1, 1)),
        (2, 3, 2, (0, 0), (0, 1)),
        (2, 3, 1, (0, 0), (0, 0)),
    ],
)
def test_cover_pads_for_the_overhang_only(size, window, stride, pads, expected):
    """Padding grows by the overhang of the last window, unless that window sees only padding."""
    assert cover((pads,), (size,), (window,), (stride,)) == (expected,)


test_refusals = refusals(globals())

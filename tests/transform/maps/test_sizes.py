"""The one size that arrays have along their axes."""

import pytest

from pytreemod.errors import ArgumentError, ShapeError
from pytreemod.transform.maps.sizes import common_size
from tests.helpers.trees import ramp


def size(tree, axes, **options):
    return common_size("map", [("x", tree)], tree, axes, **options)


def test_it_is_that_of_every_array():
    """Of arrays with an axis; an option gives one more size."""
    assert size([ramp(2, 3), ramp(3), ramp(5)], [1, 0, None]) == 3
    assert size([ramp(2, 3)], [-1], size=3, option="length=n") == 3
    assert size([ramp(5)], [None], size=4, option="length=n") == 4


@pytest.mark.parametrize(
    ("tree", "axes", "options", "error", "text"),
    [
        (
            [ramp(2), ramp()],
            [0, 0],
            {},
            ShapeError,
            r"got other arrays\.\n  at x\[1\]: f32\[\], axis 0$",
        ),
        ([ramp(2)], [None], {}, ArgumentError, r"an array with an axis to map over, got none\.$"),
        (
            [ramp(2)],
            [None],
            {"option": "length=n"},
            ArgumentError,
            r"or length=n, got neither\.\n  pass",
        ),
        (
            [ramp(2), ramp(3), ramp(2)],
            [0, 0, 0],
            {"size": 4, "option": "length=n"},
            ShapeError,
            r"got 3 sizes\.\n  at size 2 of x\[0\]: f32\[2\], axis 0 \(and 1 more\)\n"
            r"  at size 3 of x\[1\]: f32\[3\], axis 0\n  at size 4 of length=4$",
        ),
    ],
)
def test_mistakes_are_explained(tree, axes, options, error, text):
    """A missing axis, nothing to map over, sizes that disagree."""
    with pytest.raises(error, match=text):
        size(tree, axes, **options)


def test_the_hint_is_about_the_array_that_lacks_its_axis():
    """And not about those before it or after it."""
    with pytest.raises(ShapeError, match=r"axis of the array:\n      x, 1, 7$"):
        common_size(
            "map",
            [("x", [ramp(2), ramp(2), ramp(2)])],
            [ramp(2), ramp(2), ramp(2)],
            [0, 7, 0],
            whole=lambda name, path, axis: f"{name}, {path[0].idx}, {axis}",
        )

"""`filled_in`."""

import inspect

from pytreemod.nn.dimensions import filled_in


class Grid:
    """A class for any number of axes."""

    def __init__(self, num_spatial_dims: int, size: int, *, fill: float = 0.0):
        self.made = (num_spatial_dims, size, fill)


class Grid2d(Grid):
    """The same for two."""

    @filled_in(Grid.__init__, 2)
    def __init__(self): ...


def test_the_dimension_is_filled_in():
    """Grid2d(size) == Grid(2, size), by position and by keyword."""
    assert Grid2d(5).made == Grid(2, 5).made
    assert Grid2d(size=5, fill=1.0).made == Grid(2, 5, fill=1.0).made


def test_the_signature_is_the_rest():
    """inspect and help() show the right parameters and the name of the method."""
    assert str(inspect.signature(Grid2d)) == "(size: int, *, fill: float = 0.0)"
    assert Grid2d.__init__.__qualname__ == "Grid2d.__init__"
    assert inspect.unwrap(Grid2d.__init__) is Grid2d.__init__

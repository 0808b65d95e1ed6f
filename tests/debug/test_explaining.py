"""debug.explain_retraces: listening to the traces of a jitted function."""

import pytest

import pytreemod as pm
from tests.helpers.trees import ramp


@pytest.fixture
def scale():
    """A new jitted function."""

    @pm.filter_jit
    def scale(x, factor=1.0):
        return x * factor

    return scale


SECOND = "scale was traced again (trace 2), because of\n  factor: 1.0 -> 2.0"
THIRD = "scale was traced again (trace 3), because of\n  x: f32[2] -> f32[3]"


def test_as_a_context_manager(scale):
    """While it is open, each trace after the first is printed and recorded."""
    announced = []
    scale(ramp(2), 1.0)
    with pm.debug.explain_retraces(scale, announce=announced.append) as report:
        scale(ramp(2), 2.0)
        scale(ramp(2), 1.0)
        scale(ramp(3), 2.0)
    scale(ramp(4), 2.0)

    assert report.reports == announced == [SECOND, THIRD]
    assert str(report) == f"{SECOND}\n{THIRD}"


def test_in_the_functions_place(scale):
    """It can be called instead of the function, and listens during its calls only."""
    announced = []
    explained = pm.debug.explain_retraces(scale, announce=announced.append)

    assert (explained(ramp(2), 1.0) == ramp(2)).all()
    assert (explained(ramp(2), factor=2.0) == 2 * ramp(2)).all()
    scale(ramp(3), 1.0)
    assert announced == explained.reports == [SECOND]


def test_it_closes_after_an_error(scale):
    """A failure inside ends the listening; the failing trace was reported before it ran."""
    announced = []
    explained = pm.debug.explain_retraces(scale, announce=announced.append)
    explained(ramp(2), 1.0)
    with pytest.raises(TypeError, match="NoneType"):
        explained(ramp(2), None)
    with pytest.raises(KeyError, match="mine"), explained:
        raise KeyError("mine")
    scale(ramp(3), 1.0)

    [report] = announced
    assert report.endswith("factor: 1.0 -> None")


def test_printed_after_the_fact(scale):
    """Without a listener, it prints the traces so far."""
    report = pm.debug.explain_retraces(scale)
    scale(ramp(2), 1.0)
    assert str(report) == "no retraces"

    scale(ramp(2), 2.0)
    scale(ramp(3), 2.0)
    assert str(report) == f"{SECOND}\n{THIRD}"

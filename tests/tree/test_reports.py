"""report_text: how many are printed."""

from pytreemod.tree.reports import report_text


def test_of_each_kind_the_first_are_printed():
    """And how many are left."""
    rows = {"a": ["x"] * 12, "b": []}
    assert report_text("R", rows).splitlines()[2:] == ["    x"] * 10 + ["    and 2 more"]
    assert report_text("R", rows, most=None).splitlines()[2:] == ["    x"] * 12
    assert report_text("R", rows, always="b").splitlines()[0] == "R: 12 a, 0 b"

"""The printed report of a load."""

import pytreemod as pm


def test_a_report_tells_how_many_and_then_which():
    """The count of each kind, and then the names."""
    report = pm.LoadReport(
        loaded=("a", "b"), renamed=(("a", "old"),), configuration=("act: like has relu",)
    )

    assert str(report) == repr(report)
    assert str(report).splitlines() == [
        "LoadReport: 2 loaded, 1 renamed, 1 configuration",
        "  loaded",
        "    a",
        "    b",
        "  renamed",
        "    a, from old",
        "  configuration",
        "    act: like has relu",
    ]


def test_a_report_of_a_large_model_is_short():
    """It was one line of as many names as there are leaves."""
    names = tuple(f"layers.{i}.weight" for i in range(100))
    lines = repr(pm.LoadReport(loaded=names, cast=names[:10], missing=names[:11])).splitlines()

    assert lines[0] == "LoadReport: 100 loaded, 11 missing, 10 cast"
    assert lines[2:13] == [*(f"    {name}" for name in names[:10]), "    and 90 more"]
    assert "    and 1 more" in lines
    assert lines[-10:] == [f"    {name}" for name in names[:10]]
    assert max(map(len, lines)) < 80

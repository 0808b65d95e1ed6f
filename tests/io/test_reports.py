"""The report of a load, as it is printed."""

import pytreemod as pm


def test_a_report_is_a_table_of_what_is_there():
    report = pm.LoadReport(
        loaded=("a", "b"), renamed=(("a", "old"),), configuration=("act: like has relu",)
    )

    assert str(report) == (
        "loaded        2  a, b\nrenamed       1  a (old)\nconfiguration 1  act: like has relu"
    )
    assert str(pm.LoadReport()) == "nothing"


def test_a_report_is_a_value():
    assert pm.LoadReport(loaded=("a",)) == pm.LoadReport(loaded=("a",))
    assert hash(pm.LoadReport()) == hash(pm.LoadReport())

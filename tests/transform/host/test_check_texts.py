"""Messages of failed checks."""

import numpy as np

from pytreemod.transform.host.check_texts import CheckText, print_error, user_line

TEXT = CheckText(("first", "second"), "here.py:1, in f")


def notes(error):
    return [str(error), *error.__notes__]


def test_one_failure_says_its_message_and_its_line():
    assert notes(TEXT.error(True, 1, is_batch=True)) == ["second", "checked at here.py:1, in f"]


def test_of_a_batch_the_first_is_shown_and_the_others_are_counted():
    failed = np.array([[False, True], [True, False]])
    index = np.array([[0, 1], [0, 0]])

    error = TEXT.error(failed, index, is_batch=True)
    assert notes(error)[:2] == ["second", "for the batch index (0, 1), and 1 more"]
    error = TEXT.error(failed, index, is_batch=False)
    assert notes(error) == ["second", "checked at here.py:1, in f"]


def test_steps_are_no_members():
    """Axes are counted from the last."""
    failed = np.zeros((2, 3, 4), bool)
    failed[1, 2, 3] = True

    error = TEXT.error(failed, 0, is_batch=True, steps=(0, 2))
    assert notes(error)[1] == "for the batch index 2, in step (1, 3) of a scan"
    error = TEXT.error(failed, 0, is_batch=True, steps=(0, 1, 2), more=4)
    assert notes(error)[1] == "in step (1, 2, 3) of a scan, and 4 more"


def test_a_message_that_there_is_not():
    """The index may have been traced."""
    assert TEXT.message(-1) == "second"
    assert TEXT.message(2) == "message 2 of 2 (no such message)"


def test_an_error_is_printed_with_its_notes(capsys):
    print_error(TEXT.error(True, 0, is_batch=True))

    printed = capsys.readouterr().err
    assert printed == "pytreemod.errors.CheckError: first\nchecked at here.py:1, in f\n"


def test_the_line_is_that_of_the_user():
    assert user_line().endswith("in test_the_line_is_that_of_the_user")

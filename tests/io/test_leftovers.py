"""What killed processes leave, and what others are writing at this moment."""

import os
import time

import pytest

from pytreemod.errors import FileMissingError
from pytreemod.io import leftovers
from pytreemod.io.leftovers import remove_leftovers, show_alive
from pytreemod.io.replacing import replacement

NAME = "a.safetensors.saving-0123456789abcdef"


def make(folder, name=NAME, age=3600.0):
    path = folder / name
    path.write_bytes(b"a part")
    os.utime(path, (time.time() - age,) * 2)
    return path


def remaining(folder):
    remove_leftovers(folder, lambda name: name.startswith("a"))
    return sorted(path.name for path in folder.iterdir())


def test_what_nobody_writes_is_removed(tmp_path):
    """It was left alone for a while, and nobody holds it."""
    make(tmp_path)

    assert remaining(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        "a.safetensors",
        "b.safetensors.saving-0123456789abcdef",
        "a.saving-",
        "a.saving-0123",
        NAME + ".txt",
        NAME + "0",
    ],
)
def test_other_files_stay(tmp_path, name):
    """Whole files, those of others, and what only looks alike."""
    make(tmp_path, name)

    assert remaining(tmp_path) == [name]


def test_a_file_that_was_just_made_stays(tmp_path):
    """Whoever made it may not hold it yet."""
    make(tmp_path, age=1)

    assert remaining(tmp_path) == [NAME]


def test_a_file_that_somebody_holds_stays(tmp_path):
    """As long as it is open, which ends with the process at the latest."""
    descriptor = os.open(make(tmp_path), os.O_RDWR)
    show_alive(descriptor)

    assert remaining(tmp_path) == [NAME]

    os.close(descriptor)

    assert remaining(tmp_path) == []


def test_who_writes_a_file_holds_it(tmp_path):
    """What is written in the place of a file is known by its name, and held until it is done."""
    with replacement(str(tmp_path / "a.safetensors"), 9, durable=False) as file:
        file.write(b"the whole")
        (beside,) = tmp_path.iterdir()
        os.utime(beside, (0, 0))
        assert remaining(tmp_path) == [beside.name]

    assert remaining(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("why", ["no locks in the system", "no locks on the disk"])
def test_without_locks_age_decides(tmp_path, monkeypatch, why):
    """What was left alone for more than a day is nobody's."""
    make(tmp_path)
    make(tmp_path, NAME.replace("a.", "a2."), age=2 * 24 * 3600)
    if why == "no locks in the system":
        monkeypatch.setattr(leftovers, "fcntl", None)
    else:

        def refuse(*args):
            raise OSError("no locks available")

        monkeypatch.setattr(leftovers.fcntl, "flock", refuse)

    assert remaining(tmp_path) == [NAME]


def test_who_cannot_show_it_writes_nonetheless(tmp_path, monkeypatch):
    """Not every disk has locks."""

    def refuse(*args):
        raise OSError("no locks available")

    monkeypatch.setattr(leftovers.fcntl, "flock", refuse)
    with open(make(tmp_path)) as file:
        show_alive(file.fileno())


def test_what_another_process_removes_first_is_not_missed(tmp_path, monkeypatch):
    """Nor is what nobody may remove: the others are."""
    first, second = make(tmp_path), make(tmp_path, NAME.replace("a.", "a2."))
    unlink = os.unlink

    def late(path):
        if path == str(first):
            raise FileNotFoundError(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", late)

    assert remaining(tmp_path) == [first.name]
    assert not second.exists()


def test_what_was_looked_at_is_closed(tmp_path, monkeypatch):
    """A run looks with each save, for days."""
    opened = []
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(open_file(*args)) or opened[-1])
    descriptor = os.open(make(tmp_path), os.O_RDWR)
    show_alive(descriptor)
    remaining(tmp_path)
    os.close(descriptor)
    remaining(tmp_path)

    assert len(opened) == 3
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_folder_that_is_not_there_is_told(tmp_path):
    """By its path."""
    with pytest.raises(FileMissingError, match="missing: expected a folder to read"):
        remove_leftovers(tmp_path / "missing", lambda name: True)

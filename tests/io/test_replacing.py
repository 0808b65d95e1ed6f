"""A file replaces another in one step, or not at all."""

import errno
import io
import os
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FileAccessError, FileMissingError, FilePermissionError

ROOT = os.geteuid() == 0
needs_permissions = pytest.mark.skipif(ROOT, reason="root may do anything")


def write(path, number, durable=False):
    """Replace a file by one of this number."""
    pm.save(path, number, durable=durable)


def interrupted(monkeypatch, work):
    """Let something happen while a file is written, after some of its bytes."""
    real = io.FileIO.write

    class File(io.FileIO):
        def write(self, data):
            count = real(self, data)
            work()
            return count

    monkeypatch.setattr(io, "FileIO", File)


@pytest.fixture
def path(tmp_path):
    """A file that is there."""
    path = tmp_path / "model.safetensors"
    pm.save(path, 1)
    return path


@pytest.mark.parametrize("durable", [True, False])
def test_the_new_file_takes_the_place_of_the_old_one(path, durable):
    """And nothing is left beside it."""
    write(path, 2, durable)

    assert pm.load(path) == 2
    assert os.listdir(path.parent) == [path.name]


def test_a_durable_file_is_on_the_disk_before_its_name_is(path, monkeypatch):
    """First its bytes, then the name, then the folder that has the name."""
    done = []
    real = {"fsync": os.fsync, "replace": os.replace}

    def fsync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append(f"fsync {kind}")
        real["fsync"](descriptor)

    def replace(*args):
        done.append("replace")
        real["replace"](*args)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write(path, 2, durable=True)
    assert done == ["fsync file", "replace", "fsync folder"]
    done.clear()
    write(path, 2, durable=False)
    assert done == ["replace"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("was_there", [True, False])
def test_what_fails_leaves_the_old_file(path, monkeypatch, error, was_there):
    """Whatever fails, the person at the keyboard included; where nothing was, nothing is left."""

    def stop():
        (beside,) = {*os.listdir(path.parent)} - {path.name}
        # After a kill its name shows its origin, and that it is not part of a model.
        assert beside.startswith("model.safetensors.saving-")
        assert path.exists() == was_there
        raise error("stop")

    if not was_there:
        path.unlink()
    with monkeypatch.context() as patched:
        interrupted(patched, stop)
        with pytest.raises(error, match="stop"):
            write(path, np.ones(3))

    assert os.listdir(path.parent) == [path.name] * was_there
    assert not was_there or pm.load(path) == 1


@pytest.mark.parametrize("special", [0, stat.S_ISUID])
def test_permissions_are_those_of_the_old_file_or_of_any_new_one(path, special):
    """As if the file had been opened and written: the mode is that of the process."""
    path.chmod(0o640 | special)
    write(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        write(path.parent / "another", 2)
    finally:
        os.umask(before)
    assert stat.S_IMODE((path.parent / "another").stat().st_mode) == 0o640


def test_a_symbolic_link_stays_and_what_it_leads_to_is_replaced(path):
    """Also through another link, and if there is no file yet."""
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    link, far = elsewhere / "link", elsewhere / "far"
    link.symlink_to(path)
    far.symlink_to("link")
    write(far, 2)
    assert (pm.load(path), link.is_symlink(), far.is_symlink()) == (2, True, True)
    link.unlink()
    link.symlink_to(elsewhere / "fresh")
    write(link, 3)
    assert pm.load(elsewhere / "fresh") == 3
    assert link.is_symlink()


def test_devices_folders_and_pipes_are_not_replaced(path):
    """To rename a file over a device would remove the device."""
    os.mkfifo(path.parent / "pipe")
    (path.parent / "folder").mkdir()
    for name, kind in (("pipe", "a pipe or a device"), ("folder", "a folder")):
        with pytest.raises(FileAccessError, match=kind):
            write(path.parent / name, 2)
    with pytest.raises(FileAccessError, match="a pipe or a device"):
        write(os.devnull, 2)
    assert sorted(os.listdir(path.parent)) == ["folder", "model.safetensors", "pipe"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    """And so is the kind of error."""
    with pytest.raises(FileMissingError, match="none/a"):
        write(tmp_path / "none" / "a", 2)


def test_a_read_only_file_stays(path, monkeypatch):
    """Though the folder would let it be replaced."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(FilePermissionError, match="read-only"):
        write(path, 2)

    assert pm.load(path) == 1


@needs_permissions
def test_a_read_only_folder_is_named(path):
    """The system's refusal is an error of both kinds."""
    path.parent.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="new"):
            write(path.parent / "new", 2)
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize("number", [errno.ENOSPC])
def test_a_full_disk_says_so_before_anything_is_written(path, monkeypatch, number):
    """The old file stays, and nothing beside it."""

    def full(descriptor, start, size):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileAccessError, match=r"model\.safetensors") as caught:
        write(path, 2)

    assert caught.value.errno == number
    assert os.listdir(path.parent) == [path.name]
    assert pm.load(path) == 1


PROGRAM = """
import sys
import numpy as np
import pytreemod as pm
path, number = sys.argv[1:3]
tree = [np.full(10_000, int(number))] * 3
for i in range(int(sys.argv[3])):
    pm.save(path, tree)
    if i == 0:
        print("writing", flush=True)
"""


def start(path, number, times):
    """A process that replaces a file again and again."""
    command = [sys.executable, "-c", PROGRAM, str(path), str(number), str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_a_whole_file(path):
    """At any moment; the name of an unfinished file shows that it is unfinished."""
    process = start(path, 7, 1_000_000)
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    assert [array[0] for array in pm.load(path)] == [7] * 3
    assert all(".saving-" in name for name in {*os.listdir(path.parent)} - {path.name})


@pytest.mark.slow
def test_of_two_that_write_at_once_one_wins_whole(path):
    """A reader always sees a complete file, too."""
    pm.save(path, [np.full(1, 7)])
    processes = [start(path, number, 100) for number in (7, 8)]
    while any(process.poll() is None for process in processes):
        assert pm.load(path)[0][0] in (7, 8)
    for process in processes:
        process.stdout.close()

    assert [process.returncode for process in processes] == [0, 0]
    assert [array[0] for array in pm.load(path)] in ([7] * 3, [8] * 3)
    assert os.listdir(path.parent) == [path.name]

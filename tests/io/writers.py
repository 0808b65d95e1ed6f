"""A program: processes write one file again and again; they are killed, or several at once."""

import glob
import os
import random
import signal
import sys
import time

import numpy as np

import pytreemod as pm

WRITERS = {
    "model.safetensors": (pm.save, pm.load),
    "model.eqx": (pm.tree_serialise_leaves, pm.tree_deserialise_leaves),
}


def numbers(number):
    return [np.full(100_000, float(number))] * 3


def start(write, path, number, times):
    """A process that writes growing numbers; it starts faster than a new one."""
    # What Python does after a fork ignores errors, so Ctrl-C waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    child = os.fork()
    if child == 0:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            for i in range(times):
                write(path, numbers(number + 10 * i))
            os._exit(0)
        finally:
            os._exit(1)
    return child


def end(child, number):
    """Send a signal, and again if it came while Python ignored errors."""
    waited = 0
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if waited % 500 == 0:
            os.kill(child, number)
        time.sleep(0.01)
        waited += 1


def number_in(path, read):
    arrays = read(path, numbers(0))
    assert all((array == arrays[0][0]).all() for array in arrays), "a mixed file"
    return arrays[0][0]


def interrupt_many(path, write, read, number, count):
    """Whenever a writer ends, the file is whole; only one that cannot notice leaves more."""
    for _ in range(count):
        child = start(write, path, 0, 10**9)
        time.sleep(random.random() / 10)
        end(child, number)
        number_in(path, read)
        left = glob.glob(f"{path}.*.tmp")
        assert number == signal.SIGKILL or not left, left


def write_at_once(path, write, read, count):
    """Three write while one reads."""
    running = [start(write, path, i, count) for i in range(3)]
    while running:
        number_in(path, read)
        ended = {child: os.waitpid(child, os.WNOHANG) for child in running}
        assert all(status == 0 for _, status in ended.values()), "a writer failed"
        running = [child for child, (found, _) in ended.items() if not found]
    assert number_in(path, read) >= 10 * (count - 1)


if __name__ == "__main__":
    # Ignored by a program that a shell has started in the background: the writers would never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, count, *jobs = sys.argv[1:]
    for name, (write, read) in WRITERS.items():
        path = os.path.join(folder, name)
        write(path, numbers(-1))
        for job in jobs:
            if job == "at once":
                write_at_once(path, write, read, int(count))
            else:
                interrupt_many(path, write, read, getattr(signal, job), int(count))
    print("done")

"""Files by hand, valid and invalid; and arrays compared bit for bit."""

import json
import tracemalloc

import numpy as np

METADATA = "__metadata__"
LENGTH = 8


def write_plain(path, header, data=b""):
    """A file with this header: JSON, or invalid text."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    text = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(len(text).to_bytes(LENGTH, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    """One array in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def header_of(path):
    content = path.read_bytes()
    return json.loads(content[LENGTH : LENGTH + int.from_bytes(content[:LENGTH], "little")])


def faults(left, right):
    """The names whose arrays differ in shape, dtype or bits; and the names of one side."""
    found = [*(left.keys() ^ right.keys())]
    for name in left.keys() & right.keys():
        one, two = (np.asarray(each) for each in (left[name], right[name]))
        one, two = (x.astype(x.dtype.newbyteorder("<")) for x in (one, two))
        is_same = (one.dtype, one.shape) == (two.dtype, two.shape)
        found += [] if is_same and one.tobytes() == two.tobytes() else [name]
    return found


def peak_of(work):
    """The memory that a call takes in Python and NumPy, and its result."""
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def damaged(content, head, rng):
    """A file in which something is wrong, mostly in its head."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(min(rng.choice([8, head, head, len(content)]), len(content)))
        past = at + rng.choice([1, 1, 4, 100])
        kind = rng.randrange(7)
        if kind == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at:past] = rng.randbytes(len(content[at:past]))
        elif kind == 2:
            del content[at:past]
        elif kind == 3:
            content[at:at] = content[at:past]
        elif kind == 4:
            del content[at:]
        elif kind == 5:
            content[at : at + 1] = rng.choice(
                ["0", "9", "-", '"', "[", "}", "\\", "O", ""]
            ).encode()
        else:
            content[:8] = rng.randrange(2 ** rng.choice([8, 16, 64])).to_bytes(8, "little")
        content = content or bytearray(1)
    return bytes(content)

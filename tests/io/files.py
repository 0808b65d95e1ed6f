"""Files by hand, valid and invalid; and the content of a file."""

import json
import zlib

import numpy as np
import safetensors.numpy

OWN = "pytreemod.container."
METADATA = "__metadata__"
LENGTH = 8


def write_plain(path, header, data=b""):
    """A file with this header: JSON, or invalid text."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    text = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(len(text).to_bytes(LENGTH, "little") + text + data)
    return path


def write_described(path, tree, arrays=None, **about):
    """A file that has this description of a tree, whatever it says."""
    about = json.dumps({"version": 1, "tree": tree, **about})
    safetensors.numpy.save_file(arrays or {}, path, {"pytreemod.tree": about})
    return path


def header_of(path):
    """The header, from JSON."""
    content = path.read_bytes()
    return json.loads(content[LENGTH : LENGTH + int.from_bytes(content[:LENGTH], "little")])


def tree_in(path):
    """The description of the tree."""
    return json.loads(header_of(path)[METADATA]["pytreemod.tree"])["tree"]


def write_changed(path, change):
    """The same file with another header, whose checksum is right."""
    content = path.read_bytes()
    header, data = header_of(path), content[LENGTH + int.from_bytes(content[:LENGTH], "little") :]
    change(header)
    seal, metadata = f"{OWN}header-crc32", header[METADATA]
    metadata |= {seal: "0" * 8} if seal in metadata else {}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    summed = f"{zlib.crc32(len(text.encode()).to_bytes(LENGTH, 'little') + text.encode()):08x}"
    write_plain(path, text.replace(f'"{seal}":"{"0" * 8}"', f'"{seal}":"{summed}"'), data)


def dtype_called(jnp, name):
    """Of JAX's names."""
    return np.dtype(getattr(jnp, name))

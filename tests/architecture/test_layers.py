"""The walls of the house (docs/contributing/layout.md): imports point down, without cycles."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.imports import ALL_IMPORTS, FILES, OWN_IMPORTS

LAYERS = [
    {"errors", "other_words", "typing", "version"},
    {"tree"},
    {"module"},
    {"transform", "state"},
    {"nn", "training"},
    {"io", "debug", "parallel"},
    {"", "constraints", "select", "testing"},
]
"""From the ground up; rooms of one layer are peers, which may not import each other."""

DEPENDENCIES = {"jax", "jaxtyping", "numpy", "wadler_lindig"}
OPTIONAL = {"pytreemod.io": {"safetensors", "orbax", "torch"}, "pytreemod.tree": {"treescope"}}
"""Extras, each with the one room that may import it."""


def room(name: str) -> str:
    """The room that a file is in; the front door is the empty string."""
    return name.split(".")[1] if "." in name else ""


def test_imports_point_down():
    """A file imports files of its own room and of lower layers."""
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    pairs = [(i, room(i.source), room(i.target)) for i in OWN_IMPORTS]

    assert [i for i, source, to in pairs if source != to and level[source] <= level[to]] == []


def test_there_are_no_cycles_between_files():
    """The files can be put in an order in which each imports earlier ones only."""
    graph = {name: set() for name in FILES}
    for i in OWN_IMPORTS:
        if i.target != i.source:
            graph[i.source].add(i.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")


def test_imports_name_the_file_that_has_the_name():
    """Not a room, nor the front door, which is for users."""
    doors = {f"pytreemod.{name}" for name in ("tree", "module", "transform", "state")}
    inner = [i for i in OWN_IMPORTS if i.source != "pytreemod"]
    assert [i for i in OWN_IMPORTS if i.target not in FILES] == []
    assert [i for i in inner if i.target in doors | {"pytreemod"}] == []


def test_no_private_names_of_jax():
    """Neither an import nor an attribute goes through `jax._src`, or any private name of JAX."""
    of_jax = [i for i in ALL_IMPORTS if i.target.split(".")[0] in ("jax", "jaxlib")]
    assert [i for i in of_jax if any(p.startswith("_") for p in i.target.split("."))] == []
    names = {"jax", "jnp", "jtu", "jex", "untyped_jax"}
    attributes = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        if node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node).split(".")[0] in names
    ]
    assert attributes == []


def test_three_files_go_beyond_what_jax_promises_to_keep():
    """They say what would have to change without it."""
    unpromised = ("jax.extend", "jax.interpreters")
    users = {i.source for i in ALL_IMPORTS if i.target.startswith(unpromised)}
    primitives = {"pytreemod.debug.probing", "pytreemod.transform.runtime_checks"}
    assert users == primitives | {"pytreemod.tree.traces"}


def test_dependencies_are_the_declared_ones():
    """Everything imported is in the standard library, declared, or an extra in its one room."""
    known = sys.stdlib_module_names | DEPENDENCIES | {"pytreemod"}
    tops = [(i, i.target.split(".")[0]) for i in ALL_IMPORTS]
    extras = [OPTIONAL.get(f"pytreemod.{room(i.source)}", set()) for i in ALL_IMPORTS]
    assert [i for (i, top), own in zip(tops, extras, strict=True) if top not in known | own] == []

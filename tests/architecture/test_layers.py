"""The walls of the house (docs/explanation/design.md): imports point down only, without cycles."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.imports import ALL_IMPORTS, FILES, OWN_IMPORTS, imports_of

LAYERS = [
    {"errors", "typing", "version"},
    {"tree"},
    {"module"},
    {"transform", "state"},
    {"nn", "training"},
    {"io", "debug", "parallel"},
    {""},
]
"""From the ground up; rooms of one layer are peers, which may not import each other."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

DEPENDENCIES = {"jax", "jaxtyping", "numpy", "wadler_lindig"}
"""The packages that it imports at run time."""

OPTIONAL = {"pytreemod.io": {"safetensors", "orbax", "torch"}, "pytreemod.tree": {"treescope"}}
"""Extras, each with the one room that may import it."""


def room(name: str) -> str:
    """The room that a file is in; the front door is the empty string."""
    return name.split(".")[1] if "." in name else ""


def test_every_file_is_in_a_room():
    """The table above has every room."""
    assert {room(name) for name in FILES} <= set(LEVEL)
    assert {"tree", "module", "transform", "state", "nn", "errors", "typing", ""} <= {
        room(name) for name in FILES
    }


def test_imports_point_down():
    """A file imports files of its own room and of lower layers; lazy imports count."""
    wrong = [
        i
        for i in OWN_IMPORTS
        if room(i.source) != room(i.target) and LEVEL[room(i.source)] <= LEVEL[room(i.target)]
    ]
    assert wrong == []


ROOMS_OF_TRANSFORM = [
    "boundary",
    "interception",
    "host",
    "compilation",
    {"derivatives", "maps"},
    "control_flow",
]
"""From the ground up, as above."""


def test_the_rooms_of_transform_are_in_order():
    """Each imports rooms below it only; `derivatives` and `maps` are peers."""
    levels = [{rooms} if isinstance(rooms, str) else rooms for rooms in ROOMS_OF_TRANSFORM]
    level = {name: i for i, names in enumerate(levels) for name in names}
    inside = "pytreemod.transform."
    found = {name.split(".")[2] for name in FILES if name.startswith(inside)}
    assert found == set(level)
    within = [i for i in OWN_IMPORTS if i.source.startswith(inside) and inside in i.target]
    pairs = [(i, i.source.split(".")[2], i.target.split(".")[2]) for i in within]
    assert [i for i, source, to in pairs if source != to and level[source] <= level[to]] == []


def test_there_are_no_cycles_between_files():
    """The files can be put in an order in which each imports earlier ones only."""
    graph = {name: set() for name in FILES}
    for i in OWN_IMPORTS:
        if i.target != i.source:
            graph[i.source].add(i.target)
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")
    assert set(order) == set(FILES)


def test_imports_name_existing_files():
    """Every import of the package is of a file that defines the name, not of a room."""
    wrong = [i for i in OWN_IMPORTS if i.target not in FILES]
    assert wrong == []
    rooms = {f"pytreemod.{r}" for r in ("tree", "module", "transform", "state")}
    through_rooms = [i for i in OWN_IMPORTS if i.target in rooms and i.source != "pytreemod"]
    assert through_rooms == []


def test_nothing_imports_the_front_door():
    """`pytreemod` itself is for users."""
    assert [i for i in OWN_IMPORTS if i.target == "pytreemod"] == []


def test_the_front_door_only_reexports():
    """It contains imports and assignments of names; and, once, the loader of the other names."""
    body = ast.parse(FILES["pytreemod"].read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    others = [node for node in body if not isinstance(node, allowed)]
    assert [ast.unparse(node.test) for node in others] == ["_typing.TYPE_CHECKING"]


def test_no_private_names_of_jax():
    """Neither an import nor an attribute goes through `jax._src`, or any private name of JAX."""
    of_jax = [i for i in ALL_IMPORTS if i.target.split(".")[0] in ("jax", "jaxlib")]
    private = [i for i in of_jax if any(part.startswith("_") for part in i.target.split("."))]
    assert private == []
    attributes = []
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                text = ast.unparse(node)
                if text.split(".")[0] in (
                    "jax",
                    "jnp",
                    "jtu",
                    "jex",
                    "untyped_jax",
                ) and not node.attr.startswith("__"):
                    attributes.append(f"{name}:{node.lineno}: {text}")
    assert attributes == []


UNPROMISED = ("jax.extend", "jax.interpreters")
"""Parts of JAX that its promise of compatibility excludes."""


def test_one_file_goes_beyond_what_jax_promises_to_keep():
    """It has the purpose of each part, and what would have to change without it."""
    users = {i.source for i in ALL_IMPORTS if i.target.startswith(UNPROMISED)}
    assert users == {"pytreemod.tree.traces"}


def test_dependencies_are_the_declared_ones():
    """Everything imported is in the standard library, declared, or an extra in its one room."""
    undeclared = []
    for i in ALL_IMPORTS:
        top = i.target.split(".")[0]
        extras = OPTIONAL.get(f"pytreemod.{room(i.source)}", set())
        if top not in sys.stdlib_module_names | DEPENDENCIES | extras | {"pytreemod"}:
            undeclared.append(i)
    assert undeclared == []


def test_the_type_checking_constant_hides_nothing():
    """Only type checkers see the names that the front door loads later; it hides nothing else."""
    users = [name for name, path in FILES.items() if "TYPE_CHECKING" in path.read_text()]
    assert users == ["pytreemod"]


def test_rooms_say_what_they_own_and_may_import():
    """The docstring of each room names both, also of rooms inside of rooms."""
    rooms = [path for path in FILES.values() if path.name == "__init__.py"]
    texts = {path.parent.name: ast.get_docstring(ast.parse(path.read_text())) for path in rooms}
    # The front door is above all of them.
    del texts["pytreemod"]
    assert len(texts) > 15
    assert [name for name, t in texts.items() if "Owns" not in t or "May import" not in t] == []


def test_no_file_bears_the_name_of_something_it_exports():
    """`from pytreemod.nn import linear` can only ever mean one thing."""
    clashes = []
    for name, path in FILES.items():
        own = name.rsplit(".", 1)[-1]
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == own:
                clashes.append(f"{name}.{node.name}")
    assert clashes == []


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("import jax.numpy as jnp", ["jax.numpy"]),
        ("from pytreemod.tree import paths", ["pytreemod.tree.paths"]),
        ("from pytreemod.tree.paths import path_text", ["pytreemod.tree.paths"]),
        ("def f():\n    from pytreemod.nn import linear", ["pytreemod.nn.linear"]),
        ("if TYPE_CHECKING:\n    import pytreemod.nn", ["pytreemod.nn"]),
        ("x = __import__('pytreemod.nn')", ["pytreemod.nn"]),
        ("import importlib\nimportlib.import_module('jax._src')", ["importlib", "jax._src"]),
    ],
)
def test_the_reader_sees_every_import(text, targets):
    """This test can fail: imports of every kind are found."""
    assert [i.target for i in imports_of("test", text)] == targets

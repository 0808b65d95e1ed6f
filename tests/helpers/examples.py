"""The examples as modules: each file is a script in a folder that is not a package."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples"


@contextmanager
def example(name: str) -> Iterator[ModuleType]:
    """Import an example by its name while the context is active."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # As an import does: dataclasses look up their module by its name.
    sys.modules[spec.name] = module
    # As Python does for a script, because an example may import another.
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        del sys.modules[spec.name]

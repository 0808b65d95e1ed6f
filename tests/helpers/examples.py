"""The examples as modules: each file is a script in a folder that is no package."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples"


@contextmanager
def example(name: str) -> Iterator[ModuleType]:
    """The example of that name, imported as long as the context lasts."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Entered as an import would: dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    # As Python does for a script: it may import another.
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        del sys.modules[spec.name]

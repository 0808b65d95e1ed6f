"""A library that imports Equinox, run over pytreemod.

    python -m tests.parity.alias LIBRARY PROGRAM FILE

`equinox` becomes a module of pytreemod's public names. Names that pytreemod does not have, and all
private ones (`equinox.internal`), come from the real Equinox. Public names that `equinox.internal`
exports again are pytreemod's. This must happen before the library is imported, and so in a separate
process.

Owns: the alias, and the running of a program over it, with the result in a file.
"""

import importlib
import pickle
import sys
import types
import warnings
from pathlib import Path

import equinox
import equinox.internal
import jax
import numpy as np

import pytreemod


def over(real: types.ModuleType) -> types.ModuleType:
    """A module like `real`, with pytreemod's names where they are public names of Equinox's."""
    alias = types.ModuleType(real.__name__)
    alias.__dict__.update(vars(real))
    public = (name for name in dir(equinox) if not name.startswith("_") and name != "internal")
    shared = [name for name in public if hasattr(real, name) and hasattr(pytreemod, name)]
    alias.__dict__.update({name: getattr(pytreemod, name) for name in shared})
    return alias


def install() -> None:
    """From now on, `import equinox` imports pytreemod."""
    alias = over(equinox)
    alias.internal = over(equinox.internal)
    for name in ("nn", "debug"):
        submodule = types.ModuleType(f"equinox.{name}")
        submodule.__dict__.update(vars(getattr(equinox, name)))
        submodule.__dict__.update(vars(getattr(pytreemod, name)))
        setattr(alias, name, submodule)
        sys.modules[f"equinox.{name}"] = submodule
    sys.modules["equinox"] = alias
    sys.modules["equinox.internal"] = alias.internal


def main(library: str, program: str, file: str) -> None:
    """Run `main` of `program` over `library`, and write its result to `file`, arrays as NumPy's."""
    warnings.simplefilter("ignore")  # other libraries' business
    if library == "pytreemod":
        install()
    result = importlib.import_module(program).main()
    is_array = lambda leaf: isinstance(leaf, jax.Array)  # noqa: E731
    plain = jax.tree.map(lambda leaf: np.asarray(leaf) if is_array(leaf) else leaf, result)
    Path(file).write_bytes(pickle.dumps(plain))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The libraries that are compared, and the environment of a measurement."""

import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

MODULES = {"Equinox": "equinox", "NNX": "flax.nnx", "pytreemod": "pytreemod"}
"""The modules, by their name in the tables."""

OURS = "pytreemod"
FILTERING = ("Equinox", "pytreemod")
"""Libraries with the same names for the same functions: one program works with both."""


def installed(*names: str) -> dict[str, Any]:
    """The modules of the installed libraries: of all, or of those named."""
    found: dict[str, Any] = {}
    for name in names or MODULES:
        try:
            found[name] = importlib.import_module(MODULES[name])
        except ModuleNotFoundError as error:
            # A broken library is an error; a missing one is left out.
            if error.name != MODULES[name].partition(".")[0]:
                raise
    return found


def versions() -> dict[str, str]:
    """The version of each installed library."""
    found: dict[str, str] = {}
    for name, module in MODULES.items():
        try:
            found[name] = version(module.partition(".")[0])
        except PackageNotFoundError:
            continue
    return found


def surroundings() -> dict[str, Any]:
    """The versions and the machine, on which the numbers depend."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": versions(),
    }

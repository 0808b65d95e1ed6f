"""Who takes part: which libraries are installed, and the surroundings that numbers depend on."""

import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

MODULES = {"Equinox": "equinox", "NNX": "flax.nnx", "pytreemod": "pytreemod"}
"""By the name that each bears in the tables."""

OURS = "pytreemod"
FILTERING = ("Equinox", "pytreemod")
"""Those that have the same names for the same things, so that one program serves both."""


def installed(*names: str) -> dict[str, Any]:
    """The modules of those that are installed, of all or of those named."""
    found: dict[str, Any] = {}
    for name in names or MODULES:
        try:
            found[name] = importlib.import_module(MODULES[name])
        except ModuleNotFoundError as error:
            # A library that is there and broken is not the same as one that is not there.
            if error.name != MODULES[name].partition(".")[0]:
                raise
    return found


def versions() -> dict[str, str]:
    """Of each that is installed."""
    found: dict[str, str] = {}
    for name, module in MODULES.items():
        try:
            found[name] = version(module.partition(".")[0])
        except PackageNotFoundError:
            continue
    return found


def surroundings() -> dict[str, Any]:
    """What the numbers depend on besides the libraries."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": versions(),
    }

"""`pm.constraints`: what the values of a field satisfy (see `training.constraints`)."""

from pytreemod.training.constraints import *  # noqa: F403

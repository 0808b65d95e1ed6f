"""`pm.select`: selectors of leaves (see `tree.selectors`)."""

from pytreemod.tree.selectors import *  # noqa: F403

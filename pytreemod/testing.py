"""`pm.testing`: assertions about trees, for tests of models (see `debug.testing`)."""

from pytreemod.debug.testing import assert_changed as assert_changed
from pytreemod.debug.testing import assert_trees_close as assert_trees_close

"""`python -m pytreemod.io show FILE`, `python -m pytreemod.io diff FILE FILE`."""

from __future__ import annotations

import sys

from pytreemod.io.showing import main

sys.exit(main(sys.argv[1:]))

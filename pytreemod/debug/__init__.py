"""Room `debug`: looking inside what runs.

Owns: looking at intermediate values, explaining retraces, and counting traces.

May import everything below it (`transform`, `state`, `module`, `tree`); nothing imports it.

Promises: nothing here changes what a program computes.
"""

from pytreemod.debug.capturing import capture as capture
from pytreemod.debug.counting import assert_max_traces as assert_max_traces
from pytreemod.debug.counting import get_num_traces as get_num_traces
from pytreemod.debug.explaining import explain_retraces as explain_retraces

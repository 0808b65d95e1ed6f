"""Room `debug`: inspecting models and running programs.

Owns: summaries, reports, explanations of retraces, counts of traces, assertions about
trees (`testing`).

May import everything below it (`training`, `transform`, `state`, `module`, `tree`); nothing imports
it.

Promises: nothing here changes what a program computes.
"""

from pytreemod.debug.bad_values import FirstBad as FirstBad
from pytreemod.debug.bad_values import first_bad as first_bad
from pytreemod.debug.gradient_reports import GradientReport as GradientReport
from pytreemod.debug.gradient_reports import GradientRow as GradientRow
from pytreemod.debug.gradient_reports import gradient_report as gradient_report
from pytreemod.debug.probing import announce_transform as announce_transform
from pytreemod.debug.probing import backward_nan as backward_nan
from pytreemod.debug.probing import breakpoint_if as breakpoint_if
from pytreemod.debug.probing import inspect_dce as inspect_dce
from pytreemod.debug.probing import store_dce as store_dce
from pytreemod.debug.summaries import Summary as Summary
from pytreemod.debug.summaries import SummaryRow as SummaryRow
from pytreemod.debug.traces import assert_max_traces as assert_max_traces
from pytreemod.debug.traces import explain_retraces as explain_retraces
from pytreemod.debug.traces import get_num_traces as get_num_traces
from pytreemod.transform.capturing import capture as capture
from pytreemod.transform.capturing import intervene as intervene

"""Options of the driver's JVM for a local master with few cores, where it shares them with Python and with its own
compiler and garbage collector."""

from __future__ import annotations

import re

from onceflow.host.java import with_flags

FEW_CORES = 2
#: Of the short JVM that puts the command of Spark's own together.
LAUNCHER = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# One thread is enough for 1 GB, and its heap grows less: on two cores G1 takes 250 MB more, and some CPU.
_COLLECTOR = ("-XX:+UseSerialGC",)
# Ten times the JVM's own bounds. A start runs most of Spark's code some hundred times, so the second compiler takes a
# third of the CPU of a start and never pays for it. What a busy flow runs for each record reaches the bounds soon.
_COMPILER = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)


def for_cores(options: str, cores: int) -> str:
    """These JVM options, with a garbage collector and bounds of the compiler for so few cores, unless they have such
    options already."""
    if cores > FEW_CORES:
        return options
    if not re.search(r"-XX:\+Use\w+GC\b", options):
        options = with_flags(options, list(_COLLECTOR))
    if not re.search(r"-XX:[+-]?(Tier|CompileThreshold)|-Xint|-Xcomp", options):
        options = with_flags(options, list(_COMPILER))
    return options

"""Windows over event time, for processors: ``onceflow.windows``.

::

    from onceflow import serdes, windows

    class PerMinute(windows.WindowProcessor):
        value = serdes.JSON
        window = windows.Tumbling("1 minute")
        allowed_lateness = "10 seconds"
        aggregates = {"count": windows.Count(), "amount": windows.Sum("amount")}
"""

from __future__ import annotations

from onceflow.state.windows.aggregates import Aggregate, Count, Max, Mean, Min, Sum
from onceflow.state.windows.kinds import Hopping, Session, Sliding, Tumbling, Window
from onceflow.state.windows.processor import WindowProcessor

__all__ = [
    "Aggregate",
    "Count",
    "Hopping",
    "Max",
    "Mean",
    "Min",
    "Session",
    "Sliding",
    "Sum",
    "Tumbling",
    "Window",
    "WindowProcessor",
]

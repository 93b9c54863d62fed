"""A run that ends by itself, because all of its reads have a bound (``Flow.read(until=...)``)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from onceflow.errors import OptionError
from onceflow.planning.options import SinkOptions


def bounded(options: SinkOptions, sources: Collection[str], bounds: Collection[str], flow: str) -> SinkOptions:
    """The options of a run as they are if its reads end: as with ``once=True``. Unchanged if no read has a bound.

    Args:
        sources: the topics that are read. bounds: those whose read ends.

    Raises:
        OptionError: some of the reads would not end, or Spark keeps state for the query.
    """
    if not bounds:
        return options
    endless = sorted({*sources} - {*bounds})
    if endless:
        raise OptionError(
            "Some reads of the flow have until= and others have none, so it would never end",
            flow=flow,
            topic=endless[0],
            detail=f"without until=: {', '.join(endless)}",
            next_step='give it to every Flow.read of the flow, for example until="latest"',
        )
    if options.checkpoint is not None:
        raise OptionError(
            "Flow.read(until=...) cannot be used with checkpoint=",
            flow=flow,
            detail="Spark keeps its own offsets in the checkpoint, and those would be beyond the bound",
            next_step="leave until out and give once=True: the flow ends when it has read what is there at its start. "
            "Or keep the state with Flow.process",
        )
    return replace(options, once=True, timers_s=math.inf)

"""Ends a query whose reads have a bound (``Flow.read(until=...)``) as soon as everything before it is committed.

Spark's source would go on to the end of its topics. The sink writes nothing of that, but Spark would plan many batches
for nothing.
"""

from __future__ import annotations

import logging
import threading
import time

from onceflow import log_context
from onceflow.query import FlowQuery

log = logging.getLogger("onceflow")

_LOOK_EVERY_S = 0.1
_BATCH_S = 60.0  # a batch that runs when everything is committed writes nothing any more


def end_when_complete(query: FlowQuery) -> None:
    """Stop the query, in a thread, when it is complete."""

    def run() -> None:
        log_context.add(flow=query.flow)
        while not query.is_over:
            if query.is_complete:
                log.info("flow %s: everything before the end of its reads is committed, it ends", query.flow)
                query.stop(batch_s=_BATCH_S)
                return
            time.sleep(_LOOK_EVERY_S)

    threading.Thread(target=run, daemon=True, name=f"onceflow-until-{query.flow}").start()

"""Ends a query in its engine."""

from __future__ import annotations

import logging
import threading

from onceflow.calls.runner import give_up
from onceflow.driver.batch.batches import Batches
from onceflow.engine_query import EngineQuery
from onceflow.logs import log_context

log = logging.getLogger("onceflow")

# The thread of a query normally ends in milliseconds, unless it waits for brokers.
_STOP_S, _LOOK_S = 10.0, 0.1


class QueryStop:
    """The stop of one query."""

    def __init__(self, engine: EngineQuery, sink: Batches) -> None:
        self._engine = engine
        self._sink = sink
        self._left_behind = False

    def __call__(self, *, idle: bool) -> None:
        """Stop the query in its engine, and wait for its thread.

        If brokers do not answer, Spark's thread first waits for its Kafka clients, up to ``default.api.timeout.ms``
        (``KafkaAdminClient.close``). If no batch is running, nothing depends on that, so this call returns earlier.

        Args:
            idle: whether it is certain that no batch is running, and that none begins.
        """
        if self._left_behind:
            return
        raised: list[BaseException] = []

        def stop() -> None:
            try:
                self._engine.stop()
            except BaseException as error:  # raised later in the thread of the caller
                raised.append(error)

        thread = threading.Thread(target=stop, name="onceflow-stop", daemon=True)
        thread.start()
        thread.join(_STOP_S)
        flow = self._sink.flow
        while thread.is_alive():
            give_up(flow)  # the batch may have begun its calls only now
            # The lock is never released: if a batch still begins, it ends at once.
            if idle or self._sink.turn.acquire(blocking=False):
                self._left_behind = True
                with log_context.within(flow=flow):
                    log.warning("flow %s: stopped, without waiting for requests that brokers do not answer", flow)
                return
            thread.join(_LOOK_S)
        if raised:
            raise raised[0]

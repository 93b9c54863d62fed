"""Log lines of tasks: JSON where the environment of the worker asks for it, with the batch that the task works for."""

from __future__ import annotations

import functools
import logging
import os

from onceflow.logs import log_context
from onceflow.messages import TaskInfo, WriteOrder

log = logging.getLogger("onceflow.task")


def of_batch(order: WriteOrder, info: TaskInfo) -> log_context.within:
    """The context in which a task writes its lines. Workers are used again, by other flows and by other queries."""
    use_format()
    return log_context.within(
        flow=order.flow,
        batch=order.batch,
        producer_id=order.producer.producer_id,
        producer_epoch=order.producer.producer_epoch,
        task=info.task,
    )


def of_reading(flow: str, task: int) -> log_context.within:
    """The same for a task that only reads."""
    use_format()
    return log_context.within(flow=flow, task=task)


def use_format() -> None:
    """Write lines as JSON from now on, if the environment says so. Neither a wrong value nor a missing package fails a
    task."""
    if os.environ.get(log_context.VARIABLE) == log_context.JSON:
        try:
            from onceflow.logs import json_logs  # a worker needs its package only for this
        except ImportError as missing:
            _warn(str(missing))
            return
        json_logs.use_json()


@functools.cache
def _warn(missing: str) -> None:
    """Once per process."""
    log.warning("log lines of tasks are not JSON, because this worker lacks a package: %s", missing)

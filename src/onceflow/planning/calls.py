"""Calls of other services: ``Flow.enrich``, and whether calls fit into a transaction."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from pyspark.sql import DataFrame

from onceflow.calls.concurrently import Calls
from onceflow.errors import OptionError
from onceflow.planning.dead_letter_limit import check_limit
from onceflow.planning.step_frames import state_columns
from onceflow.protocol.names import OwnTopics
from onceflow.task.call_rows import CallOrder, CallRows
from onceflow.task.step_outputs import OUTPUT_SPARK_SCHEMA

log = logging.getLogger("onceflow")

# No service across a network answers as fast as that.
_VERY_FAST_S = 0.02


def check_enrich(order: CallOrder, own: OwnTopics) -> None:
    """Check the arguments of ``Flow.enrich``.

    Raises:
        OptionError: see its text.
    """
    calls: object = order.calls
    flow, letters = order.flow, order.dead_letter_topic
    if not isinstance(calls, Calls):
        raise OptionError(
            f"Flow.enrich takes what onceflow.concurrently returns, not {calls!r:.100}",
            flow=flow,
            next_step="for example flow.enrich(df, onceflow.concurrently(score), topic=...)",
        )
    check_limit(order.max_dead_letters, flow)
    if order.max_dead_letters is not None and letters is None:
        raise OptionError(
            "max_dead_letters= is given, but there are no dead letters",
            flow=flow,
            next_step="give dead_letter_topic=, too; without it, the first call that fails stops the flow",
        )
    if letters == order.topic:
        raise OptionError(
            f"Results and dead letters would both go to {letters!r}",
            flow=flow,
            next_step="give the dead letters a topic of their own",
        )
    for topic in (order.topic, letters):
        why = "" if topic is None else own.refusal(topic)
        if topic == "" or why:
            raise OptionError(
                f"Flow.enrich cannot write to {topic!r}{', which ' + why if why else ''}",
                flow=flow,
                next_step="give its records and its dead letters topics of their own",
            )


def enrich_frame(df: DataFrame, task: CallRows) -> DataFrame:
    """What ``Flow.enrich`` returns.

    Raises:
        SchemaError: the DataFrame lacks columns, or they have wrong types.
    """
    rows = state_columns(df, task.order.flow, one_topic=False)
    return rows.mapInArrow(task, OUTPUT_SPARK_SCHEMA)


def check_times(calls: Iterable[Calls], transaction_s: float, records: Iterable[int | None], flow: str) -> None:
    """Check that a call can end before the transaction of its batch does. Warn if the calls of a large batch can not.

    Args:
        transaction_s: for how long a transaction may be open.
        records: most records of one batch, of each source; None: any number.

    Raises:
        OptionError: it cannot.
    """
    counts = [math.inf if count is None else count for count in records]
    for each in calls:
        options = each.target.options
        if options.longest_s >= transaction_s:
            raise OptionError(
                f"One call of {each.target.name} can take {options.longest_s:g} s with all its attempts, but "
                f"transaction_timeout is {transaction_s:g} s",
                flow=flow,
                detail=f"timeout {options.timeout_s:g} s, retries {options.retries}, backoff {options.backoff_s:g} s",
                next_step="lower timeout= or retries= of onceflow.concurrently, give it a deadline=, or raise "
                "transaction_timeout of Flow.write",
            )
        must_take_s = options.limit * transaction_s / max(1, sum(counts))
        if must_take_s < _VERY_FAST_S:
            log.warning(
                "flow %s: a batch may have %s records. With limit=%d, a task makes all calls of %s in time only if one "
                "takes less than %.0f ms; lower max_records_per_batch of Flow.read",
                flow,
                "any number of" if math.isinf(sum(counts)) else f"{sum(counts):,.0f}",
                options.limit,
                each.target.name,
                must_take_s * 1000,
            )

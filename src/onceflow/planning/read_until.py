"""Where a read that ends stops: a pure decision from ``Flow.read(until=...)`` and the offsets of the topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from onceflow.errors import OptionError
from onceflow.options.instants import instant_ms
from onceflow.planning.source_starts import SourceTopic, is_count

Until = str | int | datetime | Mapping[int, int]
LATEST = "latest"


@dataclass(frozen=True)
class ReadBound:
    """``until`` of a read, checked.

    Args:
        timestamp_ms: up to the first record with this timestamp or a later one, epoch milliseconds.
        offsets: up to these offsets, by partition.

    Without both it is ``latest``: up to the end of the topic now.
    """

    timestamp_ms: int | None = None
    offsets: Mapping[int, int] | None = None


def check_until(until: Any, *, topic: str, flow: str, now_ms: int) -> ReadBound | None:
    """The bound of a read; None: it has none.

    Args:
        now_ms: the time, epoch milliseconds.

    Raises:
        OptionError: it is neither of what ``Flow.read`` takes, or a time to come.
    """
    if until is None:
        return None
    if isinstance(until, Mapping):
        for partition, offset in until.items():
            if not (is_count(partition) and is_count(offset)):
                raise _refused(f"until={{{partition!r}: {offset!r}}} is not {{partition: offset}}", topic, flow)
        return ReadBound(offsets=dict(until))
    if isinstance(until, str) and until.strip().lower() == LATEST:
        return ReadBound()
    try:
        timestamp_ms = instant_ms(until)
    except ValueError as error:
        raise _refused(f"until={until!r} is not a bound: {error}", topic, flow) from None
    if timestamp_ms > now_ms:
        raise OptionError(
            f"until={until!r} is a time to come: nobody knows yet which records are before it",
            flow=flow,
            topic=topic,
            next_step="give a time that has passed, or leave until out and stop the flow when it is time",
        )
    return ReadBound(timestamp_ms=timestamp_ms)


def bound_offsets(
    topic: SourceTopic,
    start: Mapping[int, int],
    bound: ReadBound,
    at_time: Mapping[int, int] | None,
    *,
    flow: str,
) -> dict[int, int]:
    """Where each partition ends: the first offset that is not read. It is never before the start.

    Args:
        start: where each partition is read from.
        at_time: the first offset with the timestamp of the bound; -1: there is none, the partition ends before it.

    Raises:
        OptionError: the offsets of the bound are not those of the topic's partitions, or are beyond its end.
    """
    if bound.offsets is not None:
        _check_offsets(topic, bound.offsets, flow)
        ends: Mapping[int, int] = bound.offsets
    elif at_time is not None:
        ends = {partition: topic.latest[partition] if found < 0 else found for partition, found in at_time.items()}
    else:
        ends = topic.latest
    return {partition: max(start[partition], min(ends[partition], topic.latest[partition])) for partition in start}


def _check_offsets(topic: SourceTopic, offsets: Mapping[int, int], flow: str) -> None:
    missing, unknown = sorted(set(topic.latest) - set(offsets)), sorted(set(offsets) - set(topic.latest))
    if missing or unknown:
        raise OptionError(
            f"until= must name every partition of {topic.name} and no other",
            flow=flow,
            topic=topic.name,
            detail=f"missing {missing}, unknown {unknown}",
            next_step="give one offset for each partition",
        )
    for partition, offset in offsets.items():
        if offset > topic.latest[partition]:
            raise OptionError(
                f"until= of {topic.name}-{partition} is {offset}, the log ends at {topic.latest[partition]}",
                flow=flow,
                topic=f"{topic.name}-{partition}",
                next_step='give an offset that exists, or until="latest" for all that is there now',
            )


def _refused(what: str, topic: str, flow: str) -> OptionError:
    return OptionError(
        what,
        flow=flow,
        topic=topic,
        next_step='give "latest", a time such as "2025-01-31T08:00:00Z" (or a datetime with a time zone, or epoch '
        "milliseconds), or {partition: offset} of all partitions",
    )

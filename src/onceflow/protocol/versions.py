"""How a flow follows another one: as a copy of it (`onceflow fork`), or in its place (`onceflow promote`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onceflow.protocol.progress_fields import Offsets, garbage, offsets, plain, short, take


@dataclass(frozen=True)
class ForkOrigin:
    """Where a flow comes from that was made by `onceflow fork`.

    Args:
        flow: progress key of the flow that was copied.
        batch_id: its last batch that is in the copy.
        time_ms: when it was copied, epoch milliseconds.
        offsets: the source position of the copy, in the form of `Progress.offsets`.
        tables: by table of that flow, its copy.
        outputs: by topic and partition, the first offset behind what the copied flow had written up to there. Only
            topics that its progress records have named lately.
        producer_id, producer_epoch: of the transaction that has copied it; -1: not known, earlier builds have not kept
            them. What that producer wrote before is not of this copy, but of an earlier flow with its name.
    """

    flow: str
    batch_id: int
    time_ms: int
    offsets: Offsets = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    outputs: Offsets = field(default_factory=dict)
    producer_id: int = -1
    producer_epoch: int = -1


class TimerId(NamedTuple):
    """One registration of a timer.

    Args:
        key: bytes of its key, in hexadecimal digits.
        name: unique for the key.
        clock: ``event`` or ``processing``.
        at_ms: when it is due, epoch milliseconds.
    """

    key: str
    name: str
    clock: str
    at_ms: int


@dataclass(frozen=True)
class HandOver:
    """What an earlier version of a flow has written already. The new version changes its state for it, and writes no
    outputs.

    Args:
        offsets: the source position of the earlier version. Outputs of the records before it are written.
        timers: by table and clock, the time up to which timers have fired; without an entry, none has.
        unfired: by table, the timers before that time that have not fired all the same. Their outputs are not written.
    """

    offsets: Offsets
    timers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unfired: Mapping[str, frozenset[TimerId]] = field(default_factory=dict)


@dataclass(frozen=True)
class Promotion:
    """That another flow has taken this flow's place.

    Args:
        flow: progress key of the other flow, which does not exist any more.
        time_ms: when that was, epoch milliseconds.
        tables: tables of earlier versions, which are not this flow's any more, and what has replaced each: the name of
            a table, or '' for nothing.
        batch_id: this flow's last batch before that; None: not known, earlier builds have not kept it.
        inherited: the tables that this flow has got from the other one, if `batch_id` is known.
    """

    flow: str
    time_ms: int
    tables: Mapping[str, str] = field(default_factory=dict)
    batch_id: int | None = None
    inherited: tuple[str, ...] = ()


def fork_content(forked: ForkOrigin) -> dict[str, Any]:
    """The JSON object of a `ForkOrigin`."""
    content = {
        "flow": forked.flow,
        "batch_id": int(forked.batch_id),
        "time_ms": int(forked.time_ms),
        "offsets": plain(forked.offsets),
        "tables": dict(forked.tables),
        "outputs": plain(forked.outputs),
    }
    if forked.producer_id >= 0:
        content |= {"producer_id": int(forked.producer_id), "producer_epoch": int(forked.producer_epoch)}
    return content


def fork_of(content: dict[str, Any], flow: str) -> ForkOrigin:
    """The `ForkOrigin` of a JSON object."""
    known = "producer_id" in content
    return ForkOrigin(
        flow=take(content, flow, "flow", str),
        batch_id=take(content, flow, "batch_id", int),
        time_ms=take(content, flow, "time_ms", int),
        offsets=offsets(content, flow, "offsets"),
        tables=_names(content, flow, "tables"),
        outputs=offsets(content, flow, "outputs"),
        producer_id=take(content, flow, "producer_id", int) if known else -1,
        producer_epoch=take(content, flow, "producer_epoch", int) if known else -1,
    )


def handover_content(handover: HandOver) -> dict[str, Any]:
    """The JSON object of a `HandOver`."""
    content: dict[str, Any] = {
        "offsets": plain(handover.offsets),
        "timers": {table: times_content(times) for table, times in handover.timers.items()},
    }
    if handover.unfired:
        content["unfired"] = {table: [[*each] for each in sorted(ids)] for table, ids in handover.unfired.items()}
    return content


def handover_of(content: dict[str, Any], flow: str) -> HandOver:
    """The `HandOver` of a JSON object."""
    timers = take(content, flow, "timers", dict)
    unfired = take(content, flow, "unfired", dict) if "unfired" in content else {}
    return HandOver(
        offsets(content, flow, "offsets"),
        {table: times_of(timers, flow, table) for table in timers},
        {table: _timer_ids(unfired, flow, table) for table in unfired},
    )


def promotion_content(promoted: Promotion) -> dict[str, Any]:
    """The JSON object of a `Promotion`."""
    content = {"flow": promoted.flow, "time_ms": int(promoted.time_ms), "tables": dict(promoted.tables)}
    if promoted.batch_id is not None:
        content |= {"batch_id": int(promoted.batch_id), "inherited": list(promoted.inherited)}
    return content


def promotion_of(content: dict[str, Any], flow: str) -> Promotion:
    """The `Promotion` of a JSON object."""
    known = "batch_id" in content
    inherited = take(content, flow, "inherited", list) if known else []
    if not all(isinstance(name, str) for name in inherited):
        garbage(flow, "inherited has a name that is not a text")
    return Promotion(
        take(content, flow, "flow", str),
        take(content, flow, "time_ms", int),
        _names(content, flow, "tables"),
        take(content, flow, "batch_id", int) if known else None,
        tuple(inherited),
    )


def times_content(times: Mapping[str, int]) -> dict[str, int]:
    """Times by name, as JSON."""
    return {name: int(ms) for name, ms in sorted(times.items())}


def times_of(content: dict[str, Any], flow: str, name: str) -> dict[str, int]:
    """Times by name, from JSON."""
    times = take(content, flow, name, dict)
    return {each: take(times, flow, each, int) for each in times}


def _timer_ids(content: dict[str, Any], flow: str, table: str) -> frozenset[TimerId]:
    found = take(content, flow, table, list)
    for each in found:
        if not (isinstance(each, list) and [type(part) for part in each] == [str, str, str, int]):
            garbage(flow, f"unfired of {table} has {short(each)}")
    return frozenset(TimerId(*each) for each in found)


def _names(content: dict[str, Any], flow: str, field_: str) -> dict[str, str]:
    names = take(content, flow, field_, dict)
    if not all(isinstance(name, str) for name in names.values()):
        garbage(flow, f"{field_} has a name that is not a text")
    return dict(names)

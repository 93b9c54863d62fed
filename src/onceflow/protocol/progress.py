"""The progress record: what a flow has committed, as one record per flow in a compacted topic.

It is written in the transaction of the batch that it describes, so it becomes visible exactly when the batch does
(I1). The key is the flow's name. The value is JSON with a format number, which any consumer can read. Readers ignore
unknown fields. They refuse a format number above their own, because in a newer format the same fields may have another
meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa

from onceflow.errors import ProgressConflictError
from onceflow.protocol import progress_fields
from onceflow.protocol import versions as succession
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress_fields import PROGRESS_TOPIC, Epochs, Offsets, garbage, plain, short, take
from onceflow.protocol.versions import ForkOrigin, HandOver, Promotion, TimerId

__all__ = [
    "NO_TIMER",
    "PROGRESS_FORMAT",
    "PROGRESS_TOPIC",
    "CheckpointProgress",
    "DriverProcess",
    "Epochs",
    "EventTime",
    "ForkOrigin",
    "HandOver",
    "LocalTable",
    "Offsets",
    "Origin",
    "Progress",
    "Promotion",
    "TableProgress",
    "TimerId",
    "decode",
    "encode",
    "progress_partition",
]

PROGRESS_FORMAT = 2
"""The highest format that is read. It is written if a field has the form for many partitions
(`progress_fields.MANY`), which versions that know only format 1 cannot read. Otherwise format 1 is written."""

NO_TIMER = (1 << 63) - 1
"""In place of the time of a timer: there is no timer."""

Origin: TypeAlias = tuple[str | None, int]
"""Where rows of a step come from: topic and partition of a source. If the topic is None, they come from another step,
and the number is that of its table's partition."""

_T = TypeVar("_T")


class EventTime(NamedTuple):
    """How far event time has come in one partition.

    Args:
        latest_ms: the latest event time, epoch milliseconds; None: no record with one was seen yet.
        since_ms: when records with an event time were seen last, or when the flow has begun to look for them; epoch
            milliseconds of the driver's clock.
    """

    latest_ms: int | None
    since_ms: int


@dataclass(frozen=True)
class LocalTable:
    """A table without a changelog: it has no topics, its rows are only in local stores.

    Args:
        table_id: made up when the flow gets the table. It tells its copies from those of an earlier life of the flow.
        partitions: how many partitions its keys are divided among.
        last: by partition, the transaction that has changed it last: batch, producer id, producer epoch. A partition
            that was never changed is missing.
    """

    table_id: str
    partitions: int
    last: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class TableProgress:
    """What a flow has committed about one of its tables, besides the end offsets.

    Args:
        version: version of the processor's state.
        watermark_ms: event-time watermark for the next batch, epoch milliseconds.
        fields: names and types of the state fields that the processor declares; None: it declares none.
        local: what takes the place of end offsets if the table has no changelog; None: it has one.
        open_ended: whether the table was ever written without transactions (at_least_once). Then rows after the end
            offsets may belong to a batch that has no progress, and compaction may have removed the rows before them.
        fired: by clock (``event``, ``processing``), if a timer of it has ever fired: the time up to which the last
            batch has fired timers, epoch milliseconds.
        soonest: by clock, the time of the earliest timer that is left; `NO_TIMER`: there is none. Missing: not known.
        unfired: partitions that may have timers which are due before that time, and have not fired: more of them were
            due than one batch may fire, or they were registered for a time that had passed.
        processing_timers: whether there was ever a timer in processing time; None: not known.
        event_times: how far event time has come, by partition; empty if the table does not use it.
        event_times_ms: as of when that is, epoch milliseconds of the driver's clock. The record may be newer: a start
            and commands commit progress, too, and know nothing new of event time.
        schemas: ids of the schemas in a registry with which this version of the processor has written state.
    """

    version: int = 0
    watermark_ms: int | None = None
    fields: str | None = None
    local: LocalTable | None = None
    open_ended: bool = False
    fired: Mapping[str, int] = field(default_factory=dict)
    soonest: Mapping[str, int] = field(default_factory=dict)
    unfired: tuple[int, ...] = ()
    processing_timers: bool | None = None
    event_times: Mapping[Origin, EventTime] = field(default_factory=dict)
    event_times_ms: int = 0
    schemas: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckpointProgress:
    """The batch of a Spark checkpoint that a progress record belongs to.

    Args:
        query_id: id of the query, from the checkpoint's ``metadata``.
        batch: Spark's number of the batch.
        digest: digest of the end offsets of all sources, as stored in the checkpoint. It distinguishes the batch from
            another one that was planned with the same number.
        commit: the entry of Spark's commit log for the batch, in the form in which Spark writes it; None: not known.
    """

    query_id: str
    batch: int
    digest: str
    commit: str | None = None


@dataclass(frozen=True)
class DriverProcess:
    """The process of a driver.

    Args:
        host, pid: the name of its machine, and its process id there.
        since_ms: when it has fenced the drivers before it, epoch milliseconds.
    """

    host: str
    pid: int
    since_ms: int


@dataclass(frozen=True)
class Progress:
    """State of a flow after its last committed batch.

    Args:
        flow: name of the flow.
        batch_id: number of the committed batch, counted since the flow's first start.
        offsets: source end offsets: topic, partition, next offset to read.
        topic_ids: source topic -> Kafka's topic id, to detect a topic that was deleted and created again.
        changelogs: end offsets of the table topics, in the form of ``offsets``.
        checkpoint: the batch in Spark's checkpoint, if the query has one.
        watermark_ms: event-time watermark for the next batch, epoch milliseconds.
        tables: name of the table topic -> other facts about the table.
        joined: at which offsets the batch has seen the topics that the flow joins with, in the form of ``offsets``.
        joined_ms: the time of the batch for these topics: rows that had expired then were hidden from it.
        outputs: topics that the batch has written to, without table topics.
        side_topics: topics for records that the program sets aside: topic -> ``dead letter``, ``late``, ``duplicate``
            or ``parked``.
        producer_id, producer_epoch: those of the batch's transaction. With them a start finds out whether pending
            changes of a local store are committed, and which undecided records belong to the batch. -1: unknown.
        forked: where the flow comes from, if it is a fork of another one.
        promoted: which flow has taken its place; None: none has.
        handover: after that, what is in the outputs already; None: nothing behind ``offsets``.
        epochs: leaders of the sources: with them, a start finds out whether the records before ``offsets`` are still
            there (KIP-320). A fact about the log, not about the position, so it may be older than ``offsets``.
        became: the progress key of the flow whose place this one has taken: it does not exist under its own name any
            more; None: it exists.
        driver: which driver has committed it; None: a command has, or a version that did not write it.
        external: the system other than Kafka that the flow writes, in words; "": it writes none.
        external_commit: a random text of the transaction of that system which has committed the batch: two batches may
            have one number, after a reset, or in clusters with the same id. "": not known.
        external_before: the ``external_commit`` of the progress that this batch has begun from; None: not known.
        transactional_id: of the flow. Flows may share the key of the record: prefix ``a.`` with name ``b``, and name
            ``a.b`` without a prefix. Their transactional ids differ, so they do not fence each other. "": not known.
        elsewhere: what failed attempts have found, and when, epoch milliseconds: ``keys`` (records were not in the
            partitions where Kafka's default partitioner puts their keys), ``outputs`` (outputs of a step belong to
            partitions of other tasks). The next driver need not find it out again.
        time_ms: when the record was created, epoch milliseconds.
    """

    flow: str
    batch_id: int
    offsets: Offsets
    topic_ids: Mapping[str, str]
    time_ms: int
    changelogs: Offsets = field(default_factory=dict)
    checkpoint: CheckpointProgress | None = None
    watermark_ms: int | None = None
    tables: Mapping[str, TableProgress] = field(default_factory=dict)
    joined: Offsets = field(default_factory=dict)
    joined_ms: int | None = None
    outputs: tuple[str, ...] = ()
    side_topics: Mapping[str, str] = field(default_factory=dict)
    producer_id: int = -1
    producer_epoch: int = -1
    forked: ForkOrigin | None = None
    promoted: Promotion | None = None
    handover: HandOver | None = None
    epochs: Epochs = field(default_factory=dict)
    became: str | None = None
    driver: DriverProcess | None = None
    external: str = ""
    external_commit: str = ""
    external_before: str | None = None
    transactional_id: str = ""
    elsewhere: Mapping[str, int] = field(default_factory=dict)


def progress_partition(flow: str, partition_count: int) -> int:
    """Partition of the progress topic with the record of a flow: the Java client would choose the same for its key."""
    return int(key_partitions(pa.array([flow.encode()], pa.binary()), partition_count)[0])


def encode(progress: Progress) -> tuple[bytes, bytes]:
    """Key and value of the record. Equal progress gives equal bytes."""
    content = {
        "batch_id": int(progress.batch_id),
        "changelogs": plain(progress.changelogs),
        "checkpoint_query_id": None if progress.checkpoint is None else progress.checkpoint.query_id,
        "flow": progress.flow,
        "offsets": plain(progress.offsets),
        "time_ms": int(progress.time_ms),
        "topic_ids": dict(progress.topic_ids),
        "watermark_ms": None if progress.watermark_ms is None else int(progress.watermark_ms),
    }
    if progress.checkpoint is not None:
        kept: dict[str, Any] = {"batch": int(progress.checkpoint.batch), "digest": progress.checkpoint.digest}
        if progress.checkpoint.commit is not None:
            kept["commit"] = progress.checkpoint.commit
        content["checkpoint"] = kept
    if progress.producer_id >= 0:
        content |= {"producer_id": int(progress.producer_id), "producer_epoch": int(progress.producer_epoch)}
    if progress.joined:
        content["joined"] = plain(progress.joined)
    if progress.joined_ms is not None:
        content["joined_ms"] = int(progress.joined_ms)
    if progress.outputs:
        content["outputs"] = list(progress.outputs)
    if progress.side_topics:
        content["side_topics"] = dict(progress.side_topics)
    if progress.forked is not None:
        content["forked"] = succession.fork_content(progress.forked)
    if progress.promoted is not None:
        content["promoted"] = succession.promotion_content(progress.promoted)
    if progress.handover is not None:
        content["handover"] = succession.handover_content(progress.handover)
    content |= progress_fields.epochs_content(progress.epochs, progress.offsets)
    if progress.became is not None:
        content["became"] = progress.became
    if progress.driver is not None:
        process = progress.driver
        content["driver"] = {"host": process.host, "pid": int(process.pid), "since_ms": int(process.since_ms)}
    texts = {name: getattr(progress, name) for name in ("external", "external_commit", "transactional_id")}
    content |= {name: text for name, text in texts.items() if text}
    if progress.external_before is not None:
        content["external_before"] = progress.external_before
    if progress.elsewhere:
        content["elsewhere"] = succession.times_content(progress.elsewhere)
    if progress.tables:
        content["tables"] = {name: _table_content(table) for name, table in progress.tables.items()}
    content["format"] = PROGRESS_FORMAT if _is_long(content) else 1
    value = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return progress.flow.encode(), value.encode()


def decode(key: bytes | None, value: bytes) -> Progress:
    """Decode a progress record.

    Raises:
        ProtocolError: the bytes are not a progress record.
        ProgressConflictError: it was written by a newer onceflow, or under the key of another flow.
    """
    name = _flow_of(key)
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        garbage(name, f"the value is not JSON: {error}")
    if not isinstance(content, dict):
        garbage(name, f"the value is a JSON {type(content).__name__}, not an object")
    _check_version(content, name)
    flow = take(content, name, "flow", str)
    if flow != name:
        raise ProgressConflictError(
            f"the progress record under this flow's key belongs to flow {flow!r}",
            next_step=f"find out who writes to {PROGRESS_TOPIC}; only onceflow may.",
            flow=name,
        )
    return _progress(content, name)


def _is_long(content: dict[str, Any]) -> bool:
    """Whether a field of a record has the form for many partitions."""
    forked, handover = content.get("forked", {}), content.get("handover", {})
    offsets = [
        *(content.get(name, {}) for name in ("offsets", "changelogs", "joined")),
        *(forked.get(name, {}) for name in ("offsets", "outputs")),
        handover.get("offsets", {}),
    ]
    times = [table.get("event_times", {}) for table in content.get("tables", {}).values()]
    return (
        "leaders" in content
        or any(isinstance(each, list) for by_topic in offsets for each in by_topic.values())
        or any("partitions" in each for by_topic in times for each in by_topic.values())
    )


def _progress(content: dict[str, Any], name: str) -> Progress:
    batch_id = take(content, name, "batch_id", int)
    if batch_id < 0:
        garbage(name, f"batch_id is {batch_id}")
    offsets = progress_fields.offsets(content, name, "offsets")
    return Progress(
        flow=name,
        batch_id=batch_id,
        offsets=offsets,
        topic_ids=progress_fields.texts(content, name, "topic_ids"),
        changelogs=progress_fields.offsets(content, name, "changelogs") if "changelogs" in content else {},
        checkpoint=_checkpoint(content, name),
        watermark_ms=None if content.get("watermark_ms") is None else take(content, name, "watermark_ms", int),
        tables=_tables(content, name) if "tables" in content else {},
        joined=progress_fields.offsets(content, name, "joined") if "joined" in content else {},
        joined_ms=take(content, name, "joined_ms", int) if "joined_ms" in content else None,
        outputs=_topics(content, name) if "outputs" in content else (),
        side_topics=progress_fields.texts(content, name, "side_topics") if "side_topics" in content else {},
        producer_id=take(content, name, "producer_id", int) if "producer_id" in content else -1,
        producer_epoch=take(content, name, "producer_epoch", int) if "producer_epoch" in content else -1,
        forked=_part(content, name, "forked", succession.fork_of),
        promoted=_part(content, name, "promoted", succession.promotion_of),
        handover=_part(content, name, "handover", succession.handover_of),
        epochs=progress_fields.epochs_of(content, name, offsets),
        became=take(content, name, "became", str) if "became" in content else None,
        driver=_part(content, name, "driver", _driver),
        external=take(content, name, "external", str) if "external" in content else "",
        external_commit=take(content, name, "external_commit", str) if "external_commit" in content else "",
        external_before=take(content, name, "external_before", str) if "external_before" in content else None,
        transactional_id=take(content, name, "transactional_id", str) if "transactional_id" in content else "",
        elsewhere=succession.times_of(content, name, "elsewhere") if "elsewhere" in content else {},
        time_ms=take(content, name, "time_ms", int),
    )


def _check_version(content: dict[str, Any], flow: str) -> None:
    version: int = take(content, flow, "format", int)
    if version > PROGRESS_FORMAT:
        raise ProgressConflictError(
            "the flow's progress was written by a newer onceflow",
            next_step="upgrade onceflow here to at least the version that last ran this flow.",
            flow=flow,
            detail=f"record format {version}, this version reads up to {PROGRESS_FORMAT}",
        )
    if version < 1:
        garbage(flow, f"format is {version}")


def _table_content(table: TableProgress) -> dict[str, Any]:
    content: dict[str, Any] = {"version": int(table.version), "watermark_ms": table.watermark_ms}
    if table.fields is not None:
        content["fields"] = table.fields
    if table.open_ended:
        content["open_ended"] = True
    if table.fired:
        content["fired"] = succession.times_content(table.fired)
    if table.soonest:
        content["soonest"] = succession.times_content(table.soonest)
    if table.unfired:
        content["unfired"] = [int(partition) for partition in sorted(table.unfired)]
    if table.schemas:
        content["schemas"] = [int(schema_id) for schema_id in sorted(table.schemas)]
    if table.processing_timers is not None:
        content["processing_timers"] = table.processing_timers
    if table.event_times:
        content["event_times"] = _event_times_content(table.event_times)
        content["event_times_ms"] = int(table.event_times_ms)
    if table.local is not None:
        last = {
            int(partition): [int(part) for part in commit] for partition, commit in sorted(table.local.last.items())
        }
        content["local"] = {"table_id": table.local.table_id, "partitions": int(table.local.partitions), "last": last}
    return content


def _flow_of(key: bytes | None) -> str:
    try:
        name = (key or b"").decode()
    except UnicodeDecodeError:
        name = ""
    if not name:
        garbage(None, f"the key is {key!r}, not the name of a flow")
    return name


def _part(content: dict[str, Any], flow: str, name: str, read: Callable[[dict[str, Any], str], _T]) -> _T | None:
    return read(take(content, flow, name, dict), flow) if name in content else None


def _topics(content: dict[str, Any], flow: str) -> tuple[str, ...]:
    topics = take(content, flow, "outputs", list)
    for topic in topics:
        if not isinstance(topic, str):
            garbage(flow, f"outputs has {short(topic)}")
    return tuple(topics)


def _tables(content: dict[str, Any], flow: str) -> dict[str, TableProgress]:
    result: dict[str, TableProgress] = {}
    for topic, table in take(content, flow, "tables", dict).items():
        if not isinstance(table, dict):
            garbage(flow, f"tables of {topic} is {short(table)}")
        watermark_ms, processing = table.get("watermark_ms"), table.get("processing_timers")
        times = _event_times(take(table, flow, "event_times", dict), flow) if "event_times" in table else {}
        # Records of earlier versions have no such time: that of the record is the nearest that is known.
        times_of = table if "event_times_ms" in table else {"event_times_ms": content.get("time_ms")}
        result[topic] = TableProgress(
            version=take(table, flow, "version", int),
            watermark_ms=None if watermark_ms is None else take(table, flow, "watermark_ms", int),
            fields=take(table, flow, "fields", str) if "fields" in table else None,
            open_ended=table.get("open_ended") is True,
            fired=succession.times_of(table, flow, "fired") if "fired" in table else {},
            soonest=succession.times_of(table, flow, "soonest") if "soonest" in table else {},
            unfired=_numbers(table, flow, "unfired") if "unfired" in table else (),
            processing_timers=processing if isinstance(processing, bool) else None,
            event_times=times,
            event_times_ms=take(times_of, flow, "event_times_ms", int) if times else 0,
            local=_local(take(table, flow, "local", dict), flow) if "local" in table else None,
            schemas=_numbers(table, flow, "schemas") if "schemas" in table else (),
        )
    return result


def _numbers(content: dict[str, Any], flow: str, name: str) -> tuple[int, ...]:
    numbers = take(content, flow, name, list)
    if any(type(number) is not int or number < 0 for number in numbers):
        garbage(flow, f"{name} is {short(numbers)}")
    return tuple(numbers)


def _event_times_content(found: Mapping[Origin, EventTime]) -> dict[str, Any]:
    """By topic, which is empty for rows of another step, and partition: the two numbers of an `EventTime`.

    If there are many partitions: the partitions, and differences from the smallest number. Partitions that begin at 0
    and have no gaps are only counted.
    """
    by_topic: dict[str, dict[int, EventTime]] = {}
    for (topic, partition), time in found.items():
        by_topic.setdefault(topic or "", {})[int(partition)] = time
    content: dict[str, Any] = {}
    for topic, times in by_topic.items():
        numbers = sorted(times)
        if len(numbers) < progress_fields.MANY:
            content[topic] = {
                str(number): [None if latest_ms is None else int(latest_ms), int(since_ms)]
                for number, (latest_ms, since_ms) in sorted(times.items())
            }
            continue
        content[topic] = {
            "partitions": len(numbers) if numbers == list(range(len(numbers))) else numbers,
            "latest_ms": _differences([times[number].latest_ms for number in numbers]),
            "since_ms": _differences([times[number].since_ms for number in numbers]),
        }
    return content


def _differences(numbers: list[int | None]) -> list[Any]:
    """The smallest number, then what each one adds to it; null stays null."""
    least = min((int(number) for number in numbers if number is not None), default=0)
    return [least, [None if number is None else int(number) - least for number in numbers]]


def _event_times(content: dict[str, Any], flow: str) -> dict[Origin, EventTime]:
    found: dict[Origin, EventTime] = {}
    for topic, partitions in content.items():
        if isinstance(partitions, dict) and "partitions" in partitions:
            found |= {(topic or None, number): time for number, time in _times_of(partitions, topic, flow)}
            continue
        for partition, pair in (partitions if isinstance(partitions, dict) else {topic: partitions}).items():
            legal = partition.isascii() and partition.isdecimal() and isinstance(pair, list) and len(pair) == 2
            if not legal or type(pair[1]) is not int or not (pair[0] is None or type(pair[0]) is int):
                garbage(flow, f"event_times of {topic} has {short(partition)}: {short(pair)}")
            found[topic or None, int(partition)] = EventTime(*pair)
    return found


def _times_of(content: dict[str, Any], topic: str, flow: str) -> Iterable[tuple[int, EventTime]]:
    given, latest, since = content["partitions"], content.get("latest_ms"), content.get("since_ms")
    columns = []
    for column in (latest, since):
        if not isinstance(column, list) or [type(each) for each in column] != [int, list]:
            garbage(flow, f"event_times of {topic} is {short(content)}")
        columns.append(column[1])
    if type(given) is int and given == len(columns[0]):  # before a list is made of a number that may be any
        given = list(range(given))
    legal = isinstance(given, list) and all(type(each) is int and each >= 0 for each in given)
    legal = legal and len(given) == len(columns[0]) == len(columns[1])
    legal = legal and all(each is None or type(each) is int for each in columns[0])
    if not legal or not all(type(each) is int for each in columns[1]):
        garbage(flow, f"event_times of {topic} is {short(content)}")
    assert latest is not None
    assert since is not None
    for number, ahead, later in zip(given, *columns, strict=True):
        yield number, EventTime(None if ahead is None else latest[0] + ahead, since[0] + later)


def _local(content: dict[str, Any], flow: str) -> LocalTable:
    last: dict[int, tuple[int, int, int]] = {}
    for partition, commit in take(content, flow, "last", dict).items():
        numbers = isinstance(commit, list) and len(commit) == 3 and all(type(part) is int for part in commit)
        if not (partition.isascii() and partition.isdecimal() and numbers):
            garbage(flow, f"last of a local table has {short(partition)}: {short(commit)}")
        last[int(partition)] = (commit[0], commit[1], commit[2])
    return LocalTable(take(content, flow, "table_id", str), take(content, flow, "partitions", int), last)


def _driver(content: dict[str, Any], flow: str) -> DriverProcess:
    return DriverProcess(
        take(content, flow, "host", str), take(content, flow, "pid", int), take(content, flow, "since_ms", int)
    )


def _checkpoint(content: dict[str, Any], flow: str) -> CheckpointProgress | None:
    if content.get("checkpoint_query_id") is None:
        return None
    rest = take(content, flow, "checkpoint", dict)
    return CheckpointProgress(
        query_id=take(content, flow, "checkpoint_query_id", str),
        batch=take(rest, flow, "batch", int),
        digest=take(rest, flow, "digest", str),
        commit=take(rest, flow, "commit", str) if "commit" in rest else None,
    )


def writer_of(topic: str, topic_id: str, known: Iterable[Progress]) -> Progress | None:
    """The progress of the flow that writes a table; of the latest one, if the table has gone from one to another.

    Args:
        topic_id: Kafka's id of the topic.
        known: the last progress of each flow.
    """
    writers = (each for each in known if topic in each.changelogs and each.topic_ids.get(topic) in (None, topic_id))
    return max(writers, key=lambda each: each.time_ms, default=None)

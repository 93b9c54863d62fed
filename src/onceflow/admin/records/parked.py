"""Parked records are dead letters that ``Retry`` has given up. This module reads, retries and drops them.

A topic of parked records works like a table: the key is the origin of the record (``topic/partition/offset``) with what
tells it from other records of this origin, and a tombstone removes it. Keys of earlier versions are the origin alone.
An ordinary topic of dead letters is no table: its keys are those of the records, so several dead letters may have the
same key, and none can be removed. Such a topic can be read here, but its records can neither be retried nor dropped.

A retry is one transaction. It writes the record to the retry topic and its tombstone to the topic of parked records, so
the record is never in both topics, and never in neither. All commands for a topic use the same transactional id. A
second command fences the first one, and reads the topic only when the transaction of the first one is decided. So no
record is retried twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from onceflow import hooks
from onceflow.admin.records.writer import Row, Writer, abort_anew
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.interrupts import outcome_told
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topics, topic_limits
from onceflow.client.transactions import Outcome, Transactions
from onceflow.errors import (
    DeadlineExceededError,
    FencedError,
    OptionError,
    TransactionTimeoutError,
    located,
)
from onceflow.protocol.headers import Header
from onceflow.protocol.names import transactional_id_of_parked
from onceflow.protocol.partitioners import group_by_partition, key_partitions
from onceflow.state.engine import dead_letters
from onceflow.state.engine.retry import KEY, NULL_VALUE, PARKED, PARKED_WHY, RETRY_TOPIC

_PREPARE_S, _COMMIT_S = 60.0, 60.0
_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class Parked:
    """One parked record, or one dead letter of an ordinary topic.

    Args:
        origin: where it was first read, ``topic/partition/offset``. Several records may have the same one.
        partition: its partition in the topic that was read here.
        stored: its value in that topic.
        headers: its headers in that topic.
        timestamp_ms: timestamp of the record; negative: it has none.
        dead_letter: whether it is an ordinary dead letter, not a parked record.
        stored_key: its key in that topic. For a parked record None: the origin.
        offset: its offset in that topic.
    """

    origin: str
    partition: int
    stored: bytes | None
    headers: Sequence[Header]
    timestamp_ms: int
    dead_letter: bool = False
    stored_key: bytes | None = None
    offset: int = -1

    @property
    def raw_name(self) -> bytes:
        """The key of a parked record in the topic."""
        return self.origin.encode(errors="surrogateescape") if self.stored_key is None else self.stored_key

    @property
    def name(self) -> str:
        """What names this parked record alone: its key in the topic. Of a dead letter: its origin."""
        return self.origin if self.dead_letter else _text(self.raw_name)

    @property
    def key(self) -> bytes | None:
        """The record's own key."""
        return self.stored_key if self.dead_letter else dict(self.headers).get(KEY)

    @property
    def value(self) -> bytes | None:
        """The record's own value."""
        return None if NULL_VALUE in dict(self.headers) and not self.dead_letter else self.stored

    @property
    def attempt(self) -> int:
        """How often it has failed; 0: not known from its headers."""
        count = self.header(dead_letters.ATTEMPT)
        return int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0

    @property
    def cause(self) -> str:
        """The class of the error."""
        return self.header(dead_letters.ERROR_CLASS)

    @property
    def message(self) -> str:
        """The text of the error."""
        return self.header(dead_letters.ERROR_MESSAGE)

    @property
    def why(self) -> str:
        """Why it is not retried any more, see `dead_letters.PARKED_WHY`; empty: an earlier version has parked it."""
        return self.header(PARKED_WHY)

    @property
    def retry_topic(self) -> str:
        """The topic of its retries; empty: not known from its headers."""
        return self.header(RETRY_TOPIC)

    def header(self, name: str) -> str:
        """The last header with this name, as text; empty if there is none."""
        return dead_letters.header_text(self.headers, name)

    def again(self, topic: str) -> Row:
        """The record for a retry topic: attempts are counted from the beginning again, the origin stays."""
        left_out = (KEY, NULL_VALUE, RETRY_TOPIC, PARKED_WHY, dead_letters.ATTEMPT)
        headers = [(name, content) for name, content in self.headers if name not in left_out]
        headers.append((RETRY_TOPIC, topic.encode()))
        return Row(self.value, self.timestamp_ms, headers)


def read(settings: ClientSettings, topic: str, origins: Collection[str] | None = None) -> list[Parked]:
    """The records that are parked in a topic now, sorted by origin. For an ordinary topic: every dead letter.

    If a record was processed several times, its dead letters have the same origin. Open transactions are waited for,
    so the effects of earlier commands are visible.

    Args:
        origins: the records to return, by origins or names; None: all, but without their values.

    Raises:
        OptionError: one of the origins is not there.
        OnceflowError: the topic cannot be read.
    """
    deadline = Deadline(_PREPARE_S, f"reading parked records of {topic}")
    with connected(settings, topic) as cluster:
        parts = list(_parts(cluster, topic, origins, deadline, values=origins is not None))
        if origins is not None:
            _check_found(topic, origins, parts)
        found = (record for part in parts for record in part)
        return sorted(found, key=lambda record: (_order(record.origin), "" if record.dead_letter else record.name))


def retry(
    settings: ClientSettings, topic: str, origins: Collection[str] | None, *, to: str | None = None
) -> dict[str, int]:
    """Write parked records to the retry topic and remove them from their topic, in one transaction.

    Args:
        topic: the topic of parked records.
        origins: the records to retry, by origins (all records of each) or names; None: all.
        to: the retry topic; None: the one that the headers of each record name.

    Returns:
        The number of records written, by retry topic.

    Raises:
        OptionError: one of the origins is not there (any more), the retry topic is not known, or the topic has
            ordinary dead letters.
        FencedError: another command for this topic has started meanwhile.
        DeadlineExceededError: the outcome of the commit is not known.
        OnceflowError: Kafka refused a request. After every error except an unknown outcome, nothing has changed.
    """
    with connected(settings, topic) as cluster:
        return _Change(cluster, topic).run(origins, lambda record: _target(topic, record, to))


def drop(settings: ClientSettings, topic: str, origins: Collection[str] | None) -> int:
    """Remove parked records from the topic without retrying them, in one transaction.

    Args, Raises: as for `retry`.

    Returns:
        The number of records removed.
    """
    with connected(settings, topic) as cluster:
        return sum(_Change(cluster, topic).run(origins, lambda record: "").values())


class _Change:
    """One call of `retry` or `drop`."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._transactions = Transactions(cluster, transactional_id_of_parked(topic), _TIMEOUT_MS)

    def run(self, origins: Collection[str] | None, target_of: Callable[[Parked], str]) -> dict[str, int]:
        """Remove the records with these origins, and write them to other topics.

        Args:
            target_of: returns the topic to write a record to; empty: write it nowhere.

        Returns:
            The number of records, by that topic.
        """
        deadline = Deadline(_PREPARE_S, f"preparing to change topic {self._topic}")
        try:
            self._transactions.check_supported(deadline)
            find_topics(self._cluster, {self._topic: ""}, deadline)  # before another command is fenced
            self._transactions.init(deadline)
            self._at("init")
            # Read after init: now the transaction of an older command is decided, and that command is fenced.
            parts: Iterable[list[Parked]] = _parts(self._cluster, self._topic, origins, deadline)
            if origins is not None:
                parts = list(parts)  # all must exist before anything is written
                _check_found(self._topic, origins, parts)
                for records in parts:
                    _refuse_dead_letters(self._topic, records)
            counts = self._write(parts, target_of)
            if counts:
                look = f"`onceflow parked list {self._topic}` shows what is parked"
                end_transaction(self._transactions, self._topic, look)
            self._at("end")
            return counts
        except FencedError as error:
            raise FencedError(
                f"Another command has started to change topic {self._topic}; this one has changed nothing",
                topic=self._topic,
                detail=f"{error.what} (the broker also says so when a transaction took longer than "
                f"{_TIMEOUT_MS / 1000:g} s)",
                next_step="see what is left with onceflow parked list; run this command again if necessary",
            ) from error

    def _write(self, parts: Iterable[list[Parked]], target_of: Callable[[Parked], str]) -> dict[str, int]:
        """Write records and tombstones, one partition after the other. Without origins, ``parts`` reads each partition
        only when its turn has come."""
        deadline = Deadline(_TIMEOUT_MS / 1000, f"changing topic {self._topic}")
        self._transactions.begin(deadline)
        counts: dict[str, int] = {}
        try:
            limits = topic_limits(self._cluster, [self._topic], deadline)
            writer = Writer(self._cluster, self._transactions, limits, deadline)
            for records in parts:
                _refuse_dead_letters(self._topic, records)
                by_target: dict[str, list[Parked]] = {}
                for record in records:
                    by_target.setdefault(target_of(record), []).append(record)
                for target, found in by_target.items():
                    if target and target not in limits:
                        limits |= topic_limits(self._cluster, [target], deadline)
                    if target:
                        self._write_to(target, found, writer, deadline)
                    counts[target] = counts.get(target, 0) + len(found)
                if records:
                    writer.delete(self._topic, records[0].partition, [record.raw_name for record in records])
                    writer.finish()
            self._at("write")
        except BaseException as problem:
            if not isinstance(problem, FencedError):
                abort_anew(self._cluster, self._transactions)
            raise
        return counts

    def _write_to(self, target: str, found: Sequence[Parked], writer: Writer, deadline: Deadline) -> None:
        count = find_topics(self._cluster, {target: "retry"}, deadline)[target].partitions
        keys = pa.array([record.key for record in found], pa.large_binary())
        places = key_partitions(keys, count)
        # Records without a key may go to any partition.
        spread = key_partitions(pa.array([record.raw_name for record in found], pa.large_binary()), count)
        places[places < 0] = spread[places < 0]
        for partition, rows in group_by_partition(places, count):
            again = [(found[n].key, found[n].again(target)) for n in rows.tolist()]
            writer.write(target, partition, again)

    def _at(self, step: str) -> None:
        hooks.at(step, where="driver", flow=f"parked.{self._topic}")


def end_transaction(transactions: Transactions, topic: str, look: str) -> None:
    """Commit.

    Args:
        look: how the user finds out what was changed.

    Raises:
        FencedError, TransactionTimeoutError: nothing has changed.
        DeadlineExceededError: the outcome is not known.
    """
    try:
        with outcome_told(f"the change of topic {topic}", look):
            outcome = transactions.end(Deadline(_COMMIT_S, "committing"), commit=True)
    except DeadlineExceededError as error:
        raise DeadlineExceededError(
            "The outcome of the commit is not known: the coordinator does not answer",
            topic=topic,
            detail=f"{error.what}; {error.detail}",
            next_step=f"when the brokers are up, {look}: all records were changed, or none",
        ) from error
    if outcome is Outcome.FENCED:
        raise FencedError("the commit was refused")
    if outcome is Outcome.ABORTED:
        raise TransactionTimeoutError(
            f"The transaction was aborted: it took longer than {_TIMEOUT_MS / 1000:g} s; nothing has changed",
            topic=topic,
            next_step="try again, or choose fewer records",
        )


@contextlib.contextmanager
def connected(settings: ClientSettings, topic: str) -> Iterator[Cluster]:
    """Connections for one command."""
    cluster = Cluster(settings)
    try:
        with located(topic=topic):
            yield cluster
    finally:
        cluster.close()


def _parts(
    cluster: Cluster, topic: str, origins: Collection[str] | None, deadline: Deadline, *, values: bool = True
) -> Iterator[list[Parked]]:
    """The parked records and dead letters of each partition.

    Partitions are read up to their current end, not only to the last stable offset. Otherwise an open transaction of
    the flow that parks records would hide everything that was decided after it began, and a record that was already
    retried would still seem to be parked.

    Args:
        origins: the records to return; None: all.
        values: whether the values are needed.
    """
    cluster.connect(deadline)
    wanted = None if origins is None else {*origins}
    span = {topic: sorted(find_topics(cluster, {topic: ""}, deadline)[topic].leaders)}
    ends = list_offsets(cluster, span, LATEST, deadline, committed=False)[topic]
    reader = CommittedReader(cluster)
    for partition, end in sorted(ends.items()):
        live: dict[bytes, Parked] = {}
        found: list[Parked] = []  # dead letters
        for chunk in reader.read(topic, partition, 0, end):
            rows = zip(chunk.offsets.tolist(), chunk.keys, chunk.values, chunk.timestamps_ms.tolist(), strict=True)
            for row, (offset, key, value, stamp) in enumerate(rows):
                headers = tuple(chunk.headers.get(row, ()))
                if key is not None and is_parked(key, headers):
                    live.pop(key, None)
                    origin = _stem(key)
                    if value is not None and (wanted is None or origin in wanted or _text(key) in wanted):
                        stored = value if values else b""
                        live[key] = Parked(origin, partition, stored, headers, stamp, stored_key=key)
                    continue
                origin = dead_letters.origin_of(headers) or f"{topic}/{partition}/{offset}"
                if wanted is None or origin in wanted:
                    headers = (
                        headers if values else tuple(each for each in headers if each[0] != dead_letters.ERROR_STACK)
                    )
                    content = value if values else b""
                    place = {"stored_key": key, "offset": offset}
                    found.append(Parked(origin, partition, content, headers, stamp, dead_letter=True, **place))
        yield [*live.values(), *found]


def is_parked(key: bytes, headers: Sequence[Header]) -> bool:
    """Whether this is a parked record, or the tombstone of one.

    The key of an ordinary dead letter may look like an origin. But then the origin in its headers is another one.
    """
    return PARKED.fullmatch(_text(key)) is not None and dead_letters.origin_of(headers) in ("", _stem(key))


def _stem(key: bytes) -> str:
    """The origin in the key of a parked record."""
    text = _text(key)
    found = PARKED.fullmatch(text)
    return text if found is None else found[1]


def _refuse_dead_letters(topic: str, records: Iterable[Parked]) -> None:
    dead_letter = next((record for record in records if record.dead_letter), None)
    if dead_letter is not None:
        raise OptionError(
            f"{dead_letter.origin} is an ordinary dead letter in {topic}, not a parked record: it can be neither "
            "retried nor dropped here",
            topic=topic,
            detail="parked records are those that onceflow.Retry has given up; their keys are topic/partition/offset",
            next_step=f"`onceflow parked replay {topic}` sends dead letters back to their sources, each once; "
            "onceflow.Retry in a flow retries them; nothing has changed",
        )


def _check_found(topic: str, origins: Collection[str], parts: Iterable[list[Parked]]) -> None:
    found = {name for part in parts for record in part for name in (record.origin, record.name)}
    missing = [origin for origin in dict.fromkeys(origins) if origin not in found]
    if missing:
        more = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise OptionError(
            f"{missing[0]}{more} is not parked in {topic}: it never was, or it was retried or dropped already",
            topic=topic,
            next_step="see what is there with onceflow parked list; nothing has changed",
        )


def _target(topic: str, record: Parked, to: str | None) -> str:
    if why := dead_letters.why_not_retried(record.headers):
        names = [dead_letters.TIMER_NAME, dead_letters.TIMER_TABLE, dead_letters.SHORTENED]
        raise OptionError(
            f"{record.origin} cannot be retried: {why}",
            topic=topic,
            detail=", ".join(f"{name}: {record.header(name)}" for name in names if record.header(name)),
            next_step="name the other records, and drop this one when it is dealt with; nothing has changed",
        )
    target = to or record.retry_topic
    if not target or target == topic:
        raise OptionError(
            f"The headers of record {record.origin} do not name a retry topic"
            if not target
            else "A record cannot be retried into the topic that it is parked in",
            topic=topic,
            next_step="name the retry topic with --to; nothing has changed",
        )
    return target


def _order(origin: str) -> tuple[str, int, int]:
    topic, *numbers = origin.rsplit("/", 2)
    partition, offset = (int(part) if part.isdecimal() else 0 for part in (*numbers, "", "")[:2])
    return topic, partition, offset


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")

"""``Retry``: retries dead letters with exponential backoff, and parks those that keep failing."""

from __future__ import annotations

import hashlib
import logging
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from onceflow.errors import BadRecordError, OptionError, SchemaError
from onceflow.options.arguments import checked_arguments
from onceflow.options.durations import duration_ms
from onceflow.protocol.headers import Header
from onceflow.protocol.timestamps import known_ms
from onceflow.state.api.deduplication import SOURCE_COLUMNS
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import STRING, Serde
from onceflow.state.api.user_errors import MAX_MESSAGE
from onceflow.state.engine import dead_letters

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from onceflow.state.api.handle import State
    from onceflow.state.api.timers import Timer

KEY, NULL_VALUE, RETRY_TOPIC = dead_letters.RECORD_KEY, dead_letters.NULL_VALUE, dead_letters.RETRY_TOPIC
PARKED_WHY = dead_letters.PARKED_WHY
IDENTITY = dead_letters.IDENTITY
"""An origin: ``topic/partition/offset`` where a record was first read."""
PARKED = re.compile(rf"({IDENTITY.pattern})(?:/[0-9a-f]{{16}})?")
"""The key of a parked record: its origin, and what tells it from others of this origin. Earlier versions wrote the
origin alone."""

log = logging.getLogger("onceflow")

_TOLD: set[tuple[str, str]] = set()
"""Topics of parked records, and causes of which this process has said that they are parked at once."""
_ORIGIN = (dead_letters.ORIGIN_TOPIC, dead_letters.ORIGIN_PARTITION, dead_letters.ORIGIN_OFFSET)
_TIMER = "due"
_OTHERS = "others"
_LENGTH = struct.Struct(">i")
_HEADERS_TYPE = "array<struct<key:string,value:binary>>"


def _encoded(record: Record) -> bytes:
    """A record without topic, partition and offset, in hardly more bytes than in Kafka: it must fit into the table."""
    at_ms = None if record.timestamp_ms is None else str(record.timestamp_ms).encode()
    fields: list[bytes | None] = [record.key, record.value, at_ms]
    for name, content in record.headers:
        fields += [name.encode(), content]
    parts = []
    for field in fields:
        parts += [_LENGTH.pack(-1)] if field is None else [_LENGTH.pack(len(field)), field]
    return b"".join(parts)


def _decoded(raw: bytes) -> Record:
    fields: list[bytes | None] = []
    at = 0
    while at < len(raw):
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        fields.append(None if length < 0 else raw[at : at + length])
        at += max(0, length)
    key, value, at_ms, *listed = fields
    headers: list[Header] = [
        ((name or b"").decode(), content) for name, content in zip(listed[::2], listed[1::2], strict=True)
    ]
    return Record(key, value, headers=headers, timestamp_ms=None if at_ms is None else int(at_ms))


class Retry(Processor):
    """Reads dead letters, waits, and writes each to a retry topic, or to a topic of parked records.

    ::

        failed = flow.read("failed", include_headers=True)
        retry = onceflow.Retry(retry_topic="retry", parked_topic="parked", base="1 second", max_attempts=8)
        flow.write(flow.process(onceflow.Retry.by_origin(failed), retry, table="waiting")).start()

    The flow whose records fail also reads the retry topic, with ``include_headers=True``. So its next dead letter says
    how often the record has failed. The wait grows with every failure of a record. It starts when this flow reads the
    dead letter. A record is parked when it has failed ``max_attempts`` times, or for a cause that no retry can fix. The
    letter of a timer is parked at once, and so is one that was shortened: they are no records of a source. So is one
    that is too large for the table, or that the retry topic refuses. A record in the retry topic has the headers of its
    last failure, and the name of this topic in ``onceflow.retry.topic``: a flow that reads it elsewhere counts anew.
    ``parked_topic`` should be compacted; its keys begin with the origins (``topic/partition/offset``) of the records. A
    null value is written there as an empty one, with a header that says so. ``onceflow parked`` lists, retries and
    drops parked records.

    Waiting records are rows of the table, each with a timer. Row and timer are deleted in the transaction that writes
    the record to the retry topic, so at any time a record is in exactly one place. Several records may have one origin,
    such as the rows that ``explode`` has made of a record: each waits, is retried and is parked by itself.

    Args:
        retry_topic: the topic of records that are due; the flow whose records fail reads it beside its source. They
            keep their timestamps: set ``message.timestamp.type=LogAppendTime`` if it has a retention.
        parked_topic: the topic of records that are given up, with their origins in the keys.
        base: the wait after the first failure.
        factor: by which the wait grows from one failure to the next.
        ceiling: the longest wait.
        jitter: the share of the wait that is random; with 0.5, a wait of 10 seconds is between 5 and 10 seconds.
        max_attempts: how often a record is processed, the first time included, before it is parked.
        permanent: causes whose records are parked at once: exception classes, or their names. A class does not include
            its subclasses. Add causes that can only be errors in the record: ``Retry.PERMANENT | {"KeyError"}``.

    Raises:
        OptionError: an argument is invalid.
    """

    #: The default of ``permanent``: the bytes of the record cannot be read, or it was late, and neither ever changes.
    PERMANENT = frozenset({"JSONDecodeError", "LateRecord", "UnicodeDecodeError"})

    key = STRING
    state = Serde(_encoded, _decoded, "record")

    @checked_arguments
    def __init__(
        self,
        *,
        retry_topic: str,
        parked_topic: str,
        base: str | float = "1 second",
        factor: float = 2.0,
        ceiling: str | float = "10 minutes",
        jitter: float = 0.5,
        max_attempts: int = 5,
        permanent: Iterable[str | type[BaseException]] = PERMANENT,
    ) -> None:
        if not retry_topic or not parked_topic or retry_topic == parked_topic:
            raise _option("retry_topic and parked_topic must be two topics", "name both")
        try:
            self.base_ms, self.ceiling_ms = duration_ms(base), duration_ms(ceiling)
        except ValueError as error:
            raise _option(f"base={base!r}, ceiling={ceiling!r}: {error}", 'for example "2 seconds"') from None
        if not 0 < self.base_ms <= self.ceiling_ms:
            raise _option(f"base={base!r} must be positive, and at most ceiling={ceiling!r}", "change one of them")
        if not factor >= 1:
            raise _option(f"factor={factor!r} would let the wait shrink", "give 1 or more")
        if not 0 <= jitter <= 1:
            raise _option(f"jitter={jitter!r} is not a share of the wait", "give a number from 0 to 1")
        if max_attempts < 1:
            raise _option(f"max_attempts={max_attempts!r} is too few", "give at least 1, which means no retry")
        if isinstance(permanent, str):
            raise _option(f"permanent={permanent!r} is a single string", 'give a set of names: {"ValueError"}')
        self.retry_topic, self.parked_topic = retry_topic, parked_topic
        self.factor, self.jitter, self.max_attempts = factor, jitter, max_attempts
        self.permanent = frozenset(each if isinstance(each, str) else each.__name__ for each in permanent)

    @staticmethod
    def by_origin(df: DataFrame) -> DataFrame:
        """The same dead letters with their origins, ``topic/partition/offset``, as keys. ``Retry`` needs this.

        Dead letters may have no key, or share a key with others, but all have an origin. Records that were made of one
        record have the same one. The record's own key is kept in a header. If the headers of a dead letter do not name
        its origin, the dead letter's own topic, partition and offset are used.

        Args:
            df: what ``flow.read(..., include_headers=True)`` returns. You may filter its rows, but keep its columns.

        Raises:
            SchemaError: a column is missing.
        """
        from pyspark.sql import functions as F

        from onceflow.options.column_names import check_reserved, is_case_sensitive

        reserved = {"key", "value", "headers", "timestamp", *SOURCE_COLUMNS, *SOURCE_COLUMNS.values()}
        exact = is_case_sensitive(df.sparkSession)
        check_reserved(df.columns, reserved, caller="Retry.by_origin", flow=None, case_sensitive=exact)
        needed = ("key", "value", "headers", "topic", "partition", "offset", "timestamp")
        missing = [name for name in needed if not {name, SOURCE_COLUMNS.get(name)} & {*df.columns}]
        if missing:
            raise SchemaError(
                f"Retry.by_origin needs the columns {', '.join(missing)}, which the DataFrame does not have",
                next_step="give it what flow.read(..., include_headers=True) returns",
            )

        def own(name: str) -> Any:
            given = [F.col(each) for each in (name, SOURCE_COLUMNS[name]) if each in df.columns]
            return F.coalesce(*given)

        def header(name: str) -> Any:
            return F.expr(f"cast(try_element_at(filter(headers, h -> h.key = '{name}'), -1).value AS string)")

        # `\z`, because `$` would also match before a line feed at the end.
        places = [
            (header(dead_letters.ORIGIN_TOPIC), r"^[a-zA-Z0-9._-]{1,249}\z", own("topic")),
            (header(dead_letters.ORIGIN_PARTITION), r"^[0-9]{1,10}\z", own("partition").cast("string")),
            (header(dead_letters.ORIGIN_OFFSET), r"^[0-9]{1,19}\z", own("offset").cast("string")),
        ]
        complete = F.lit(True)
        for found, pattern, _ in places:
            complete = complete & F.coalesce(found.rlike(pattern), F.lit(False))
        identity = F.when(complete, F.concat_ws("/", *(found for found, _, _ in places))).otherwise(
            F.concat_ws("/", *(place for _, _, place in places))
        )
        kept = (
            f"filter(coalesce(headers, cast(array() AS {_HEADERS_TYPE})), h -> h.key NOT IN ('{KEY}', '{NULL_VALUE}'))"
        )
        own_key = f"filter(array(named_struct('key', '{KEY}', 'value', cast(key AS binary))), h -> h.value IS NOT NULL)"
        headers = F.expr(f"concat({kept}, {own_key})").alias("headers")
        # Without the column `partition`: a dead letter is not in the partition of its new key, so a shuffle is needed.
        place = [own(name).alias(name) for name in ("topic", "offset")]
        return df.select(identity.alias("key"), "value", headers, *place, "timestamp")

    def delay_ms(self, origin: str, attempt: int) -> int:
        """How long a record waits after a failure.

        Args:
            origin: ``topic/partition/offset``.
            attempt: how often the record has failed.

        Returns:
            The wait in milliseconds.
        """
        try:
            wait_ms = min(self.base_ms * self.factor ** (attempt - 1), self.ceiling_ms)
        except OverflowError:
            wait_ms = self.ceiling_ms
        digest = hashlib.blake2b(f"{origin}#{attempt}".encode(), digest_size=8).digest()
        chance = int.from_bytes(digest, "big") / (1 << 64)
        return round(wait_ms * (1 - self.jitter * chance))

    # ---- the processor ---------------------------------------------------------------------------------

    def process(self, key: str, records: Sequence[Record], state: State) -> Iterator[Record]:
        """Store dead letters until they are due, or park them. See `Processor.process`."""
        if not IDENTITY.fullmatch(key):
            raise ValueError(f"key {key!r:.200} is not an origin: give Retry the result of Retry.by_origin(df)")
        for record in records:
            attempt = max(1, dead_letters.attempts(record))
            original = _original(record)
            if why := self._why_final(record, attempt):
                yield self._parked(key, original, why, record.topic, record.partition, record.offset)
                continue
            slot = _free_slot(original, state)
            slot.put(original)
            try:
                state._scope.check_rows()
            except BadRecordError:  # it is as large as its topic takes, so it cannot wait in the table
                slot.clear()
                yield self._parked(key, original, "too large", record.topic, record.partition, record.offset)
            else:
                state.timers.register(slot.timer, state.now_ms + self.delay_ms(key, attempt), "processing")

    def on_timer(self, key: str, timer: Timer, state: State) -> Iterator[Record]:
        """Write the record to the retry topic, or park it if that topic refuses it. See `Processor.on_timer`."""
        slot = _Slot(state, timer.name[len(_TIMER) + 1 :])
        waiting = slot.get()
        if waiting is None:
            return
        slot.clear()
        headers = (*waiting.headers, *_origin_headers(key), (RETRY_TOPIC, self.retry_topic.encode()))
        again = Record(waiting.key, waiting.value, self.retry_topic, headers, waiting.timestamp_ms)
        if why := state._scope.refusal(again):
            yield self._parked(key, _refused(waiting, why), "refused", timer.name, timer.at_ms)
        else:
            yield again

    def _why_final(self, record: Record, attempt: int) -> str:
        """Why a letter is not retried any more; empty: it is. Attempt: how often it has failed."""
        if dead_letters.why_not_retried(record.headers):
            return "not a record"
        if (cause := _cause(record)) in self.permanent:
            if (self.parked_topic, cause) not in _TOLD:
                _TOLD.add((self.parked_topic, cause))
                log.warning(
                    "Retry parks records with the cause %s at once, because it is in permanent=; the first one is %s",
                    cause,
                    record.key,
                )
            return "permanent"
        return "attempts" if attempt >= self.max_attempts else ""

    def _parked(self, origin: str, original: Record, why: str, *place: object) -> Record:
        """A record for the topic of parked records.

        Args:
            why: see `PARKED_WHY`.
            place: where it comes from. It tells equal records apart, and is the same when a batch runs again.
        """
        headers = [*original.headers, *_origin_headers(origin), (RETRY_TOPIC, self.retry_topic.encode())]
        if original.key is not None:
            headers.append((KEY, original.key))
        value = original.value
        if value is None:
            value = b""
            headers.append((NULL_VALUE, b"true"))
        headers.append((PARKED_WHY, why.encode()))
        # Compaction keeps one record of each key, so records of the same origin need keys of their own.
        own = _digest(_encoded(original), repr(place).encode())
        return Record(f"{origin}/{own}", value, self.parked_topic, headers, original.timestamp_ms)


class _Slot(NamedTuple):
    """Where one of the records of an origin waits.

    Args:
        state: of the origin.
        name: of an entry of the map `_OTHERS`; empty: the value of the key. Mostly an origin has one record, which is
            there, and so are those that earlier versions have stored.
    """

    state: State
    name: str = ""

    @property
    def timer(self) -> str:
        return f"{_TIMER}-{self.name}" if self.name else _TIMER

    def get(self) -> Record | None:
        found: Record | None = self.state.map(_OTHERS).get(self.name) if self.name else self.state.get()
        return found

    def put(self, record: Record) -> None:
        """Let a record wait. It lives as long as it takes, whatever the default is."""
        if self.name:
            self.state.map(_OTHERS).put(self.name, record, ttl="never")
        else:
            self.state.put(record, ttl="never")

    def clear(self) -> None:
        """Delete the record and its timer."""
        if self.name:
            self.state.map(_OTHERS).delete(self.name)
        else:
            self.state.delete()
        self.state.timers.cancel(self.timer)


def _free_slot(record: Record, state: State) -> _Slot:
    """A place for one more record of an origin. What waits stays: a record that waits cannot fail, so an equal letter,
    also one with more attempts, is of another record (or was read twice, and then it is retried twice)."""
    if state.get() is None:
        return _Slot(state)
    digest, number = _digest(_encoded(Record(record.key, record.value))), 0
    while _Slot(state, f"{digest}-{number}").get() is not None:
        number += 1
    return _Slot(state, f"{digest}-{number}")


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def _refused(waiting: Record, why: str) -> Record:
    """The record with another cause: its topic refuses it. What it has failed with before is in the message."""
    before = dead_letters.header_text(waiting.headers, dead_letters.ERROR_MESSAGE)
    message = f"it cannot be retried: {why}; it failed with {_cause(waiting) or 'an unknown error'}: {before}"
    cause = {dead_letters.ERROR_CLASS: BadRecordError.__name__, dead_letters.ERROR_MESSAGE: message[:MAX_MESSAGE]}
    headers = [header for header in waiting.headers if header[0] not in cause]
    headers += [(name, text.encode(errors="replace")) for name, text in cause.items()]
    return Record(waiting.key, waiting.value, headers=headers, timestamp_ms=waiting.timestamp_ms)


def _original(dead_letter: Record) -> Record:
    """The record that has failed, with its own key, and without the headers that are added again from its origin."""
    left_out = (*_ORIGIN, KEY, RETRY_TOPIC, PARKED_WHY)
    headers = [(name, content) for name, content in dead_letter.headers if name not in left_out]
    at_ms = known_ms(dead_letter.timestamp_ms)
    return Record(dict(dead_letter.headers).get(KEY), dead_letter.value, headers=headers, timestamp_ms=at_ms)


def _origin_headers(origin: str) -> list[Header]:
    return [(name, part.encode()) for name, part in zip(_ORIGIN, origin.rsplit("/", 2), strict=True)]


def _cause(dead_letter: Record) -> str:
    return dead_letters.header_text(dead_letter.headers, dead_letters.ERROR_CLASS)


def _option(what: str, next_step: str) -> OptionError:
    return OptionError(f"Retry: {what}", next_step=next_step)

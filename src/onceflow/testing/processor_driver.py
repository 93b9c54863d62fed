"""``ProcessorDriver``: runs a processor in a test, without Spark and Kafka, in milliseconds."""

from __future__ import annotations

import itertools
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.errors import ProcessorError
from onceflow.options.durations import duration_ms
from onceflow.planning.dead_letter_limit import merged
from onceflow.protocol.headers import Header
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.handle import State
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.record import Record
from onceflow.state.api.scope import Scope
from onceflow.state.api.serdes import BYTES, struct
from onceflow.state.api.timers import Timer, timer_of
from onceflow.state.engine.base import BatchTimes, EngineOptions
from onceflow.state.engine.choice import engine_for
from onceflow.state.engine.output_collector import SCHEMA
from onceflow.state.format import exact_json, rows
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.overlay import Overlay
from onceflow.testing.joined_tables import joined_table

_INPUT = pa.schema([*SCHEMA, ("partition", pa.int32()), ("offset", pa.int64())])
_LATE, _DEAD = "late", "dead-letters"
# After so many batches without input, timers are certainly registered in an endless loop.
_SETTLE_BATCHES = 1000

# The class has a method named list, so its annotations need these names.
_Records = list[Record]
_Timers = list[tuple[Any, Timer]]


class ProcessorDriver:
    """Sends records to a processor and collects its outputs.

    ::

        driver = ProcessorDriver(Balance())
        assert driver.send("ada", {"amount": 5}) == [Record("ada", {"balance": 5})]
        assert driver.state("ada") == {"balance": 5}
        driver.advance(60)  # seconds; timers fire, rows expire

    Every batch runs as in production: the processor is opened and closed, changes are committed when all of it has
    succeeded, and a timer fires in a later batch than the one that registered it. After each batch, all timers that
    are due then fire, as they would in a flow that waits for input, in several batches if one may not fire them all.

    Args:
        processor: a `Processor` or `ColumnProcessor`. To test a migration, assign a newer one to ``driver.processor``.
        partitions: the number of partitions of the table.
        now_ms: processing time at the beginning, in epoch milliseconds. It moves only when the test moves it. None: it
            begins at 0, and event times may be as far ahead of it as they like (``max_ahead`` does not hold).
        tables: what ``state.table(name)`` finds, as dicts: ``{"rates": {"EUR": {"rate": 1.1}}}``. A test may change the
            dicts; the next batch sees that.
        options: `EngineOptions` by name: ``on_error="dead-letter"``, ``default_ttl_ms``, ``max_timers_per_batch``, ...

    Attributes:
        outputs: all records that were yielded so far, decoded by the processor's serdes if they can.
        late: records that were older than the watermark. Key and value are bytes, the cause is in the headers.
        dead_letters: records that could not be processed, in the same form.
        watermark_ms: after every batch, the latest event time minus ``allowed_lateness``. A test may set it.
        counts: the counters of the engine, over all batches.
        causes: of dead letters, over all batches: by class of the cause, how many, and a description of the first one.
    """

    def __init__(
        self,
        processor: Processor | ColumnProcessor,
        partitions: int = 1,
        *,
        now_ms: int | None = None,
        tables: Mapping[str, Mapping[Any, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.processor = processor
        self.now_ms = 0 if now_ms is None else now_ms
        self.watermark_ms: int | None = None
        self.outputs: _Records = []
        self.tables = dict(tables or {})
        self.late: _Records = []
        self.dead_letters: _Records = []
        self.counts: dict[str, int] = {}
        self.causes: dict[str, tuple[int, str]] = {}
        given = {"dead_letter_topic": _DEAD, "late_topic": _LATE, "keeps_time": now_ms is not None, **options}
        self._options = EngineOptions("test", "table", **given)
        self._queue: list[tuple[int, Record]] = []  # partition of the table and record, in bytes
        self._offsets: dict[tuple[str, int], int] = {}
        self._latest: dict[tuple[str | None, int], int] = {}
        self._batches = itertools.count(1)
        folder = Path(tempfile.gettempdir(), f"onceflow-driver-{uuid.uuid4().hex}")
        self._stores = []
        for partition in range(partitions):
            self._stores.append(MemoryStore.open(folder / str(partition)))
            weakref.finalize(self, MemoryStore.remove, folder / str(partition))

    # ---- input ---------------------------------------------------------------------------------------

    def send(
        self,
        key: Any,
        value: Any = None,
        *,
        timestamp_ms: int | None = None,
        headers: Iterable[Header] = (),
        topic: str = "input",
        partition: int = 0,
        run: bool = True,
    ) -> _Records:
        """Send one record, as a batch of its own.

        Args:
            key, value: bytes, None, or what the serdes of the processor can encode. With a column processor also text,
                and values that become JSON.
            timestamp_ms: epoch milliseconds; None: now; -1: the record has no time.
            topic, partition: where the record comes from.
            run: False: keep the record for the next batch.

        Returns:
            The records that the batch has yielded.

        Raises:
            ProcessorError: the batch has failed, and nothing of it is kept.
        """
        encode_key, encode_value = self._encoders()
        raw_key = key if key is None or isinstance(key, bytes) else encode_key(key)
        raw_value = value if value is None or isinstance(value, bytes) else encode_value(value)
        offset = self._offsets.get((topic, partition), 0)
        self._offsets[topic, partition] = offset + 1
        time_ms = self.now_ms if timestamp_ms is None else timestamp_ms
        record = Record(raw_key, raw_value, topic, tuple(headers), time_ms, partition, offset)
        self._queue.append((self._partition_of(raw_key), record))
        return self.run() if run else []

    def send_many(self, records: Iterable[Record | tuple[Any, Any]]) -> _Records:
        """Send records, or pairs of key and value, as one batch. Returns and raises as `send` does."""
        for each in records:
            record = each if isinstance(each, Record) else Record(*each)
            self.send(
                record.key,
                record.value,
                timestamp_ms=record.timestamp_ms,
                headers=record.headers,
                topic=record.topic or "input",
                partition=record.partition or 0,
                run=False,
            )
        return self.run()

    def advance(self, seconds: float) -> _Records:
        """Move processing time forward, and run what is due. Returns and raises as `send` does."""
        self.now_ms += duration_ms(seconds)
        return self.run()

    def run(self) -> _Records:
        """Run a batch of the queued records, and what is due then. Returns and raises as `send` does."""
        yielded, due, left = self._batch()
        settling = 0
        while settling < _SETTLE_BATCHES:
            if not due:
                return yielded
            settling = 0 if left else settling + 1
            more, due, left = self._batch()
            yielded += more
        raise ProcessorError(
            f"timers are due again after {_SETTLE_BATCHES} batches", next_step="register timers for a later time."
        )

    # ---- results -------------------------------------------------------------------------------------

    def take(self) -> _Records:
        """Return the outputs so far, and remove them from ``outputs``."""
        taken, self.outputs = self.outputs, []
        return taken

    def state(self, key: Any, default: Any = None) -> Any:
        """The committed value of a key, decoded."""
        return self._state(key).get(default)

    def map(self, key: Any, name: str, /, **serdes: Any) -> dict[Any, Any]:
        """The committed entries of a map of a key; ``key=`` and ``value=`` are serdes as in `State.map`."""
        return dict(self._state(key).map(name, **serdes).items())

    def list(self, key: Any, name: str, /, **serdes: Any) -> list[Any]:
        """The committed items of a list of a key; ``value=`` is a serde as in `State.list`."""
        return [*self._state(key).list(name, **serdes)]

    @property
    def states(self) -> dict[Any, Any]:
        """The committed values of all keys, decoded."""
        return {key: value for at in range(len(self._stores)) for key, value in State(self._scope(at), b"").range()}

    @property
    def timers(self) -> _Timers:
        """Keys and timers that are registered, the earliest first."""
        found = []
        for at, store in enumerate(self._stores):
            decode = self._scope(at).key_serde.decode
            for row_key, row in store.scan(rows.TIMER, rows.after(rows.TIMER)):
                key, name = rows.timer_parts(row_key)
                found.append((decode(key), Timer(name.decode(), *timer_of(row))))
        return sorted(found, key=lambda each: each[1].at_ms)

    # ---- inside --------------------------------------------------------------------------------------

    def _batch(self) -> tuple[_Records, bool, bool]:
        """Run one batch. Returns what it yielded, whether timers are due after it, and whether it left due timers."""
        queued, self._queue = self._queue, []
        number = next(self._batches)
        engines = []
        written: list[pa.RecordBatch] = []
        tables = {name: joined_table(name, content, self.now_ms) for name, content in self.tables.items()}
        times = BatchTimes(number, self.now_ms, self.watermark_ms)
        for partition, store in enumerate(self._stores):
            engine = engine_for(self.processor)(store, partition, times, self._options, tables)
            engine.start()
            records = [record for at, record in queued if at == partition]
            if records:
                engine.feed(_batch_of(records))
                engine.settle()
            engine.finish()
            engines.append(engine)
            written += iter(engine.outputs, None)
        for engine, store in zip(engines, self._stores, strict=True):
            self._settle(engine, store)
        yielded = [record for batch in written for record in self._sorted(batch)]
        self.outputs += yielded
        due = [engine.next_timer_ms for engine in engines]
        self._move_watermark()
        is_due = any(
            at_ms is not None and until_ms is not None and at_ms <= until_ms
            for each in due
            for at_ms, until_ms in ((each["event"], self.watermark_ms), (each["processing"], self.now_ms))
        )
        return yielded, is_due, any(engine.timers_left for engine in engines)

    def _settle(self, engine: Any, store: MemoryStore) -> None:
        for place, ms in engine.max_event_ms.items():
            self._latest[place] = max(ms, self._latest.get(place, ms))
        for name, count in engine.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.causes = merged([self.causes, engine.causes])
        store.write(engine.local_changes(), index=True)

    def _move_watermark(self) -> None:
        if self._latest:
            reached = min(self._latest.values()) - duration_ms(self.processor.allowed_lateness or 0)
            self.watermark_ms = reached if self.watermark_ms is None else max(reached, self.watermark_ms)

    def _sorted(self, batch: pa.RecordBatch) -> Iterable[Record]:
        """Put dead letters and late records into their lists; return the other outputs, decoded."""
        decode_key = getattr(self.processor, "key", BYTES).decode
        decode_value = getattr(self.processor, "output", BYTES).decode
        for row in batch.to_pylist():
            headers = tuple((each["key"], each["value"]) for each in row["headers"] or ())
            record = Record(row["key"], row["value"], row["topic"], headers, row["timestamp"])
            if record.topic is not None and record.topic == self._options.late_topic:
                self.late.append(record)
            elif record.topic is not None and record.topic == self._options.dead_letter_topic:
                self.dead_letters.append(record)
            else:
                record.key, record.value = _decoded(record.key, decode_key), _decoded(record.value, decode_value)
                yield record

    def _encoders(self) -> tuple[Any, Any]:
        if isinstance(self.processor, ColumnProcessor):
            return str.encode, lambda value: value.encode() if isinstance(value, str) else exact_json.dumps(value)
        return self.processor.key.encode, self.processor.value.encode

    def _partition_of(self, raw_key: bytes | None) -> int:
        if raw_key is None or len(self._stores) == 1:
            return 0
        return int(key_partitions(pa.array([raw_key], pa.binary()), len(self._stores))[0])

    def _state(self, key: Any) -> State:
        raw_key = key if isinstance(key, bytes) else self._encoders()[0](key)
        return State(self._scope(self._partition_of(raw_key)), raw_key)

    def _scope(self, partition: int) -> Scope:
        scope = Scope(
            self.processor,
            Overlay(self._stores[partition]),
            partition=partition,
            now_ms=self.now_ms,
            watermark_ms=self.watermark_ms,
            ttl_ms=None,
        )
        if isinstance(self.processor, ColumnProcessor) and self.processor.state_fields is not None:
            scope.decode = struct(**self.processor.state_fields).decode
        return scope


def _batch_of(records: list[Record]) -> pa.RecordBatch:
    columns = [
        [record.key for record in records],
        [record.value for record in records],
        [record.topic for record in records],
        [record.headers or None for record in records],
        [record.timestamp_ms for record in records],
        [record.partition for record in records],
        [record.offset for record in records],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _INPUT, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_INPUT)


def _decoded(raw: bytes | None, decode: Any) -> Any:
    """Decoded, or the bytes unchanged: a processor may yield bytes that its serde cannot decode."""
    try:
        return None if raw is None else decode(raw)
    except Exception:
        return raw

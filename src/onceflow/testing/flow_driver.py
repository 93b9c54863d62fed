"""``FlowDriver``: runs whole flows in a test, on topics in memory, in milliseconds once Spark runs."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from onceflow.clock import told_by
from onceflow.driver.record.progress_log import PROGRESS_PARTITIONS
from onceflow.errors import OptionError, ProcessorError
from onceflow.flow_chain import ChainWriter, FlowChain
from onceflow.options.arguments import checked_arguments
from onceflow.options.column_names import did_you_mean
from onceflow.options.durations import duration_ms
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single
from onceflow.protocol.headers import Header
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.query import FlowQuery, FlowWriter
from onceflow.session import session
from onceflow.state.api import serdes
from onceflow.state.api.record import Record
from onceflow.state.format import exact_json, rows
from onceflow.testing.driven_flow import COMPACTED, DrivenFlow, World
from onceflow.testing.memory_broker import MemoryBroker
from onceflow.testing.memory_log import MemoryTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Processing time at the beginning, unless a test says another one: 2025-01-01 00:00 UTC.
START_MS = 1_735_689_600_000
_PLAIN = ProducerIdAndEpoch(-1, -1, transactional=False)
# As often flows may wake each other up in one `run`.
_ROUNDS_MAX = 1_000

FlowFunction = Callable[..., Any]
_Records = list[Record]


class FlowDriver:
    """Runs flows on topics in memory: sends records, moves the clock, reads outputs, tables and dead letters.

    ::

        def totals_flow(flow: onceflow.Flow) -> onceflow.FlowWriter:
            return flow.write(flow.process(flow.read("deposits"), Total(), table="totals"), topic="balances")

        driver = FlowDriver(totals_flow)
        driver.send("deposits", "ada", {"amount": 5})
        assert driver.read("balances") == [Record("ada", {"balance": 5})]
        assert driver.table("totals") == {"ada": 5}

    Everything but the brokers is as in production: planning, Spark's expressions, steps, transactions, progress. All
    drivers of a process share one Spark session. Each has topics of its own, whose names are free.

    Args:
        flows: functions that get a `Flow` and return what ``Flow.write`` returns. The name of a flow is that of its
            function, with ``-`` for ``_``. Several flows are connected by their topics.
        topics: the topics that exist, with their numbers of partitions; None: all that flows name.
        partitions: number of partitions of topics that are not in ``topics``.
        compacted: those of ``topics`` that are compacted: tables that are joined with.
        tables: rows of tables that flows join with, as dicts: ``{"rates": {"EUR": {"rate": 1.1}}}``.
        now_ms: the time of day at the beginning, in epoch milliseconds. It moves only when the test moves it.
        spark: None: a session with two local cores, or the one that is active.
        key, value: serdes of what is read. What they cannot decode stays bytes.

    Attributes:
        now_ms: the time of day.

    Raises:
        OnceflowError: what ``Flow.read`` and the start of a query raise. The flows are started here.
    """

    @checked_arguments
    def __init__(
        self,
        *flows: FlowFunction,
        topics: Mapping[str, int] | None = None,
        partitions: int = 1,
        compacted: Collection[str] = (),
        tables: Mapping[str, Mapping[Any, Any]] | None = None,
        now_ms: int = START_MS,
        spark: SparkSession | None = None,
        key: Any = serdes.STRING,
        value: Any = serdes.JSON,
    ) -> None:
        counts: dict[str, Any] = {"partitions=": partitions, **(topics or {})}
        for name, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise OptionError(
                    f"FlowDriver: {count!r} is no number of partitions, given for {name}", next_step="give 1 or more"
                )
        self.now_ms = now_ms
        self._key, self._value = key, value
        self._spark = spark
        self._functions = flows
        self._names: list[str] = []
        self._flows: list[DrivenFlow] = []
        self._written: list[FlowQuery] = []
        self._next_partition: dict[str, int] = {}
        self._taken: dict[str, int] = {}  # by topic: how many of its records were taken
        broker = MemoryBroker()
        folder = Path(tempfile.mkdtemp(prefix="onceflow-driver-"))
        self._world = World(broker, folder, partitions if topics is None else None)
        broker.make = self._world.make
        self._finalizer = weakref.finalize(self, _ended, self._flows, broker, folder)
        # What the first start in a cluster creates. It looks for it for a while before.
        broker.create(PROGRESS_TOPIC, PROGRESS_PARTITIONS, COMPACTED)
        for name, count in (topics or {}).items():
            broker.create(name, count, COMPACTED if name in compacted else None)
        for name, content in (tables or {}).items():
            self._fill(broker.create(name, partitions, COMPACTED), content)
        self._start(flows)

    def close(self) -> None:
        """Stop the flows and forget their topics. The end of the driver does the same."""
        self._finalizer()

    def __enter__(self) -> FlowDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- input ---------------------------------------------------------------------------------------

    @checked_arguments
    def send(
        self,
        topic: str,
        key: Any,
        value: Any = None,
        *,
        timestamp_ms: int | None = None,
        headers: Iterable[Header] = (),
        partition: int | None = None,
        run: bool = True,
    ) -> _Records:
        """Send one record, and run the flows.

        Args:
            topic: one that a flow reads or joins with.
            key, value: bytes, None, text, or what becomes JSON.
            timestamp_ms: epoch milliseconds; None: now; -1: the record has no time.
            partition: None: where Kafka's default partitioner puts the key; without a key, each in turn.
            run: False: the flows run later, with `run`.

        Returns:
            What the flows have written to their outputs.

        Raises:
            OptionError: no flow reads the topic, or it has no such partition.
            OnceflowError: a flow has failed, see `run`.
        """
        found = self._topic_to_send(topic)
        raw_key, raw_value = _encoded(key), _encoded(value)
        number = self._partition_of(found, raw_key) if partition is None else partition
        if not 0 <= number < len(found.partitions):
            raise OptionError(
                f"Topic {topic} has no partition {partition}",
                topic=topic,
                next_step=f"it has {len(found.partitions)}; FlowDriver(topics={{...}}) says how many there are",
            )
        if timestamp_ms is not None and not isinstance(timestamp_ms, int):
            raise OptionError(
                f"timestamp_ms={timestamp_ms!r} is no time of a record",
                next_step="give whole milliseconds since 1970: int(time.timestamp() * 1000) for a datetime",
            )
        time_ms = self.now_ms if timestamp_ms is None else timestamp_ms
        batch = encode_single(raw_key, raw_value, headers, timestamp_ms=time_ms, identity=_PLAIN, base_sequence=-1)
        found.partitions[number].append(batch.head + batch.body)
        return self.run() if run else []

    @checked_arguments
    def send_many(self, topic: str, records: Iterable[Record | tuple[Any, Any]]) -> _Records:
        """Send records, or pairs of key and value, and run the flows once. Returns and raises as `send` does."""
        for each in records:
            record = each if isinstance(each, Record) else Record(*each)
            self.send(
                topic,
                record.key,
                record.value,
                timestamp_ms=record.timestamp_ms,
                headers=record.headers,
                partition=record.partition,
                run=False,
            )
        return self.run()

    def advance(self, seconds: float) -> _Records:
        """Move the clock forward, and run what is due. Returns and raises as `send` does."""
        self.now_ms += duration_ms(seconds)
        return self.run()

    def run(self) -> _Records:
        """Run the flows until they have read everything and nothing is due.

        Returns:
            What they have written to their outputs, with its topics.

        Raises:
            OnceflowError: a flow has failed. Its batch has left nothing behind, and its records are read again by the
                next run, or by another version after `restart`.
        """
        before = self._ends()
        if not self._written or not all(query.isActive for query in self._written):
            self._stop()  # one of them has failed: all begin again, as a supervisor would have it
            self._start(self._functions)
        with told_by(lambda: self.now_ms):
            for _ in range(_ROUNDS_MAX):
                ends = self._ends()
                for query in self._world.queries:
                    query.run_through()
                if len(self._world.queries) == 1 or self._ends() == ends:
                    return self._new_records(before)
        raise ProcessorError(
            f"The flows wake each other up after {_ROUNDS_MAX} rounds",
            next_step="does one of them read what it has written itself?",
        )

    # ---- results -------------------------------------------------------------------------------------

    @checked_arguments
    def read(self, topic: str, *, places: bool = False, key: Any = None, value: Any = None) -> _Records:
        """All committed records of a topic, in the order in which they were written.

        Args:
            places: also with topic, partition, offset and time.
            key, value: serdes; None: those of the driver.

        Raises:
            OptionError: there is no such topic.
        """
        return self._records(topic, places=places, key=key, value=value)

    @checked_arguments
    def take(self, topic: str, *, places: bool = False, key: Any = None, value: Any = None) -> _Records:
        """As `read`, only the records that no earlier call of `take` has returned."""
        found = self._records(topic, places=places, key=key, value=value)
        before, self._taken[topic] = self._taken.get(topic, 0), len(found)
        return found[before:]

    @checked_arguments
    def table(self, name: str, *, key: Any = None, value: Any = None) -> dict[Any, Any]:
        """The committed rows of a table, or of any compacted topic.

        Args:
            key, value: serdes; None: those of the driver.

        Raises:
            OptionError: there is no such table.
        """
        found: dict[bytes | None, Record] = {}
        decode = self._decoder(key, value)
        for record in self._raw(name):
            found[record.key] = record
        return {
            row.key: row.value
            for row in map(decode, found.values())
            if row.value is not None and not self._has_expired(row)
        }

    def watermark_ms(self, table: str) -> int | None:
        """The watermark of the step that keeps a table; None: it has none yet.

        Raises:
            OptionError: no flow has such a table.
        """
        tables = {name: each for query in self._written for name, each in query.progress.tables.items()}
        if table not in tables:
            raise OptionError(
                f"No flow has committed anything to a table {table!r}",
                next_step=f"{did_you_mean(table, tables)}There are: {_listed(tables)}",
            )
        return tables[table].watermark_ms

    # ---- another version -----------------------------------------------------------------------------

    def restart(self, *flows: FlowFunction) -> _Records:
        """Stop the flows and start them again, as a new version of the program: topics, state and progress stay.

        Args:
            flows: the functions of the new version, in the same order: names are those of the first ones. None: the
                same again.

        Returns and raises as `send` does.
        """
        if flows and len(flows) != len(self._names):
            raise OptionError(
                f"FlowDriver.restart got {len(flows)} functions, there are {len(self._names)} flows",
                next_step="give one for each flow, or none",
            )
        self._functions = flows or self._functions
        self._stop()
        self._start(self._functions)
        return self.run()

    # ---- inside --------------------------------------------------------------------------------------

    def _start(self, functions: Iterable[FlowFunction]) -> None:
        functions = [*functions]
        if not functions or not all(map(callable, functions)):
            raise OptionError(
                "FlowDriver takes functions that build flows",
                next_step="give a function that takes a Flow and returns what Flow.write returns",
            )
        spark = self._spark or session("onceflow-tests", master="local[2]")
        self._names = self._names or [_name_of(each, number) for number, each in enumerate(functions, 1)]
        try:
            with told_by(lambda: self.now_ms):
                for name, function in zip(self._names, functions, strict=True):
                    flow = DrivenFlow(name, spark, self._world)
                    self._flows.append(flow)
                    self._written += _started(function(flow), function)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        for flow in self._flows:
            flow.close()
        self._flows.clear()
        self._written.clear()
        self._world.queries.clear()

    def _fill(self, topic: MemoryTopic, content: Mapping[Any, Any]) -> None:
        self._world.joined.add(topic.name)
        for key, value in content.items():
            self.send(topic.name, key, value, run=False)

    def _topic_to_send(self, name: str) -> MemoryTopic:
        known = self._world.read | self._world.joined
        if name not in known:
            raise OptionError(
                f"No flow reads topic {name!r}",
                topic=name,
                next_step=f"{did_you_mean(name, known)}Flows read {_listed(known)}",
            )
        return self._world.broker.topics[name]

    def _partition_of(self, topic: MemoryTopic, key: bytes | None) -> int:
        count = len(topic.partitions)
        if key is not None:
            return int(key_partitions(pa.array([key], pa.binary()), count)[0])
        number = self._next_partition.get(topic.name, 0)
        self._next_partition[topic.name] = (number + 1) % count
        return number

    def _outputs(self) -> list[str]:
        """Topics that flows write, other than tables."""
        tables = {*self._world.tables, *(name + INTERNAL_SUFFIX for name in self._world.tables)}
        return [name for name in self._world.broker.topics if not name.startswith("__") and name not in tables]

    def _ends(self) -> dict[str, list[int]]:
        return {name: [log.end for log in topic.partitions] for name, topic in self._world.broker.topics.items()}

    def _new_records(self, before: Mapping[str, list[int]]) -> _Records:
        decode = self._decoder(None, None)
        found = []
        for name in self._outputs():
            for record in self._raw(name, before.get(name)):
                found.append(_without_places(decode(record), topic=name))
        return found

    def _records(self, topic: str, *, places: bool, key: Any, value: Any) -> _Records:
        decode = self._decoder(key, value)
        return [decode(each) if places else _without_places(decode(each)) for each in self._raw(topic)]

    def _raw(self, name: str, starts: list[int] | None = None) -> Iterator[Record]:
        """The committed records of a topic in bytes, in the order in which their batches were appended."""
        topic = self._world.broker.topics.get(name)
        if topic is None:
            there = [each for each in self._world.broker.topics if not each.startswith("__")]
            raise OptionError(
                f"There is no topic {name!r}",
                topic=name,
                detail=f"there are {_listed(there)}",
                next_step=f"{did_you_mean(name, there)}A topic that only rows name is there when one was written; or "
                "give all topics: FlowDriver(..., topics={...})",
            )
        found = [
            (batch.number, number, batch.decoded())
            for number, log in enumerate(topic.partitions)
            for batch in log.committed(starts[number] if starts else 0)
        ]
        for _, partition, decoded in sorted(found, key=lambda each: each[0]):
            columns = zip(
                decoded.offsets.tolist(), decoded.timestamps_ms.tolist(), decoded.keys, decoded.values, strict=True
            )
            for row, (offset, at_ms, key, value) in enumerate(columns):
                headers = tuple(decoded.headers.get(row, ()))
                yield Record(key, value, name, headers, None if at_ms < 0 else at_ms, partition, offset)

    def _decoder(self, key: Any, value: Any) -> Callable[[Record], Record]:
        of_key, of_value = (key or self._key).decode, (value or self._value).decode

        def decode(record: Record) -> Record:
            record.key, record.value = _decoded(record.key, of_key), _decoded(record.value, of_value)
            return record

        return decode

    def _has_expired(self, row: Record) -> bool:
        at = dict(row.headers).get(rows.EXPIRES_HEADER)
        return at is not None and int(at) <= self.now_ms


def _started(made: Any, function: FlowFunction) -> list[FlowQuery]:
    """The queries that a function has made; they are started here if it has not done so."""
    started = made.start() if isinstance(made, (FlowWriter, ChainWriter)) else made
    queries = [*started] if isinstance(started, FlowChain) else [started]
    if not all(isinstance(each, FlowQuery) for each in queries):
        raise OptionError(
            f"{_name_of(function, 1)} returns {type(made).__name__}",
            next_step="it has to return what Flow.write, Flow.write_external or Flow.write_chain returns",
        )
    return queries


def _name_of(function: FlowFunction, number: int) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", "").strip("<>")
    return name.replace("_", "-") if name.isidentifier() and name != "lambda" else f"flow-{number}"


def _ended(flows: list[DrivenFlow], broker: MemoryBroker, folder: Path) -> None:
    for flow in flows:
        with contextlib.suppress(Exception):
            flow.close()
    broker.close()
    shutil.rmtree(folder, ignore_errors=True)


def _encoded(given: Any) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    try:
        return given.encode() if isinstance(given, str) else exact_json.dumps(given)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"A {type(given).__name__} was sent that is no JSON: {error}",
            next_step="give bytes, a text, None, or what JSON can express",
        ) from error


def _decoded(raw: bytes | None, decode: Callable[[bytes], Any]) -> Any:
    """Decoded, or the bytes unchanged: a flow may write bytes that the serde cannot decode."""
    try:
        return None if raw is None else decode(raw)
    except Exception:
        return raw


def _without_places(record: Record, topic: str | None = None) -> Record:
    return Record(record.key, record.value, topic, record.headers)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"

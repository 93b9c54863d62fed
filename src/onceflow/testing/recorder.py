"""Records what a driver does and tags what its flow writes, so that ``history.check`` can compare the two.

Call ``Recorder(path).attach()`` in every process that runs the flow, before the flow starts. All of them may share one
file. Rows get their tags from ``tagged``, outputs of a processor from ``tag_of``. When the drivers are done, ``verify``
checks whether what consumers see agrees with what the drivers did.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from onceflow import hooks
from onceflow.protocol.headers import Header
from onceflow.state.api.record import Record
from onceflow.testing.final import read_final
from onceflow.testing.history import History, Op, OutputsOf, Tag, Verdict, check
from onceflow.testing.observed import FAIL, HEADER, INVOKE, OK, TopicOffsets

if TYPE_CHECKING:
    from onceflow import Flow

#: The local property from which the tasks of a batch know their attempt (driver/kafka/commit.py).
PROPERTY = "onceflow.transaction"
#: The columns of rows with tags.
TAGGED_SCHEMA = "key binary, value binary, headers array<struct<key: string, value: binary>>"

# The last attempts that this process has begun, by flow and thread: a process step may run in the driver itself.
_begun: dict[tuple[str, int], tuple[int, str]] = {}


# ---- in a driver -----------------------------------------------------------------------------------------


class Recorder:
    """Appends what the flows of this process do to a file of JSON lines. Usable in a with statement.

    Args:
        path: the file. It may exist and be shared with other drivers, because each line is one write.
        driver: name of this process in the history.
    """

    def __init__(self, path: str | Path, *, driver: str | None = None) -> None:
        self.path = Path(path)
        self.driver = driver or f"{os.getpid()}-{uuid.uuid4().hex[:6]}"
        # An attempt runs in one thread, even when two drivers of a flow share a process.
        self._open: dict[tuple[str, int], tuple[int, str]] = {}
        self._file = -1
        self._detach: Callable[[], None] | None = None

    def attach(self) -> Recorder:
        """Record from now on."""
        if self._detach is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._end_torn_line()
            self._detach = hooks.observe(self._observed)
        return self

    def close(self) -> None:
        """Stop recording."""
        if self._detach is not None:
            self._detach()
            self._detach = None
            os.close(self._file)

    def __enter__(self) -> Recorder:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_torn_line(self) -> None:
        """End the last line if a killed driver has left it incomplete."""
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def _observed(self, step: str, *, flow: str, batch: int | None = None, **facts: Any) -> None:
        producer, here = facts.get("producer"), (flow, threading.get_ident())
        if step == "begin" and batch is not None and producer is not None:
            begun = batch, _attempt(producer.producer_id, producer.producer_epoch)
            self._open[here] = _begun[here] = begun
            self._write(INVOKE, flow, begun, facts.get("source"))
        elif step in ("end", hooks.ABORTED) and here in self._open and self._open[here][0] == batch:
            # An attempt that failed before it had a producer id and epoch does not count.
            self._write(OK if step == "end" else FAIL, flow, self._open.pop(here))

    def _write(self, kind: str, flow: str, begun: tuple[int, str], source: Any = None) -> None:
        ranges = {} if source is None else {"start": source.start, "end": source.end}
        op = Op(kind, flow, *begun, self.driver, int(time.time() * 1000), **ranges)
        os.write(self._file, op.to_json().encode() + b"\n")


def load(path: str | Path) -> History:
    """What drivers have recorded in a file; an empty history when there is none.

    Raises:
        ValueError: the file is no history.
    """
    try:
        text = Path(path).read_text(errors="replace")
    except FileNotFoundError:
        return History()
    return History.parse(text.split("\n"))


def _attempt(producer_id: int, producer_epoch: int) -> str:
    return f"{producer_id}:{producer_epoch}"


# ---- tags ------------------------------------------------------------------------------------------------


def tagged(df: DataFrame, flow: Flow, *, n: str | None = None) -> DataFrame:
    """Rows of ``Flow.read``, or made from them, with tags: columns key, value and headers, for ``Flow.write``.

    Args:
        df: with key, value, topic, partition and offset, the last three as they were read; headers are kept.
        flow: writes them.
        n: column that numbers the rows of one source record from 0, when there may be several.
    """
    wanted = [F.col(name).cast("binary").alias(name) for name in ("key", "value")]
    wanted += [F.col("topic"), F.col("partition").cast("int"), F.col("offset").cast("long")]
    wanted.append((F.lit(0) if n is None else F.col(n)).cast("long").alias("n"))
    if "headers" in df.columns:
        wanted.append(F.col("headers"))
    return flow.map(df.select(*wanted), functools.partial(tagged_rows, flow=flow.name), schema=TAGGED_SCHEMA)


def tagged_rows(rows: pa.RecordBatch, flow: str) -> pa.RecordBatch:
    """Rows with tags: a function for ``Flow.map``, whose schema is ``TAGGED_SCHEMA``.

    Args:
        rows: with key and value, both binary, topic, partition, offset and n, and maybe headers.
        flow: name of the flow that writes them.
    """
    return _with_tags(rows, _of_task(flow))


def _with_tags(rows: pa.RecordBatch, begun: tuple[str, int, str] | None) -> pa.RecordBatch:
    own = rows.column("headers") if "headers" in rows.schema.names else None
    columns = [rows.column("key"), rows.column("value"), _with_header(own, _tags(rows, begun))]
    return pa.RecordBatch.from_arrays(columns, ["key", "value", "headers"])


def _tags(rows: pa.RecordBatch, begun: tuple[str, int, str] | None) -> Any:
    """``Tag.encode`` of every row."""
    if begun is None:  # nothing is being written: a committed batch is drained
        return pa.repeat(pa.scalar(b"", pa.binary()), rows.num_rows)
    before = json.dumps(begun, separators=(",", ":"))[:-1] + ',"'
    partition, offset, n = (rows.column(name).cast(pa.string()) for name in ("partition", "offset", "n"))
    # Topic names have no character that JSON would escape.
    joined = pc.binary_join_element_wise(before, rows.column("topic"), '",', partition, ",", offset, ",", n, "]", "")
    return joined.cast(pa.binary())


def _with_header(headers: Any, tags: Any) -> Any:
    """A list of headers per row: those it has, then the tag."""
    count = len(tags)
    fields = [pa.field("key", pa.string()), pa.field("value", pa.binary())]
    added = pa.StructArray.from_arrays([pa.repeat(pa.scalar(HEADER), count), tags], fields=fields)
    if headers is None:
        return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), added)
    present = headers.flatten()
    own = pa.StructArray.from_arrays([present.field(0), present.field(1).cast(pa.binary())], fields=fields)
    sizes = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False).astype(np.int32)
    ends = np.cumsum(sizes + 1, dtype=np.int32)
    taken = np.empty(len(own) + count, np.int64)
    last = np.zeros(len(taken), bool)
    last[ends - 1] = True
    taken[last] = np.arange(len(own), len(taken))
    taken[~last] = np.arange(len(own))
    together = pa.concat_arrays([own, added]).take(pa.array(taken))
    return pa.ListArray.from_arrays(np.concatenate(([0], ends)).astype(np.int32), together)


def tag_of(record: Record, n: int = 0, *, flow: str) -> Header:
    """The header of an output that a processor makes from ``record``: ``Record(..., headers=[tag_of(...)])``.

    Args:
        record: as it was read; the DataFrame given to ``Flow.process`` has to have partition and offset.
        n: which output of the record, from 0.

    Raises:
        ValueError: the record does not know where it was read.
    """
    topic, partition, offset = record.topic, record.partition, record.offset
    if topic is None or partition is None or offset is None:
        raise ValueError("the record has no topic, partition or offset: give these columns to Flow.process")
    begun = _of_task(flow)
    return HEADER, b"" if begun is None else Tag(*begun, topic, partition, offset, n).encode()


def _of_task(flow: str) -> tuple[str, int, str] | None:
    """Flow, batch and attempt that the code which calls this runs for."""
    context = TaskContext.get()
    if context is None:  # the driver processes a small batch itself
        begun = _begun.get((flow, threading.get_ident()))
        return None if begun is None else (flow, *begun)
    told = json.loads(context.getLocalProperty(PROPERTY) or "null")
    return None if told is None else (flow, told["batch"], _attempt(told["producer_id"], told["producer_epoch"]))


# ---- the verdict -----------------------------------------------------------------------------------------


def verify(
    path: str | Path,
    bootstrap_servers: str,
    flow: str,
    *,
    sources: Iterable[str],
    outputs: Iterable[str],
    outputs_of: OutputsOf = 1,
    ordered: bool = True,
    foreign: bool = False,
    start: TopicOffsets | None = None,
    **reading: Any,
) -> Verdict:
    """The verdict on a flow whose drivers recorded to ``path`` and have ended.

    Args:
        sources, outputs: all topics that the flow reads, and all to which it writes tagged records.
        outputs_of, ordered, foreign, start: see ``history.check``. reading: see ``read_final``.
    """
    final = read_final(bootstrap_servers, flow, sources, outputs, start=start, **reading)
    return check(load(path), final, outputs_of=outputs_of, ordered=ordered, foreign=foreign, start=start)

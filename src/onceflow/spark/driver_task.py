"""A partition of an RDD that is computed in the driver's JVM by the thread that asks for it, without a Spark job.

It does what a task does (Spark: ``ResultTask.runTask``, ``Executor.TaskRunner``): there is a task context with memory
of its own, whose listeners are called in the end, so that operators give back what they hold. From Python all of this
is one call, if there are not too many rows: its parts are put together once, see ``java_functions.py``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from onceflow.spark.java_functions import JavaFunctions
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.memory_file import MemoryFile

# Of the Arrow batches that come back, and how many of them one call makes.
_ROWS_MAX, _BYTES_MAX, _BATCHES = 10_000, 4_000_000, 4
_CONVERTERS = "org.apache.spark.sql.execution.arrow.ArrowConverters"
_CONTEXT, _CONTEXT_IMPL = "org.apache.spark.TaskContext", "org.apache.spark.TaskContextImpl"
_MEMORY, _RDD = "org.apache.spark.memory.TaskMemoryManager", "org.apache.spark.rdd.RDD"
_ITERATOR = "java.util.Iterator"
_BLOCKS = "org.apache.spark.storage.BlockManager"
_RELEASE = "releaseAllLocksForTask"
_REFERENCE = "java.util.concurrent.atomic.AtomicReference"
_OBJECT = "java.lang.Object"
_SET, _GET = f"set({_OBJECT}) -> void", f"get() -> {_OBJECT}"
_COMPUTE = f"iterator(org.apache.spark.Partition, {_CONTEXT}) -> scala.collection.Iterator"
_AS_JAVA = f"static asJavaIterator(scala.collection.Iterator) -> {_ITERATOR}"
# No task of a job has such a number.
_task_ids = itertools.count(1 << 62)


class DriverTask:
    """Computes the only partition of an RDD of rows, again and again. One thread makes all calls, but for `interrupt`.

    Args:
        make: functions of the JVM.
        spark: the session whose settings hold.
        rdd: of ``InternalRow``, with one partition or none.
        schema: of its rows, as an object of the JVM.
        file: where the JVM puts the rows. It is closed with the task.
    """

    def __init__(
        self,
        make: JavaFunctions,
        spark: SparkSession,
        rdd: Any,
        schema: Any,
        file: MemoryFile,
    ) -> None:
        self._make = make
        self._context, self._rest = (make.static(_REFERENCE)() for _ in range(2))
        self._running = False
        self._thread: Any = None
        self._number = next(_task_ids)
        self._file = file
        self._calls: _Calls | None = None
        partitions = list(rdd.partitions())
        if partitions:
            (only,) = partitions
            # Writes of a stream that appends go to the end of the file, also after it was made empty.
            self._stream = make.static("java.io.FileOutputStream")(file.path, True)
            self._calls = self._composed(spark, rdd, only, schema)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._calls is not None:
            self._calls = None
            with contextlib.suppress(*SPARK_ERRORS, OSError):  # the JVM may have ended
                self._stream.close()

    def interrupt(self) -> None:
        """End what `batches` does, from another thread: it fails."""
        if self._running and self._thread is not None:
            context = self._context.get()
            if context is not None:
                context.markInterrupted("the query is being stopped")
            self._thread.interrupt()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Compute the rows. They are computed as they are taken, so that any number of them needs little memory.

        Raises:
            PySparkException, Py4JError: an operator fails for a row.
        """
        calls = self._calls
        if calls is None:
            return
        if self._thread is None:
            self._thread = self._make.static("java.lang.Thread").currentThread()
        is_open = self._call(calls.begin)
        try:
            yield from self._taken()
            while is_open:
                is_open = False  # if it fails, it has ended
                is_open = self._call(calls.go_on)
                yield from self._taken()
        finally:
            if is_open:
                calls.end.call()

    def _call(self, step: Any) -> bool:
        self._file.clear()
        self._running = True
        try:
            return bool(step.call())
        finally:
            self._running = False

    def _taken(self) -> list[pa.RecordBatch]:
        """The batches in the file, each of which is a stream of its own (Spark: ``ArrowBatchWithSchemaIterator``)."""
        found: list[pa.RecordBatch] = []
        with pa.BufferReader(self._file.take()) as reader:
            while reader.tell() < reader.size():
                found += pa.ipc.open_stream(reader)
        return found

    # ---- how it is put together --------------------------------------------------------------------------------------

    def _composed(self, spark: SparkSession, rdd: Any, partition: Any, schema: Any) -> _Calls:
        make = self._make
        rows = make.bound(make.method(_RDD, _COMPUTE, of=rdd), 0, partition)
        as_java = make.method("scala.collection.JavaConverters", _AS_JAVA)
        keep = make.typed(make.method(_REFERENCE, _SET, of=self._context), "void", _CONTEXT)
        keep_rest = make.typed(make.method(_REFERENCE, _SET, of=self._rest), "void", _ITERATOR)
        write = make.typed(make.method("java.io.OutputStream", "write([B) -> void", of=self._stream), "void", _OBJECT)
        ended = make.lastly(make.once("end", self._end), self._of_blocks(_RELEASE))
        end = make.fed(ended, 0, make.method(_REFERENCE, _GET, of=self._context))
        some = self._some(write, end)
        first = make.then(rows, self._batches(spark, schema), as_java, make.after(keep_rest, some))
        first = make.after(make.once("set", self._set), make.after(keep, first))
        first = make.after(self._of_blocks("registerTask"), first)
        new = make.once("new", lambda: self._new(spark))
        begin = make.fed(make.rescued(first, make.ignoring(end, 0, _CONTEXT)), 0, new)
        # Another program may have run since, in the same thread.
        again = make.fed(make.once("set", self._set), 0, make.method(_REFERENCE, _GET, of=self._context))
        rest = make.fed(some, 0, make.method(_REFERENCE, _GET, of=self._rest))
        go_on = make.rescued(make.after(again, rest), end)
        give_up = make.after(again, end)  # listeners give back what they hold for the task of the thread
        return _Calls(*(make.as_interface(each, "java.util.concurrent.Callable") for each in (begin, go_on, give_up)))

    def _some(self, write: Any, end: Any) -> Any:
        """For an iterator of Arrow batches: writes some of them. Returns whether there are more; if not, it ends."""
        make = self._make
        more = make.method(_ITERATOR, "hasNext() -> boolean")
        one = make.typed(make.then(make.method(_ITERATOR, f"next() -> {_OBJECT}"), write), "void", _ITERATOR)
        step = make.either(more, one, make.nothing(_ITERATOR))
        for _ in range(_BATCHES - 1):
            one = make.after(one, step)
            step = make.either(more, one, make.nothing(_ITERATOR))
        closed = make.ignoring(make.after(end, make.constant(False)), 0, "boolean")
        # Meanwhile this thread may plan and run something else.
        open_ = make.ignoring(make.after(self._unset(), make.constant(True)), 0, "boolean")
        return make.after(step, make.then(more, make.either(make.identity("boolean"), open_, closed)))

    def _batches(self, spark: SparkSession, schema: Any) -> Any:
        """From an iterator of rows to one of Arrow batches."""
        make = self._make
        found = make.method(f"{_CONVERTERS}$", "toBatchWithSchemaIterator", of=make.object(_CONVERTERS))
        zone = str(spark.conf.get("spark.sql.session.timeZone"))
        flags = [False] * (make.parameters(found) - 5)
        return make.bound(found, 1, schema, _ROWS_MAX, _BYTES_MAX, zone, *flags)

    def _new(self, spark: SparkSession) -> Any:
        """Makes a task context. It has the settings of the session as they are now."""
        make = self._make
        environment = make.function("org.apache.spark.SparkEnv", "get")()
        session: Any = spark._jsparkSession
        settings = session.sessionState().conf().getAllConfs()
        properties = make.static("java.util.Properties")()
        properties.putAll(make.function("scala.collection.JavaConverters", "mapAsJavaMap")(settings))
        empty = make.object(_CONTEXT).empty()
        memory = make.bound(make.constructor(_MEMORY), 0, environment.memoryManager(), self._number)
        given = properties, environment.metricsSystem(), empty.taskMetrics(), 1, empty.resources()
        context = make.bound(make.constructor(_CONTEXT_IMPL), 7, *given)
        return make.fed(make.bound(context, 0, -1, 0, 0, self._number, 0, 1), 0, memory)

    def _set(self) -> Any:
        return self._make.method(f"{_CONTEXT}$", f"setTaskContext({_CONTEXT}) -> void", of=self._make.object(_CONTEXT))

    def _unset(self) -> Any:
        return self._make.method(f"{_CONTEXT}$", "unset() -> void", of=self._make.object(_CONTEXT))

    def _end(self) -> Any:
        """For a task context: its listeners are called, its memory is given back, and the thread is without it."""
        make = self._make
        none = make.function("scala.Option", "empty")()
        done = make.typed(
            make.bound(make.method(_CONTEXT_IMPL, "markTaskCompleted(scala.Option) -> void"), 1, none), "void", _CONTEXT
        )
        freed = make.then(
            make.method(_CONTEXT_IMPL, f"taskMemoryManager() -> {_MEMORY}"),
            make.method(_MEMORY, "cleanUpAllAllocatedMemory() -> long"),
        )
        freed = make.typed(freed, "void", _CONTEXT)
        return make.lastly(make.lastly(done, freed), make.ignoring(self._unset(), 0, _CONTEXT))

    def _of_blocks(self, name: str) -> Any:
        """For a task context: a method of the block manager for the task. Blocks, such as broadcast variables, are read
        only for tasks that it knows."""
        make = self._make
        blocks = make.once("blocks", lambda: make.function("org.apache.spark.SparkEnv", "get")().blockManager())
        found = make.method(_BLOCKS, f"{name}(long) -> {self._sequence() if name == _RELEASE else 'void'}", of=blocks)
        return make.ignoring(make.typed(make.bound(found, 0, self._number), "void"), 0, _CONTEXT)

    def _sequence(self) -> str:
        """What Scala calls ``Seq``: before 2.13 another class."""
        version = self._make.once("scala", self._make.function("scala.util.Properties", "versionNumberString"))
        return "scala.collection.Seq" if str(version).startswith("2.12") else "scala.collection.immutable.Seq"


class _Calls(NamedTuple):
    """Each is a ``Callable``. The first two write some batches to the file, and return whether there are more.

    Args:
        begin: makes a new task context. go_on: goes on in it. end: ends it, if there were more.
    """

    begin: Any
    go_on: Any
    end: Any

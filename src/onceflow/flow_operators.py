"""The operators of a ``Flow`` that keep no state of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from onceflow.arguments import known_arguments
from onceflow.calls.concurrently import Calls
from onceflow.driver.joins import join_frame, join_order
from onceflow.flow_writes import FlowWrites
from onceflow.planning import calls as planned_calls
from onceflow.planning import joins, maps
from onceflow.planning.write_options import check_no_dead_letters
from onceflow.spark import queries
from onceflow.spark.arrow_maps import map_in_arrow
from onceflow.spark.master import is_local
from onceflow.state.api import serdes
from onceflow.state.joins.spec import JoinTable
from onceflow.task.call_rows import CallOrder, CallReports, CallRows
from onceflow.task.join_task import JoinTask


class FlowOperators(FlowWrites):
    """What a flow does with a DataFrame between its sources and its end."""

    @known_arguments
    def join_table(
        self,
        df: DataFrame,
        table: str | JoinTable,
        *,
        on: str,
        columns: str | Mapping[str, str],
        how: str = "inner",
        corrupt_column: str | None = None,
    ) -> DataFrame:
        """Add columns of a table to the rows of a stream. All rows of a batch see the table at the same offsets.

        Args:
            df: a streaming DataFrame of this flow.
            table: a compacted topic, but no table of this flow; or a `JoinTable`, which also names its serdes.
            on: the column with the table's key: string or binary, or what the table's key serde takes.
            columns: fields of the table's values and their types, for example ``{"name": "string", "tier": "int"}``
                (with ``value=serdes.JSON`` or a struct); or the name of one new column for the whole value, which is
                binary unless the serde is STRING, LONG or DOUBLE.
            how: ``inner``: rows whose key is not in the table are left out. ``left``: their new columns are null.
            corrupt_column: name of one more column, binary: the value of the table where it cannot be read as
                ``columns``, whose columns are null then. None: such a value stops the flow with a BadRecordError.

        Returns:
            The columns of ``df`` and the new ones. Rows keep their order.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnknownTopicError, PermissionDeniedError: the topic does not exist, or may not be read.
        """
        with self._runs.lock:
            startup = self._runs.startup
            startup.known_progress()
            checked = joins.checked_table(table, own=startup.table_names, flow=self.name)
            queries.check_query(df, self.name, checkpoint=True, columns=False)  # `write` knows of checkpoints
            spec = startup.find_join(checked.topic, checked, local=is_local(self._spark))
            number = next(self._runs.function_numbers)
            order, wanted = join_order(
                df, spec, self._settings, on=on, how=how, columns=columns, corrupt=corrupt_column, flow=self.name
            )
            task = JoinTask(order, number)
            joined = join_frame(df, task, wanted)
            startup.joins.append(spec)
            startup.functions[task.__name__] = task
            return joined

    @known_arguments
    def map(
        self,
        df: DataFrame,
        function: Callable[[pa.RecordBatch], pa.RecordBatch],
        *,
        schema: str | T.StructType | None = None,
    ) -> DataFrame:
        """Change the rows of a stream with a Python function over Arrow batches, without state.

        The function is called in the driver, or in the tasks that read a backlog. In Spark's micro-batches tasks call
        it (``mapInArrow``). It may be called again for the same rows, and batches may have any number of rows, so its
        result must depend on each row alone.

        Args:
            df: a streaming DataFrame of this flow.
            function: gets a ``pyarrow.RecordBatch`` with the columns of ``df``, and returns one or a ``pyarrow.Table``.
                It may leave rows out, or return more. Times are in UTC. It is pickled and sent to tasks, as processors
                are.
            schema: the columns of the rows that it returns: names and types as in SQL (``"key binary, value string"``),
                or a ``StructType``; None: those of ``df``. Columns may be returned in another order, and with a type
                that is cast without a change of values, such as ``int32`` in place of ``bigint``.

        Returns:
            A streaming DataFrame with these columns.

        Raises:
            OptionError: the function cannot be called or sent to tasks, or the schema cannot be read.
            SchemaError: Arrow has no type for a column.
            UnsupportedQueryError: ``df`` is not a stream of this flow.

        A function that raises stops the flow with ProcessorError, and one that returns other columns with SchemaError.
        Nothing of that batch becomes visible.
        """
        with self._runs.lock:
            startup = self._runs.startup
            startup.known_progress()
            facts = queries.check_query(df, self.name, checkpoint=True, columns=False)  # `write` knows of checkpoints
            check_no_dead_letters(facts, "Flow.map", self.name)
            rows_map, columns = maps.map_of(
                df, function, schema, number=next(self._runs.function_numbers), flow=self.name
            )
            mapped = map_in_arrow(df, rows_map, columns)
            startup.maps[rows_map.__name__] = rows_map
            return mapped

    @known_arguments
    def enrich(
        self,
        df: DataFrame,
        calls: Calls,
        *,
        topic: str,
        dead_letter_topic: str | None = None,
        value: Any = None,
        output: Any = None,
        max_dead_letters: int | float | None = None,
    ) -> DataFrame:
        """Call another service once for each row, many at a time, without state. Write the result with `write`, without
        ``topic=``.

        The function of ``calls`` gets a `Record` with the decoded value, and the key in bytes. It returns the value to
        write under the same key, or a `Record`, or a list of `Record`s, or None for nothing. When a batch runs again,
        its calls are made again.

        Args:
            df: a streaming DataFrame of this flow, with the columns key and value (string or binary). The columns
                topic, partition, offset, timestamp and headers are optional; the function sees them where they are
                present.
            calls: what `concurrently` returns. Rows keep their order. Calls for rows of one key are made one after the
                other, unless ``order=None``.
            topic: where results go that name no other topic.
            dead_letter_topic: where rows go whose call fails, with the cause in their headers. None: a call that fails
                stops the flow with ProcessorError. With it, operators can only stand in front of this step.
            value: serde of the values that are read; None: bytes.
            output: serde of results that are not bytes; None: there are only bytes.
            max_dead_letters: stop the flow when one run has more dead letters than this: a count (``100``), or a share
                of the rows (``0.01``), which counts from the 100th row on. Nothing of that batch becomes visible.

        Returns:
            A streaming DataFrame: key, value, topic, headers, timestamp.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnsupportedQueryError: ``df`` is not a stream of this flow.
        """
        with self._runs.lock:
            startup = self._runs.startup
            order = CallOrder(
                calls, topic, dead_letter_topic, value or serdes.BYTES, output or serdes.BYTES, self.name,
                self._spark.sparkContext.accumulator({}, CallReports()), max_dead_letters,
            )  # fmt: skip
            planned_calls.check_enrich(order, startup.own_topics)
            facts = queries.check_query(df, self.name, checkpoint=True, columns=False)  # `write` knows of checkpoints
            check_no_dead_letters(facts, "Flow.enrich", self.name)
            task = CallRows(order, next(self._runs.function_numbers))
            frame = planned_calls.enrich_frame(df, task)
            startup.calls.append(order)
            startup.functions[task.__name__] = task
            return frame

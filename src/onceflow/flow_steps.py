"""The steps with state of a ``Flow`` that need no processor, and how a step is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame

from onceflow.arguments import known_arguments
from onceflow.flow_operators import FlowOperators
from onceflow.planning import joins, process, step_query
from onceflow.planning.deduplicate import DedupOptions, check_deduplication, dedup_columns
from onceflow.planning.process import StepOptions
from onceflow.planning.record_order import check_order
from onceflow.planning.write_options import check_no_dead_letters
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.spark import queries
from onceflow.spark.master import is_local
from onceflow.spark.pickling import pickled
from onceflow.state.api.processor import MAX_AHEAD, ColumnProcessor, Processor
from onceflow.state.joins.spec import JoinTable
from onceflow.state.stores.base import Store
from onceflow.uncaught import fenced_ends_program


class FlowSteps(FlowOperators):
    """Steps whose state is a table."""

    @known_arguments
    def deduplicate(
        self,
        df: DataFrame,
        *,
        id: str,  # noqa: A002 (a keyword argument, and the word that users know)
        within: str | float | None = None,
        records: int | None = None,
        late: str = "drop",
        duplicates_topic: str | None = None,
        event_time: str | None = None,
        table: str | None = None,
        partitions: int | None = None,
        on_error: str = "fail",
        dead_letter_topic: str | None = None,
        store: str | type[Store] = "lmdb",
        state_dir: str | Path | None = None,
        adopt_existing: bool = False,
        idle_timeout: str = "30 seconds",
        max_ahead: str | float | None = MAX_AHEAD,
        max_dead_letters: int | float | None = None,
    ) -> DataFrame:
        """The first record of every id; records with an id that is remembered are duplicates, and are left out.

        Ids are state in a table, as in `process`: they are committed together with the outputs. Give either ``within``
        or ``records``. ``docs/deduplication.md`` says exactly what is remembered, and which records are late.

        Args:
            df: made from ``Flow.read`` or another step of this flow, with the columns key and value (string or binary).
                With ``within`` it also needs the column of the event time.
            id: the column with the id: string or binary; numbers without fraction, decimals, booleans and dates count
                as their text. ``"key"``: the record's key.
            within: how long an id is remembered, in stream time (``"24 hours"``).
            records: how many ids each partition of the table remembers.
            late: what happens to records that are older than ``within``, and cannot be judged: ``drop``, or the topic
                that they go to. It must exist.
            duplicates_topic: the topic that duplicates go to; None: they are dropped. It must exist.
            event_time: the column with the time of a record: a timestamp, or epoch milliseconds. None: ``timestamp``.
            table: name of the table topic; None: ``<flow>-ids``.
            max_ahead: how far the time of a record may be ahead of the clock; None: as far as it likes.
            on_error: what happens to a record without id or time, or with a time too far ahead, as in `process`.
            partitions, dead_letter_topic, store, state_dir, adopt_existing, idle_timeout, max_dead_letters: as in
                `process`.

        Returns:
            A streaming DataFrame of the records that were not seen before: key, value, topic (null), headers,
            timestamp; and source_topic, source_partition, source_offset: where the record was read. `write` leaves
            these out, and steps take them for topic, partition and offset.

        Raises:
            OptionError, SchemaError: wrong arguments or columns.
            UnsupportedQueryError, ProgressConflictError, PermissionDeniedError: as in `process`.
        """
        own = DedupOptions(id, within, records, late, duplicates_topic, event_time, max_ahead)
        options = StepOptions(
            f"{self.name}-ids" if table is None else table, partitions, on_error, dead_letter_topic, own.late_topic,
            None, False, store, state_dir, adopt_existing, idle_timeout, max_dead_letters=max_dead_letters,
            duplicates_topic=duplicates_topic,
        )  # fmt: skip
        processor = check_deduplication(own, self.name)
        columns = partial(dedup_columns, df, own, self.name)
        return self._step(df, options, processor, columns, caller="Flow.deduplicate")

    def _step(
        self,
        df: DataFrame,
        options: StepOptions,
        processor: Processor | ColumnProcessor,
        columns: Callable[..., DataFrame],
        *,
        tables: Mapping[str, str | JoinTable] | None = None,
        caller: str = "Flow.process",
    ) -> DataFrame:
        """Add a step with state.

        Args:
            columns: returns the rows that the step takes; called with ``one_topic``.
            tables: see `process`.
            caller: what the user has called, for messages.
        """
        with fenced_ends_program(), self._runs.lock:
            startup = self._runs.startup
            checked = process.check_options(
                options, processor, flow=self.name, sources=startup.sources, tables=startup.steps
            )
            # Pickled here only so that an error is raised at this line of user code. For the tasks it is pickled again
            # at the start: by then the processor may have changed, and names that it uses may have been defined.
            pickled(checked, flow=self.name)
            startup.known_progress()
            table, own = options.table, startup.table_names
            joins.check_not_joined(table, startup.joins, self.name)
            joined = joins.checked_tables(tables, own=own | {table, table + INTERNAL_SUFFIX}, flow=self.name)
            facts = queries.check_query(df, self.name, call=caller, columns=False)
            check_order(caller, facts, self.name)
            check_no_dead_letters(facts, caller, self.name)
            # The output rows of another step do not come from a topic.
            one_topic = next(iter(startup.sources)) if len(startup.sources) == 1 and not facts.has_step else None
            rows = columns(one_topic=one_topic is not None)
            local = is_local(self._spark)
            specs = [startup.find_join(*each, local=local, state_dir=options.state_dir) for each in joined.items()]
            startup.add_step(options, checked, source_topic=one_topic, local=local, joins=specs)
            startup.joins += specs
            return step_query.step_frame(rows, table, checked)

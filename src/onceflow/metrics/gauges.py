"""The values of the metrics that are looked up when somebody asks for them. The others are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onceflow.metrics.counts import Labels
from onceflow.metrics.watch import RUNNING, STARTING, FlowWatch
from onceflow.state.table_facts import CopyFacts, TableFacts

Values = dict[Labels, float]


def looked_up(watch: FlowWatch, name: str) -> Values | None:
    """The values of a metric by its labels; None: it is counted. Do not hold the lock of the counts: Spark may be
    slow."""
    look = _LOOK.get(name)
    return None if look is None else look(watch)


def _up(watch: FlowWatch) -> Values:
    return {(flow,): float(found in (STARTING, RUNNING)) for flow, found in watch.conditions().items()}


def _ready(watch: FlowWatch) -> Values:
    return {(flow,): float(found == RUNNING) for flow, found in watch.conditions().items()}


def _lag(watch: FlowWatch) -> Values:
    return {
        (flow, topic, str(partition)): float(left)
        for flow, topics in watch.lags().items()
        for topic, partitions in topics.items()
        for partition, left in partitions.items()
    }


def _timeout(watch: FlowWatch) -> Values:
    return {(flow,): seconds for flow, seconds in watch.transaction_timeouts().items()}


def _standbys(watch: FlowWatch) -> Values:
    return {(flow,): float(count) for flow, count in watch.standbys().items()}


def _of_tables(value: Callable[[TableFacts], Mapping[Labels, float]]) -> Callable[[FlowWatch], Values]:
    """``value`` gives what a table has, by the labels behind flow and table."""

    def look(watch: FlowWatch) -> Values:
        return {
            (flow, table.table, *labels): number
            for flow, tables in watch.tables().items()
            for table in tables
            for labels, number in value(table).items()
        }

    return look


def _rows(table: TableFacts) -> Values:
    return {(kind,): count for kind, count in table.rows.items()}


def _timers(table: TableFacts) -> Values:
    return {(clock,): ms / 1000 for clock, ms in table.next_timer_ms.items() if ms is not None}


def _bytes(table: TableFacts) -> Values:
    return {} if table.nbytes is None else {(): table.nbytes}


def _letters(table: TableFacts) -> Values:
    # The first of the records of an origin is the value of its key, others are entries of a map.
    return {(): table.rows["value"] + table.rows["entry"]} if table.waiting_letters and table.rows else {}


def _copies(value: Callable[[CopyFacts], int]) -> Callable[[FlowWatch], Values]:
    """``value`` gives a number of a table whose copies are on a cluster."""

    def look(table: TableFacts) -> Values:
        return {} if table.copies is None else {(): value(table.copies)}

    return _of_tables(look)


_LOOK: Mapping[str, Callable[[FlowWatch], Values]] = {
    "onceflow_up": _up,
    "onceflow_ready": _ready,
    "onceflow_source_lag": _lag,
    "onceflow_standby_drivers": _standbys,
    "onceflow_transaction_timeout_seconds": _timeout,
    "onceflow_table_rows": _of_tables(_rows),
    "onceflow_table_bytes": _of_tables(_bytes),
    "onceflow_table_partitions": _of_tables(lambda table: {(): table.partitions}),
    "onceflow_table_partitions_open": _of_tables(lambda table: {(): table.opened}),
    "onceflow_table_hosts": _copies(lambda copies: copies.hosts),
    "onceflow_table_partitions_waiting": _copies(lambda copies: copies.waiting),
    "onceflow_table_partitions_moved": _copies(lambda copies: copies.moved),
    "onceflow_table_records_lacking": _copies(lambda copies: copies.lacking),
    "onceflow_standby_copies": _copies(lambda copies: copies.standby),
    "onceflow_standby_records_lacking": _copies(lambda copies: copies.standby_lacking),
    "onceflow_next_timer_timestamp_seconds": _of_tables(_timers),
    "onceflow_letters_waiting": _of_tables(_letters),
}

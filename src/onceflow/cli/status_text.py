"""What ``onceflow status`` prints for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onceflow.cli.text import in_columns, shown, span
from onceflow.errors import counted
from onceflow.protocol.timestamps import in_utc

if TYPE_CHECKING:
    from onceflow.admin.status.driver_status import DriverStatus, DriverTable
    from onceflow.admin.status.flow_status import FlowStatus, PartitionStatus
    from onceflow.admin.status.standby_status import StandbyDriver
    from onceflow.admin.status.table_counts import TableCounts


def overview(found: Sequence[FlowStatus]) -> list[str]:
    """A table of flows, and below it what is wrong with them."""
    if not found:
        return []
    from onceflow.admin.status.flow_status import NOT_ASKED

    asked = any(each.driver_answer != NOT_ASKED for each in found)
    rows = [
        [
            shown(each.flow),
            _known(each.batch),
            _known(each.lag),
            span(each.lag_seconds),
            "?" if each.last_commit_ms is None else in_utc(each.last_commit_ms),
            *([shown(each.driver.condition) if each.driver else "?"] if asked else []),
            len(each.warnings) + len(each.missing) + len(each.unseen),
        ]
        for each in found
    ]
    columns = ["FLOW", "BATCH", "LAG", "TIME LAG", "LAST COMMIT", *(["DRIVER"] if asked else []), "WARNINGS"]
    lines = in_columns(columns, rows)
    return lines + [f"{shown(each.flow)}: {text}" for each in found for text in _remarks(each)]


def details(found: Sequence[FlowStatus]) -> list[str]:
    """Everything about each flow."""
    lines: list[str] = []
    for each in found:
        lines += [*([""] if lines else []), *_detail(each)]
    return lines


def _detail(flow: FlowStatus) -> list[str]:
    lag = "an unknown lag"
    if flow.lag is not None:
        lag = f"a lag of {counted(flow.lag)}, {span(flow.lag_seconds)}"
    elif flow.lag_at_least:
        lag = f"a lag of at least {counted(flow.lag_at_least)}"
    lines = [f"{shown(flow.flow)}: batch {_known(flow.batch)}, {lag}"]
    if flow.last_commit_ms is not None:
        lines.append(f"last commit {in_utc(flow.last_commit_ms)}, {span(flow.age_s)} ago")
    if flow.producer_id >= 0:
        lines.append(f"committed by producer id {flow.producer_id}, epoch {flow.producer_epoch}")
    if (known := flow.transaction) is not None:
        state = "not known to its coordinator" if known.state == "Dead" else known.state
        text = f"transactional id {known.transactional_id}: {state}"
        if known.producer_id >= 0:
            text += f", producer id {known.producer_id}, epoch {known.producer_epoch}"
            if known.producer_id == flow.producer_id and known.producer_epoch > flow.producer_epoch:
                text += " (each attempt and each start raises it)"
        lines.append(text + ("" if known.age_s is None else f", open for {span(known.age_s)}"))
    if flow.driver is not None:
        lines += _driver(flow.driver)
    else:
        lines.append(_no_driver(flow))
        if (last := flow.committed_by) is not None:
            lines.append(shown(f"the driver that committed last: {_where(last.host, last.pid, last.since_ms)}"))
    lines += [shown(_standby(each)) for each in flow.standbys]
    for source in flow.sources:
        columns = ["SOURCE", "OFFSET", "FIRST", "STABLE", "END", "LAG", "TIME LAG", "HELD BACK"]
        if source.partitions is None:
            rows = [[f"{source.topic}-{n}", offset, *"??????"] for n, offset in sorted(source.offsets.items())]
        else:
            shown_rows = {part.partition: _cells(part) for part in source.partitions}
            shown_rows |= {number: [source.offsets.get(number, "-"), *"??????"] for number in source.unseen}
            rows = [[f"{source.topic}-{number}", *cells] for number, cells in sorted(shown_rows.items())]
        lines += _table(columns, rows)
    if flow.tables:
        rows = [
            [
                each.topic,
                _known(each.records_at_most),
                ".".join(str(o) for _, o in sorted(each.offsets.items())) or "-",
                _time_or_none(each.watermark_ms),
            ]
            for each in flow.tables
        ]
        lines += _table(["TABLE", "RECORDS AT MOST", "END OFFSETS", "WATERMARK"], rows)
    if flow.letters:
        found = [
            [shown(each.topic), each.role, _known(each.records_at_most), _known(each.waiting)] for each in flow.letters
        ]
        lines += _table(["LETTERS", "ROLE", "RECORDS AT MOST", "WAITING"], found)
    counted_tables = [(each.topic, each.contents) for each in flow.tables if each.contents is not None]
    if counted_tables:
        lines += _table(_CONTENTS, [_contents(topic, contents) for topic, contents in counted_tables])
    if flow.driver is not None and flow.driver.tables:
        lines += _table(_LOCAL, [_local(table) for table in flow.driver.tables])
        spread = [table for table in flow.driver.tables if table.copies is not None]
        lines += _table(_COPIES, [_copies(table) for table in spread]) if spread else []
    return lines + _remarks(flow) + [f"note: {shown(text)}" for text in flow.notes]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table. If they are not in one form with those around it, there are empty lines between them."""
    lines = in_columns(columns, rows)
    return lines if len(lines) == len(rows) + 1 and lines[0].startswith(columns[0]) else ["", *lines, ""]


def _no_driver(flow: FlowStatus) -> str:
    """That no driver was asked, or that none has answered; and what Kafka shows of it."""
    from onceflow.admin.status.flow_status import NOT_ASKED, NOT_SERVED, signs_of_life

    answers = {NOT_ASKED: "not asked (give --endpoint)", NOT_SERVED: "not known, no endpoint here serves this flow"}
    signs = signs_of_life(flow)
    return f"driver: {answers.get(flow.driver_answer, flow.driver_answer)}" + (f"; {signs}" if signs else "")


def _driver(driver: DriverStatus) -> list[str]:
    """What the driver says of itself."""
    where = _where(driver.host, driver.pid, driver.since_ms)
    lines = [shown(f"driver: {driver.condition} on {where}; {driver.guarantee}; onceflow {driver.version}")]
    if (last := driver.last_batch) is not None:
        read = "" if last.read is None else f"{counted(last.read, 'offset')} read, "
        how = f"in {counted(last.attempts, 'attempt')}, {span(last.seconds)}, by {last.ran_in}"
        lines.append(shown(f"last batch of this run: {read}{counted(last.records)} written {how}"))
    counts = [f"{name.replace('_', ' ')} {count:,}" for name, count in driver.counts.items() if count]
    return lines + ([shown(f"counted by this driver: {', '.join(counts)}")] if counts else [])


def _standby(driver: StandbyDriver) -> str:
    """A driver that stands by, or that others stand by for."""
    role = driver.role if driver.role == "active" or driver.warm else f"{driver.role} (warming up)"
    return f"{role}: {_where(driver.host, driver.pid, driver.since_ms)}; heard {span(driver.age_s)} ago"


def _where(host: str, pid: int, since_ms: int) -> str:
    return f"host {host}, process {pid}, since {in_utc(since_ms)}"


_NEXT_TIMERS = ["NEXT EVENT TIMER", "NEXT PROCESSING TIMER"]
_CONTENTS = ["IN KAFKA", "VALUES", "ENTRIES", "TIMERS", "DUE", *_NEXT_TIMERS]


def _contents(topic: str, found: TableCounts) -> list[Any]:
    counts = [found.values, found.entries, found.timers, found.timers_due]
    return [shown(topic), *counts, *_next_timers(found.next_timer_ms)]


_LOCAL = ["LOCAL STATE", "OPEN", "VALUES", "ENTRIES", "TIMERS", "BYTES", "RESTORED", *_NEXT_TIMERS]


def _local(table: DriverTable) -> list[Any]:
    rows = [_known(table.rows.get(kind)) for kind in ("value", "entry", "timer")]
    name = f"{shown(table.table)} (waiting letters)" if table.waiting_letters else shown(table.table)
    opened = f"{table.opened}/{table.partitions}"
    return [name, opened, *rows, _known(table.nbytes), table.restored, *_next_timers(table.next_timer_ms)]


_COPIES = ["COPIES ON THE CLUSTER", "HOSTS", "WAITING", "LACKING", "READ/S", "STANDBY", "STANDBY LACKING", "MOVED"]


def _copies(table: DriverTable) -> list[Any]:
    """How many partitions wait for a restore, how many records copies lack, and so on: see `CopyFacts`."""
    found = table.copies or {}
    names = ("hosts", "waiting", "lacking", "restored_per_s", "standby", "standby_lacking", "moved")
    return [shown(table.table), *(_known(found.get(name)) for name in names)]


def _next_timers(by_clock: Mapping[str, int | None]) -> list[str]:
    """The cells of the next timers: of event time, which fire by the watermark, and of processing time."""
    return [_time_or_none(by_clock.get(clock)) for clock in ("event", "processing")]


def _cells(part: PartitionStatus) -> list[Any]:
    offset = "-" if part.offset is None else part.offset
    return [offset, part.first, part.stable, part.end, part.lag, span(part.lag_seconds), part.held_back]


def _remarks(flow: FlowStatus) -> list[str]:
    missing = [f"not permitted: {shown(text)}" for text in flow.missing]
    unseen = [f"not asked: {shown(text)}" for text in flow.unseen]
    return [f"warning: {shown(text)}" for text in flow.warnings] + missing + unseen


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def _time_or_none(epoch_ms: int | None) -> str:
    return "-" if epoch_ms is None else in_utc(epoch_ms)

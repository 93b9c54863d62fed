"""Compares the records on the topics at the end of a run with the expected ones. Reads with confluent-kafka only.

The history checker checks the tagged flows. The expected outputs of every flow follow from the source alone: copies,
running totals per key, alarms, and the totals of each batch in the progress records.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onceflow import Table
from onceflow.admin.verify.local_copies import LocalCopies
from onceflow.admin.verify.progress_history import last_of, read_history
from onceflow.admin.verify.report import Report
from onceflow.client.cluster import Cluster
from onceflow.client.settings import ClientSettings
from onceflow.errors import OptionError
from onceflow.protocol.names import Names as FlowNames
from onceflow.protocol.position import Position
from onceflow.testing import history, independent, recorder
from onceflow.testing.final import read_final
from onceflow_workshop.chaos import external
from onceflow_workshop.chaos.feeder import KEYS
from onceflow_workshop.chaos.flows import (
    ALARM_EVERY,
    BAD,
    BAD_EVERY,
    COPY,
    JOINER,
    LATE,
    LATE_EVERY,
    LEDGER,
    PAIRS,
    PLAIN,
    SORTER,
    TOTALS,
    UNLOGGED,
    Names,
)
from onceflow_workshop.testing.served import Answer, Versions

READ_S = 180.0


@dataclass
class Findings:
    """The findings for one setup.

    Args:
        records: number of source records, counted once for each flow.
        lost, duplicated, torn: anomalies of these kinds. others: all others, by name.
        host_copies: how many copies of partitions were compared on hosts.
        examples: texts of some anomalies. unknown: why there is no verdict, if there is none.
    """

    records: int = 0
    lost: int = 0
    duplicated: int = 0
    torn: int = 0
    others: Counter[str] = field(default_factory=Counter)
    host_copies: int = 0
    examples: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.lost or self.duplicated or self.torn or self.others.total():
            return "failed"
        return "unknown" if self.unknown or not self.records else "passed"

    def see(self, kind: str, detail: str, count: int = 1) -> None:
        """Count an anomaly."""
        if kind == history.LOST:
            self.lost += count
        elif kind == history.DUPLICATE:
            self.duplicated += count
        elif kind == history.TORN:
            self.torn += count
        else:
            self.others[kind] += count
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {detail}")

    def compare(self, what: str, found: Counter[Any], expected: Counter[Any]) -> None:
        """Compare two multisets, which must be equal."""
        lost, more = expected - found, found - expected
        if lost:
            self.see(history.LOST, f"{what}: {list(lost)[:3]}", lost.total())
        doubled = sum(count for item, count in more.items() if item in expected)
        if doubled:
            self.see(history.DUPLICATE, f"{what}: {[item for item in more if item in expected][:3]}", doubled)
        foreign = more.total() - doubled
        if foreign:
            self.see("wrong value", f"{what}: {[item for item in more if item not in expected][:3]}", foreign)


def verify(
    bootstrap_servers: str,
    names: Names,
    kinds: Iterable[str],
    found: Findings,
    *,
    copies: Iterable[tuple[str, Names]] = (),
    replays: bool = False,
    states: Sequence[Path] | None = None,
) -> None:
    """Read and check everything. No driver may be running any more.

    Args:
        replays: whether all dead letters were replayed.
        copies: kind and names of each copy of a flow that has run beside it.
        states: state folders of the hosts, where each host has a part of each table. None: one folder has everything.
    """
    kinds = list(kinds)
    source = independent.read_topic(bootstrap_servers, names.source, decided=True, seconds=READ_S)
    found.records = len(source) * len(kinds)
    for kind in (COPY, LEDGER, UNLOGGED):
        # The history checker does not know that a copy goes on behind its flow, and writes nothing up to there.
        if kind in kinds and not (kind == LEDGER and names.versions.get(kind)):
            _judge(bootstrap_servers, names, kind, found)
    if COPY in kinds:
        copied = _read(bootstrap_servers, names.output(COPY))
        found.compare("copies", _pairs(copied), _pairs(source))
    if PLAIN in kinds:
        copied = _read(bootstrap_servers, names.output(PLAIN))
        found.compare("plain copies", _pairs(copied), _pairs(source))
    if LEDGER in kinds:
        table = _ledger(bootstrap_servers, names, source, found)
        if states is None:
            _ledger_copy(names, table, found)
    if states is not None:
        for kind in kinds:
            if names.own_table(kind) is not None:
                check_hosts(bootstrap_servers, names.flow(kind), states, found)
    if UNLOGGED in kinds:
        deletions = len(names.deletions.read_text().splitlines()) if names.deletions.exists() else 0
        check_unlogged(source, _read(bootstrap_servers, names.output(UNLOGGED)), deletions, found)
    if TOTALS in kinds:
        _totals(bootstrap_servers, names, source, found)
    if SORTER in kinds:
        _sorter(bootstrap_servers, names, source, found, replays=replays)
    if JOINER in kinds:
        _joiner(bootstrap_servers, names, source, found)
    if PAIRS in kinds:
        _pairs_of_keys(bootstrap_servers, names, source, found)
    for kind, copy in copies:
        written = _numbers(kind, _read(bootstrap_servers, copy.output(kind)))
        check_copy(copy.flow(kind), written, _numbers(kind, source), found)
    for kind in external.KINDS:
        if kind in kinds:
            verify_external(kind, names.target(kind).state(), source, found)


def _numbers(kind: str, records: Sequence[independent.Seen]) -> list[tuple[bytes | None, int]]:
    """Keys and numbers, without those that need not be in the output of the flow."""
    numbers = [(record.key, _number(record)) for record in records]
    if kind != SORTER:
        return numbers
    return [(key, n) for key, n in numbers if n % BAD_EVERY != BAD and n % LATE_EVERY != LATE]


def check_copy(
    flow: str,
    written: Sequence[tuple[bytes | None, int]],
    source: Sequence[tuple[bytes | None, int]],
    found: Findings,
) -> None:
    """A copy begins somewhere, and ends somewhere. In between, it must have written every number of a key once.

    Args:
        written, source: key and number.
    """
    wanted, there = defaultdict(list), defaultdict(list)
    for key, n in source:
        wanted[key].append(n)
    for key, n in written:
        there[key].append(n)
    for key, numbers in there.items():
        first, last = min(numbers), max(numbers)
        expected = Counter(n for n in wanted[key] if first <= n <= last)
        found.compare(f"numbers of {flow}, key {key!r}", Counter(numbers), expected)


def verify_external(kind: str, state: external.State, source: Sequence[independent.Seen], found: Findings) -> None:
    """The system must have one row for each record."""
    check_state(kind, state, found)
    expected = Counter(
        (record.partition, record.offset, (record.key or b"").decode(), (record.value or b"").decode())
        for record in source
    )
    found.compare(f"rows of {kind}", state.rows, expected)


def check_state(kind: str, state: external.State, found: Findings) -> None:
    """At any moment, the system must have the rows that its progress row says, each once, and no others."""
    for problem in state.torn():
        found.see(history.TORN, f"{kind}: {problem}")


def verify_answers(
    bootstrap_servers: str, names: Names, answers: Sequence[Answer], strange: Sequence[str], found: Findings
) -> None:
    """Each answer of the query servers must be what the ledger's table had at the position of the answer, or later."""
    for each in strange:
        found.see("strange answer", each)
    if answers:
        wrong = Versions.read(bootstrap_servers, names.table, seconds=READ_S).problems(answers)
        if wrong:
            found.see("wrong answer", f"{names.table}: {wrong[:3]}", len(wrong))


def _judge(bootstrap_servers: str, names: Names, kind: str, found: Findings) -> None:
    verdict = recorder.verify(
        names.history,
        bootstrap_servers,
        names.flow(kind),
        sources=[names.source],
        outputs=[names.output(kind)],
        seconds=READ_S,
    )
    for anomaly in verdict.anomalies:
        found.see(anomaly.kind, f"{names.flow(kind)}: {anomaly}", anomaly.count)
    if verdict.verdict == "unknown":
        found.unknown.append(f"{names.flow(kind)}: {verdict.why}")


def _ledger(
    bootstrap_servers: str, names: Names, source: list[independent.Seen], found: Findings
) -> dict[bytes | None, Any]:
    """Returns the rows of its table."""
    expected: Counter[Any] = Counter()
    accounts: dict[bytes, tuple[int, int]] = {}
    alarms: Counter[Any] = Counter()
    for record in source:  # a key is in one partition, and read_topic keeps the order of partitions
        key, n = record.key or b"", _number(record)
        count, total = accounts.get(key, (0, 0))
        accounts[key] = count + 1, total + n
        expected[key, n, count + 1, total + n] += 1
        if n % ALARM_EVERY == 0:
            alarms[key, n] += 1
    outputs = (
        json.loads(record.value or b"") | {"key": record.key}
        for record in _read(bootstrap_servers, names.output(LEDGER))
    )
    found.compare("ledger", Counter((v["key"], v["n"], v["count"], v["sum"]) for v in outputs), expected)
    rung = _read(bootstrap_servers, names.alarms)
    found.compare("alarms", Counter((record.key, _number(record)) for record in rung), alarms)
    table = check_rows(names.table, _read(bootstrap_servers, names.table), found)
    replayed = {key: {"count": count, "sum": total} for key, (count, total) in accounts.items()}
    if table != replayed:
        found.see(history.STATE, f"{names.table}: {_difference(table, replayed)}")
    return table


def _ledger_copy(names: Names, table: dict[bytes | None, Any], found: Findings) -> None:
    local = {
        key: json.loads(value) for key, value in Table.of_flow(names.state / names.flow(LEDGER) / names.table).range()
    }
    if local != table:
        found.see(history.STATE, f"local copy of {names.table}: {_difference(local, table)}")


def check_hosts(bootstrap_servers: str, flow: str, states: Iterable[Path], found: Findings) -> None:
    """Each copy of a table on a host must be what the topics had where the copy is. One may be behind: a standby copy,
    or that of a host that is gone."""
    named = FlowNames(flow)
    with closing(Cluster(ClientSettings(bootstrap_servers, {}))) as cluster:
        progress = last_of(read_history(cluster, named), named)
        for folder in states:
            report = Report(limit=3)
            copies = LocalCopies(cluster, named, report, scratch=None, tell=lambda text, done, total: None)
            try:
                copies.run(folder, progress)
            except OptionError:  # it has none
                continue
            found.host_copies += report.checked["local copies"]
            if report.counts:
                texts = [each.text for each in report.examples]
                found.see(history.STATE, f"{flow}, {folder.name}: {texts}", sum(report.counts.values()))


def check_unlogged(
    source: Sequence[independent.Seen], outputs: Sequence[independent.Seen], deletions: int, found: Findings
) -> None:
    """Every number must be written once, in the order of its key. Each account must follow from the one before. It may
    begin again only as often as the local copies were deleted."""
    values = [(record.key or b"", json.loads(record.value or b"")) for record in outputs]
    numbers = [(record.key or b"", _number(record)) for record in source]
    found.compare("numbers of unlogged", Counter((key, value["n"]) for key, value in values), Counter(numbers))
    wanted, written = defaultdict(list), defaultdict(list)
    for key, n in numbers:
        wanted[key].append(n)
    known: dict[bytes, tuple[int, int]] = {}
    begun: Counter[bytes] = Counter()
    wrong = []
    for key, value in values:
        written[key].append(value["n"])
        count, total = known.get(key, (0, 0))
        known[key] = account = value["count"], value["sum"]
        if account == (1, value["n"]):
            begun[key] += 1
        elif account != (count + 1, total + value["n"]):
            wrong.append((key, value, (count, total)))
    if wrong:
        found.see(history.STATE, f"accounts of unlogged: {wrong[:3]}", len(wrong))
    disordered = [key for key in wanted if written[key] != wanted[key]]
    if disordered:
        found.see("order", f"keys of unlogged: {disordered[:3]}", len(disordered))
    early = {key: count - 1 for key, count in begun.items() if count - 1 > deletions}
    if early:
        found.see(history.STATE, f"unlogged: {deletions} deletions, accounts begun again {early}"[:300], len(early))


def check_rows(table: str, records: Sequence[independent.Seen], found: Findings) -> dict[bytes | None, Any]:
    """The rows of a table: the last value of each key. A row must be in one partition only, also after rows moved."""
    last: dict[tuple[int, bytes | None], bytes | None] = {}
    for record in records:
        last[record.partition, record.key] = record.value
    rows: dict[bytes | None, Any] = {}
    twice = []
    for (partition, key), value in last.items():
        if value is not None:
            if key in rows:
                twice.append((key, partition))
            rows[key] = json.loads(value)
    if twice:
        found.see(history.STATE, f"rows of {table} that are in two partitions: {twice[:3]}", len(twice))
    return rows


def _sorter(
    bootstrap_servers: str, names: Names, source: list[independent.Seen], found: Findings, *, replays: bool
) -> None:
    """Every number must be in exactly one topic: bad ones in the dead letters, others in the output. Late ones may be
    in the late topic or, if they came before there was a watermark, in the output.
    The table has the output's sums. Every dead letter must have been replayed once."""
    out = Counter((record.key, _number(record)) for record in _read(bootstrap_servers, names.output(SORTER)))
    late = Counter((record.key, _number(record)) for record in _read(bootstrap_servers, names.late))
    dead = Counter((record.key, _number(record)) for record in _read(bootstrap_servers, names.dead))
    numbers = [(record.key, _number(record)) for record in source]
    may_be_late = {pair for pair in numbers if pair[1] % LATE_EVERY == LATE}
    found.compare("dead letters", dead, Counter(pair for pair in numbers if pair[1] % BAD_EVERY == BAD))
    found.compare("outputs and late records", out + late, Counter(p for p in numbers if p[1] % BAD_EVERY != BAD))
    strange = set(late) - may_be_late
    if strange:
        found.see("wrong value", f"late records: {list(strange)[:3]}", len(strange))
    sums: dict[bytes | None, int] = defaultdict(int)
    for (key, number), count in out.items():
        sums[key] += number * count
    if replays:
        again = Counter((record.key, _number(record)) for record in _read(bootstrap_servers, names.replayed))
        found.compare("replayed letters", again, dead)
    table = check_rows(names.sums, _read(bootstrap_servers, names.sums), found)
    if table != dict(sums):
        found.see(history.STATE, f"{names.sums}: {_difference(table, sums)}")


def _pairs_of_keys(bootstrap_servers: str, names: Names, source: list[independent.Seen], found: Findings) -> None:
    """Every left number must be written once with the next number of its key, unless one of them was late."""
    late = {_number(record) for record in _read(bootstrap_servers, names.late_pairs)}
    taken = {n for n in map(_number, source) if n not in late}
    expected = Counter((n, n + KEYS) for n in taken if n // KEYS % 2 == 0 and n + KEYS in taken)
    written = (json.loads(record.value or b"") for record in _read(bootstrap_servers, names.output(PAIRS)))
    found.compare("pairs", Counter((value["n"], value["partner"]) for value in written), expected)


def _joiner(bootstrap_servers: str, names: Names, source: list[independent.Seen], found: Findings) -> None:
    """Every number must be written once, with the account that its key had at the position that the output names."""
    records = _read(bootstrap_servers, names.output(JOINER))
    found.compare(
        "joined numbers",
        Counter((record.key, _number(record)) for record in records),
        Counter((record.key, _number(record)) for record in source),
    )
    history_of: dict[tuple[int, bytes | None], list[tuple[int, Any]]] = defaultdict(list)
    partition_of: dict[bytes | None, int] = {}
    for row in _read(bootstrap_servers, names.table):
        account = None if row.value is None else json.loads(row.value)
        history_of[row.partition, row.key].append((row.offset, account))
        partition_of[row.key] = row.partition
    wrong = []
    for record in records:
        value = json.loads(record.value or b"")
        ends = Position.parse(value["at"]).offsets[names.table]
        partition = partition_of.get(record.key, -1)
        known = [account for offset, account in history_of[partition, record.key] if offset < ends.get(partition, 0)]
        if value["account"] != (known[-1] if known else None):
            wrong.append((record.key, value, known[-1:]))
    if wrong:
        found.see("wrong value", f"joined accounts: {wrong[:3]}", len(wrong))


def _totals(bootstrap_servers: str, names: Names, source: list[independent.Seen], found: Findings) -> None:
    """Every batch writes the totals of the keys that it read; its progress record says what it read."""
    by_partition: dict[int, dict[int, independent.Seen]] = defaultdict(dict)
    for record in source:
        by_partition[record.partition][record.offset] = record
    expected: Counter[Any] = Counter()
    totals: dict[bytes | None, tuple[int, int]] = {}
    for start, end in _ranges(bootstrap_servers, names):
        changed = set()
        for partition, upto in end.items():
            for offset in range(start.get(partition, 0), upto):
                if offset in by_partition[partition]:
                    record = by_partition[partition][offset]
                    count, total = totals.get(record.key, (0, 0))
                    totals[record.key] = count + 1, total + _number(record)
                    changed.add(record.key)
        expected.update((key, *totals[key]) for key in changed)
    outputs = _read(bootstrap_servers, names.output(TOTALS))
    values = ((record.key, json.loads(record.value or b"")) for record in outputs)
    found.compare("totals", Counter((key, value["count"], value["sum"]) for key, value in values), expected)


def _ranges(bootstrap_servers: str, names: Names) -> Iterator[tuple[Mapping[int, int], Mapping[int, int]]]:
    start: Mapping[int, int] = {}
    final = read_final(bootstrap_servers, names.flow(TOTALS), [], [], seconds=READ_S)
    for _, offsets in final.progress:
        end = offsets.get(names.source, {})
        yield start, end
        start = end


def _read(bootstrap_servers: str, topic: str) -> list[independent.Seen]:
    return independent.read_topic(bootstrap_servers, topic, decided=True, seconds=READ_S)


def _number(record: independent.Seen) -> int:
    return int(json.loads(record.value or b"")["n"])


def _pairs(records: Iterable[independent.Seen]) -> Counter[Any]:
    return Counter((record.key, record.value) for record in records)


def _difference(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> str:
    keys = [key for key in {*one, *other} if one.get(key) != other.get(key)]
    return f"{len(keys)} keys, for example {[(key, one.get(key), other.get(key)) for key in keys[:3]]}"

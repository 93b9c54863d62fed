"""The parts of ``onceflow bench state`` that need neither broker nor Spark: its checks must find what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
import pytest

from onceflow.state.api.record import Record
from onceflow_workshop.bench import balance_runs, processes, restore, state
from onceflow_workshop.bench.balances import Balance, ColumnBalance, expected, payments, problem_of, row_of

SENT = list(payments(500, 20))


class OneState:
    """The state of one key."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    def put(self, value: Any) -> None:
        self.value = value


def by_records(sent: list[tuple[bytes, bytes]], states: dict[bytes, Any]) -> Iterator[tuple[bytes, bytes]]:
    processor = Balance()
    for key in dict.fromkeys(key for key, _ in sent):
        records = [Record(key, orjson.loads(raw)) for each, raw in sent if each == key]
        known = OneState(states.get(key))
        for record in processor.process(key, records, known):
            yield record.key, orjson.dumps(record.value)
        states[key] = known.value


def by_columns(sent: list[tuple[bytes, bytes]], states: dict[bytes, Any]) -> Iterator[tuple[bytes, bytes]]:
    keys = list(dict.fromkeys(key for key, _ in sent))
    records = pa.table(
        {
            "key": pa.array([key for key, _ in sent], pa.binary()),
            "value": pa.array([raw for _, raw in sent], pa.binary()),
            "state": pa.array([keys.index(key) for key, _ in sent], pa.int32()),
        }
    )
    known = [states.get(key, {}) for key in keys]
    columns = {name: pa.array([row.get(name) for row in known], pa.int64()) for name in ("balance", "count")}
    before = pa.table({"key": pa.array(keys, pa.binary()), **columns, "exists": pa.array([bool(row) for row in known])})
    outputs, after = ColumnBalance().process(records, before, None)
    for row in after.to_pylist():
        states[row.pop("key")] = row
    yield from zip(outputs["key"].to_pylist(), outputs["value"].to_pylist(), strict=True)


@pytest.mark.parametrize("process", [by_records, by_columns])
def test_processors_agree_with_the_fold(process: Any) -> None:
    """In two batches: some keys are new in the second, others go on."""
    states: dict[bytes, Any] = {}
    outputs = [*process(SENT[:30], states), *process(SENT[30:], states)]
    want = expected(SENT)
    rows = {key: (row["balance"], row["count"]) for key, row in states.items()}
    assert problem_of(outputs, rows, want) == ""
    assert len(want[1]) == 20


def test_what_a_fold_begins_with() -> None:
    first = expected(SENT[:100])
    assert expected(SENT[100:], first[1])[1].items() <= expected(SENT)[1].items()
    by_id, final = expected([(b"a", b'{"account":"a","amount":-2,"id":9}')], {b"a": (5, 1), b"b": (1, 1)})
    assert by_id == {9: (b"a", 3, 2)}
    assert final == {b"a": (3, 2)}


def test_problems_are_found() -> None:
    want = expected(SENT)
    good = list(by_records(SENT, {}))
    rows = dict(want[1])
    assert problem_of(good[:-1], rows, want).startswith("1 missing")
    assert problem_of([*good, good[0]], rows, want) == "1 doubled"
    key, raw = good[0]
    assert "1 wrong outputs" in problem_of([(b"other", raw), *good[1:]], rows, want)
    off = orjson.dumps({**orjson.loads(raw), "balance": 10**6})
    assert "1 wrong outputs" in problem_of([(key, off), *good[1:]], rows, want)
    last = orjson.loads(good[-1][1])
    off = orjson.dumps({**last, "count": last["count"] + 1})
    assert "1 wrong last outputs" in problem_of([*good[:-1], (good[-1][0], off)], rows, want)
    assert problem_of(good, {**rows, b"stranger": (0, 1)}, want) == "1 wrong rows"
    assert "wrong rows" in problem_of(good, dict(list(rows.items())[1:]), want)
    assert problem_of(good, None, want) == ""


def test_rows_of_the_table_topic() -> None:
    assert row_of(b'{"balance":-7,"count":2}') == (-7, 2)
    assert row_of(b"\0" + struct.pack("<qq", -7, 2)) == (-7, 2)


def test_log_lines_of_a_restore() -> None:
    lines = [
        "table t-0: restored, 1000 records read in 0.50 s",
        "table t-0: restored because there is no local copy; 1000 records read in 0.50 s, 2000 a second",
        "table t-1: caught up, 7 records read in 0.10 s",
        "table t-1: restored, 500 records read in 0.25 s",
    ]
    assert restore.restored_of(lines) == (1500, 0.75)


def test_proc_files() -> None:
    stat = "12 (a (b) c) S 7 12 12 0 -1 4194560 1 2 3 4 100 50 20 30 20 0 1 0 999 1 1"
    process = processes.stat_of(stat)
    assert (process.parent, process.begun) == (7, 999)
    assert process.cpu_s == pytest.approx(150 / processes._TICKS)
    assert processes.busy_of("cpu  10 1 20 500 60 2 3 40 0 0\ncpu0 1\n") == pytest.approx(36 / processes._TICKS)
    assert processes.memory_of("Name:\tx\nVmRSS:\t  2048 kB\nRssAnon:\t  1024 kB\n") == (2.0, 1.0)
    assert processes.memory_of("Name:\tx\n") == (0.0, 0.0)


def test_processes_below_another() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 1, 5: 9}
    stats = {pid: processes.Process(parent, 0.0, 0) for pid, parent in parents.items()}
    assert sorted(processes.below(1, stats)) == [2, 3, 4]
    assert processes.below(5, stats) == []


def test_time_of_workers_that_have_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = processes.Process(1, 5.0, 77)
    stats = {1: processes.Process(0, 1.0, 1), 2: worker}
    monkeypatch.setattr(processes, "_stats", lambda: stats.items())
    meter = processes.Meter(1, (), "x")
    stats[2] = worker._replace(cpu_s=7.0)
    meter._cpu()
    del stats[2]
    assert meter.cpu_s()["workers"] == 2.0
    stats[2] = processes.Process(1, 0.5, 99)  # another one with the same pid
    assert meter.cpu_s()["workers"] == 2.5


def test_rates_leave_out_the_first_batch_and_a_rest() -> None:
    reports = [
        {"numInputRows": n, "durationMs": {"triggerExecution": ms}} for n, ms in ((100, 9000), (100, 500), (0, 7))
    ]
    reports += [{"numInputRows": n, "durationMs": {"triggerExecution": ms}} for n, ms in ((100, 300), (10, 200))]
    batches = balance_runs.batches_of(reports)
    assert batches == [(100, 9000.0), (100, 500.0), (100, 300.0), (10, 200.0)]
    assert balance_runs.rate_of(batches) == (250.0, [500.0, 300.0])
    assert balance_runs.rate_of(batches[:1]) == (0.0, [])
    assert balance_runs.rate_of([]) == (0.0, [])


def test_steps_are_those_of_later_batches() -> None:
    batches = [SimpleNamespace(seconds={"write": s}) for s in (9.0, 0.1, 0.3)]
    assert balance_runs.steps_ms(batches) == {"write": 200.0}
    assert balance_runs.steps_ms(batches[:1]) == {"write": 9000.0}
    assert balance_runs.steps_ms([]) == {}


def test_summary_of_runs() -> None:
    def run(rate: float, problem: str = "") -> balance_runs.Measured:
        meter: Any = SimpleNamespace(rss_mib=rate, anon_mib=None)
        cpu_s = {"driver": 1.0, "jvm": 2.0, "workers": 3.0, "broker": 4.0, "others": 9.0}
        return balance_runs.Measured(rate, 1_000_000, 3, [100.0, 300.0], cpu_s, meter, problem=problem)

    line = state.summary(balance_runs.COLUMNS, [run(300), run(100), run(200, "2 missing")], 50, records=1)
    assert line["records_per_s"] == 200
    assert line["ratio_to_transform_with_state"] == 4.0
    assert line["commits"] == 3
    assert line["commit_ms_median"] == 200
    assert line["cpu_us_per_record"] == 6.0
    assert line["max_worker_rss_mib"] == 300
    assert line["max_worker_anon_mib"] is None
    assert line["correct"] == "2 missing"
    assert line["guarantee"] == "exactly_once"
    assert state.summary(balance_runs.SPARK, [run(1)], 1)["guarantee"] == "at_least_once"

"""The parts of ``onceflow bench cluster`` that need neither broker nor Spark."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from onceflow import hooks
from onceflow.cli.main import cli
from onceflow.driver.step.table_state import TableState
from onceflow.planning.options import BatchSummary
from onceflow.protocol.progress import Progress
from onceflow.state.api.processor import Processor
from onceflow.state.changelog.topics import TableTopics
from onceflow.state.local.catch_up import CAUGHT_UP
from onceflow.state.local.format import CommitId
from onceflow.state.spec import ProcessSpec, StateReport
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow_workshop.bench import cluster, processes
from onceflow_workshop.bench import cluster_figures as figures
from onceflow_workshop.bench.cluster_hosts import Hosts
from onceflow_workshop.bench.cluster_load import Tally
from onceflow_workshop.bench.cluster_service import Batch, BatchLog, watched_reports
from onceflow_workshop.bench.latency_records import Balances
from onceflow_workshop.cli import bench_cluster


def batch(number: int, at: float, records: int = 10, homes: dict[int, str] | None = None, **more: Any) -> Batch:
    given = {
        "read_again": 0,
        "read_in_batch": 0,
        "aborted": 0,
        "seconds": {"write": 0.2, "end": 0.1},
        "path": "2 tasks",
        **more,
    }
    return Batch(batch=number, at=at, records=records, homes=homes or {}, **given)


# ---- what the service tells ------------------------------------------------------------------------------


def test_the_log_has_a_line_for_each_batch() -> None:
    file = io.StringIO()
    log = BatchLog(file)
    report = SimpleNamespace(partition=3, location="host:/a", restored=30)
    log.observed("begin", flow="f", batch=7)
    log.observed(hooks.RESTORED, flow="f", batch=None, table="t", records=40, seconds=0.1)
    log.observed(hooks.RESTORED, flow="f", batch=None, table="t", records=2, seconds=0.1)
    log.observed(hooks.ABORTED, flow="f", batch=7, error=RuntimeError())
    log.reported([report])  # type: ignore[list-item]
    log.observed("end", flow="f", batch=7, summary=BatchSummary(7, 100, "2 tasks", records=99, seconds={"end": 0.5}))
    log.observed("end", flow="f", batch=8, summary=BatchSummary(8, 100, records=1))
    log.observed("end", flow="f", batch=9)  # of a command, without a summary
    first, second = (Batch.of_line(line) for line in file.getvalue().splitlines())
    assert (first.batch, first.records, first.aborted) == (7, 99, 1)
    assert (first.read_again, first.read_in_batch) == (42, 30)
    assert first.homes == {3: "host:/a"}
    assert first.seconds == {"end": 0.5}
    assert (second.batch, second.aborted, second.homes) == (8, 0, {})
    assert (second.read_again, second.read_in_batch) == (0, 0)


def test_the_driver_tells_its_reports_and_what_was_read_again(tmp_path: Path) -> None:
    topics = TableTopics("table", "table-internal", "id-t", "id-i", 2, 86_400_000, 1_000_000)
    spec = ProcessSpec("flow", "flow", Processor(), topics, LmdbStore, tmp_path)
    ends = {name: dict.fromkeys(range(2), 0) for name in topics.ids}
    progress = Progress("flow", 0, {}, {}, changelogs=ends, time_ms=0)
    table = TableState(spec, progress, source_partitions=[], lateness_ms=None, idle_s=30)
    moment = table.moment(1, CommitId(1, 9, 1), 0)
    report = StateReport("table", 1, "host:/a", moment.commit, CAUGHT_UP, 17, 0.1, 18, None)
    told: list[StateReport] = []
    again: list[int] = []

    def observer(step: str, **facts: Any) -> None:
        if step == hooks.RESTORED:
            again.append(facts["records"])

    forget = hooks.observe(observer)
    try:
        with watched_reports(told.extend):
            table.on_commit([report], moment)
    finally:
        forget()
    assert told == [report]
    assert again == [17]
    table.on_commit([report], moment)
    assert told == [report], "it was not watched any more"


def test_lines_are_read_when_they_are_whole(tmp_path: Path) -> None:
    known = cluster._Batches(tmp_path / "log")
    assert known.look() == []
    lines = [json.dumps({**vars(batch(n, float(n))), "homes": {"0": "a"}}) + "\n" for n in range(4)]
    (tmp_path / "log").write_text(lines[0] + lines[1][:9])
    assert [each.batch for each in known.look()] == [0]
    (tmp_path / "log").write_text("".join(lines))
    assert [each.batch for each in known.look()] == [0, 1, 2, 3]
    within, earlier = known.between(1.0, 3.0)
    assert [each.batch for each in within] == [1, 2]
    assert [each.batch for each in earlier] == [0]


# ---- figures ---------------------------------------------------------------------------------------------


def test_a_partition_has_moved_when_another_host_processes_it() -> None:
    earlier = [batch(1, 1.0, homes={0: "a", 1: "b"})]
    batches = [batch(2, 2.0, homes={0: "b"}), batch(3, 3.0), batch(4, 4.0, homes={0: "b", 1: "b", 2: "a"})]
    assert figures.moved(batches, earlier) == 1
    assert figures.moved([*batches, batch(5, 5.0, homes={0: "a", 1: "a", 2: "a"})], earlier) == 3
    assert figures.moved(batches, []) == 0


def test_figures_of_a_phase() -> None:
    batches = [
        batch(1, 1.0, 30, read_again=60, aborted=1),
        batch(2, 2.0, 10, read_in_batch=4),
        batch(3, 3.0, 0, read_again=20),
    ]
    assert figures.of_batches(batches, []) == {
        "records": 40,
        "batches": 3,
        "batch_ms_median": 300,
        "read_again_per_record": 2.0,
        "read_in_batches_per_record": 0.1,
        "partitions_moved": 0,
        "failed_batches": 1,
    }
    nothing = figures.of_batches([], [])
    assert (nothing["records"], nothing["read_again_per_record"], nothing["batch_ms_median"]) == (0, None, None)
    assert figures.of_cpu({"driver": 0.5}, 1000) == {"driver_us_per_record": 500.0}
    assert figures.of_cpu({"driver": 0.5}, 0) == {"driver_us_per_record": None}
    assert figures.rate_after_first(batches[:1]) is None
    assert figures.rate_after_first([batch(1, 5.0, 1000), batch(2, 6.0, 50), batch(3, 7.0, 50)]) == 50


def test_the_summary_compares_backlogs() -> None:
    steady = {"bench": "cluster", "phase": "steady", "read_again_per_record": 3.7, "p50_ms": 5.0, "p99_ms": 9.0}
    host = {"bench": "cluster", "phase": "host", "outage_s": 2.5}
    ours = {"bench": "cluster_backlog", "runs_on": "cluster", "phase": "backlog", "records_per_s": 500}
    cpu = {"executors_us_per_record": 20.0, "driver_us_per_record": 10.0}
    local = {**ours, "runs_on": "local", "records_per_s": 1000, "executors_us_per_record": 0.0}
    rows = [{**steady, "outage_s": 0.4}, host, {**ours, **cpu}, {**local, "driver_us_per_record": 12.0}]
    found = figures.summary(rows, "")
    assert found["read_again_per_record"] == 3.7
    assert found["longest_outage_s"] == 2.5
    assert found["backlog_ratio_to_local"] == 0.5
    assert found["backlog_cpu_ratio_to_local"] == 2.5
    assert found["correct"] == "yes"
    alone = figures.summary([{**ours, **cpu}], "3 missing")
    assert (alone["backlog_ratio_to_local"], alone["p99_ms"], alone["longest_outage_s"]) == (None, None, None)
    assert alone["correct"] == "3 missing"


# ---- the load --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accounts", [1, 500, 7919, 2 * 7919])
def test_the_first_records_are_of_each_account_once(accounts: int) -> None:
    records = Balances(None, accounts)
    assert len({records.record(number)[0] for number in range(accounts)}) == accounts
    again, _ = records.record(accounts)
    assert records.output(again, _output(again, accounts, 2, records)).right


def _output(key: bytes, number: int, count: int, records: Balances) -> bytes:
    return orjson.dumps({"account": key.decode(), "id": number, "balance": records._balances[number], "count": count})


def outputs(tally: Tally, count: int, now: float) -> Iterator[tuple[bytes, bytes]]:
    """Sends so many records at this time; what has to come out of them."""
    for _ in range(count):
        key, _ = tally.next(now)
        number = len(tally._at) - 1
        yield key, _output(key, number, tally._records._counts[number], tally._records)


def test_a_window_has_the_records_that_were_sent_in_it() -> None:
    tally = Tally(accounts=3)
    before = list(outputs(tally, 4, 0.0))
    tally.open_window(10.0)
    within = list(outputs(tally, 100, 10.0))
    tally.close_window()
    after = list(outputs(tally, 2, 11.0))
    for number, (key, value) in enumerate([*before, *within[:50]]):
        tally.came(key, value, 10.1 + number / 1000)
    assert tally.seen().window_visible == 50
    assert tally.seen().window_sent == 100
    for key, value in [*within[50:], *after]:
        tally.came(key, value, 14.0)
    seen = tally.seen(percentiles=True)
    assert (seen.sent, seen.visible, seen.window_sent, seen.window_visible) == (106, 106, 100, 100)
    assert (seen.p50_ms, seen.p99_ms) == (153.0, 4000.0)
    assert seen.outage_s == 3.85
    assert seen.problem == ""
    tally.open_window(20.0)
    assert tally.seen(percentiles=True) == tally.seen()
    assert (tally.seen().window_sent, tally.seen().outage_s) == (0, 0.0)


def test_what_is_missing_doubled_or_wrong() -> None:
    tally = Tally(accounts=3)
    sent = list(outputs(tally, 10, 0.0))
    for key, value in sent[:8]:
        tally.came(key, value, 1.0)
    tally.came(*sent[0], 1.1)
    assert tally.seen().problem == "2 missing, 1 doubled of 10 records"
    key, value = sent[8]
    tally.came(key, value.replace(b'"count":3', b'"count":4'), 1.2)
    tally.came(*sent[9], 1.2)
    assert tally.seen().problem == "1 doubled, 1 wrong of 10 records"
    tally.came(b"x", value.replace(b'"id":8', b'"id":99'), 1.3)  # nobody has sent this
    assert tally.seen().wrong == 2


# ---- processes and files ---------------------------------------------------------------------------------


def test_cpu_time_of_processes_that_come_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {pid: processes.Process(parent, cpu_s, pid) for pid, parent, cpu_s in ((1, 0, 5.0), (2, 1, 1.0))}
    monkeypatch.setattr(processes, "_stats", lambda: stats.items())
    monkeypatch.setattr(processes, "_read", lambda name: b"")
    roots = [1]
    usage = processes.Usage(lambda: roots)
    assert usage.cpu_s_since == 0.0
    del stats[1], stats[2]
    stats[3], stats[4] = processes.Process(0, 2.0, 3), processes.Process(3, 0.5, 4)
    roots[:] = [3]
    usage.look()
    assert usage.cpu_s_since == 2.5


def test_files_with_holes_take_what_is_in_them(tmp_path: Path) -> None:
    with (tmp_path / "store").open("wb") as file:
        file.truncate(1 << 30)
        file.write(os.urandom(50_000))
    assert 40_000 < processes.nbytes_on_disk(tmp_path) < 1 << 20
    assert processes.nbytes_on_disk(tmp_path / "none") == 0


def test_hosts_share_no_folder(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    first, second = hosts.environment("worker-0"), hosts.environment("worker-1")
    for variable in ("HOME", "TMPDIR", "SPARK_LOCAL_DIRS", "ONCEFLOW_STATE_DIR"):
        assert Path(first[variable]).is_relative_to(tmp_path / "worker-0")
        assert Path(second[variable]).is_relative_to(tmp_path / "worker-1")
    assert first["ONCEFLOW_STATE_DIR"] == str(hosts.state_dir("worker-0"))


# ---- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls the command without measuring; returns its result and what it would have measured."""

    def call(*arguments: str, correct: str = "yes") -> tuple[Any, cluster.Choices | None]:
        known: list[cluster.Choices] = []

        def run(choices: cluster.Choices, show: Any) -> Iterator[dict[str, Any]]:
            known.append(choices)
            show("steady", 1, 2)
            yield {"bench": "cluster", "phase": "steady", "p50_ms": 5.0, "correct": correct}
            if correct == "fails":
                raise RuntimeError("the service has ended")
            yield figures.summary([], "" if correct == "yes" else correct)

        monkeypatch.setattr(cluster, "run", run)
        given = ["bench", "cluster", "--output", str(tmp_path / "results"), *arguments]
        return CliRunner().invoke(cli, given), known[0] if known else None

    return call


def test_the_command_passes_its_options(called: Any, tmp_path: Path) -> None:
    result, choices = called()
    assert result.exit_code == 0, result.output
    assert choices == cluster.Choices(phases=list(cluster.PHASES))
    assert bench_cluster.PHASES == cluster.PHASES
    assert len((tmp_path / "results").read_text().splitlines()) == 2
    _, choices = called("--phases", "backlog,host", "--phases", "steady", "--copies", "2", "--local", "--workers", "2")
    assert list(choices.phases) == ["steady", "host", "backlog"]
    assert (choices.copies, choices.local, choices.workers) == (2, True, 2)
    result, choices = called("--phases", "steady,flood")
    assert result.exit_code == 2
    assert choices is None


def test_results_can_be_printed_as_json(called: Any, tmp_path: Path) -> None:
    result, _ = called("--json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        json.loads(line) for line in (tmp_path / "results").read_text().splitlines()
    ]


def test_the_command_fails_when_outputs_are_wrong(called: Any) -> None:
    result, _ = called(correct="3 missing of 10 records")
    assert result.exit_code == 1
    assert "Wrong: 3 missing of 10 records." in result.output


def test_what_was_measured_is_printed_when_a_phase_fails(called: Any) -> None:
    result, _ = called(correct="fails")
    assert result.exit_code != 0
    assert "p50_ms" in result.output


def test_what_the_progress_bar_counts() -> None:
    told: list[tuple[str, int, int]] = []
    choices = cluster.Choices(seconds=10, warm_seconds=5, backlog=40_000, phases=["steady", "backlog"], local=True)
    assert list(choices.steps()) == ["starting", "warming up", "steady", "backlog", "backlog, local", "checking"]
    clock = cluster._Clock(choices.steps(), lambda *given: told.append(given))
    clock.begin("steady")
    clock.begin("checking")
    assert told == [("steady", 35, 108), ("checking", 107, 108)]
    assert list(cluster.Choices(phases=["backlog"]).steps()) == ["starting", "backlog", "checking"]

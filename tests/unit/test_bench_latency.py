"""The parts of ``onceflow bench latency`` that need neither broker nor Spark."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from click.testing import CliRunner, Result

from onceflow.cli.main import cli
from onceflow.errors import EnvironmentUnusableError
from onceflow.planning import engine
from onceflow.state.api.record import Record
from onceflow.testing.waiting import wait_until
from onceflow_workshop.bench import latency_plot, latency_runs
from onceflow_workshop.bench.balances import Balance
from onceflow_workshop.bench.latency import Plan, Probed, _Probe, percentile, percentile_of_sorted
from onceflow_workshop.bench.latency_records import WORKLOADS, Balances, Copies, records_of
from onceflow_workshop.bench.latency_runs import Choices, Measured, Setting, labels_of, settings_of
from onceflow_workshop.bench.processes import Usage
from onceflow_workshop.cli import bench_latency

pytestmark = pytest.mark.slow  # the tables and pictures of a benchmark

# ---- records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_bytes", [8, 9, 1024])
def test_a_copy_is_the_record_itself(value_bytes: int) -> None:
    copies = Copies(value_bytes)
    key, value = copies.record(7)
    assert len(value) == value_bytes
    assert copies.output(key, value) == (7, True)
    assert copies.output(key, value + b"x") == (7, False)
    other, _ = copies.record(8)
    assert copies.output(other, value) == (8, False)
    with pytest.raises(ValueError, match="key None"):
        copies.output(None, value)


def processed(records: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """What the service makes of them."""
    states: dict[bytes, Any] = {}
    for key, raw in records:
        state = SimpleNamespace(
            get=lambda key=key: states.get(key), put=lambda given, key=key: states.update({key: given})
        )
        for record in Balance().process(key, [Record(key, orjson.loads(raw))], state):
            yield key, orjson.dumps(record.value)


@pytest.mark.parametrize("value_bytes", [None, 500])
def test_a_balance_is_that_of_its_account(value_bytes: int | None) -> None:
    balances = Balances(value_bytes)
    sent = [balances.record(number) for number in range(25_000)]
    assert len({key for key, _ in sent}) == 10_000
    assert {len(value) for _, value in sent} == {500} if value_bytes else len(sent[0][1]) < 60
    for number, (key, value) in enumerate(processed(sent)):
        assert balances.output(key, value) == (number, True)
    wrong = {**orjson.loads(value), "count": 1}
    assert balances.output(key, orjson.dumps(wrong)) == (24_999, False)
    assert balances.output(b"acc-0000001", value) == (24_999, False)


def test_each_workload_has_its_records() -> None:
    assert [type(records_of(workload, None)) for workload in WORKLOADS] == [Copies, Balances]
    assert len(records_of("copy", None).record(0)[1]) == 1024


# ---- what the probe sees --------------------------------------------------------------------------------


class Outputs:
    """A consumer of what comes out: the records that were sent up to now, with some of them lost or doubled."""

    def __init__(self, probe: Any, lost: set[int], doubled: set[int]) -> None:
        self._probe, self._lost = probe, lost
        self._left = set(doubled)
        self._next = 0

    def poll(self, seconds: float) -> Any:
        while self._next in self._lost:
            self._next += 1
        if self._next >= len(self._probe._at):
            time.sleep(0.001)
            return None
        key = self._next.to_bytes(8, "big")
        if self._next in self._left:
            self._left.discard(self._next)
        else:
            self._next += 1
        value = key + self._probe._records._rest
        return SimpleNamespace(error=lambda: None, key=lambda: key, value=lambda: value)


@pytest.mark.parametrize(
    "lost, doubled, problem",
    [(set(), set(), ""), (set(), {3, 5}, "2 doubled of 40 records"), ({4}, set(), "1 missing of 40 records")],
    ids=["all", "doubled", "lost"],
)
@pytest.mark.slow
def test_what_comes_out_is_counted(
    lost: set[int], doubled: set[int], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onceflow_workshop.bench.latency._DRAIN_SECONDS", 1.0)
    monkeypatch.setattr("onceflow_workshop.bench.latency._DOUBLES_SECONDS", 0.05)
    probe = _Probe(Plan("nowhere", "in", "out", 100, 0.1, 0.2, value_bytes=8))
    begun = time.monotonic()
    probe._at.extend(begun + number / 100 for number in range(40))  # a record every 10 ms, the last one at 390 ms
    latencies = probe._receive(Outputs(probe, lost, doubled))
    seen = Probed(latencies, 40, 40 - probe._distinct, probe._doubled, probe._wrong)
    assert seen.problem == problem
    # From 100 ms after the first output on, for 200 ms. The first output comes a little after the beginning.
    assert 18 <= len(latencies) <= 20
    phases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert phases == ["warming up", "measuring", "draining"]


def test_a_service_that_writes_nothing_is_not_waited_for_long() -> None:
    probe = _Probe(Plan("nowhere", "in", "out", 100, 0.0, 0.2, start_seconds=0.05))
    with pytest.raises(TimeoutError, match=r"nothing came out within 0\.05 s"):
        probe._receive(Outputs(probe, set(), set()))


def test_percentiles_of_sorted_values_are_the_same() -> None:
    values = [float(number) for number in range(1, 1001)]
    assert [percentile_of_sorted(values, percent) for percent in (0.1, 50, 99, 100)] == [1.0, 500.0, 990.0, 1000.0]
    assert percentile(values[::-1], 99) == 990.0


# ---- what processes use ---------------------------------------------------------------------------------

BUSY = "import sys, time\nprint('on', flush=True)\nwhile True: pass"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell")
def test_the_use_of_a_process_and_of_those_below_it() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == b"on\n"
        usage = Usage([started.pid])
        before = usage.cpu_s

        def used() -> bool:
            usage.look()
            return usage.cpu_s >= before + 0.1

        wait_until(used, 30, "a busy process uses processor time")
        assert (usage.cpu_percent() or 0) > 0
        assert (usage.max_rss_mib or 0) > 10, "of two processes"
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
    spent = usage.cpu_s
    usage.restart()
    assert usage.cpu_s >= spent, "what has ended is not forgotten"
    assert usage.max_rss_mib is None
    assert Usage([]).cpu_percent() is None


# ---- settings -------------------------------------------------------------------------------------------


def test_every_combination_is_measured_once() -> None:
    found = settings_of(["copy"], ["auto", "tasks", "auto"], [100, 1000], [2000], None)
    assert [(each.engine, each.trigger_ms) for each in found] == [
        ("auto", 100),
        ("tasks", 100),
        ("auto", 1000),
        ("tasks", 1000),
    ]
    assert labels_of(found)[1] == "engine tasks, 100 ms"
    assert labels_of([Setting()]) == ["copy, engine auto, 100 ms, 2,000 records/s"]


# ---- the plot -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    one, two = ([float(ms + number % 50) for number in range(500)] for ms in (20, 200))
    file = tmp_path / "one.png"
    latency_plot.draw(file, {"one": one}, "a title")
    first = image.imread(file)
    assert first.shape[:2] == (latency_plot.HEIGHT, latency_plot.WIDTH)
    latency_plot.draw(file, {"one": one, "two": two, "three": []}, "a title")
    both = image.imread(file)
    assert [pixels(first, color) > 500 for color in (BLUE, ORANGE)] == [True, False]
    assert [pixels(both, color) > 500 for color in (BLUE, ORANGE)] == [True, True]


BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)  # the first two of matplotlib


def pixels(picture: Any, color: tuple[int, int, int]) -> int:
    """How many have exactly this colour."""
    return int(((picture[..., :3] * 255).round() == color).all(axis=2).sum())


@pytest.mark.parametrize("values", [[], [0.0], [5.0], [0.01, 3.0, 40_000.0]])
def test_bins_hold_all_values(values: list[float]) -> None:
    edges = latency_plot.bin_edges(values)
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert edges[0] <= max(0.1, min(values, default=1.0))
    assert edges[-1] >= max(values, default=0.0)


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EnvironmentUnusableError, match="matplotlib") as failed:
        latency_plot.module("figure")
    assert "pip install matplotlib" in str(failed.value)


# ---- the command ----------------------------------------------------------------------------------------


def figures_of(setting: Setting, correct: str = "yes") -> dict[str, Any]:
    found = {"bench": "latency", "workload": "copy", "engine": setting.engine, "trigger_ms": setting.trigger_ms}
    rates = {"records_per_second": setting.records_per_second, "p50_ms": 5.0, "p99_ms": 9.0}
    return {**found, **rates, "cpu_percent": None, "correct": correct}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls the command without measuring; returns its result and what it would have measured."""

    def call(*arguments: str, correct: str = "yes") -> tuple[Result, Choices | None]:
        known: list[Choices] = []

        def run(choices: Choices, show: Any) -> Iterator[Measured]:
            known.append(choices)
            for setting in choices.settings:
                show("measuring", 1, 2)
                yield Measured(setting, figures_of(setting, correct), [4.0, 5.0, 6.0])

        monkeypatch.setattr(latency_runs, "run", run)
        given = ["bench", "latency", "--output", str(tmp_path / "results"), *arguments]
        return CliRunner().invoke(cli, given), known[0] if known else None

    return call


def test_options_may_have_several_values(called: Any) -> None:
    result, choices = called(
        "--engine", "auto,driver", "--engine", "tasks", "--trigger", "50ms, 1 second", "--rate", "5"
    )
    assert result.exit_code == 0
    assert [(each.engine, each.trigger_ms) for each in choices.settings[:4]] == [
        ("auto", 50),
        ("driver", 50),
        ("tasks", 50),
        ("auto", 1000),
    ]
    assert {each.records_per_second for each in choices.settings} == {5}
    _, choices = called()
    assert choices == Choices([Setting()])
    assert choices.settings[0].trigger_ms == 100


def test_results_are_printed_and_added_to_the_file(called: Any, tmp_path: Path) -> None:
    result, _ = called("--engine", "auto,tasks", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["engine"] for line in lines] == ["auto", "tasks"]
    assert [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()] == lines
    assert "measuring" in result.stderr
    table, _ = called()
    assert "p50_ms" in table.stdout
    assert any(line.split() == ["cpu_percent", "-"] for line in table.stdout.splitlines()), "what is not known"
    assert len((tmp_path / "results").read_text().splitlines()) == 3


def test_the_exit_code_tells_of_wrong_outputs(called: Any) -> None:
    assert called(correct="1 missing of 40 records")[0].exit_code == 1


@pytest.mark.slow
def test_the_command_draws(called: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib.figure")
    result, _ = called("--engine", "auto,driver", "--plot", str(tmp_path / "it.png"))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert "it.png" in result.stderr


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--engine", "fast"], "'fast' is not one of"),
        (["--trigger", "soon"], "'soon' is not a duration"),
        (["--trigger", "0ms"], "not from 1 ms to 1 minute"),
        (["--rate", "0"], "'0' is not a number from 1 to 50,000"),
        (["--rate", "100,many"], "'many' is not a number"),
        (["--plot", "it.jpg"], "does not end with .png"),
        (["--plot", "/nowhere/it.png"], "there is no folder /nowhere"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(called: Any, arguments: list[str], says: str) -> None:
    result, choices = called(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert choices is None


def test_the_command_knows_what_can_be_measured() -> None:
    """It does not import the benchmarks for that."""
    assert bench_latency.WORKLOADS == WORKLOADS
    assert bench_latency.ENGINES == engine.ENGINES

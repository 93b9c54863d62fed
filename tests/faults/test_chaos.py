"""A short chaos run: faults of many kinds, then every record is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onceflow.planning.engine import DRIVER, TASKS
from onceflow.testing import history
from onceflow_workshop.chaos import external, fault_kinds, run
from onceflow_workshop.chaos.commands import Commands
from onceflow_workshop.chaos.driver_process import DriverProcess
from onceflow_workshop.chaos.flows import COPY, LEDGER, PLAIN, SORTER, UNLOGGED
from onceflow_workshop.chaos.observer import LOCAL, REPLAY, VERIFY
from onceflow_workshop.chaos.test_bed import Setup

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_broken_sink_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits rows of attempts that failed, and tasks die after writing."""
    setup = Setup("mutant", flows=(external.SQLITE,))
    monkeypatch.setattr(run, "SETUPS", {setup.name: setup})
    monkeypatch.setattr(DriverProcess, "program", (str(Path(__file__).with_name("chaos_mutant.py")),))
    kinds = ["task dies after writing"]
    result = run.run(seconds=5, seed=1, setups=[setup.name], kinds=kinds, keep=tmp_path / "run")
    assert result["verdict"] == "failed"
    assert result["duplicated"] > 0
    assert result["torn"] > 0
    assert (result["lost"], result["others"]) == (0, {})


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_broken_local_store_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a changelog: it applies changes of aborted batches, and drivers die before the commit."""
    setup = Setup("mutant", flows=(UNLOGGED,), rate=100)  # so that the driver, which is broken, runs all batches
    monkeypatch.setattr(run, "SETUPS", {setup.name: setup})
    monkeypatch.setattr(fault_kinds, "STEPS", ("audit",))
    monkeypatch.setattr(DriverProcess, "program", (str(Path(__file__).with_name("chaos_state_mutant.py")),))
    result = run.run(seconds=5, seed=1, setups=[setup.name], kinds=["driver dies at a step"], keep=tmp_path / "run")
    assert result["verdict"] == "failed"
    assert result["others"].keys() == {history.STATE}
    assert (result["lost"], result["duplicated"], result["torn"]) == (0, 0, 0)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "engine, mutant",
    [(DRIVER, "chaos_direct_mutant.py"), (TASKS, "chaos_direct_mutant.py"), (TASKS, "chaos_range_mutant.py")],
)
def test_a_broken_direct_engine_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, mutant: str
) -> None:
    """A record is in two batches where the driver divides what it has fetched, or tasks read it twice. What the driver
    would do wrong does not happen to tasks."""
    setup = Setup("mutant", flows=(COPY, PLAIN), rate=3_000)
    monkeypatch.setattr(run, "SETUPS", {setup.name: setup})
    monkeypatch.setattr(DriverProcess, "program", (str(Path(__file__).with_name(mutant)),))
    result = run.run(
        seconds=5, seed=1, setups=[setup.name], kinds=["driver killed"], engines=[engine], keep=tmp_path / "run"
    )
    assert result["driver_kills"] >= result["faults"] >= 3
    if engine == TASKS and "direct" in mutant:
        assert result["engines"]["batches"].keys() == {TASKS}
        assert result["verdict"] == "passed", result
    else:
        assert result["engines"]["batches"][engine] > 0
        assert result["verdict"] == "failed"
        assert result["duplicated"] > 0
        assert result["lost"] == 0


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("mutant", [None, "chaos_promotion_mutant.py"])
def test_flows_are_replaced_by_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str | None) -> None:
    """The mutant writes outputs of the records that the earlier version has read."""
    setup = Setup("replaced", flows=(LEDGER,) if mutant else (LEDGER, SORTER), rate=500)
    monkeypatch.setattr(run, "SETUPS", {setup.name: setup})
    if mutant:
        monkeypatch.setattr(DriverProcess, "program", (str(Path(__file__).with_name(mutant)),))
    kinds = ["flow replaced"]
    result = run.run(seconds=10, seed=1, setups=[setup.name], kinds=kinds, observe=not mutant, keep=tmp_path / "run")
    assert result["kinds"] == {"flow replaced": result["faults"]}
    assert result["faults"] >= 3  # a fork, its promotion, and another fork
    assert result["verdict"] == ("failed" if mutant else "passed"), result
    if mutant:
        assert result["duplicated"] > 0
        assert (result["lost"], result["torn"]) == (0, 0)
    else:
        answered = result["observed"][setup.name]["answered"]
        assert min(answered.get(name, 0) for name in (VERIFY, REPLAY, LOCAL)) >= 2, result["observed"]


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "kinds, is_broken",
    [
        (["letters replayed", "table repartitioned"], False),
        (["letters replayed"], True),
        (["table repartitioned"], True),
    ],
)
def test_operators_change_topics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str], is_broken: bool
) -> None:
    """Letters are replayed, and tables get more partitions, by commands that are killed."""
    setup = Setup("changed", flows=(LEDGER, SORTER), rate=500)
    monkeypatch.setattr(run, "SETUPS", {setup.name: setup})
    if is_broken:
        mutant = Path(__file__).with_name("chaos_command_mutant.py")
        monkeypatch.setattr(Commands, "program", (str(mutant),))
    seconds = 5 if is_broken else 60
    result = run.run(
        seconds=seconds, seed=1, setups=[setup.name], kinds=kinds, observe=not is_broken, keep=tmp_path / "run"
    )
    assert result["faults"] >= 3
    assert result["verdict"] == ("failed" if is_broken else "passed"), result
    if not is_broken:
        answered = result["observed"][setup.name]["answered"]
        assert min(answered.get(name, 0) for name in (VERIFY, REPLAY, LOCAL)) >= 2, result["observed"]
    elif kinds == ["letters replayed"]:
        assert result["duplicated"] > 0
        assert (result["lost"], result["torn"], result["others"]) == (0, 0, {})
    else:
        assert result["others"][history.STATE] > 0
        assert (result["duplicated"], result["torn"]) == (0, 0)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "setup, seconds, records", [("one-node", 10, 20_000), ("three-nodes", 150, 50_000), ("hosts", 60, 5_000)]
)
def test_a_short_run(tmp_path: Path, setup: str, seconds: int, records: int) -> None:
    """With three nodes, the commands of operators run beside the flows."""
    observe = setup == "three-nodes"
    command = [sys.executable, "-m", "onceflow.cli.main", "chaos", "--seconds", str(seconds), "--seed", "216"]
    command += ["--setup", setup, "--keep", str(tmp_path / "run"), *(["--observe"] if observe else [])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["verdict"] == "passed"
    assert result["setups"] == {setup: "passed"}
    assert (result["lost"], result["duplicated"], result["torn"], result["others"]) == (0, 0, 0, {})
    assert result["faults"] >= 3
    assert result["records"] > records
    if setup == "hosts":
        assert result["host_copies"] > 0
    else:
        assert DRIVER in result["engines"]["batches"]
    if observe:
        assert result["engines"]["batches"][TASKS] > 0, "few seconds may have no start whose tasks read"
        assert result["engines"]["switches"] > 0
        answered = result["observed"][setup]["answered"]
        assert min(answered.get(name, 0) for name in ("status", "transactions", "verify")) >= 2, result["observed"]

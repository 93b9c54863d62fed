"""How the demos plan their kills, and lose local state."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from onceflow.errors import OptionError
from onceflow.hooks import STEPS
from onceflow_workshop.cli.demo import demo
from onceflow_workshop.demos.chain import Choices
from onceflow_workshop.demos.deposits import READ_BACK, run
from onceflow_workshop.demos.harness import Service, _delete, plan_kills, plan_losses


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 3, 12])
def test_all_planned_kills_fit_into_the_batches_there_are(seed: int, count: int) -> None:
    batches = 5 * (count + 1)
    kills = plan_kills(count, batches=batches, rng=random.Random(seed))
    assert len(kills) == count
    assert all(kill.step in STEPS and kill.batches >= 1 for kill in kills)
    # Each kill needs its batches, and one more at `settle`, which belongs to the batch after.
    assert sum(kill.batches + 1 for kill in kills) < batches
    assert plan_kills(count, batches=batches, rng=random.Random(seed)) == kills


def test_no_kills_are_none() -> None:
    assert plan_kills(0, batches=5, rng=random.Random(1)) == []


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_every_plan_loses_state_that_is_there_and_is_read_back(seed: int, count: int) -> None:
    batches = 5 * (count + 1)
    kills = plan_losses(plan_kills(count, batches=batches, rng=random.Random(seed)), rng=random.Random(seed))
    assert len(kills) == count
    assert any(kill.loses_state for kill in kills)
    # The first kill, and so every one, comes after a committed batch.
    assert kills[0].step != "init"
    assert kills[0].batches >= 2
    # After the last loss, no kill before a batch that has read the state back was committed.
    last = max(n for n, kill in enumerate(kills) if kill.loses_state)
    assert all(kill.batches >= 3 for kill in kills[last + 1 :])
    assert sum(kill.batches + 1 for kill in kills) < batches
    again = plan_losses(plan_kills(count, batches=batches, rng=random.Random(seed)), rng=random.Random(seed))
    assert again == kills


def test_no_kills_lose_nothing() -> None:
    assert plan_losses([], rng=random.Random(1)) == []


def test_deleting_tells_whether_there_was_anything(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert not _delete(state)
    state.mkdir()
    assert not _delete(state)
    (state / "flow" / "0").mkdir(parents=True)
    (state / "flow" / "0" / "data.mdb").write_bytes(b"x")
    assert _delete(state)
    assert not state.exists()


def test_what_was_read_back_is_told_from_the_log(tmp_path: Path) -> None:
    """By the driver, of committed batches; what a task says of the same is not counted again."""
    lines = [
        "12:00 INFO onceflow.state: table balances-1a2b3c-0: restored, 0 records read in 0.01 s",
        "12:00 INFO onceflow.state: table balances-1a2b3c-1: restored, 500 records read in 0.01 s",
        "12:00 INFO onceflow.state: table balances-1a2b3c-2: caught up, 20 records read in 0.01 s",
        "12:00 INFO onceflow.state: table balances-1a2b3c-2: caught up; 20 records read in 0.01 s, 2000 a second",
        "something else",
    ]
    one = Service("book", [], [], tmp_path)
    assert one.log_lines(READ_BACK) == []
    one.log_file.write_text("\n".join(lines))
    assert [int(found[1]) for found in one.log_lines(READ_BACK)] == [0, 500, 20]


def test_too_few_records_for_the_kills_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="too few"):
        run(Choices(records=1000, kills=3))


def test_the_command_lists_the_demos() -> None:
    answer = CliRunner().invoke(demo, [])
    assert answer.exit_code == 0
    assert answer.output.startswith("deposits ")

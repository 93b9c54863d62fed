"""The demo `guarantees`: where it kills, and that every outcome but the promised one fails."""

from __future__ import annotations

import io
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from onceflow.cli.main import main
from onceflow.client.deadline import Deadline
from onceflow.errors import OptionError
from onceflow.protocol.partitioners import key_partitions
from onceflow_workshop.cli.demo import demo
from onceflow_workshop.demos import chain as chain_module
from onceflow_workshop.demos import guarantees as module
from onceflow_workshop.demos.audit import Findings, Message
from onceflow_workshop.demos.chain import BATCHES_PER_LIFE, Choices
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.guarantees import GUARANTEES, STEPS_ALWAYS, Guarantees, judge, plan_points, run
from onceflow_workshop.demos.harness import Death, Kill, Service

SEED = 42
RECORDS = 1500
BATCH = 100
KILLS = [Kill("write", in_batch=3), Kill("progress", in_batch=9)]
Records = list[Message]


# ---- where it kills ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 3, 7, 100])
def test_kills_are_spread_and_always_hit_both_steps(seed: int, count: int) -> None:
    batches = BATCHES_PER_LIFE * (count + 1)
    kills = plan_points(count, batches=batches, seed=seed)
    assert len(kills) == count
    # After others than these a kill may lose or double as well, which would count as unexplained.
    assert set(STEPS_ALWAYS) <= {kill.step for kill in kills} <= {"begin", "write", "progress", "end"}
    # One in each part of the run, none in the last batch: a kill there would leave no batch for the restart.
    apart = (batches - 1) // count
    places = [kill.in_batch or 0 for kill in kills]
    assert all(apart * n < place <= apart * (n + 1) for n, place in enumerate(places))
    assert places[-1] < batches
    assert plan_points(count, batches=batches, seed=seed) == kills


def test_another_seed_kills_elsewhere() -> None:
    plans = {tuple(plan_points(2, batches=15, seed=seed)) for seed in range(20)}
    assert len(plans) > 10
    assert {plan[0].step for plan in plans} == set(STEPS_ALWAYS)


def test_every_guarantee_gets_the_same_kills(chain: Guarantees) -> None:
    plans = [service._kills for service in chain.services]
    assert plans == [chain.points()] * 3
    commands = [[word.replace(name, "NAME") for word in service._command] for name, service in _services(chain)]
    assert commands[0] == commands[1] == commands[2]


SERVICE = """
import json
from onceflow import hooks
for batch in range(1, 20):
    hooks.at("write", where="driver", flow="copy", batch=batch)
    print(json.dumps({"batch": batch, "records": 10, "seconds": 0.5}), flush=True)
    hooks.at("progress", where="driver", flow="copy", batch=batch)
"""


def test_a_kill_is_in_the_batch_that_the_plan_names(tmp_path: Path) -> None:
    """Whatever was committed before: this service begins anew at every start."""
    service = Service("copy", [sys.executable, "-c", SERVICE], KILLS, tmp_path)
    service.start()
    for _ in KILLS:
        assert service._child is not None
        service._child.wait(30)
        service.check()  # starts it again
    service.wait(30)
    assert [(death.step, death.in_batch, death.batch) for death in service.deaths] == [
        ("write", 3, 2),
        ("progress", 9, 9),
    ]
    assert service.records == 10 * (2 + 9 + 19)
    assert service.seconds == 0.5 * (2 + 9 + 19)


# ---- the judgement of one topic ----------------------------------------------------------------------


def _finding(**counts: int) -> Findings:
    finding = Findings("topic-x")
    for kind, count in counts.items():
        for number in range(count):
            finding.note(kind, f"record {number}")
    return finding


@pytest.mark.parametrize(
    "name, counts",
    [
        ("at_most_once", {"lost": 1}),
        ("at_most_once", {"lost": BATCH}),
        ("at_least_once", {"duplicated": 1}),
        ("at_least_once", {"duplicated": BATCH}),
        ("exactly_once", {}),
        ("deposits", {}),
    ],
)
def test_what_was_promised_passes(name: str, counts: dict[str, int]) -> None:
    assert judge(name, _finding(**counts), KILLS, BATCH) == []


@pytest.mark.parametrize(
    "name, counts, problem",
    [
        ("at_most_once", {}, "none lost, although it was killed after step progress"),
        ("at_most_once", {"lost": BATCH + 1}, "101 lost, kills explain 100 at most"),
        ("at_most_once", {"lost": 5, "duplicated": 1}, "1 duplicated"),
        ("at_most_once", {"lost": 5, "unexpected": 2}, "2 unexpected"),
        ("at_least_once", {}, "none duplicated, although it was killed after step write"),
        ("at_least_once", {"duplicated": BATCH + 1}, "101 duplicated, kills explain 100 at most"),
        ("at_least_once", {"duplicated": 5, "lost": 1}, "1 lost"),
        ("at_least_once", {"duplicated": 5, "wrong": 1}, "1 wrong"),
        ("exactly_once", {"lost": 1}, "1 lost"),
        ("exactly_once", {"duplicated": 1}, "1 duplicated"),
        ("exactly_once", {"misplaced": 1}, "1 misplaced"),
        ("exactly_once", {"reordered": 1}, "1 reordered"),
        ("deposits", {"lost": 1}, "1 lost"),
        ("deposits", {"duplicated": 1}, "1 duplicated"),
    ],
)
def test_every_other_outcome_is_a_problem(name: str, counts: dict[str, int], problem: str) -> None:
    problems = judge(name, _finding(**counts), KILLS, BATCH)
    assert problems[0] == f"{name}: {problem}"
    # Examples are told of what must not be there; of the damage that the guarantee allows they would only be noise.
    allowed = {"at_most_once": "lost", "at_least_once": "duplicated"}.get(name)
    assert {text.split(": ")[1] for text in problems[1:]} == (set(counts) - {allowed} if len(problems) > 1 else set())
    assert (len(problems) > 1) == bool(set(counts) - {allowed})


def test_both_problems_of_a_topic_are_told() -> None:
    problems = judge("at_most_once", _finding(duplicated=2), KILLS, BATCH)
    assert len(problems) == 4  # none lost, some duplicated, and an example of each of the two
    assert judge("at_most_once", _finding(lost=1), KILLS[:1], BATCH) == [
        "at_most_once: 1 lost, kills explain 0 at most"
    ]


# ---- the verdict of a whole run ----------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path: Path) -> Guarantees:
    return Guarantees(Choices(RECORDS, SEED, 2), "localhost:1", tmp_path, Deadline(60, "the demo guarantees"))


def _services(chain: Guarantees) -> list[tuple[str, Service]]:
    return list(zip(GUARANTEES, chain.services, strict=True))


def _topic(chain: Guarantees, name: str) -> Records:
    """A flawless copy, as a consumer may deliver it."""
    import pyarrow as pa

    deposits = list(chain.inputs())
    places = key_partitions(pa.array([deposit.key for deposit in deposits], pa.binary()), chain.partitions[name])
    offsets: Counter[int] = Counter()
    records = []
    for place, deposit in zip(places.tolist(), deposits, strict=True):
        records.append(Message(place, offsets[place], deposit.key, deposit.value))
        offsets[place] += 1
    return records


def _audited(chain: Guarantees, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], None]) -> dict[str, Any]:
    """The last line of a run that has left these topics, as promised but for the damage."""
    topics = {name: _topic(chain, name) for name in chain.partitions}
    topics["at_most_once"] = topics["at_most_once"][BATCH:]
    topics["at_least_once"] += topics["at_least_once"][:BATCH]
    chain._generator.delivered = RECORDS
    for _, service in _services(chain):
        service.deaths = [Death(kill.step, 1, 0.0, in_batch=kill.in_batch) for kill in chain.points()]
        service.records, service.seconds = RECORDS, 0.5
    damage({**topics, **{f"service {name}": service for name, service in _services(chain)}})
    names = {topic: name for name, topic in chain.topics.items()}

    def read(servers: str, topic: str, deadline: Deadline, *, isolation: str = "read_committed") -> Iterator[Message]:
        aborted = 7 if isolation == "read_uncommitted" and names[topic] == "exactly_once" else 0
        yield from topics[names[topic]]
        yield from [Message(0, -1, b"", b"")] * aborted

    monkeypatch.setattr(chain_module, "read_topic", read)
    return chain.report(chain.audit(Display({}, Console(file=io.StringIO()))))


def test_a_run_as_promised_passes(
    chain: Guarantees, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _audited(chain, monkeypatch, lambda topics: None)
    seconds = result.pop("seconds")
    assert 0 <= seconds < 60
    common = {"kills": 2, "rows_per_s": 3000}
    assert result == {
        "demo": "guarantees",
        "in": RECORDS,
        "guarantees": {
            "at_most_once": {"out": RECORDS - BATCH, "lost": BATCH, "duplicated": 0, **common},
            "at_least_once": {"out": RECORDS + BATCH, "lost": 0, "duplicated": BATCH, **common},
            "exactly_once": {"out": RECORDS, "lost": 0, "duplicated": 0, **common},
        },
        "seed": SEED,
        "verdict": "passed",
    }
    shown = capsys.readouterr().out
    rows = {line.split()[1]: line.split()[3::2] for line in shown.splitlines() if "once " in line}
    assert rows == {
        "at_most_once": ["1,500", "1,400", "100", "0", "0", "2", "3,000"],
        "at_least_once": ["1,500", "1,600", "0", "100", "0", "2", "3,000"],
        "exactly_once": ["1,500", "1,500", "0", "0", "7", "2", "3,000"],
    }
    for kill in chain.points():
        assert f"{kill.step} of batch {kill.in_batch}" in shown
    assert "rows/s: rows of the batches over the seconds" in shown


def _at_most_once_loses_nothing(topics: dict[str, Any]) -> None:
    topics["at_most_once"][:0] = topics["exactly_once"][:BATCH]


def _at_most_once_loses_all(topics: dict[str, Any]) -> None:
    topics["at_most_once"].clear()


def _at_least_once_doubles_nothing(topics: dict[str, Any]) -> None:
    del topics["at_least_once"][-BATCH:]


def _miss_a_kill(topics: dict[str, Any]) -> None:
    topics["service at_least_once"].deaths.pop()


def _double(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda topics: topics[name].append(topics[name][200]._replace(offset=10_000))


def _lose(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda topics: topics[name].pop(200)


def _change(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda topics: topics[name].append(topics[name].pop(200)._replace(key=b"other"))


@pytest.mark.parametrize(
    "damage, problem",
    [
        (_at_most_once_loses_nothing, "at_most_once: none lost"),
        (_at_most_once_loses_all, "at_most_once: 1,500 lost, kills explain"),
        (_double("at_most_once"), "at_most_once: 1 duplicated"),
        (_change("at_most_once"), "at_most_once: 1 wrong"),
        (_at_least_once_doubles_nothing, "at_least_once: none duplicated"),
        (_lose("at_least_once"), "at_least_once: 1 lost"),
        (_change("at_least_once"), "at_least_once: 1 wrong"),
        (_lose("exactly_once"), "exactly_once: 1 lost"),
        (_double("exactly_once"), "exactly_once: 1 duplicated"),
        (_change("exactly_once"), "exactly_once: 1 wrong"),
        (_lose("deposits"), "deposits: 1 lost"),
        (_miss_a_kill, "1 of the planned kills did not happen"),
    ],
)
def test_any_other_run_fails(
    chain: Guarantees,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[dict[str, Any]], None],
    problem: str,
) -> None:
    result = _audited(chain, monkeypatch, damage)
    assert result["verdict"] == "failed"
    assert problem in capsys.readouterr().out


def test_a_service_that_told_of_no_batch_has_no_rate(chain: Guarantees, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(topics: dict[str, Any]) -> None:
        topics["service exactly_once"].records = topics["service exactly_once"].seconds = 0

    assert _audited(chain, monkeypatch, forget)["guarantees"]["exactly_once"]["rows_per_s"] == 0


# ---- records and command -----------------------------------------------------------------------------


def test_every_record_has_a_key_of_its_own_which_is_its_id(chain: Guarantees) -> None:
    records = list(chain.inputs())
    assert len({record.key for record in records}) == len(records) == RECORDS
    for record in records[:100]:
        assert chain.identify("deposits", Message(0, 0, record.key, record.value)) == (record.key or b"").decode()


def test_too_few_records_for_the_kills_are_refused_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="too few"):
        run(Choices(records=1000, kills=2))


def test_the_command_is_listed_and_wants_a_kill_after_each_step() -> None:
    assert "\nguarantees " in CliRunner().invoke(demo, []).output
    refused = CliRunner().invoke(demo, ["guarantees", "--kills", "1"])
    assert refused.exit_code == 2
    assert "--kills" in refused.output


@pytest.mark.parametrize("verdict, code", [("passed", 0), ("failed", 1)])
def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verdict: str, code: int
) -> None:
    given: list[Choices] = []

    def fake(choices: Choices) -> dict[str, str]:
        given.append(choices)
        return {"verdict": verdict}

    monkeypatch.setattr(module, "run", fake)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test process keeps its own
    with pytest.raises(SystemExit) as ended:
        main(["demo", "guarantees", "--seed", str(SEED)])
    assert ended.value.code == code
    assert capsys.readouterr().out.splitlines()[-1] == f'{{"verdict": "{verdict}"}}'
    assert given == [Choices(60_000, SEED, 2, None, 600)]

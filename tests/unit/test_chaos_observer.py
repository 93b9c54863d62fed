"""The observer of a chaos run finds commands that say what is not true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow.admin.verify.replayed_processor import load
from onceflow.testing.history import Final, Reads
from onceflow_workshop.chaos import observer as module
from onceflow_workshop.chaos.flows import COPY, SORTER, Ledger, Names, Sorter
from onceflow_workshop.chaos.observer import LOCAL, REPLAY, STATUS, TRANSACTIONS, VERIFY, Observer
from onceflow_workshop.chaos.verify import Findings

FLOW, SOURCE = "chaos-copy", "chaos-in"
COMMITTED = {1: {0: 10, 1: 12}, 2: {0: 20, 1: 22}, 3: {0: 30, 1: 32}}
Line = dict[str, Any]


def status(batch: int, offsets: dict[int, int] | None = None, **part: int) -> list[Line]:
    partition = {"partition": 0, "offset": 10, "stable": 40, "lag": 30, "held_back": 0} | part
    told = {str(p): offset for p, offset in (offsets or COMMITTED[batch]).items()}
    sources = [{"topic": SOURCE, "offsets": told, "partitions": [partition]}]
    return [{"flow": FLOW, "batch": batch, "sources": sources}]


def transaction(**facts: Any) -> Line:
    return {"topic": SOURCE, "partition": 0, "hanging": False, "transactional_id": f"onceflow.{FLOW}"} | facts


def verified(**facts: Any) -> Line:
    said = {"found": {}, "unjudged": [], "not_checked": [], **facts}
    return {"flow": FLOW, "exact": not any(said.values()), **said}


SOUND = {
    STATUS: [status(2), status(3)],
    TRANSACTIONS: [[transaction()], []],
    VERIFY: [[verified()]] * 4,
    REPLAY: [[verified(unjudged=["what an earlier version has written"])]] * 2,
    LOCAL: [[verified()]] * 2,
}


def found(kind: str) -> list[Line]:
    return [{"kind": kind}, verified(found={kind: 1})]


@pytest.fixture
def observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Gives what the commands print, in two rounds, and returns the anomalies."""
    history = [*COMMITTED.items(), (3, {0: 28, 1: 29})]  # the last one is a promotion
    final = Final(FLOW, Reads(), [(batch, {SOURCE: offsets}) for batch, offsets in history], {}, True)
    monkeypatch.setattr(module, "read_final", lambda *_, **__: final)

    def run(said: dict[str, list[Any]], **setup: bool) -> list[str]:
        rounds = {name: iter({**SOUND, **said}[name]) for name in SOUND}
        observer = Observer("nowhere:1", Names("chaos", tmp_path), [COPY, SORTER], {FLOW: 3}, **setup)
        monkeypatch.setattr(observer, "_call", lambda name, _: next(rounds[name]))
        for look in observer._looks():
            look()
        findings = Findings(records=1)
        observer.finish(findings)
        assert findings.verdict == ("failed" if findings.others else "unknown" if findings.unknown else "passed")
        return [*findings.others, *(findings.unknown and ["unknown"])]

    return run


def test_what_is_true_is_no_anomaly(observe: Callable[..., list[str]]) -> None:
    assert observe({}) == []


@pytest.mark.parametrize(
    "said",
    [
        {STATUS: [status(3), status(2)]},
        {STATUS: [status(1), status(3)]},
        {STATUS: [status(2, {0: 20, 1: 23}), status(3)]},
        {STATUS: [status(2), [*status(3), *status(4, {0: 40, 1: 42})]]},
        {STATUS: [status(2, lag=-1), status(3)]},
        {STATUS: [status(2, offset=41), status(3)]},
        {STATUS: [[], status(3)]},
        {TRANSACTIONS: [[transaction(hanging=True)], []]},
        {TRANSACTIONS: [[transaction(transactional_id="onceflow.other")], []]},
        {VERIFY: [found("lost"), *SOUND[VERIFY]]},
        {REPLAY: [found("state"), *SOUND[REPLAY]]},
        {REPLAY: [*SOUND[REPLAY][1:], found("state")]},
        {LOCAL: [found("local"), *SOUND[LOCAL]]},
    ],
    ids=[
        "a batch that goes back",
        "a batch older than those reported",
        "offsets that were never committed",
        "a batch that was never committed",
        "a negative lag",
        "an offset beyond the end",
        "a flow that is missing",
        "a transaction that does not hang",
        "a transaction of somebody else",
        "a record that is not lost",
        "state that does not differ from a replay",
        "state that does not differ in the end",
        "a local copy that is not damaged",
    ],
)
def test_what_is_not_true_is_an_anomaly(observe: Callable[..., list[str]], said: dict[str, list[Any]]) -> None:
    (name,) = said
    assert observe(said) == [f"onceflow {name} was wrong"]


def test_a_marker_that_was_lost_hangs_rightly(observe: Callable[..., list[str]]) -> None:
    assert observe({TRANSACTIONS: [[transaction(hanging=True)], []]}, markers_get_lost=True) == []


def test_offsets_of_a_promotion_are_no_anomaly(observe: Callable[..., list[str]]) -> None:
    assert observe({STATUS: [status(3), status(3, {0: 28, 1: 29})]}) == []


def test_copies_that_faults_damage_are_compared_at_the_end(observe: Callable[..., list[str]]) -> None:
    assert observe({LOCAL: SOUND[LOCAL][:1]}, copies_get_torn=True) == []
    assert observe({LOCAL: [found("local")]}, copies_get_torn=True) == [f"onceflow {LOCAL} was wrong"]


def test_a_slow_replay_is_left_to_the_end(observe: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPLAY_S", -1.0)
    assert observe({REPLAY: SOUND[REPLAY][:1]}) == []


def test_processors_are_named_for_a_replay(tmp_path: Path) -> None:
    observer = Observer("nowhere:1", Names("chaos", tmp_path), [SORTER], {})
    observer._write_processors()
    ledger, sorter = (load(f"{observer._processors}:{name}") for name in ("ledger", "sorter"))
    assert isinstance(ledger, Ledger)
    assert isinstance(sorter, Sorter)
    assert (ledger.flow, ledger.alarms) == ("chaos-ledger", "chaos-alarms")


def test_a_command_that_fails_meanwhile_is_no_anomaly_but_at_the_end(observe: Callable[..., list[str]]) -> None:
    assert observe({STATUS: [None, status(3)]}) == []
    assert observe({STATUS: [status(3), None]}) == ["unknown"]

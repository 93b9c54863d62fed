"""What was left undecided under a producer id that Kafka has forgotten since. No sockets: tests make the answers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.client import markers
from onceflow.client.deadline import Deadline
from onceflow.client.markers import Markers
from onceflow.client.producers import OpenTransaction
from onceflow.errors import DataLossError
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.transaction import Epoch, Mode, Phase, ProgressState, Transaction, TransactionState

OLD, NEW, SOMEBODY = 1, 2, 9
PLACE = ("out", 0)


@pytest.fixture
def transactions() -> Any:
    return SimpleNamespace(
        identity=ProducerIdAndEpoch(OLD, 5),
        transactional_id="onceflow.f",
        machine=Transaction(Mode.BATCH_V2),
    )


@pytest.fixture
def left_open(monkeypatch: pytest.MonkeyPatch) -> list[OpenTransaction]:
    """Open transactions of the partition; the coordinator knows nothing of the transactional id."""
    found: list[OpenTransaction] = []
    monkeypatch.setattr(markers, "describe_transaction", lambda *_: {"state": "Dead"})
    monkeypatch.setattr(
        markers, "list_offsets", lambda c, span, *_, committed=True: {"out": {0: 10 if committed else 12}}
    )
    monkeypatch.setattr(markers, "open_transactions", lambda c, places, d: dict.fromkeys(places, found))
    return found


def confirm(transactions: Any, *, committed: bool) -> None:
    one = Markers(SimpleNamespace(), transactions, "f")  # type: ignore[arg-type]
    phase = Phase.COMMITTED if committed else Phase.ABORTED
    transactions.machine.state = TransactionState(phase, Epoch.FRESH, ProgressState.READ)
    one.ended({PLACE: None})
    transactions.identity = ProducerIdAndEpoch(NEW, 0)  # the flow was idle
    one.confirm(Deadline(5, "a test"))


def test_committed_records_stop_the_flow(transactions: Any, left_open: list[OpenTransaction]) -> None:
    left_open.append(OpenTransaction(OLD, 5, 10, 0))
    with pytest.raises(DataLossError, match="may have been lost in out-0") as caught:
        confirm(transactions, committed=True)
    assert "forgotten its transactional id" in caught.value.detail


def test_aborted_records_are_told(
    transactions: Any, left_open: list[OpenTransaction], caplog: pytest.LogCaptureFixture
) -> None:
    left_open.append(OpenTransaction(OLD, 5, 10, 0))
    with caplog.at_level(logging.WARNING, "onceflow.client"):
        confirm(transactions, committed=False)
    (warning,) = caplog.messages
    assert f"onceflow transactions abort --producer-id {OLD} --topic out" in warning


@pytest.mark.parametrize("committed", [True, False])
def test_markers_that_come_late_when_the_epochs_of_the_producer_id_are_used_up(
    transactions: Any,
    left_open: list[OpenTransaction],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
) -> None:
    """With version 2, the answer to EndTxn has another producer id, and comes before the markers are written."""
    one = Markers(SimpleNamespace(), transactions, "f")  # type: ignore[arg-type]
    transactions.machine.state = TransactionState(Phase.COMMITTED, Epoch.FRESH, ProgressState.READ)
    one.ended({})  # an earlier batch
    one.confirm(Deadline(5, "a test"))
    left_open.append(OpenTransaction(OLD, 32_766, 10, 0))
    states = iter(["PrepareCommit", "PrepareCommit", "CompleteCommit"])

    def state(*_: Any) -> dict[str, str]:
        found = next(states)
        if found == "CompleteCommit":
            left_open.clear()
        return {"state": found}

    monkeypatch.setattr(markers, "describe_transaction", state)
    phase = Phase.COMMITTED if committed else Phase.ABORTED
    transactions.machine.state = TransactionState(phase, Epoch.FRESH, ProgressState.READ)
    transactions.identity = ProducerIdAndEpoch(NEW, 0)
    one.ended({PLACE: None})
    one.confirm(Deadline(5, "a test"))
    assert next(states, None) is None, "it waits for the markers of the transaction"
    assert caplog.messages == []


@pytest.mark.parametrize("committed", [True, False])
def test_those_of_others_do_not_matter(
    transactions: Any, left_open: list[OpenTransaction], caplog: pytest.LogCaptureFixture, committed: bool
) -> None:
    left_open.append(OpenTransaction(SOMEBODY, 0, 10, 0))
    confirm(transactions, committed=committed)
    assert caplog.messages == []

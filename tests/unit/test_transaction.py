"""The table of transactions: what it allows, and above all what it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onceflow.protocol.transaction import (
    GIVEN,
    NOT_ABORTABLE,
    START,
    TRANSITIONS,
    Epoch,
    Event,
    IllegalEventError,
    Mode,
    Phase,
    ProgressState,
    Transaction,
    TransactionState,
    after,
    diagram,
    epochs_diagram,
    reachable,
)

PAGE = Path(__file__).parents[2] / "docs" / "internals.md"
BATCH = (Mode.BATCH_V2, Mode.BATCH_V1)
WEAKER = (Mode.AT_LEAST_ONCE, Mode.AT_MOST_ONCE)
OPENED = (Event.INITIALIZED, Event.PROGRESS_READ, Event.BEGIN)
WHOLE = (*OPENED, Event.ROWS_AUDITED, Event.PROGRESS_WRITTEN, Event.COMMIT, Event.COMMIT_DONE)
batch_modes = pytest.mark.parametrize("mode", BATCH, ids=lambda mode: mode.value)


def at(mode: Mode, *events: Event, start: TransactionState = START) -> TransactionState:
    machine = Transaction(mode, start)
    for event in events:
        machine.on(event)
    return machine.state


def transaction_states(mode: Mode) -> dict[TransactionState, dict[Event, TransactionState]]:
    return reachable(mode, GIVEN if mode in (*WEAKER, Mode.EXTERNAL) else START)


# ---- what is allowed -------------------------------------------------------------------------------------


def test_a_batch_after_a_batch() -> None:
    """Version 2 needs InitProducerId once, version 1 before every transaction."""
    between = (Event.SETTLE, Event.MARKERS_CONFIRMED)
    assert at(Mode.BATCH_V2, *WHOLE) == (Phase.COMMITTED, Epoch.FRESH, ProgressState.READ)
    assert at(Mode.BATCH_V2, *WHOLE, *between, *WHOLE[2:]).phase is Phase.COMMITTED
    assert at(Mode.BATCH_V1, *WHOLE) == (Phase.COMMITTED, Epoch.USED, ProgressState.READ)
    with pytest.raises(IllegalEventError):
        at(Mode.BATCH_V1, *WHOLE, *between, Event.BEGIN)
    assert at(Mode.BATCH_V1, *WHOLE, *between, Event.EPOCH_BUMPED, *WHOLE[2:]).phase is Phase.COMMITTED


@batch_modes
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_attempt_that_fails_is_aborted_from_every_step(mode: Mode, steps: int) -> None:
    done = Event.ABORT_DONE if mode is Mode.BATCH_V2 else Event.EPOCH_BUMPED
    aborted = at(mode, *WHOLE[: 2 + steps], Event.ABORT, Event.ABORT, done)
    assert aborted == (Phase.ABORTED, Epoch.FRESH, ProgressState.READ)
    assert after(after(aborted, Event.MARKERS_CONFIRMED, mode), Event.BEGIN, mode).phase is Phase.OPEN


@pytest.mark.parametrize("mode", WEAKER, ids=lambda mode: mode.value)
def test_the_weaker_guarantees(mode: Mode) -> None:
    middle = [Event.ROWS_AUDITED, Event.PROGRESS_WRITTEN]
    if mode is Mode.AT_MOST_ONCE:
        middle.reverse()
    whole = (Event.BEGIN, *middle, Event.COMMIT)
    assert at(mode, *whole, Event.SETTLE, *whole, start=GIVEN).phase is Phase.COMMITTED
    with pytest.raises(IllegalEventError):
        at(mode, Event.BEGIN, *reversed(middle), start=GIVEN)
    failed = at(mode, Event.BEGIN, middle[0], Event.ABORT, start=GIVEN)
    # At most once: progress has moved, so the batch counts as done.
    assert failed.phase is (Phase.COMMITTED if mode is Mode.AT_MOST_ONCE else Phase.ABORTED)


def test_a_batch_of_an_external_sink() -> None:
    mode, written = Mode.EXTERNAL, (Event.BEGIN, Event.ROWS_AUDITED)
    whole = (*written, Event.COMMIT, Event.COMMIT_DONE)
    assert at(mode, *whole, Event.SETTLE, *whole, start=GIVEN).phase is Phase.COMMITTED
    for done in (1, 2):
        assert at(mode, *written[:done], Event.ABORT, *whole, start=GIVEN).phase is Phase.COMMITTED
    # Until its outcome is known, and Kafka's progress has followed, it is neither aborted nor run again.
    committing = at(mode, *written, Event.COMMIT, start=GIVEN)
    assert not Transaction(mode, committing).may_abort
    assert transaction_states(mode)[committing].keys() == {Event.COMMIT_DONE, Event.COMMIT_REFUSED, Event.FENCED}
    assert at(mode, *written, Event.COMMIT, Event.COMMIT_REFUSED, Event.ABORT, *whole, start=GIVEN)


def test_a_start_is_possible_from_everywhere() -> None:
    for mode in (*BATCH, Mode.PLAIN_V2, Mode.PLAIN_V1):
        for transaction_state, events in transaction_states(mode).items():
            assert events[Event.INITIALIZED] == (Phase.IDLE, Epoch.FRESH, ProgressState.UNREAD), transaction_state
            assert events[Event.FENCED].phase is Phase.FENCED


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_nothing_is_a_dead_end_but_fencing(mode: Mode) -> None:
    """From every state a batch can still be committed, by a new start at the latest."""
    edges = transaction_states(mode)
    goal = {transaction_state for transaction_state in edges if transaction_state.phase is Phase.COMMITTED}
    grown = True
    while grown:
        more = {
            transaction_state
            for transaction_state, events in edges.items()
            if transaction_state not in goal and goal & {*events.values()}
        }
        goal, grown = goal | more, bool(more)
    # The weaker guarantees fence nobody. With an external sink the machine is that of a run.
    fenced = {
        transaction_state
        for transaction_state in edges
        if mode is Mode.EXTERNAL and transaction_state.phase is Phase.FENCED
    }
    assert goal | fenced == edges.keys()


# ---- what is not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_an_illegal_event_raises_and_changes_nothing(mode: Mode) -> None:
    refused = 0
    for transaction_state, events in transaction_states(mode).items():
        for event in Event:
            machine = Transaction(mode, transaction_state)
            if event in events:
                machine.on(event)
                assert machine.state == events[event]
                continue
            with pytest.raises(IllegalEventError, match=event.name):
                machine.on(event)
            assert machine.state == transaction_state
            refused += 1
    assert refused > 20


@batch_modes
def test_no_batch_begins_before_progress_was_read(mode: Mode) -> None:
    """I6: fence, then read, then write."""
    for transaction_state, events in transaction_states(mode).items():
        assert (Event.BEGIN in events) == (transaction_state == (Phase.IDLE, Epoch.FRESH, ProgressState.READ)), (
            transaction_state
        )
    with pytest.raises(IllegalEventError):
        at(mode, Event.PROGRESS_READ)


@batch_modes
def test_nothing_is_written_twice_under_an_epoch(mode: Mode) -> None:
    """I3: between two transactions the epoch is another one."""
    for transaction_state, events in transaction_states(mode).items():
        for event in (Event.BEGIN, Event.COMPLETE_COMMIT, Event.COMPLETE_ABORT):
            if event in events:
                assert transaction_state.epoch is Epoch.FRESH
                assert events[event].epoch is Epoch.USED


@batch_modes
def test_a_commit_has_every_row_and_progress(mode: Mode) -> None:
    """I1."""
    for transaction_state, events in transaction_states(mode).items():
        if Event.COMMIT in events:
            assert transaction_state.phase in (Phase.SEALED, Phase.COMMITTING, Phase.COMPLETING_COMMIT)
    leads = {
        transition.event
        for transition in TRANSITIONS
        for source, target in transition.phases.items()
        if mode in transition.modes and target is Phase.SEALED and source is not target
    }
    assert leads == {Event.PROGRESS_WRITTEN, Event.COMMIT_REFUSED}


@batch_modes
def test_a_commit_without_an_answer_is_not_aborted(mode: Mode) -> None:
    """I2: only its answer, or a new start, leads on."""
    committing = at(mode, *WHOLE[:-1])
    allowed = {event for event, target in transaction_states(mode)[committing].items() if target != committing}
    answers = {Event.COMMIT_DONE, Event.COMMIT_REFUSED, Event.TIMED_OUT}
    assert allowed == {*answers, Event.INITIALIZED, Event.FENCED, Event.GIVEN_UP}
    assert not Transaction(mode, committing).may_abort


@batch_modes
def test_where_an_abort_would_decide_something_there_is_none(mode: Mode) -> None:
    for transaction_state, events in transaction_states(mode).items():
        if transaction_state.phase in NOT_ABORTABLE:
            assert Event.ABORT not in events


@batch_modes
def test_no_transaction_begins_before_the_last_one_is_decided_everywhere(mode: Mode) -> None:
    for transaction_state, events in transaction_states(mode).items():
        if transaction_state.phase in (Phase.COMMITTED, Phase.SETTLED, Phase.ABORTED, Phase.TIMED_OUT):
            assert Event.BEGIN not in events


def test_missing_markers_end_as_the_transaction_did() -> None:
    for mode in BATCH:
        for transaction_state, events in transaction_states(mode).items():
            if transaction_state.phase in (Phase.COMMITTED, Phase.SETTLED):
                assert Event.COMPLETE_ABORT not in events
            if transaction_state.phase is Phase.ABORTED:
                assert Event.COMPLETE_COMMIT not in events


def test_events_are_expected_before_requests_are_sent() -> None:
    machine = Transaction(Mode.BATCH_V1)
    machine.on(Event.INITIALIZED)
    with pytest.raises(IllegalEventError, match="BEGIN"):
        machine.expect(Event.BEGIN)
    machine.state = TransactionState(Phase.IDLE, Epoch.USED, ProgressState.READ)  # an epoch can still be had
    machine.expect(Event.BEGIN)
    assert machine.state.phase is Phase.IDLE


# ---- the table and the page ------------------------------------------------------------------------------


def test_every_transition_is_of_use() -> None:
    for transition in TRANSITIONS:
        used = {
            transaction_state
            for mode in transition.modes
            for transaction_state, events in transaction_states(mode).items()
            if transition.event in events and transaction_state.phase in transition.phases
        }
        assert used, transition


def test_the_page_has_the_diagrams() -> None:
    found = re.findall(r"```mermaid\n(stateDiagram-v2.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert found == [diagram(), epochs_diagram()]

"""The state machine of one transactional id on its driver: a table of events, without I/O.

``TRANSITIONS`` is the table. The code that sends requests to Kafka reports each step and each result as an ``Event``.
An event that is not allowed raises `IllegalEventError` and changes nothing. So all rules are in one place:

- Nothing is written before progress was read (I6).
- Two attempts never write under the same epoch (I3).
- Nothing is committed before every row is acknowledged and progress is in the transaction (I1).
- A commit whose response is lost is never followed by an abort (I2).
- No transaction begins before the last one is decided in every partition.

There are three state machines: ``Phase`` (what is open), ``Epoch`` (whether the epoch may be used for a transaction)
and ``ProgressState`` (whether progress is known). An event must be allowed by all three, and changes them together.

Transaction version 2 is KIP-890: EndTxn returns the next epoch. With version 1 the epoch stays the same. A transaction
of version 1 is aborted with InitProducerId, see ``client/transactions.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple


class _Member(enum.Enum):
    """Hashed by identity, for speed: the model of the protocol (tests/model) looks members up millions of times."""

    __hash__ = object.__hash__


class Phase(_Member):
    """What is open under the transactional id."""

    IDLE = "idle"  # nothing is open, and the last transaction is decided in every partition
    OPEN = "open"  # rows may be written
    PROGRESS_FIRST = "progress first"  # at-most-once: progress is written, rows are being written
    AUDITED = "audited"  # every row is acknowledged, and the audit has passed
    SEALED = "sealed"  # progress is in the transaction: only EndTxn may follow
    COMMITTING = "committing"  # EndTxn(commit) is sent: from now on only its response shows the outcome
    COMMITTED = "committed"  # committed; local state is not settled, markers are not confirmed
    SETTLED = "settled"  # committed, and local state may be applied; markers are not confirmed
    TIMED_OUT = "timed out"  # the coordinator has aborted it; tasks can still write until there is a new epoch
    ABORTING = "aborting"  # an abort is sent; it may be repeated
    ABORTED = "aborted"  # aborted; markers are not confirmed
    COMPLETING_COMMIT = (
        "completing a commit"  # an empty transaction writes missing markers: an abort would lose records
    )
    COMPLETING_ABORT = "completing an abort"  # an empty transaction writes missing markers
    FENCED = "fenced"  # another process owns the transactional id


class Epoch(_Member):
    """The producer epoch."""

    NONE = "none"  # InitProducerId was not called yet
    FRESH = "fresh"  # nothing was written under it
    USED = "used"  # records may have been written under it
    UNVERIFIED = "unverified"  # nothing was written under it, but a newer driver may have committed before


class ProgressState(_Member):
    """Whether committed progress was read since the older drivers were fenced."""

    UNREAD = "unread"
    READ = "read"


class Event(_Member):
    """What was done, or what a response has shown."""

    INITIALIZED = "InitProducerId without an epoch: older drivers are fenced, their transaction is decided"
    PROGRESS_READ = "committed progress was read, and the transaction that wrote it is decided"
    GIVEN_UP = "a start has failed: the progress that was read may be out of date"
    EPOCH_BUMPED = "InitProducerId with the own epoch returned the next epoch"
    PRODUCER_ID_REPLACED = "InitProducerId with the own epoch returned another producer id: the old one was forgotten"
    TIMEOUT_CONTINUED = "version 1: InitProducerId with the epoch under which the coordinator has aborted"
    OWNERSHIP_VERIFIED = "progress has not changed since this driver wrote it: no other driver has committed"
    BEGIN = "a transaction begins"
    NOTHING_WRITTEN = "the batch had no effect: nothing was sent"
    ROWS_AUDITED = "every row is acknowledged, and the audit has passed"
    PROGRESS_WRITTEN = "the progress record and the source offsets are acknowledged"
    COMMIT = "EndTxn(commit) is sent"
    COMMIT_DONE = "EndTxn(commit) has succeeded"
    COMMIT_REFUSED = "EndTxn(commit) has failed, with an error that means that it was not applied"
    TIMED_OUT = "EndTxn has failed: the coordinator had aborted the transaction, or has forgotten it"
    ABORT = "the abort is sent"
    ABORT_DONE = "EndTxn(abort) has succeeded"
    SETTLE = "Spark has logged the batch: local state may be applied"
    MARKERS_CONFIRMED = "the last transaction is decided in every partition"
    COMPLETE_COMMIT = "markers of a commit are missing: an empty transaction is to commit"
    COMPLETE_ABORT = "markers of an abort are missing: an empty transaction is to abort"
    FENCED = "a response with a fencing error, or progress of another driver"


class Mode(_Member):
    """The kind of transaction.

    A *batch* has an audit and a progress record. A *plain* transaction, as used by tools, has neither. That of an
    *external sink* is committed by another system; Kafka's progress follows.
    """

    BATCH_V2 = "batch, version 2"
    BATCH_V1 = "batch, version 1"
    PLAIN_V2 = "plain, version 2"
    PLAIN_V1 = "plain, version 1"
    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"
    EXTERNAL = "of an external sink"

    @staticmethod
    def of(version: int, *, batch: bool) -> Mode:
        """The mode of a transaction at a transaction version (1 or 2)."""
        if batch:
            return Mode.BATCH_V2 if version >= 2 else Mode.BATCH_V1
        return Mode.PLAIN_V2 if version >= 2 else Mode.PLAIN_V1


class TransactionState(NamedTuple):
    """The state of a transactional id."""

    phase: Phase
    epoch: Epoch
    progress_state: ProgressState

    def __str__(self) -> str:
        return f"{self.phase.value}, epoch {self.epoch.value}, progress {self.progress_state.value}"


#: Before the first request to Kafka.
START = TransactionState(Phase.IDLE, Epoch.NONE, ProgressState.UNREAD)
#: With a producer id and epoch from another process: a task gets them from the driver.
GIVEN = TransactionState(Phase.IDLE, Epoch.FRESH, ProgressState.READ)


class Transition(NamedTuple):
    """When an event is allowed, and the states after it. An empty mapping: the event allows every state of that
    machine, and does not change it."""

    event: Event
    phases: Mapping[Phase, Phase]
    epochs: Mapping[Epoch, Epoch] = {}
    progress_states: Mapping[ProgressState, ProgressState] = {}
    modes: frozenset[Mode] = frozenset(Mode)


_V2 = frozenset({Mode.BATCH_V2, Mode.PLAIN_V2})
_V1 = frozenset({Mode.BATCH_V1, Mode.PLAIN_V1})
_TRANSACTIONAL = _V1 | _V2
_BATCH = frozenset({Mode.BATCH_V2, Mode.BATCH_V1})
_PLAIN = frozenset({Mode.PLAIN_V2, Mode.PLAIN_V1})
_WEAKER = frozenset({Mode.AT_LEAST_ONCE, Mode.AT_MOST_ONCE})
_EXTERNAL = frozenset({Mode.EXTERNAL})

_ANY_PHASE = tuple(Phase)
_ANY_EPOCH = tuple(Epoch)
_RESTING = (Phase.IDLE, Phase.COMMITTED, Phase.SETTLED, Phase.ABORTED)
_NOT_OPEN = (*_RESTING, Phase.TIMED_OUT)
_ABORTABLE = (Phase.OPEN, Phase.AUDITED, Phase.SEALED, Phase.TIMED_OUT, Phase.ABORTING)
_OWNED = (Epoch.FRESH, Epoch.USED, Epoch.UNVERIFIED)


def _to(target: Phase, *sources: Phase) -> dict[Phase, Phase]:
    return dict.fromkeys(sources, target)


def _stay(*phases: Phase) -> dict[Phase, Phase]:
    return {phase: phase for phase in phases}


def _epoch(target: Epoch, *sources: Epoch) -> dict[Epoch, Epoch]:
    return dict.fromkeys(sources, target)


_READ = {ProgressState.READ: ProgressState.READ}
# Version 1 aborts with InitProducerId: whatever it returns, the transaction is aborted.
_NEW_EPOCH = _stay(*_NOT_OPEN) | _to(Phase.ABORTED, Phase.ABORTING, Phase.COMPLETING_ABORT)
_NOW_COMMITTED = {Phase.COMMITTING: Phase.COMMITTED, Phase.COMPLETING_COMMIT: Phase.SETTLED}

#: All events, and when each is allowed. An event may have several transitions; the first that matches is applied.
TRANSITIONS: tuple[Transition, ...] = (
    # A start.
    Transition(
        Event.INITIALIZED,
        _to(Phase.IDLE, *_ANY_PHASE),
        _epoch(Epoch.FRESH, *_ANY_EPOCH),
        dict.fromkeys(ProgressState, ProgressState.UNREAD),
        _TRANSACTIONAL,
    ),
    Transition(
        Event.PROGRESS_READ,
        _stay(Phase.IDLE),
        {epoch: epoch for epoch in _OWNED},
        dict.fromkeys(ProgressState, ProgressState.READ),
        _TRANSACTIONAL,
    ),
    Transition(Event.GIVEN_UP, _stay(*_ANY_PHASE), {}, dict.fromkeys(ProgressState, ProgressState.UNREAD),
               _TRANSACTIONAL),
    # Epochs.
    Transition(Event.EPOCH_BUMPED, _NEW_EPOCH, _epoch(Epoch.FRESH, Epoch.FRESH, Epoch.USED), {}, _TRANSACTIONAL),
    Transition(Event.EPOCH_BUMPED, _NEW_EPOCH, _epoch(Epoch.UNVERIFIED, Epoch.UNVERIFIED), {}, _TRANSACTIONAL),
    Transition(Event.PRODUCER_ID_REPLACED, _NEW_EPOCH, _epoch(Epoch.UNVERIFIED, *_OWNED), {}, _TRANSACTIONAL),
    Transition(Event.TIMEOUT_CONTINUED, _NEW_EPOCH, _epoch(Epoch.UNVERIFIED, *_OWNED), {}, _V1),
    Transition(Event.OWNERSHIP_VERIFIED, _stay(*_NOT_OPEN), _epoch(Epoch.FRESH, Epoch.UNVERIFIED), {}, _TRANSACTIONAL),
    # A batch.
    Transition(Event.BEGIN, _to(Phase.OPEN, Phase.IDLE), _epoch(Epoch.USED, Epoch.FRESH), _READ, _BATCH),
    Transition(Event.BEGIN, _to(Phase.OPEN, *_NOT_OPEN), _epoch(Epoch.USED, Epoch.FRESH), {}, _PLAIN),
    Transition(Event.BEGIN, _to(Phase.OPEN, Phase.IDLE, Phase.SETTLED, Phase.ABORTED), {}, _READ, _WEAKER | _EXTERNAL),
    Transition(Event.NOTHING_WRITTEN, _to(Phase.IDLE, Phase.OPEN)),
    Transition(Event.ROWS_AUDITED, _to(Phase.AUDITED, Phase.OPEN), {}, {}, _BATCH | {Mode.AT_LEAST_ONCE} | _EXTERNAL),
    Transition(Event.ROWS_AUDITED, _to(Phase.SEALED, Phase.PROGRESS_FIRST), {}, {}, frozenset({Mode.AT_MOST_ONCE})),
    Transition(Event.PROGRESS_WRITTEN, _to(Phase.SEALED, Phase.AUDITED), {}, {}, _BATCH | {Mode.AT_LEAST_ONCE}),
    Transition(Event.PROGRESS_WRITTEN, _stay(Phase.OPEN), {}, {}, _PLAIN),
    Transition(Event.PROGRESS_WRITTEN, _to(Phase.PROGRESS_FIRST, Phase.OPEN), {}, {}, frozenset({Mode.AT_MOST_ONCE})),
    # Its end.
    Transition(Event.COMMIT, _to(Phase.COMMITTING, Phase.SEALED, Phase.COMMITTING) | _stay(Phase.COMPLETING_COMMIT),
               {}, {}, _BATCH),
    # IDLE and FRESH: another process has begun the transaction, with the same epoch.
    Transition(Event.COMMIT, _to(Phase.COMMITTING, Phase.IDLE, Phase.OPEN, Phase.COMMITTING) |
               _stay(Phase.COMPLETING_COMMIT),
               _epoch(Epoch.USED, Epoch.FRESH, Epoch.USED), {}, _PLAIN),
    Transition(Event.COMMIT, _to(Phase.COMMITTED, Phase.SEALED), {}, {}, _WEAKER),
    # From here on an attempt may have been committed; it is done when Kafka's progress has followed.
    Transition(Event.COMMIT, _to(Phase.COMMITTING, Phase.AUDITED), {}, {}, _EXTERNAL),
    Transition(Event.COMMIT_DONE, _to(Phase.COMMITTED, Phase.COMMITTING), {}, {}, _EXTERNAL),
    Transition(Event.COMMIT_REFUSED, _to(Phase.AUDITED, Phase.COMMITTING), {}, {}, _EXTERNAL),
    Transition(Event.ABORT, _to(Phase.ABORTED, Phase.OPEN, Phase.AUDITED), {}, {}, _EXTERNAL),
    Transition(Event.FENCED, _to(Phase.FENCED, *_ANY_PHASE), {}, {}, _EXTERNAL),
    Transition(Event.COMMIT_DONE, _NOW_COMMITTED, {Epoch.USED: Epoch.FRESH}, {}, _V2),
    Transition(Event.COMMIT_DONE, _NOW_COMMITTED, {Epoch.USED: Epoch.USED}, {}, _V1),
    Transition(Event.COMMIT_REFUSED, {Phase.COMMITTING: Phase.SEALED} | _stay(Phase.COMPLETING_COMMIT), {}, {}, _BATCH),
    Transition(Event.COMMIT_REFUSED, {Phase.COMMITTING: Phase.OPEN} | _stay(Phase.COMPLETING_COMMIT), {}, {}, _PLAIN),
    Transition(Event.TIMED_OUT,
               {
             Phase.COMMITTING: Phase.TIMED_OUT,
             Phase.ABORTING: Phase.ABORTED,
             Phase.COMPLETING_COMMIT: Phase.SETTLED,
             Phase.COMPLETING_ABORT: Phase.ABORTED,
               },
               {}, {}, _TRANSACTIONAL),
    Transition(Event.ABORT, _to(Phase.ABORTING, *_ABORTABLE) | _stay(Phase.COMPLETING_ABORT), {}, {}, _BATCH),
    Transition(Event.ABORT, _to(Phase.ABORTING, *_ABORTABLE, *_NOT_OPEN) | _stay(Phase.COMPLETING_ABORT), {}, {},
               _PLAIN),
    Transition(Event.ABORT,
               _to(Phase.ABORTED, Phase.IDLE, Phase.OPEN, Phase.AUDITED, Phase.SEALED)
               | {Phase.PROGRESS_FIRST: Phase.COMMITTED} | _stay(Phase.COMMITTED, Phase.SETTLED, Phase.ABORTED),
               {}, {}, _WEAKER),
    Transition(Event.ABORT_DONE, _to(Phase.ABORTED, Phase.ABORTING, Phase.COMPLETING_ABORT),
               _epoch(Epoch.FRESH, Epoch.FRESH, Epoch.USED) | _epoch(Epoch.UNVERIFIED, Epoch.UNVERIFIED), {}, _V2),
    Transition(Event.ABORT_DONE, _to(Phase.ABORTED, Phase.ABORTING, Phase.COMPLETING_ABORT), {}, {}, _V1),
    Transition(Event.SETTLE, _to(Phase.SETTLED, Phase.COMMITTED)),
    # Missing markers: Kafka writes none where a partition has no leader, see ``client/markers.py``.
    Transition(Event.MARKERS_CONFIRMED, _to(Phase.IDLE, *_RESTING), {}, {}, _TRANSACTIONAL),
    Transition(Event.COMPLETE_COMMIT, _to(Phase.COMPLETING_COMMIT, Phase.IDLE, Phase.COMMITTED, Phase.SETTLED),
               _epoch(Epoch.USED, Epoch.FRESH), {}, _TRANSACTIONAL),
    Transition(Event.COMPLETE_ABORT, _to(Phase.COMPLETING_ABORT, Phase.IDLE, Phase.ABORTED), _epoch(Epoch.USED,
               Epoch.FRESH),
               {}, _TRANSACTIONAL),
    Transition(Event.FENCED, _to(Phase.FENCED, *_ANY_PHASE), {}, {}, _TRANSACTIONAL),
)  # fmt: skip

#: Phases in which the driver must not abort: a commit may have been applied, or another process owns the id.
NOT_ABORTABLE = frozenset({Phase.COMMITTING, Phase.COMPLETING_COMMIT, Phase.FENCED})


class IllegalEventError(RuntimeError):
    """An event is not allowed in the current state: a bug in the code. The state has not changed."""


@cache
def transitions_of(event: Event, mode: Mode) -> tuple[Transition, ...]:
    """The transitions of an event in a mode."""
    return tuple(transition for transition in TRANSITIONS if transition.event is event and mode in transition.modes)


@cache
def find(state: TransactionState, event: Event, mode: Mode) -> TransactionState | None:
    """The state after an event; None: it is not allowed."""
    phase, epoch, progress_state = state
    for transition in transitions_of(event, mode):
        if (
            phase in transition.phases
            and (not transition.epochs or epoch in transition.epochs)
            and (not transition.progress_states or progress_state in transition.progress_states)
        ):
            return TransactionState(
                transition.phases[phase],
                transition.epochs.get(epoch, epoch),
                transition.progress_states.get(progress_state, progress_state),
            )
    return None


def after(state: TransactionState, event: Event, mode: Mode) -> TransactionState:
    """The state after an event.

    Raises:
        IllegalEventError: it is not allowed.
    """
    found = find(state, event, mode)
    if found is None:
        raise IllegalEventError(f"{event.name} ({event.value}) is not allowed here: {state}; {mode.value}")
    return found


class Transaction:
    """The state of one transactional id, changed by events. Not thread-safe.

    Args:
        mode: the kind of transaction; may be set until the first event.
        state: the first state.
    """

    def __init__(self, mode: Mode, state: TransactionState = START) -> None:
        self.mode = mode
        self.state = state

    def on(self, event: Event) -> None:
        """Report an event.

        Raises:
            IllegalEventError: it is not allowed. The state has not changed.
        """
        self.state = after(self.state, event, self.mode)

    def expect(self, event: Event) -> None:
        """Check that an event is allowed in this phase and progress state. Call it before the requests that lead to
        the event. The epoch is not checked, because these requests may change it.

        Raises:
            IllegalEventError: the event is not allowed.
        """
        phase, _, progress_state = self.state
        if not any(
            phase in transition.phases
            and (not transition.progress_states or progress_state in transition.progress_states)
            for transition in transitions_of(event, self.mode)
        ):
            after(self.state, event, self.mode)

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def epoch(self) -> Epoch:
        return self.state.epoch

    @property
    def progress_state(self) -> ProgressState:
        return self.state.progress_state

    @property
    def is_fenced(self) -> bool:
        """Whether another process owns the transactional id."""
        return self.phase is Phase.FENCED

    @property
    def may_abort(self) -> bool:
        """Whether the driver may abort: the outcome cannot have been decided already."""
        return self.phase not in NOT_ABORTABLE


def reachable(mode: Mode, start: TransactionState = START) -> dict[TransactionState, dict[Event, TransactionState]]:
    """All states that events can lead to, and the events that each allows, with the states after them."""
    found: dict[TransactionState, dict[Event, TransactionState]] = {}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state in found:
            continue
        found[state] = {event: target for event in Event if (target := find(state, event, mode)) is not None}
        waiting += found[state].values()
    return found


def diagram(mode: Mode = Mode.BATCH_V2) -> str:
    """The phases of a mode as a Mermaid state diagram, generated from ``TRANSITIONS``.

    A start and fencing are left out: they are allowed in every phase.
    """
    return _diagram(mode, "phases", Phase.IDLE.name)


def epochs_diagram(mode: Mode = Mode.BATCH_V2) -> str:
    """As `diagram`, for the producer epoch."""
    return _diagram(mode, "epochs", Epoch.NONE.name)


def _diagram(mode: Mode, machine: str, start: str) -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    everywhere = {Event.INITIALIZED, Event.FENCED} if machine == "phases" else set()
    for transition in TRANSITIONS:
        if mode in transition.modes and transition.event not in everywhere:
            for source, target in getattr(transition, machine).items():
                if source is not target:
                    arrows.setdefault((source.name, target.name), []).append(transition.event.name)
    lines = ["stateDiagram-v2", f"    [*] --> {start}"]
    lines += [f"    {a} --> {b}: {', '.join(dict.fromkeys(events))}" for (a, b), events in arrows.items()]
    return "\n".join(lines)

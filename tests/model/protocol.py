"""onceflow's protocol as a model whose states can all be searched: docs/model.md says how to read it.

    python tests/model/protocol.py                          a table of configurations
    python tests/model/protocol.py --transaction-version 1 --batches 3 --crashes 2
    python tests/model/protocol.py --variant reads_before_fencing

What the driver and its tasks do has the names of ``onceflow.hooks.STEPS``; comments name the code that does it. What
brokers do is in brokers.py. A crash, a delay, a lost answer are steps of their own, and bounded by ``Config``. A driver
stands for one of either engine: docs/model.md says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from brokers import (
    AUDITED,
    BEGUN,
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    CONTINUING,
    DEAD,
    EMPTY,
    ENDING,
    FAILED,
    FAULTS,
    FENCED,
    IDLE,
    IN_PROGRESS,
    LOOKING,
    NONE,
    ONGOING,
    OUTSIDE,
    PLANNED,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    PREPARING,
    READY,
    RENEWING,
    SENT,
    STARTED,
    TO_ADD,
    TO_SETTLE,
    WRITING,
    Config,
    Coordinator,
    Driver,
    Kafka,
    Log,
    Message,
    Next,
    Progress,
    State,
    Store,
    spans,
    swap,
)
from explore import Action, Result, SearchTooLargeError, explore, readable

from onceflow.protocol.transaction import (
    Epoch,
    Event,
    IllegalEventError,
    Mode,
    Phase,
    ProgressState,
    TransactionState,
    find,
    transitions_of,
)

if TYPE_CHECKING:
    from variants import Variant


class Model(Kafka):
    """What drivers and tasks do, and what goes wrong. The flags are rules that variants.py breaks, one at a time."""

    fences_before_reading = True
    waits_for_decision = True
    new_epoch_after_abort = True
    progress_in_transaction = True
    looks_for_markers = True
    looks_before_it_stops = True
    aborts_as_the_timeout_does = True
    checks_progress = True
    aborted_states = (COMPLETE_ABORT,)
    follows_the_table = True

    @property
    def mode(self) -> Mode:
        return Mode.BATCH_V2 if self.v2 else Mode.BATCH_V1

    def on(self, transaction_state: TransactionState, *events: Event) -> TransactionState:
        """What a driver reports to the table of ``onceflow.protocol.transaction``, which raises where the code would.

        A variant that does what the table does not allow goes on as if it did.
        """
        for event in events:
            after = find(transaction_state, event, self.mode)
            if after is None and self.follows_the_table:
                raise IllegalEventError(f"{event.name} at: {transaction_state}")
            if after is None:
                transition = transitions_of(event, self.mode)[0]
                phase, epoch, progress_state = transaction_state
                after = TransactionState(
                    transition.phases.get(phase) or next(iter(transition.phases.values())),
                    transition.epochs.get(epoch) or next(iter(transition.epochs.values()), epoch),
                    transition.progress_states.get(progress_state)
                    or next(iter(transition.progress_states.values()), progress_state),
                )
            self.events.add((transaction_state, event, after))
            transaction_state = after
        return transaction_state

    def noted(self, s: State, n: int, *events: Event) -> State:
        """The state with a driver's events reported."""
        d = s.drivers[n]
        return self.moved(s, n, d, transaction_state=self.on(d.transaction_state, *events))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.events: set[tuple[TransactionState, Event, TransactionState]] = (
            set()
        )  # transitions of the table that were taken

    @property
    def looks_why(self) -> bool:
        """Version 1: a driver that is refused looks whether that was a timeout."""
        return not self.v2 and self.looks_before_it_stops

    def initial(self) -> State:
        counts = [getattr(self.config, fault) for fault in FAULTS]
        total = min(self.config.faults, sum(counts))
        return State(
            Coordinator(EMPTY, 0, NONE, 0, False),
            (Log(NONE, 0, ()),) * (self.config.outputs + 1),
            (),
            (),
            (),
            Progress(0),
            Store(0),
            (total, *(min(count, total) for count in counts)),
            0,
        )

    def moved(self, s: State, n: int, d: Driver, **changes: object) -> State:
        return State(s[0], s[1], s[2], swap(s.drivers, n, d._replace(**changes)), *s[4:])  # quicker than _replace

    def stopped(self, s: State, n: int) -> State:
        return s._replace(drivers=s.drivers[:n] + s.drivers[n + 1 :])

    # ---- the steps of a batch, in order ------------------------------------------------------------------

    def init(self, s: State) -> Next:
        """driver/record/session.py: Transactions.init fences, then progress_log.read_progress reads."""
        to_fence, to_read = (STARTED, FENCED) if self.fences_before_reading else (FENCED, STARTED)
        for n, d in enumerate(s.drivers):
            if d.phase == to_fence:
                yield from self.take_over(s, n, d, FENCED if self.fences_before_reading else TO_SETTLE)
            elif d.phase == to_read and self.missing_markers(s):
                yield from self.confirm(s, n, d)
            elif d.phase == to_read:
                progress, undecided = s.progress, s.parts[self.progress].open
                if not self.waits_for_decision and undecided:
                    progress = Progress(undecided[-1].end)  # a reader that takes what has no marker for committed
                after = TO_SETTLE if self.fences_before_reading else FENCED
                known = {
                    "at": progress.at,
                    "last": progress.epoch,
                    "transaction_state": self.on(d.transaction_state, Event.PROGRESS_READ),
                }
                moved = self.moved(s, n, d, phase=after, **known)
                yield f"driver {d.name}: reads that progress is at {progress.at}", moved

    def take_over(self, s: State, n: int, d: Driver, phase: str) -> Next:
        answer, c = self.init_producer_id(s.coordinator, NONE)
        what = f"driver {d.name}: InitProducerId, "
        if answer == "ok" or not self.waits_for_decision:
            fenced = d._replace(
                phase=phase, epoch=c.epoch, transaction_state=self.on(d.transaction_state, Event.INITIALIZED)
            )
            newest = (*s.drivers[:n], *s.drivers[n + 1 :], fenced)
            yield what + f"epoch {c.epoch} is its own", self.decided(s._replace(drivers=newest), c)
        elif c is not s.coordinator:
            yield what + f"the transaction of epoch {s.coordinator.epoch} is to be aborted", self.decided(s, c)

    def missing_markers(self, s: State) -> bool:
        """A driver that has begun nothing looks at last stable offsets and open transactions."""
        return self.looks_for_markers and any(log.unmarked for log in s.parts)

    def confirm(self, s: State, n: int, d: Driver) -> Next:
        """Markers.confirm, DriverSession.progress: what was left undecided is decided by a transaction without records.
        In one step; what happens when the driver dies between its two requests is in the guarantees."""
        c = s.coordinator
        if c.state in PREPARING:
            return
        what = f"driver {d.name}: missing markers, "
        if c.epoch != d.epoch:
            yield what + "fenced, it stops", self.stopped(s, n)
        elif c.state == ONGOING:  # a late task has added its partition (version 1): only the timeout ends that
            yield what + "it gives up", self.stopped(s, n)
        else:
            visible, progress = self.decided_so_far(s)
            commits = any(log.unmarked and log.kept for log in s.parts)
            # Version 1 aborts by InitProducerId, so that the epoch of an abort is nobody's (Transactions.end).
            epoch = c.epoch + (1 if self.v2 or commits else 3)
            parts = tuple(Log(epoch, 0, log.open) if log.unmarked else log for log in s.parts)
            after = s._replace(parts=parts, visible=visible, progress=progress)
            transaction_state = self.completed(self.settled(d.transaction_state), commits)
            after = self.moved(after, n, d, epoch=epoch, transaction_state=transaction_state)
            if self.v2:
                now = Coordinator(COMPLETE_ABORT, epoch, c.epoch, 0, False)
            elif commits:
                now = Coordinator(COMPLETE_COMMIT, epoch, c.epoch, 0, False)
            else:
                now = Coordinator(EMPTY, epoch, epoch - 1, 0, False)
            yield what + "written now", self.decided(after, now)

    def completed(self, transaction_state: TransactionState, commits: bool) -> TransactionState:
        """Markers._write, Markers.confirm."""
        if transaction_state.epoch is Epoch.USED:
            transaction_state = self.on(transaction_state, Event.EPOCH_BUMPED)
        if commits:
            return self.on(
                transaction_state, Event.COMPLETE_COMMIT, Event.COMMIT, Event.COMMIT_DONE, Event.MARKERS_CONFIRMED
            )
        done = Event.ABORT_DONE if self.v2 else Event.EPOCH_BUMPED
        return self.on(transaction_state, Event.COMPLETE_ABORT, Event.ABORT, done, Event.MARKERS_CONFIRMED)

    def settled(self, transaction_state: TransactionState) -> TransactionState:
        return (
            self.on(transaction_state, Event.SETTLE)
            if transaction_state.phase is Phase.COMMITTED
            else transaction_state
        )

    def settle(self, s: State) -> Next:
        """BatchCommit.settle; of local state CatchUp._step of state/local/catch_up.py, as far as the driver knows."""
        for n, d in enumerate(s.drivers):
            if d.phase != TO_SETTLE:
                continue
            how, store = "", s.store
            if self.config.local:
                pending = store.pending
                if self.applies(d, store):
                    truth = self.truth(s)
                    wrong = pending[2] == truth.at and pending[3] != truth.tag
                    how, store = f": what attempt {pending[3]} left is applied", Store(pending[2], None, wrong)
                elif store.at > d.at:  # still_owner says no
                    yield f"driver {d.name}: the copy is a newer driver's, it stops", self.stopped(s, n)
                    continue
                elif store.at < d.at:
                    how, store = ": the copy reads what is committed", Store(d.at)
            ready = self.settled(d.transaction_state)
            after = self.moved(s._replace(store=store), n, d, phase=READY, last=NONE, transaction_state=ready)
            yield f"driver {d.name}{how}", after

    def applies(self, d: Driver, store: Store) -> bool:
        """Whether what is pending is of just the transaction that the driver knows as the last committed one."""
        return store.pending is not None and store.at != d.at and store.pending[:3] == (d.last, store.at, d.at)

    def truth(self, s: State) -> Progress:
        """Progress as it is decided: the markers of a decided commit may be missing."""
        records = s.parts[self.progress].open
        if s.coordinator.state == PREPARE_COMMIT and records:
            return Progress(records[-1].end, s.parts[self.progress].epoch, records[-1].tag)
        return self.decided_so_far(s)[1]

    def plan(self, s: State) -> Next:
        """BatchCommit.plan, BatchCommit.plan_range: a range that starts where progress ends. Its end is the choice of
        Spark, or of the direct engine: it takes what has arrived, up to a limit (Arrivals.take)."""
        for n, d in enumerate(s.drivers):
            if d.phase == READY:
                for end in range(d.at + 1, min(d.at + 2, self.config.batches) + 1):
                    what = f"driver {d.name}: from {d.at}, before {end}"
                    yield what, self.moved(s, n, d, phase=PLANNED, end=end, attempt=1)

    def begin(self, s: State) -> Next:
        """BatchCommit._begin, Transactions.begin: an epoch nothing was written under; version 1 has to ask for one."""
        for n, d in enumerate(s.drivers):
            if d.phase == PLANNED and self.looks_for_markers and s.coordinator.state in PREPARING:
                continue  # Markers.confirm: only what is open after that is left out
            if d.phase == PLANNED and self.missing_markers(s):
                yield from self.confirm(s, n, d)
            elif d.phase == PLANNED and d.transaction_state.epoch is Epoch.USED:
                yield from self.renewed(s, n, d, self.begun)
            elif d.phase == PLANNED:
                after = self.begun(s, n, d.epoch)
                yield f"driver {d.name}: attempt {after.drivers[n].tag}, epoch {d.epoch}", after

    def begun(self, s: State, n: int, epoch: int) -> State:
        d = s.drivers[n]
        transaction_state = self.on(d.transaction_state, Event.MARKERS_CONFIRMED, Event.BEGIN)
        return self.moved(s, n, d, phase=BEGUN, epoch=epoch, transaction_state=transaction_state, tag=self.free_tag(s))

    def renewed(self, s: State, n: int, d: Driver, then: Callable[[State, int, int], State]) -> Next:
        """Transactions.renew: InitProducerId that names the driver's own epoch."""
        answer, c = self.init_producer_id(s.coordinator, d.epoch)
        what = f"driver {d.name}: InitProducerId after epoch {d.epoch}: "
        if answer == "fenced":
            if self.looks_why:
                yield what + "refused", self.moved(s, n, d, phase=LOOKING, bad=d.phase == RENEWING)
            else:
                yield what + "fenced, it stops", self.stopped(s, n)
            return
        if c is not s.coordinator and (left := self.spent(s, "lost")):
            yield what + "done, the answer is lost", self.decided(s._replace(left=left), c)
        if answer == "ok" and s.coordinator.state == DEAD:
            yield from self.remembered(s, n, d, c, then)
        elif answer == "ok":
            after = then(self.noted(self.decided(s, c), n, Event.EPOCH_BUMPED), n, c.epoch)
            yield what + f"epoch {c.epoch}" + ", it gives up" * (len(after.drivers) < len(s.drivers)), after
        elif c is not s.coordinator:
            yield what + "what is open is to be aborted", self.decided(s, c)

    def remembered(self, s: State, n: int, d: Driver, c: Coordinator, then: Callable[[State, int, int], State]) -> Next:
        """A new producer id, for an id that had been forgotten. DriverSession._check_progress: progress tells whether
        somebody else has committed meanwhile. If not, this driver is the newest one."""
        what = f"driver {d.name}: InitProducerId, a new producer id: "
        if self.has_moved(s, d):
            yield what + "progress has moved, it stops", self.decided(self.stopped(s, n), c)
            return
        d = d._replace(
            transaction_state=self.on(d.transaction_state, Event.PRODUCER_ID_REPLACED, Event.OWNERSHIP_VERIFIED)
        )
        newest = self.decided(s._replace(drivers=(*s.drivers[:n], *s.drivers[n + 1 :], d)), c)
        after = then(newest, len(s.drivers) - 1, c.epoch)
        yield what + f"epoch {c.epoch}" + ", it gives up" * (len(after.drivers) < len(s.drivers)), after

    def has_moved(self, s: State, d: Driver) -> bool:
        """Whether progress is another one than this driver has read or committed last."""
        return self.checks_progress and self.decided_so_far(s)[1].at != d.at

    def free_tag(self, s: State) -> int:
        """A name for an attempt: the smallest that nothing bears any more. Names are compared for equality only."""
        taken = {d.tag for d in s.drivers} | {m.tag for m in s.net}
        taken |= {r.tag for log in s.parts for r in (*log.open, *log.unmarked)}
        if self.config.local:
            taken |= {s.progress.tag, s.store.pending[3] if s.store.pending else 0}
        return next(tag for tag in range(1, len(taken) + 2) if tag not in taken)

    def write(self, s: State) -> Next:
        """BatchCommit._write, row_writer.write_rows: every task sends its rows, with sequences from 0 in each
        partition. They arrive one by one, in ``append``: a task that sends later is one whose request takes longer.

        Version 2: a driver that writes the rows itself may send progress with them (ExactlyOnce.ahead)."""
        places = (True, False) if self.config.local else (False,)
        may_send_ahead = self.implicit and self.progress_in_transaction
        for n, d in enumerate(s.drivers):
            if d.phase != BEGUN:
                continue
            for ahead in (False, True) if may_send_ahead else (False,):
                rows = [*self.requests(d), *([self.sent_ahead(d)] if ahead else ())]
                net = tuple(sorted((*s.net, *rows)))
                what = f"driver {d.name}: tasks send {spans(self.requests(d))} in epoch {d.epoch}"
                what += f", and progress to {d.end}" * ahead
                for here in places:
                    after = self.moved(s, n, d, phase=WRITING, waiting=len(rows), here=here)
                    yield what + ", on this host" * here, self.swept(after._replace(net=net))

    def requests(self, d: Driver) -> list[Message]:
        """One for each record; the partition has been added when the first one of it was acknowledged."""
        rows: list[Message] = []
        for record in range(d.at, d.end):
            part = record % self.config.outputs
            seq = sum(m.part == part for m in rows)
            stage = SENT if self.implicit or seq else TO_ADD
            rows.append(Message(part, d.epoch, seq, d.tag, record, record + 1, stage, writer=part))
        return rows

    def sent_ahead(self, d: Driver) -> Message:
        """ProgressAhead.record: progress of the planned range, before the rows are acknowledged."""
        return Message(self.progress, d.epoch, 0, d.tag, d.at, d.end, SENT, writer=self.progress)

    def audit(self, s: State) -> Next:
        """BatchCommit._audit, audit.audit: all rows acknowledged, one attempt of every task."""
        for n, d in enumerate(s.drivers):
            if d.phase == WRITING and d.bad:
                yield f"driver {d.name}: attempt {d.tag} is refused", self.has_failed(s, n, d)
            elif d.phase == WRITING and self.answered(s, d):
                transaction_state = self.on(d.transaction_state, Event.ROWS_AUDITED)
                yield (
                    f"driver {d.name}: attempt {d.tag} is whole",
                    self.moved(s, n, d, phase=AUDITED, transaction_state=transaction_state),
                )

    def move_progress(self, s: State) -> Next:
        """BatchCommit._move_progress, progress_log.write_progress: the record, in the batch's transaction; nothing, if
        it was sent with the rows. It is acknowledged then, as the rows are."""
        for n, d in enumerate(s.drivers):
            what = f"driver {d.name}: to {d.end}"
            if d.phase == AUDITED and any(record.tag == d.tag for record in s.parts[self.progress].open):
                yield what + ", it is there", self.moved(s, n, d, phase=IN_PROGRESS)
            elif d.phase == AUDITED and self.progress_in_transaction:
                stage = SENT if self.implicit else TO_ADD
                record = Message(self.progress, d.epoch, 0, d.tag, d.at, d.end, stage, writer=self.progress)
                after = self.moved(s, n, d, phase=IN_PROGRESS, waiting=d.waiting + 1)
                yield what, self.swept(after._replace(net=tuple(sorted((*s.net, record)))))
            elif d.phase == OUTSIDE:
                after = self.moved(s, n, d, phase=TO_SETTLE)
                yield what + ", outside the transaction", after._replace(progress=Progress(d.end))

    def end(self, s: State) -> Next:
        """BatchCommit._end, Transactions.end: EndTxn(commit), repeated with the same epoch until it is answered."""
        ready = IN_PROGRESS if self.progress_in_transaction else AUDITED
        for n, d in enumerate(s.drivers):
            if d.phase == ENDING:
                yield from self.ask_again(s, n, d)
            elif d.phase == ready and not d.bad and self.answered(s, d):
                yield from self.commit(s, n, d)

    def answered(self, s: State, d: Driver) -> bool:
        """Producer.flush: nothing that was sent is unanswered."""
        return not d.waiting

    def ask_again(self, s: State, n: int, d: Driver) -> Next:
        return self.commit(s, n, d)

    def commit(self, s: State, n: int, d: Driver) -> Next:
        if d.transaction_state.phase is not Phase.COMMITTING:
            d = d._replace(transaction_state=self.on(d.transaction_state, Event.PROGRESS_WRITTEN))
        d = d._replace(transaction_state=self.on(d.transaction_state, Event.COMMIT))
        answer, c = self.end_txn(s.coordinator, d.epoch, True)
        what = f"driver {d.name}: EndTxn(commit), epoch {d.epoch}: "
        if answer == "ok":
            if c is not s.coordinator:  # decided now
                c = c._replace(
                    late=any(
                        newer.transaction_state.progress_state is ProgressState.READ for newer in s.drivers[n + 1 :]
                    )
                )
                if left := self.spent(s, "lost"):
                    waits = self.moved(s._replace(left=left), n, d, phase=ENDING)
                    yield what + "committed, the answer is lost", self.decided(waits, c)
            yield what + "committed", self.adopted(s, n, d, c)
        elif answer == "over":
            yield what + "it was aborted", self.has_failed(s, n, d, events=(Event.TIMED_OUT,))
        elif answer == "forgotten":
            gone = self.has_failed(s, n, d, events=(Event.COMMIT_REFUSED,))
            yield what + "the transactional id is forgotten", gone
        elif answer == "fenced" and self.looks_why:
            yield what + "refused", self.has_failed(s, n, d, LOOKING, bad=True)
        elif answer == "fenced":
            yield what + "fenced, it stops", self.stopped(s, n)

    def adopted(self, s: State, n: int, d: Driver, c: Coordinator) -> State:
        """BatchCommit._on_commit; the epoch that EndTxn v5 returns is the next one."""
        changes = {"tag": 0, "waiting": 0, "attempt": 0, "at": d.end, "last": d.epoch if self.config.local else NONE}
        phase = TO_SETTLE if self.progress_in_transaction else OUTSIDE
        epoch = c.epoch if self.v2 else d.epoch
        transaction_state = self.on(d.transaction_state, Event.COMMIT_DONE)
        return self.decided(
            self.moved(s, n, d, phase=phase, epoch=epoch, transaction_state=transaction_state, **changes), c
        )

    # ---- when it goes wrong: hooks.ABORTED ---------------------------------------------------------------

    def abort(self, s: State) -> Next:
        """BatchCommit.abort, Transactions.abort: EndTxn(abort), and a fresh epoch if that did not bring one."""
        for n, d in enumerate(s.drivers):
            if d.phase == LOOKING:
                yield from self.look(s, n, d)
            elif d.phase == CONTINUING:
                yield from self.go_on(s, n, d)
            elif (
                (d.phase == FAILED or (d.phase == IN_PROGRESS and d.bad))
                and self.looks_why
                and self.aborts_as_the_timeout_does
            ):
                yield from self.look(s, n, d)
            elif d.phase == FAILED or (d.phase == IN_PROGRESS and d.bad):
                answer, c = self.end_txn(s.coordinator, d.epoch, False)
                what = f"driver {d.name}: EndTxn(abort), epoch {d.epoch}: "
                if answer == "fenced":
                    yield what + "fenced, it stops", self.stopped(s, n)
                    continue
                if answer == "wait":
                    continue
                if answer == "forgotten" and self.has_moved(s, d):
                    yield what + "forgotten, and progress has moved: it stops", self.stopped(s, n)
                    continue
                d = d._replace(transaction_state=self.on(d.transaction_state, Event.ABORT))
                if c is not s.coordinator and (left := self.spent(s, "lost")):
                    lost = self.has_failed(s._replace(left=left), n, d)
                    yield what + "aborted, the answer is lost", self.decided(lost, c)
                over = (Event.ABORT_DONE if answer == "ok" else Event.TIMED_OUT,)
                after = self.decided(self.has_failed(s, n, d, RENEWING, events=over), c)
                if answer == "ok" and self.v2:
                    after = self.rerun(after, n, c.epoch)
                elif answer != "forgotten" and not self.new_epoch_after_abort:
                    unused = after.drivers[n].transaction_state._replace(epoch=Epoch.FRESH)
                    after = self.rerun(self.moved(after, n, after.drivers[n], transaction_state=unused), n, d.epoch)
                yield what + "aborted" + ", it gives up" * (len(after.drivers) < len(s.drivers)), after
            elif d.phase == RENEWING:
                yield from self.renewed(s, n, d, self.rerun)

    def look(self, s: State, n: int, d: Driver) -> Next:
        """Version 1, Transactions._coordinator_state: DescribeTransactions. Only the abort of a transaction of this
        very driver leaves the epoch after its own with nobody, as aborted: here nobody sends EndTxn(abort)."""
        c = s.coordinator
        what = f"driver {d.name}: looks at the coordinator: "
        aborting = () if d.phase == LOOKING else (Event.ABORT,)
        if (c.epoch == d.epoch or c.state == DEAD) and d.phase != LOOKING:
            yield what + "its own epoch", self.has_failed(s, n, d, RENEWING, events=aborting)
        elif c.epoch == d.epoch + 1 and c.state in (PREPARE_ABORT, *self.aborted_states):
            failed = d.bad or d.phase != LOOKING
            # A commit that was refused: Transactions._was_aborted. The abort that follows it has nothing to abort.
            events = (Event.TIMED_OUT, Event.ABORT) if d.transaction_state.phase is Phase.COMMITTING else aborting
            yield what + "its transaction was aborted", self.has_failed(s, n, d, CONTINUING, bad=failed, events=events)
        else:
            yield what + "fenced, it stops", self.stopped(s, n)

    def go_on(self, s: State, n: int, d: Driver) -> Next:
        """Version 1, Transactions._continue: InitProducerId that names the epoch of the abort. Then progress is read
        once more (DriverSession._check_progress)."""
        answer, c = self.init_producer_id(s.coordinator, d.epoch + 1)
        what = f"driver {d.name}: InitProducerId after the abort's epoch {d.epoch + 1}: "
        if answer == "fenced":
            yield what + "fenced, it stops", self.stopped(s, n)
            return
        if c is not s.coordinator and (left := self.spent(s, "lost")):
            yield what + "done, the answer is lost", self.decided(s._replace(left=left), c)
        then = self.rerun if d.bad else self.planned_again
        if answer == "ok" and s.coordinator.state == DEAD:
            yield from self.remembered(s, n, d, c, then)
        elif answer == "ok":
            after = self.decided(s, c)
            if self.has_moved(after, d):
                yield what + "progress has moved, it stops", self.stopped(after, n)
                return
            after = self.noted(after, n, Event.TIMEOUT_CONTINUED, Event.OWNERSHIP_VERIFIED)
            after = then(after, n, c.epoch)
            yield what + f"epoch {c.epoch}" + ", it gives up" * (len(after.drivers) < len(s.drivers)), after
        elif c is not s.coordinator:
            yield what + "what is open is to be aborted", self.decided(s, c)

    def planned_again(self, s: State, n: int, epoch: int) -> State:
        return self.moved(s, n, s.drivers[n], phase=PLANNED, epoch=epoch)

    def has_failed(
        self, s: State, n: int, d: Driver, phase: str = FAILED, *, bad: bool = False, events: tuple[Event, ...] = ()
    ) -> State:
        """Its tasks are nobody's any more."""
        transaction_state = self.on(d.transaction_state, *events)
        return self.moved(s, n, d, phase=phase, tag=0, waiting=0, bad=bad, transaction_state=transaction_state)

    def rerun(self, s: State, n: int, epoch: int) -> State:
        """The batch again, under a new epoch; a driver that has tried often enough gives up."""
        d = s.drivers[n]
        if d.attempt >= self.config.attempts:
            return self.stopped(s, n)
        changes = {"tag": 0, "waiting": 0, "bad": False, "attempt": d.attempt + 1}
        return self.moved(s, n, d, phase=PLANNED, epoch=epoch, **changes)

    # ---- what happens to them ------------------------------------------------------------------------------

    def start(self, s: State) -> Next:
        """Somebody starts the driver again. No fault: it has to happen for the run to go on."""
        if not s.drivers:
            yield f"driver {s.started + 1}", self.joined(s)

    def joined(self, s: State) -> State:
        return s._replace(drivers=(*s.drivers, Driver(s.started + 1, STARTED)), started=s.started + 1)

    def second(self, s: State) -> Next:
        if len(s.drivers) == 1 and (left := self.spent(s, "rivals")):
            what = f"driver {s.started + 1} is started while driver {s.drivers[0].name} runs"
            yield what, self.joined(s._replace(left=left))

    def crash(self, s: State) -> Next:
        """What it has sent may still arrive, whenever."""
        if left := self.spent(s, "crashes"):
            for n, d in enumerate(s.drivers):
                yield f"driver {d.name} ({d.phase})", self.stopped(s, n)._replace(left=left)

    def die(self, s: State) -> Next:
        """A task dies after it has produced, and what it has sent arrives or not. Its second attempt writes nothing
        and says so (row_writer.write_rows, extra_attempt); the audit then refuses the attempt (I3)."""
        if left := self.spent(s, "deaths"):
            for n, d in enumerate(s.drivers):
                if d.phase == WRITING and d.waiting and not d.bad:
                    yield from self.died(s._replace(left=left), n, d)

    def died(self, s: State, n: int, d: Driver) -> Next:
        what = f"of driver {d.name}, attempt {d.tag}: its second attempt writes nothing"
        yield what, self.moved(s, n, d, bad=True)

    # ---- what must hold --------------------------------------------------------------------------------

    def visible_iff_progress(self, s: State) -> str:
        if s.coordinator.state == PREPARE_COMMIT:
            done = [n for record in s.parts[self.progress].open for n in range(record.start, record.end)]
            rows = sorted(record.start for log in s.parts[: self.progress] for record in log.open)
            return "" if rows == done else f"a commit is decided of records {rows}, with progress over {done}"
        visible, progress = self.decided_so_far(s)
        if s.coordinator.state != ONGOING and visible != tuple(range(progress.at)):
            return f"nothing is open, readers see records {list(visible)}, progress says {progress.at} are done"
        return ""

    def contiguous(self, s: State) -> str:
        if s.coordinator.state == PREPARE_COMMIT:
            for record in s.parts[self.progress].open:
                at = self.decided_so_far(s)[1].at
                if record.start != at or record.end <= record.start:
                    return f"a commit is decided of [{record.start}, {record.end}), progress ends at {at}"
        return ""

    def one_attempt_set(self, s: State) -> str:
        if s.coordinator.state == PREPARE_COMMIT:
            tags = {record.tag for log in s.parts for record in log.open}
            if len(tags) > 1:
                return f"a commit is decided of records of attempts {sorted(tags)}"
        return ""

    def one_writer(self, s: State) -> str:
        if not s.coordinator.enrolled:
            return ""
        for n, log in enumerate(s.parts):
            if log.open:
                if any(record.seq != seq for seq, record in enumerate(log.open)):
                    return f"{self.names[n]} has sequences {[record.seq for record in log.open]} in one transaction"
                first = log.open[0]
                writers = {record.writer for record in log.open}
                writers |= {m.writer for m in s.net if (m.part, m.epoch, m.tag) == (n, log.epoch, first.tag)}
                if len(writers) > 1:
                    return f"tasks {sorted(writers)} write to {self.names[n]} in one transaction"
        return ""

    def never_twice(self, s: State) -> str:
        visible = self.decided_so_far(s)[0]
        if len(set(visible)) < len(visible):
            return f"readers see a record twice: {list(visible)}"
        return ""

    def older_is_fenced(self, s: State) -> str:
        return "a driver has committed after a newer one had read progress" if s.coordinator.late else ""

    def store_not_ahead(self, s: State) -> str:
        if s.store.at > (at := self.truth(s).at):
            return f"the local copy serves {s.store.at} records as committed, {at} are"
        return "the local copy has what another attempt than the committed one has made" if s.store.wrong else ""

    def final(self, s: State) -> str:
        """What is missing when a run is over (I5)."""
        if s.coordinator.state not in (*IDLE, DEAD):
            return "a transaction hangs: readers wait at it"
        everything = tuple(range(self.config.batches))
        visible = self.decided_so_far(s)[0]  # markers that the last batch lacks are written before the next
        return "" if visible == everything else f"readers see records {list(visible)} of {list(everything)}"

    # ---- search ----------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Local are the steps that a driver takes in its own memory: nothing else reads or changes what they read or
        change, no invariant looks at it, and a crash leaves the same before and after them (``explore.Action``). With
        a local copy, which tasks and drivers share, only ``plan`` is."""
        alone = not self.config.local
        return [
            Action("init", self.init),
            Action("plan", self.plan, local=True),
            Action("begin", self.begin),
            Action("write", self.write),
            Action("audit", self.audit, local=alone),
            Action("progress", self.move_progress),
            Action("end", self.end),
            Action("settle", self.settle, local=alone),
            Action("aborted", self.abort),
            Action("append", self.append),
            Action("markers", self.markers),
            Action("start", self.start),
            Action("timeout", self.timeout, fault=True),
            Action("forgets", self.forgets, fault=True),
            Action("crash", self.crash, fault=True),
            Action("task dies", self.die, fault=True),
            Action("second driver", self.second, fault=True),
        ]

    def key(self, s: State) -> Hashable:
        """Equal for states that differ only in names: drivers and attempts are counted for the reader, and epochs are
        only ever compared with each other, so they count from the coordinator's. Of those below it, what matters is
        whether a driver's is the one before (EndTxn, InitProducerId once more), and the one a partition has open; new
        ones are always above all others. What is in no comparison any more counts as one and the same."""
        c = s.coordinator
        now = c.epoch
        return (
            (c.state, c.last == now - 1, c.enrolled, c.late),
            tuple([(p[0] - now, *p[1:]) if p[2] or p[3] or (p[0] == now and p[1]) else () for p in s.parts]),
            tuple([(m[0], m[1] - now, *m[2:]) for m in s.net]),
            tuple([(d[1], max(d[2] - now, -2), *d[3:10], d[11]) for d in s.drivers]),
            s.visible,
            s.progress.at,
            self.local_key(s) if self.config.local else 0,
            s.left,
        )

    def local_key(self, s: State) -> Hashable:
        now, pending = s.coordinator.epoch, s.store.pending
        left = None if pending is None else (pending[0] - now, *pending[1:])
        last = [s.progress.epoch, *(d.last for d in s.drivers)]
        known = tuple([None if epoch == NONE else epoch - now for epoch in last])
        return s.progress.tag, s.store.at, left, s.store.wrong, known

    def invariants(self) -> dict[str, Callable[[State], str]]:
        every = {
            "I1": self.visible_iff_progress,
            "I2": self.contiguous,
            "I3": self.one_attempt_set,
            "I4": self.one_writer,
            "I5": self.never_twice,
            "I6": self.older_is_fenced,
            "I7": self.store_not_ahead,
        }
        if not self.config.local:
            del every["I7"]
        return every


def search(model: Model, *, only: str = "", reduce: bool = True, states_max: int = 5_000_000) -> Result:
    """All states of a model.

    Args:
        only: the one invariant to look at; empty: all of them.
        reduce: see ``explore``.
    """
    invariants = model.invariants()
    return explore(
        model.initial(),
        model.actions(),
        {name: invariants[name] for name in invariants if only in ("", name)},
        final=model.final if only in ("", "I5") else None,
        key=model.key,
        states_max=states_max,
        reduce=reduce,
    )


def described(s: State) -> list[str]:
    """The state a trace ends in, for people."""
    c = s.coordinator
    lines = [f"coordinator: {c.state}, epoch {c.epoch}; visible: {list(s.visible)}; progress: {s.progress.at}"]
    for n, log in enumerate(s.parts):
        records = [f"{spans([r])} of attempt {r.tag}, sequence {r.seq}" for r in log.open]
        name = "progress" if n == len(s.parts) - 1 else f"out-{n}"
        lines += [f"{name}: open in epoch {log.epoch}: {'; '.join(records)}"] if records else []
        unmarked = "committed" if log.kept else "aborted"
        lines += [f"{name}: no marker, {unmarked}: {spans(log.unmarked)}"] if log.unmarked else []
    lines += [f"under way: {spans([m])} of attempt {m.tag}, epoch {m.epoch}" for m in s.net]
    lines += [f"driver {d.name}: {d.phase}; epoch {d.epoch if d.epoch >= 0 else 'none yet'}" for d in s.drivers]
    return lines


# ---- command line --------------------------------------------------------------------------------------

_EVERY_FAULT = dict.fromkeys(FAULTS[:6], 1)  # a leader that is missing, and expiry, go with some of them only
#: Searched when no sizes are given. The tests take the small ones.
SMALL: tuple[dict[str, int], ...] = (
    {"batches": 2, **_EVERY_FAULT, "faults": 2},
    {"batches": 2, "crashes": 2, "rivals": 1},
    {"batches": 2, "outputs": 1, **_EVERY_FAULT, "faults": 2},
    {"batches": 2, "crashes": 1, "deaths": 1, "timeouts": 1, "local": 1},
    {"batches": 2, "crashes": 1, "deaths": 1, "lost": 1, "rivals": 1, "leaders": 1, "faults": 2},
    {"batches": 2, "crashes": 1, "deaths": 1, "lost": 1, "rivals": 1, "expiries": 1, "faults": 2},
)
LARGE: tuple[dict[str, int], ...] = (
    {"batches": 2, **_EVERY_FAULT, "faults": 3},
    {"batches": 2, **_EVERY_FAULT, "faults": 4},
    {"batches": 3, **_EVERY_FAULT, "faults": 2},
    {"batches": 3, "crashes": 2, "deaths": 2, "rivals": 1},
    {"batches": 3, "outputs": 1, **_EVERY_FAULT, "faults": 2},
    {"batches": 2, "crashes": 1, "deaths": 1, "timeouts": 1, "rivals": 1, "faults": 2, "local": 1},
    {"batches": 2, **_EVERY_FAULT, "leaders": 1, "faults": 3},
    {"batches": 2, "crashes": 1, "deaths": 1, "leaders": 2, "faults": 3},
    {"batches": 2, "crashes": 1, "deaths": 1, "timeouts": 1, "lost": 1, "rivals": 1, "expiries": 2, "faults": 3},
)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="Search all states of onceflow's protocol.", allow_abbrev=False)
    options.add_argument("--transaction-version", type=int, choices=(1, 2), help="both, if not given")
    options.add_argument("--variant", help="the counterexample of a known mistake: a name, or 'all'")
    options.add_argument("--local", action="store_const", const=1, help="tasks keep a local copy of their state")
    options.add_argument("--no-reduction", action="store_true", help="follow local steps in every order, too")
    options.add_argument("--states-max", type=int, default=5_000_000, help="more is a failure (%(default)s)")
    for name in ("batches", "outputs", *FAULTS, "faults", "attempts"):
        least = 0 if name in (*FAULTS, "faults") else 1
        default = Config._field_defaults[name]
        options.add_argument(f"--{name}", type=_at_least(least), metavar="N", help=f"{default}, if not given")
    return options


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return int(text)

    return number


def main(arguments: list[str] | None = None) -> int:
    """Search and print; 0 only when everything was searched and holds (of a variant: when its mistake was found)."""
    options = parser()
    given = options.parse_args(arguments)
    if given.variant:
        from variants import VARIANTS

        chosen = [variant for variant in VARIANTS if given.variant in ("all", variant.name)]
        if not chosen:
            options.error(f"unknown variant; there are {', '.join(variant.name for variant in VARIANTS)}")
        return max([_counterexample(variant) for variant in chosen])
    sizes = {name: getattr(given, name) for name in Config._fields if getattr(given, name, None) is not None}
    versions = (given.transaction_version,) if given.transaction_version else (1, 2)
    print("".join(f"{name:>9}" for name in COLUMNS) + "      states transitions depth     time  verdict")
    failed = 0
    for row in [sizes] if sizes else (*SMALL, *LARGE):
        for version in versions:
            config = Config(version=version, **row)
            print(in_columns(config), end="", flush=True)
            try:
                result = search(Model(config), reduce=not given.no_reduction, states_max=given.states_max)
            except SearchTooLargeError as problem:
                print(f"  NOT FINISHED: {problem}")
                failed = 1
                continue
            print(outcome(result))
            if result.violation:
                print(readable(result.violation, described))
                failed = 1
    return failed


COLUMNS = ("version", "batches", "outputs", *FAULTS, "faults", "local")


def in_columns(config: Config) -> str:
    most = min(config.faults, sum(getattr(config, fault) for fault in FAULTS))
    return "".join(f"{most if name == 'faults' else int(getattr(config, name)):>9}" for name in COLUMNS)


def outcome(result: Result) -> str:
    verdict = f"{result.violation.invariant} VIOLATED" if result.violation else "holds"
    return f"{result.states:12,}{result.transitions:12,}{result.depth:6}{result.seconds:7.1f} s  {verdict}"


def _counterexample(variant: Variant) -> int:
    result = variant.search()
    print(f"{variant.name}: {variant.what} (breaks {variant.breaks})")
    if result.violation is None:
        print(f"NOT FOUND in {result.states} states\n")
        return 1
    print(readable(result.violation, described) + "\n")
    return 0


if __name__ == "__main__":
    # The variants import this module by its name: their classes have to be of the same module as the search.
    from protocol import main as main_of_the_module

    sys.exit(main_of_the_module())

"""Known mistakes: onceflow's protocol with one rule changed, and the invariant that breaks then.

Each has been made, proposed or nearly made somewhere. A search that cannot find them would prove nothing by finding
nothing in the protocol itself. docs/model.md has the table (a test compares it with ``VARIANTS``).
"""

from __future__ import annotations

from typing import NamedTuple

from brokers import (
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    EMPTY,
    NONE,
    ONGOING,
    PLANNED,
    Config,
    Coordinator,
    Driver,
    Log,
    Message,
    Next,
    State,
    Store,
    swap,
)
from explore import Result

from onceflow.protocol.transaction import Event
from protocol import Model, search


class CommitsBeforeAcks(Model):
    def answered(self, s: State, d: Driver) -> bool:
        """Only the progress record's answer is waited for."""
        return all((m.part, m.tag) != (self.progress, d.tag) for m in s.net)


class NoNewEpochAfterAbort(Model):
    new_epoch_after_abort = False
    looks_before_it_stops = False


class GoesOnUnchecked(Model):
    checks_progress = False


class LooksAtTheEpochOnly(Model):
    aborted_states = (COMPLETE_ABORT, COMPLETE_COMMIT, EMPTY, ONGOING)


class AbortsByEndTxn(Model):
    aborts_as_the_timeout_does = False


class ReadsBeforeFencing(Model):
    follows_the_table = False
    fences_before_reading = False


class TakesOverWithoutFencing(Model):
    def take_over(self, s: State, n: int, d: Driver, phase: str) -> Next:
        """A standby for which silence is enough: it goes on in the epoch of the driver that it takes for dead."""
        if len(s.drivers) == 1:
            yield from super().take_over(s, n, d, phase)
            return
        transaction_state = self.on(d.transaction_state, Event.INITIALIZED)
        claimed = d._replace(phase=phase, epoch=s.coordinator.epoch, transaction_state=transaction_state)
        after = s._replace(drivers=(*s.drivers[:n], *s.drivers[n + 1 :], claimed))
        yield f"driver {d.name}: the other one is silent, epoch {s.coordinator.epoch} is taken over", after


class DoesNotWaitForDecision(Model):
    waits_for_decision = False


class ProgressAfterCommit(Model):
    progress_in_transaction = False


class EnrolsWithoutBump(Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.implicit = True


class TriesForEver(Model):
    def rerun(self, s: State, n: int, epoch: int) -> State:
        return super().rerun(self.moved(s, n, s.drivers[n], attempt=0), n, epoch)


class SecondAttemptWrites(Model):
    def died(self, s: State, n: int, d: Driver) -> Next:
        """The dead attempt's rows get a name of their own; those of the second one bear the batch's."""
        ghost = self.free_tag(s)
        for writer in range(self.config.outputs):
            again = [m for m in self.requests(d) if m.writer == writer]
            if not again:
                continue

            def renamed(row: Message) -> Message:
                return row._replace(tag=ghost) if (row.tag, row.writer) == (d.tag, writer) else row  # noqa: B023

            net = [renamed(m) for m in s.net]
            waiting = sum(m.tag == d.tag for m in net) + len(again)
            parts = tuple(log._replace(open=tuple(map(renamed, log.open))) for log in s.parts)
            after = self.moved(s, n, d, waiting=waiting)._replace(net=tuple(sorted((*net, *again))), parts=parts)
            yield f"of driver {d.name}, attempt {d.tag} (now {ghost}): it runs again in epoch {d.epoch}", after


class TwoWriters(Model):
    def requests(self, d: Driver) -> list[Message]:
        return [m._replace(seq=0, writer=m.start) for m in super().requests(d)]


class LostAnswerIsAnAbort(Model):
    follows_the_table = False

    def ask_again(self, s: State, n: int, d: Driver) -> Next:
        answer, c = self.init_producer_id(s.coordinator, NONE)
        if answer == "ok":
            what = f"driver {d.name}: takes it for an abort, InitProducerId, epoch {c.epoch}"
            transaction_state = self.on(d.transaction_state, Event.INITIALIZED)
            yield (
                what,
                self.decided(
                    self.moved(s, n, d, phase=PLANNED, epoch=c.epoch, transaction_state=transaction_state, tag=0), c
                ),
            )


class InitInsteadOfRepeating(Model):
    follows_the_table = False

    def ask_again(self, s: State, n: int, d: Driver) -> Next:
        answer, c = self.init_producer_id(s.coordinator, NONE)
        if answer == "ok":
            said, _ = self.end_txn(c, c.epoch, True)
            what = f"driver {d.name}: InitProducerId, then EndTxn(commit) of epoch {c.epoch}: {said}"
            yield what, self.decided(self.has_failed(s, n, d._replace(epoch=c.epoch), events=(Event.INITIALIZED,)), c)


class TasksCommit(Model):
    follows_the_table = False

    def commit(self, s: State, n: int, d: Driver) -> Next:
        if s.coordinator.state != ONGOING or s.coordinator.epoch != d.epoch:
            yield from super().commit(s, n, d)
            return
        part = next(part for part, log in enumerate(s.parts) if log.open)
        log = s.parts[part]
        visible, progress = self.shown(part, log, log.open, s.visible, s.progress)
        parts = swap(s.parts, part, Log(log.epoch, log.sequence, ()))
        after = s._replace(parts=parts, visible=visible, progress=progress)
        if part == self.progress:
            _, c = self.end_txn(s.coordinator, d.epoch, True)
            after = self.adopted(after, n, d, Coordinator(COMPLETE_COMMIT, c.epoch, c.last, 0, False))
        yield f"driver {d.name}: {self.names[part]} is committed by itself", after


class BeginsWithoutLooking(Model):
    looks_for_markers = False


class SettlesWithoutAsking(Model):
    def applies(self, d: Driver, store: Store) -> bool:
        return store.pending is not None


class SettlesByOffset(Model):
    def applies(self, d: Driver, store: Store) -> bool:
        return store.pending is not None and store.at != d.at and store.pending[1:3] == (store.at, d.at)


class ArrivedCountsAsTaken(Model):
    def requests(self, d: Driver) -> list[Message]:
        """Of two records that have arrived, the batch takes one; progress moves behind both."""
        return super().requests(d._replace(end=d.at + 1))


class RowsAreThereOnce(Model):
    def requests(self, d: Driver) -> list[Message]:
        return [] if d.attempt > 1 else super().requests(d)


class TakesWhatFollows(Model):
    def rerun(self, s: State, n: int, epoch: int) -> State:
        """The reader is behind the batch that has failed, and nobody has given the records back."""
        d = s.drivers[n]
        if d.end < self.config.batches:
            s = self.moved(s, n, d, at=d.end, end=d.end + 1)
        return super().rerun(s, n, epoch)


class SentAheadIsNotCompared(Model):
    def sent_ahead(self, d: Driver) -> Message:
        """Progress of what has arrived. What the batch has taken in the end is not compared with it."""
        return super().sent_ahead(d._replace(end=min(d.end + 1, self.config.batches)))


class Variant(NamedTuple):
    """One mistake.

    Args:
        what: what is done instead.
        breaks: the invariant that it breaks; the search looks at this one only.
        sizes: of the smallest search that finds it.
    """

    model: type[Model]
    what: str
    breaks: str
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        """As the command line and docs/model.md call it."""
        return "".join("_" * (n > 0 and c.isupper()) + c.lower() for n, c in enumerate(self.model.__name__))

    def search(self, model: type[Model] | None = None) -> Result:
        """Every order of all steps, so that the trace is the shortest there is.

        Args:
            model: another one at the same sizes: the protocol itself, for comparison.
        """
        config = Config(**{"version": 2, "batches": 1, **self.sizes})
        return search((model or self.model)(config), only=self.breaks, reduce=False)


VARIANTS = (
    Variant(CommitsBeforeAcks, "the commit does not wait for every acknowledgement", "I1", {}),
    Variant(TwoWriters, "two tasks write to one partition", "I4", {"batches": 2, "outputs": 1}),
    Variant(SecondAttemptWrites, "the second attempt of a task writes, in the same epoch", "I3", {"deaths": 1}),
    Variant(NoNewEpochAfterAbort, "after an abort the batch runs again in the same epoch", "I3",
            {"version": 1, "deaths": 1}),
    Variant(GoesOnUnchecked, "a driver that Kafka has forgotten continues without checking progress", "I2",
            {"batches": 2, "rivals": 1, "expiries": 1}),
    Variant(LooksAtTheEpochOnly, "version 1: a driver takes the epoch after its own for a timeout, whatever the state",
            "I6", {"version": 1, "rivals": 1}),
    Variant(AbortsByEndTxn, "version 1: drivers abort by EndTxn, which keeps the epoch", "I6",
            {"version": 1, "rivals": 1, "deaths": 2}),
    Variant(ProgressAfterCommit, "progress is written after the transaction, not in it", "I1", {}),
    Variant(TasksCommit, "each task commits what it has written", "I1", {"crashes": 1}),
    Variant(LostAnswerIsAnAbort, "an EndTxn without a response counts as aborted, and the batch runs again", "I2",
            {"lost": 1}),
    Variant(InitInsteadOfRepeating, "InitProducerId, and only then EndTxn once more", "I2", {"lost": 1}),
    Variant(ReadsBeforeFencing, "a start reads progress, then fences", "I6", {"rivals": 1}),
    Variant(TakesOverWithoutFencing, "a standby takes a silent driver for dead, and goes on in its epoch", "I6",
            {"rivals": 1}),
    Variant(DoesNotWaitForDecision, "a start reads progress before the old transaction is decided", "I2",
            {"batches": 2, "crashes": 1}),
    Variant(EnrolsWithoutBump, "Produce v12, which enrols by itself, with EndTxn v4, which keeps the epoch", "I5",
            {"version": 1, "copies": 1}),
    Variant(TriesForEver, "a driver runs a batch again as often as it fails", "I5", {"rivals": 1}),
    Variant(BeginsWithoutLooking, "a transaction begins although a marker of the last one is missing", "I5",
            {"deaths": 1, "leaders": 1}),
    Variant(SettlesWithoutAsking, "pending local changes are applied without asking Kafka", "I7",
            {"local": 1, "crashes": 1}),
    Variant(SettlesByOffset, "pending changes are applied if their offsets fit, whatever attempt they are of", "I7",
            {"local": 1, "timeouts": 1}),
    Variant(ArrivedCountsAsTaken, "direct engine: progress moves behind what has arrived, not behind what was taken",
            "I1", {"batches": 2}),
    Variant(RowsAreThereOnce, "direct engine: an attempt uses up its records, and the next one finds none", "I1",
            {"deaths": 1}),
    Variant(TakesWhatFollows, "direct engine: the next attempt takes the records behind those of the failed one", "I2",
            {"batches": 2, "deaths": 1}),
    Variant(SentAheadIsNotCompared, "progress that was sent ahead is not compared with what the batch has taken", "I1",
            {"batches": 2}),
)  # fmt: skip

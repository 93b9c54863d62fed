"""The model's states, and what brokers do: the transaction coordinator, partition leaders, requests on their way.

As Kafka 4.3 does it: coordinator/transaction/TransactionCoordinator.scala, TransactionMetadata.java and
ProducerAppendInfo.java.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from onceflow.protocol.transaction import START, TransactionState

Next = Iterable[tuple[str, "State"]]

# States of the coordinator.
EMPTY, ONGOING = "Empty", "Ongoing"
PREPARE_COMMIT, PREPARE_ABORT = "PrepareCommit", "PrepareAbort"
COMPLETE_COMMIT, COMPLETE_ABORT = "CompleteCommit", "CompleteAbort"
DEAD = "Dead"  # forgotten: it was idle for longer than transactional.id.expiration.ms
PREPARING = (PREPARE_COMMIT, PREPARE_ABORT)
IDLE = (EMPTY, COMPLETE_COMMIT, COMPLETE_ABORT)
_COMPLETE = {PREPARE_COMMIT: COMPLETE_COMMIT, PREPARE_ABORT: COMPLETE_ABORT}
# What a driver has done last.
STARTED, FENCED, TO_SETTLE, READY, PLANNED = "started", "fenced the others", "to settle", "ready", "planned"
BEGUN, WRITING, AUDITED, IN_PROGRESS = "begun", "tasks are writing", "audited", "progress is sent"
ENDING, FAILED, RENEWING = "waits for EndTxn's answer", "attempt failed", "aborted, needs an epoch"
LOOKING, CONTINUING = "refused, looks why", "was aborted, needs an epoch"  # version 1
OUTSIDE = "committed, progress is not written"  # of a variant only
# Where a Produce request is: its partition is still to be added (version 1), under way, or a late copy.
TO_ADD, SENT, COPY = 0, 1, 2
NONE = -9  # no epoch, nor near one
_NEW_ID = 9  # epochs of a new producer id are near none of the old one's
FAULTS = ("crashes", "timeouts", "lost", "deaths", "copies", "rivals", "leaders", "expiries")


class Config(NamedTuple):
    """What is searched.

    Args:
        version: of transactions, 1 or 2 (KIP-890).
        batches: at most so many: the source has as many records, and a batch takes one or two of them.
        outputs: output partitions; record n belongs to partition n mod outputs, a task writes one partition.
        crashes: of a driver, anywhere. timeouts: the coordinator aborts an open transaction. lost: answers of the
            coordinator. deaths: a task dies after it has produced. copies: a Produce request arrives twice.
            rivals: another driver of the flow is started by mistake. leaders: a partition has none when a transaction
            ends, so its marker is left out. expiries: the coordinator forgets the idle transactional id.
        faults: at most so many of all these together.
        attempts: a driver gives a batch up after so many (``SinkOptions.max_attempts``).
        local: 1 if tasks keep a local copy of their state.
    """

    version: int = 2
    batches: int = 2
    outputs: int = 2
    crashes: int = 0
    timeouts: int = 0
    lost: int = 0
    deaths: int = 0
    copies: int = 0
    rivals: int = 0
    leaders: int = 0
    expiries: int = 0
    faults: int = 9
    attempts: int = 3
    local: int = 0


class Coordinator(NamedTuple):
    """Of the flow's transactional id.

    Args:
        last: the epoch before, if its owner may still name it (KIP-360).
        enrolled: a bit per partition.
        late: whether an older driver has decided this transaction though a newer one had read progress (I6).
    """

    state: str
    epoch: int
    last: int
    enrolled: int
    late: bool


class Record(NamedTuple):
    """In an open transaction: source records [start, end), written by ``writer`` of attempt ``tag``."""

    seq: int
    tag: int
    writer: int
    start: int
    end: int


class Log(NamedTuple):
    """A partition: the producer's epoch and next sequence as its leader knows them, and what is not decided yet, which
    holds readers back. Aborted records are left out (nobody looks at them again), committed ones are
    ``State.visible``.

    Args:
        unmarked: records of a transaction that is over and whose marker was left out. kept: whether it was committed:
            the leader does not know.
    """

    epoch: int
    sequence: int
    open: tuple[Record, ...]
    unmarked: tuple[Record, ...] = ()
    kept: bool = False


class Message(NamedTuple):
    """A Produce request on its way; it may arrive at any time, in any order, also when its sender is gone."""

    part: int
    epoch: int
    seq: int
    tag: int
    start: int
    end: int
    stage: int
    writer: int


class Driver(NamedTuple):
    """A driver and its tasks.

    Args:
        transaction_state: where its transactional id stands, by the table of ``onceflow.protocol.transaction``.
        at, end: its range; ``at`` is progress as it knows it.
        tag: the attempt it runs. waiting: requests of it that are not acknowledged.
        bad: a task has failed, or is a second attempt.
        last: epoch of the last commit it knows of.
        here: whether its tasks run where the local copy is.
    """

    name: int
    phase: str
    epoch: int = NONE
    transaction_state: TransactionState = START
    at: int = 0
    end: int = 0
    tag: int = 0
    waiting: int = 0
    bad: bool = False
    attempt: int = 0
    last: int = NONE
    here: bool = False


class Progress(NamedTuple):
    """The committed progress record; epoch and attempt only when there is local state."""

    at: int
    epoch: int = NONE
    tag: int = 0


class Store(NamedTuple):
    """Local state: up to which record it serves; what is pending: (epoch, from, to, attempt)."""

    at: int
    pending: tuple[int, int, int, int] | None = None
    wrong: bool = False


class State(NamedTuple):
    coordinator: Coordinator
    parts: tuple[Log, ...]  # outputs, then progress
    net: tuple[Message, ...]
    drivers: tuple[Driver, ...]  # in the order in which they have fenced: the last owns the transactional id
    visible: tuple[int, ...]  # what read_committed readers see of the outputs
    progress: Progress
    store: Store
    left: tuple[int, ...]  # faults: in all, then by kind
    started: int  # drivers so far


def spans(records: Iterable[Message | Record]) -> str:
    """Source records, for people."""
    return ", ".join(str(r.start) if r.end == r.start + 1 else f"{r.start} to {r.end - 1}" for r in records)


def swap(items: tuple, at: int, item: object) -> tuple:
    return (*items[:at], item, *items[at + 1 :])


class Kafka:
    """What the coordinator and the partition leaders do."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.v2 = config.version >= 2  # EndTxn v5: every end moves the epoch
        self.implicit = self.v2  # Produce v12: the partition's leader enrols it
        self.progress = config.outputs  # the partition of the progress record
        self.names = [f"out-{n}" for n in range(config.outputs)] + ["progress"]

    # ---- coordinator -----------------------------------------------------------------------------------

    def fence(self, c: Coordinator) -> Coordinator:
        """An ongoing transaction is aborted under a new epoch (prepareFenceProducerEpoch)."""
        return Coordinator(PREPARE_ABORT, c.epoch + 1, c.epoch if self.v2 else NONE, c.enrolled, False)

    def init_producer_id(self, c: Coordinator, epoch: int) -> tuple[str, Coordinator]:
        """InitProducerId, of a new owner (NONE) or of one that names its epoch. The answer, and the coordinator."""
        if c.state in PREPARING:
            return "wait", c
        if c.state == DEAD:  # a new producer id, whoever asks: its epochs are compared with no older one
            return "ok", Coordinator(EMPTY, c.epoch + _NEW_ID, NONE, 0, False)
        if c.state == ONGOING:  # whatever epoch is named: Kafka compares it only when it increments
            return "wait", self.fence(c)
        if epoch in (NONE, c.epoch):
            return "ok", Coordinator(EMPTY, c.epoch + 1, epoch, 0, False)
        if epoch == c.last:  # the same request once more: its first answer was lost
            return "ok", c._replace(state=EMPTY)
        return "fenced", c

    def end_txn(self, c: Coordinator, epoch: int, commit: bool) -> tuple[str, Coordinator]:
        """EndTxn v4 or v5: ``ok``, ``wait`` (51), ``over`` (48), ``fenced`` (90) or ``forgotten`` (49)."""
        if c.state == DEAD:
            return "forgotten", c
        again = self.v2 and c.epoch == epoch + 1  # the same request once more: its first answer was lost
        same = c.epoch == epoch
        if (
            not (same or again)
            or (again and c.state in (EMPTY, ONGOING))
            or (self.v2 and same and c.state in PREPARING)
        ):
            return "fenced", c
        wanted = PREPARE_COMMIT if commit else PREPARE_ABORT
        if c.state in PREPARING:
            return ("wait" if c.state == wanted else "over"), c
        if c.state == ONGOING:
            return "ok", Coordinator(wanted, c.epoch + self.v2, c.epoch if self.v2 else c.last, c.enrolled, False)
        if c.state == _COMPLETE[wanted] and (again or not self.v2):
            return "ok", c
        if self.v2 and not commit and not again:  # nothing was written: an abort still moves the epoch
            return "ok", Coordinator(COMPLETE_ABORT, c.epoch + 1, c.epoch, 0, False)
        return "over", c

    def markers(self, s: State) -> Next:
        """All partitions learn the decision. One step, though they learn it one by one: until the last one has,
        the coordinator answers "wait" to whoever wants to begin something, so no other order shows more. A partition
        without a leader is left out (TransactionMarkerChannelManager.addTxnMarkersToBrokerQueue)."""
        c = s.coordinator
        if c.state not in PREPARING:
            return
        what = ("commit" if c.state == PREPARE_COMMIT else "abort") + f" markers of epoch {c.epoch} are written"
        yield what, self.marked(s, -1)
        if left := self.spent(s, "leaders"):
            for n, log in enumerate(s.parts):
                if c.enrolled >> n & 1 and log.open and not log.unmarked:
                    yield f"{what}, but not to {self.names[n]}", self.marked(s._replace(left=left), n)

    def marked(self, s: State, without: int) -> State:
        c = s.coordinator
        committed = c.state == PREPARE_COMMIT
        parts, visible, progress = list(s.parts), s.visible, s.progress
        for n, log in enumerate(s.parts):
            if n == without:
                parts[n] = log._replace(open=(), unmarked=log.open, kept=committed)
                continue
            if committed and log.open:
                visible, progress = self.shown(n, log, (*log.unmarked, *log.open), visible, progress)
            if c.enrolled >> n & 1:
                parts[n] = Log(c.epoch, log.sequence if log.epoch == c.epoch else 0, ())
        after = s._replace(
            coordinator=Coordinator(_COMPLETE[c.state], c.epoch, c.last, 0, False),
            parts=tuple(parts),
            visible=visible,
            progress=progress,
        )
        return self.swept(after)

    def shown(
        self, n: int, log: Log, records: tuple[Record, ...], visible: tuple[int, ...], progress: Progress
    ) -> tuple[tuple[int, ...], Progress]:
        """What readers see once these records of a partition are committed."""
        if n != self.progress:
            return tuple(sorted((*visible, *(record.start for record in records)))), progress
        last = records[-1]
        return visible, Progress(last.end, log.epoch, last.tag) if self.config.local else Progress(last.end)

    def decided_so_far(self, s: State) -> tuple[tuple[int, ...], Progress]:
        """What readers would see if no marker had been left out."""
        visible, progress = s.visible, s.progress
        for n, log in enumerate(s.parts):
            if log.unmarked and log.kept:
                visible, progress = self.shown(n, log, log.unmarked, visible, progress)
        return visible, progress

    # ---- partition leaders -----------------------------------------------------------------------------

    def append(self, s: State) -> Next:
        """A Produce request arrives. With version 2 its partition is enrolled on the way, with version 1 before."""
        c = s.coordinator
        for n, m in enumerate(s.net):
            log = s.parts[m.part]
            # In the transaction already, as far as the leader knows: not verified again.
            known = bool(log.open or log.unmarked) and log.epoch == m.epoch
            if c.state in PREPARING and (m.stage == TO_ADD or not known):
                continue  # 51: the same bytes are sent again
            if c.state == DEAD:  # 49
                gone = s._replace(net=s.net[:n] + s.net[n + 1 :])
                what = f"refused, the transactional id is forgotten: {self.names[m.part]}, attempt {m.tag}"
                yield what, self.failed(gone, {m.tag} if m.stage != COPY else set())
                continue
            expected = log.sequence if log.epoch == m.epoch else 0
            if m.seq > expected:
                continue  # not sent yet: the first of a partition travels alone (client/produce.py); or 45, sent again
            what = f"{self.names[m.part]}: attempt {m.tag}, epoch {m.epoch}, sequence {m.seq}"
            if m.stage == TO_ADD:
                enrolled = c._replace(state=ONGOING, enrolled=c.enrolled | 1 << m.part)
                net = tuple(sorted((*s.net[:n], m._replace(stage=SENT), *s.net[n + 1 :])))
                yield f"AddPartitionsToTxn for {what}", s._replace(coordinator=enrolled, net=net)
                continue
            if not known and self.implicit:
                c2 = c._replace(state=ONGOING, enrolled=c.enrolled | 1 << m.part)
            elif known or (c.state == ONGOING and c.enrolled >> m.part & 1):
                c2 = c
            else:
                gone = s._replace(net=s.net[:n] + s.net[n + 1 :])
                yield f"refused: {what}", self.failed(gone, {m.tag} if m.stage != COPY else set())
                continue
            after = s._replace(coordinator=c2, net=s.net[:n] + s.net[n + 1 :])
            if m.seq == expected:
                record = Record(m.seq, m.tag, m.writer, m.start, m.end)
                if known and log.unmarked:
                    entered = log._replace(sequence=m.seq + 1, unmarked=(*log.unmarked, record))
                else:
                    same = (*log.open, record) if log.epoch == m.epoch else (record,)
                    entered = Log(m.epoch, m.seq + 1, same, log.unmarked, log.kept)
                after = after._replace(parts=swap(s.parts, m.part, entered))
                what = "appended to " + what
            else:
                what = "seen before, acknowledged, not appended to " + what
            yield what, (after if m.stage == COPY else self.acknowledged(after, m.tag))
            if m.stage == SENT and self.spent(s, "copies") and m.seq == expected:
                left = self.spent(s, "copies")
                twice = tuple(sorted((*after.net, m._replace(stage=COPY))))
                yield what + ", and a copy is late", self.acknowledged(after._replace(net=twice, left=left), m.tag)

    def acknowledged(self, s: State, tag: int) -> State:
        for n, d in enumerate(s.drivers):
            if d.tag == tag:
                d = d._replace(waiting=d.waiting - 1)
                s = s._replace(drivers=swap(s.drivers, n, d))
                # As set_pending of state/local/opening.py does.
                if self.config.local and d.here and d.phase == WRITING and not d.waiting:
                    s = s._replace(store=s.store._replace(pending=(d.epoch, d.at, d.end, d.tag)))
        return s

    def failed(self, s: State, tags: set[int]) -> State:
        """Tasks get an answer that repeating does not change; they report it (row_writer.write_rows)."""
        if not any(d.tag in tags for d in s.drivers):
            return s
        return s._replace(drivers=tuple(d._replace(bad=True) if d.tag in tags else d for d in s.drivers))

    def swept(self, s: State) -> State:
        """Without the requests that will always be refused: their epoch is over and no leader has it open. When they
        arrive makes no difference to anybody but their sender, which is told at once (it may look at it later)."""
        c = s.coordinator
        kept, tags = [], set()
        for m in s.net:
            log = s.parts[m.part]
            if m.epoch == c.epoch or ((log.open or log.unmarked) and log.epoch == m.epoch and m.stage != TO_ADD):
                kept.append(m)
            elif m.stage != COPY:
                tags.add(m.tag)
        return s if len(kept) == len(s.net) else self.failed(s._replace(net=tuple(kept)), tags)

    def decided(self, s: State, c: Coordinator) -> State:
        """After an answer of the coordinator."""
        return s if c is s.coordinator else self.swept(s._replace(coordinator=c))

    def timeout(self, s: State) -> Next:
        if (left := self.spent(s, "timeouts")) and s.coordinator.state == ONGOING:
            after = s._replace(coordinator=self.fence(s.coordinator), left=left)
            yield f"of the transaction of epoch {s.coordinator.epoch}", self.swept(after)

    def forgets(self, s: State) -> Next:
        """removeExpiredTransactionalIds. Not while a marker is missing: that is told (Markers._without_forgotten)."""
        c = s.coordinator
        if (left := self.spent(s, "expiries")) and c.state in IDLE and not any(log.unmarked for log in s.parts):
            yield "the transactional id", s._replace(coordinator=Coordinator(DEAD, c.epoch, NONE, 0, False), left=left)

    def spent(self, s: State, fault: str) -> tuple[int, ...]:
        """What is left after one more fault of a kind; empty when none is."""
        n = FAULTS.index(fault) + 1
        if not s.left[n]:
            return ()
        if s.left[0] == 1:
            return (0,) * len(s.left)
        return tuple(min(count - (kind == n), s.left[0] - 1) for kind, count in enumerate(s.left))

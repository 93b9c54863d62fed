"""Joins under kills: every output has the row that was valid at the offset that its batch has recorded."""

from __future__ import annotations

import functools
import itertools
import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from pyspark.errors import StreamingQueryException

from onceflow import hooks
from onceflow.client.deadline import Deadline
from onceflow.driver.step.joins import Joins
from onceflow.planning import placement
from onceflow.protocol.position import Position
from onceflow.state.joins import copies
from onceflow.testing import faults, independent

pytestmark = [pytest.mark.integration, pytest.mark.faults]

CURRENCIES = 30


class Updates:
    """Writes rates all the time, from its creation to ``stop``: now and then a tombstone, or an aborted transaction."""

    def __init__(self, bootstrap: str, topic: str, currencies: int, pause_s: float = 0.005) -> None:
        self._currencies = currencies
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": f"rates-{topic}", "partitioner": "murmur2_random"}
        )
        self._producer.init_transactions(30)
        self._topic, self._pause_s = topic, pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        chance = random.Random(7)
        for n in itertools.count():
            self._producer.begin_transaction()
            for _ in range(chance.randint(1, 4)):
                value = None if chance.random() < 0.1 else str(n).encode()
                self._producer.produce(self._topic, value, f"cur-{chance.randrange(self._currencies)}")
            if chance.random() < 0.2:
                # Before the broker knows the partitions, an abort can be refused (INVALID_TXN_STATE).
                self._producer.flush(30)
                self._producer.abort_transaction(30)
            else:
                self._producer.commit_transaction(30)
            if self._over.wait(self._pause_s):
                return

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)


class JoinPipe:
    """A flow that joins orders with rates; made of the same parts as the flows of the other tests of state."""

    def __init__(self, pipe: Any, rates: str, currencies: int) -> None:
        self.pipe, self.rates, self.currencies = pipe, rates, currencies
        self.options = {"processor": "Priced", "process": {"tables": {"rates": rates}}}
        self.sent = 0

    def order(self, count: int) -> None:
        numbers = range(self.sent, self.sent + count)
        self.sent += count
        rows = [
            (b"key-%d" % (n % 17), json.dumps({"n": n, "currency": f"cur-{n * 7919 % self.currencies}"}).encode())
            for n in numbers
        ]
        independent.fill(self.pipe.bootstrap, self.pipe.source, rows)

    def run(self, **options: Any) -> Any:
        process = {"processor": self.pipe.ledger.Priced(), "tables": {"rates": self.rates}}
        return self.pipe.run(process=process, **options)

    def driver(self, rule: str | None = None, **options: Any) -> Any:
        return self.pipe.driver(rule, **self.options, **options)

    def check(self) -> None:
        """By an independent consumer: all orders once, each with the rate at its offset; each batch at one position."""
        seen = independent.read_topic(self.pipe.bootstrap, self.pipe.target, decided=True)
        outputs = [json.loads(record.value or b"") for record in seen]
        assert Counter(output["n"] for output in outputs) == Counter(range(self.sent))
        recorded = {str(Position(progress.joined)) for progress in self.pipe.committed_progress()}
        assert {output["at"] for output in outputs} <= recorded, "a position that no progress record has"
        by_position: dict[str, list[Any]] = {}
        for output in outputs:
            by_position.setdefault(output["at"], []).append(output)
        assert len(by_position) > 1
        ahead = independent.read_topic(self.pipe.bootstrap, self.rates, decided=True)
        rates: dict[str, Any] = {}
        for ends, at in sorted((self.ends(at), at) for at in by_position):
            waiting = []
            for record in ahead:
                if record.offset < ends[record.partition]:
                    rates[(record.key or b"").decode()] = None if record.value is None else json.loads(record.value)
                else:
                    waiting.append(record)
            ahead = waiting
            for output in by_position[at]:
                assert output["rate"] == rates.get(output["currency"]), output

    def ends(self, at: str) -> list[int]:
        """The offsets of a position, by partition."""
        return [end for _, end in sorted(Position.parse(at).offsets[self.rates].items())]


@pytest.fixture
def make_join_pipe(
    make_state_pipe: Any, make_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., JoinPipe]]:
    monkeypatch.setattr(placement, "TASK_ROWS", 400)
    updates: list[Updates] = []

    def make(currencies: int = CURRENCIES) -> JoinPipe:
        pipe = make_state_pipe()
        rates = make_topic("rates", 3, cleanup_policy="compact")
        if currencies > CURRENCIES:
            independent.fill(pipe.bootstrap, rates, ((b"cur-%d" % n, b"-1") for n in range(currencies)))
        updates.append(Updates(pipe.bootstrap, rates, currencies))
        return JoinPipe(pipe, rates, currencies)

    yield make
    for each in updates:
        each.stop()


def kill_at(pipe: JoinPipe, step: str, **options: Any) -> None:
    history = pipe.pipe.committed_progress()
    batch = (history[-1].batch_id if history else 0) + 2
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": batch}))
    process = pipe.driver(rule, records_per_batch=500, **options)
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
    finally:
        pipe.pipe.end_driver(process)


@pytest.mark.long
def test_driver_killed(make_join_pipe: Any) -> None:
    pipe = make_join_pipe()
    pipe.order(1500)
    kill_at(pipe, "progress", write={"engine": "tasks"})
    pipe.order(500)
    pipe.run(engine="tasks")
    pipe.check()


def test_exception(make_join_pipe: Any, inject: Any) -> None:
    """What a failed attempt has read into the copies does not show in the next one."""
    pipe = make_join_pipe()
    for step, options in (("write", {}), ("audit", {"engine": "tasks"}), ("end", {"engine": "tasks"})):
        history = pipe.pipe.committed_progress()
        done = history[-1].batch_id if history else 0
        pipe.order(1000)
        inject(step, "raise", batch=done + 2)
        with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
            pipe.run(read={"max_records_per_batch": 500}, **options)
    pipe.run()
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("action", ["raise", "kill"])
def test_task_dies(make_join_pipe: Any, inject: Any, action: str) -> None:
    """All attempts of a batch see the tables at the same offsets."""
    pipe = make_join_pipe()
    pipe.order(1500)
    once = pipe.pipe.tmp_path / "fired"
    inject("write", action, where="task", batch=2, task=0, once_file=str(once))
    query = pipe.run(read={"max_records_per_batch": 500}, engine="tasks")
    assert once.exists()
    assert {batch.batch: batch.attempts for batch in query.batches}[2] == 2
    pipe.check()


def recorded_later(patch: pytest.MonkeyPatch) -> None:
    """The offsets are taken again when they are recorded."""
    progress = Joins.progress

    def wrong(self: Any, of_batch: Any) -> Any:
        self.pin(functools.partial(Deadline, 30))
        return progress(self, of_batch)

    patch.setattr(Joins, "progress", wrong)


def read_to_the_end(patch: pytest.MonkeyPatch) -> None:
    """Copies are brought to the end of the topic, not to the offset of the batch."""

    def wrong(spec: Any, partition: int, end: int, source: Any, **more: Any) -> Any:
        return open_copy(spec, partition, source.end(spec.topic, partition), source, **more)

    open_copy = copies.open_copy
    patch.setattr(copies, "open_copy", wrong)


def pinned_once(patch: pytest.MonkeyPatch) -> None:
    """Only the first batch takes offsets, but every batch names those of its time."""
    pin, handle = Joins.pin, copies.JoinedCopies.handle

    def wrong(self: Any, deadline: Any) -> None:
        if not self.ends:
            pin(self, deadline)

    def named(self: Any, name: str, now_ms: int, own: int | None) -> Any:
        found = handle(self, name, now_ms, own)
        topic = self.specs[name].topic
        now = {partition: self._source.end(topic, partition) for partition in self.ends[topic]}
        found.position = str(Position({topic: now}))
        return found

    patch.setattr(Joins, "pin", wrong)
    patch.setattr(copies.JoinedCopies, "handle", named)


@pytest.mark.long
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(recorded_later, marks=pytest.mark.long),
        read_to_the_end,
        pytest.param(pinned_once, marks=pytest.mark.long),
    ],
)
def test_mutants_are_caught(make_join_pipe: Any, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    """The check finds builds that leave out what makes a join exact. The driver runs the batches here."""
    pipe = make_join_pipe()
    pipe.order(900)
    mutant(monkeypatch)

    def run_and_check() -> None:
        for _ in range(3):
            pipe.run(read={"max_records_per_batch": 100})
            pipe.check()
            pipe.order(300)

    with pytest.raises(AssertionError):
        run_and_check()


@pytest.mark.long
@pytest.mark.parametrize("step", hooks.STEPS)
def test_driver_killed_at_every_step(make_join_pipe: Any, step: str) -> None:
    pipe = make_join_pipe()
    for turn in range(2):
        pipe.order(1500)
        kill_at(pipe, step, write={"engine": "tasks" if turn else "driver"})
    pipe.order(500)
    pipe.run()
    pipe.check()


@pytest.mark.long
def test_a_million_rows(make_join_pipe: Any) -> None:
    """Updated some five hundred times a second, while drivers are killed."""
    pipe = make_join_pipe(1_000_000)
    for turn, step in enumerate(("write", "end", "progress")):
        pipe.order(20_000)
        kill_at(pipe, step, write={"engine": "tasks" if turn else "driver"})
    pipe.order(20_000)
    pipe.run(engine="tasks")
    pipe.check()


@pytest.mark.long
def test_workers_killed(make_join_pipe: Any, inject_at_every_step: Any) -> None:
    pipe = make_join_pipe()
    pipe.order(3000)
    inject_at_every_step("kill-workers")
    query = pipe.run(read={"max_records_per_batch": 300}, engine="tasks")
    assert len(query.batches) > len(hooks.STEPS)
    pipe.check()


@pytest.mark.long
def test_copies_lost(make_join_pipe: Any) -> None:
    """The copies are deleted between runs: they are read again, up to the offset of the next batch."""
    import shutil

    pipe = make_join_pipe()
    for _ in range(3):
        pipe.order(600)
        pipe.run(read={"max_records_per_batch": 300})
        folder = Path(pipe.pipe.state_dir) / pipe.pipe.flow / pipe.rates
        assert folder.is_dir()
        shutil.rmtree(folder)
    pipe.check()

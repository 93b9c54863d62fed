"""Timers fire exactly once across crashes, and event time is the same for a batch that runs again."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow.protocol.partitioners import key_partitions
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

BATCH = 2
RECORDS = 1200
# Late enough that every timer of the records is due, too early for the timers of these last records themselves.
LAST = RECORDS * 100 + 10_000


def fired(pipe: Any) -> Counter[str]:
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    return Counter(json.loads(record.value or b"")["timer"] for record in seen)


def start(pipe: Any, late: str, **options: Any) -> Any:
    return pipe.start(
        process={"processor": pipe.ledger.Alarms(), "late_topic": late},
        read={"max_records_per_batch": 300},
        **options,
    )


def ended(query: Any) -> Callable[[], object]:
    """Why nothing more comes of a query, if it has ended."""
    return lambda: None if query.isActive else query.failure or "the query has been stopped"


def wait_for_all(pipe: Any, query: Any, expected: dict[str, int], seconds: float = 60.0) -> None:
    """Timers fire in batches after the last records: a clock wakes the flow up."""
    wait_until(
        lambda: sum(fired(pipe).values()) >= len(expected),
        seconds,
        lambda: f"{len(expected)} timers fire, not only {sum(fired(pipe).values())}",
        useless=ended(query),
        poll_s=0.1,
    )


def fill(pipe: Any) -> dict[str, int]:
    """Records, and then in every partition one that brings event time past their timers."""
    sent = pipe.ledger.alarm_inputs(0, RECORDS)
    independent.fill(pipe.bootstrap, pipe.source, sent)
    independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.alarm_inputs(RECORDS * 10 + 1, 40, at=LAST))
    pipe.sent = sent
    # The last records cancel a third of what is left: one for each key, if its number is a multiple of three.
    timers = pipe.ledger.expected_alarms(sent + pipe.ledger.alarm_inputs(RECORDS * 10 + 1, 40, at=LAST), LAST - 1000)
    assert len(timers) > RECORDS // 2
    return timers


def check(pipe: Any, late: str, expected: dict[str, int]) -> None:
    counted = fired(pipe)
    assert set(counted) == set(expected)
    assert set(counted.values()) == {1}
    assert independent.read_topic(pipe.bootstrap, late, decided=True) == []


def rss_kib(pid: int) -> int:
    """The most memory a process has had so far."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


@pytest.fixture
def late_topic(onceflow_broker: str, make_topic: Any) -> str:
    return str(make_topic("late", 1))


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True])
def test_timers_fire_once(make_state_pipe: Any, late_topic: str, inside: bool) -> None:
    pipe = make_state_pipe()
    expected = fill(pipe)
    query = start(pipe, late_topic, inside=inside)
    try:
        wait_for_all(pipe, query, expected)
        idle = len(query.batches)
        query.awaitTermination(3)  # the clock goes on; batches without effect are not committed
        assert len(query.batches) == idle
    finally:
        query.stop()
    check(pipe, late_topic, expected)


@pytest.mark.long
@pytest.mark.parametrize("step", ["begin", "write", "end", "settle"])
def test_driver_killed_among_timers(make_state_pipe: Any, late_topic: str, step: str) -> None:
    """Batch 5 has fired timers already, others are waiting."""
    pipe = make_state_pipe()
    expected = fill(pipe)
    process = pipe.driver(
        faults.fault(step, "kill", batch=5),
        processor="Alarms",
        process={"late_topic": late_topic},
        records_per_batch=300,
        forever=True,
    )
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        query = start(pipe, late_topic)
        try:
            wait_for_all(pipe, query, expected)
        finally:
            query.stop()
    finally:
        pipe.end_driver(process)
    check(pipe, late_topic, expected)


def test_task_dies_among_timers(
    make_state_pipe: Any, late_topic: str, inject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceflow.planning import placement

    monkeypatch.setattr(placement, "TASK_ROWS", 100)
    pipe = make_state_pipe()
    expected = fill(pipe)
    once = pipe.tmp_path / "fired"
    inject("write", "kill", where="task", batch_from=5, task=0, once_file=str(once))
    query = start(pipe, late_topic, engine="tasks")
    try:
        wait_for_all(pipe, query, expected)
    finally:
        query.stop()
    assert once.exists()
    check(pipe, late_topic, expected)


def test_late_records_go_to_their_topic(make_state_pipe: Any, late_topic: str) -> None:
    pipe = make_state_pipe()
    independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.alarm_inputs(0, 400))
    pipe.run(process={"processor": pipe.ledger.Alarms(), "late_topic": late_topic})
    late = pipe.ledger.alarm_inputs(1000, 10, at=10)
    independent.fill(pipe.bootstrap, pipe.source, late)
    pipe.run(process={"processor": pipe.ledger.Alarms(), "late_topic": late_topic})
    seen = independent.read_topic(pipe.bootstrap, late_topic, decided=True)
    assert Counter((record.key, record.value) for record in seen) == Counter(late)
    assert dict(seen[0].headers)["onceflow.error.class"] == b"LateRecord"


def test_processing_time_and_ttl(make_state_pipe: Any, make_topic: Any) -> None:
    """A timer of the wall clock fires without data; rows that have outlived their ttl become tombstones."""
    import onceflow

    class Reminder(onceflow.Processor):
        ttl = "2 seconds"

        def process(self, key: bytes, records: Any, state: Any) -> Any:
            state.put(records[-1].value)
            state.timers.register("reminder", state.now_ms + 1000, clock="processing")
            return ()

        def on_timer(self, key: bytes, timer: Any, state: Any) -> Any:
            yield onceflow.Record(key, b"reminded")

    pipe = make_state_pipe()
    keys = [f"key-{n}".encode() for n in range(20)]

    def all_there() -> tuple[list[independent.Seen], list[independent.Seen]] | None:
        seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
        rows = independent.read_topic(pipe.bootstrap, pipe.table, decided=True)
        tombstones = {row.key for row in rows if row.value is None}
        return (seen, rows) if len(seen) >= len(keys) and tombstones == set(keys) else None

    independent.fill(pipe.bootstrap, pipe.source, [(key, b"x") for key in keys])
    query = pipe.start(process={"processor": Reminder()})
    try:
        seen, rows = wait_until(all_there, 60, "all timers fire and go", useless=ended(query), poll_s=0.1)
    finally:
        query.stop()
    assert Counter(record.key for record in seen) == Counter(keys)
    assert dict.fromkeys(keys, b"x") == {row.key: row.value for row in rows if row.value is not None}


@pytest.mark.long
def test_timers_of_a_partition_whose_records_are_filtered_out(
    make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks open those with due timers, whether or not any row is left."""
    import onceflow
    from onceflow.planning import placement

    class Reminder(onceflow.Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            if records[0].value == b"remind":
                state.timers.register("reminder", state.now_ms + 1, clock="processing")
            return ()

        def on_timer(self, key: bytes, timer: Any, state: Any) -> Any:
            yield onceflow.Record(key, b"reminded")

    monkeypatch.setattr(placement, "TASK_ROWS", 20)
    pipe = make_state_pipe()
    keys = [f"key-{n}".encode() for n in range(40)]
    for content in (b"remind", b"other"):
        empty = (0, 3) if content == b"other" else ()
        placed = key_partitions(pa.array(keys), 4)
        records = [(key, b"skip" if at in empty else content) for key, at in zip(keys, placed, strict=True)]
        independent.fill(pipe.bootstrap, pipe.source, records)
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            wanted = flow.read(pipe.source).where("CAST(value AS STRING) != 'skip'")
            output = flow.process(wanted, Reminder(), table=pipe.table, state_dir=pipe.state_dir)
            query = flow.write(output, topic=pipe.target, engine="tasks", once=True).start()
            query.awaitTermination()
            assert "task" in query.batches[-1].path
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert Counter(record.key for record in seen) == Counter(keys)


@pytest.mark.long
def test_a_run_with_once_fires_what_exceeds_the_limit_and_leaves_what_its_last_batch_makes_due(
    make_state_pipe: Any, late_topic: str
) -> None:
    """Timers of a run whose records bring event time to their moment fire in the next run, which needs no records."""
    pipe = make_state_pipe()
    count = 2500
    independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.bell_inputs(count))
    process = {"processor": pipe.ledger.Bells(), "late_topic": late_topic, "max_timers_per_batch": 100}
    for number in range(3):
        query = pipe.start(process=process, read={"max_records_per_batch": 100_000}, once=True)
        query.awaitTermination(60)
        fired = [value["timer"] for value in pipe.outputs()]
        assert sorted(fired, key=int) == ([str(n) for n in range(count)] if number else [])
        assert len(query.batches) == 1 if number == 0 else len(query.batches) > 5 if number == 1 else not query.batches


@pytest.mark.long
def test_timers_of_one_moment_fire_in_bounded_batches_at_once(make_state_pipe: Any, late_topic: str) -> None:
    """A clock that ticks each second would take as many seconds as there are batches."""
    pipe = make_state_pipe()
    independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.bell_inputs(5000))
    process = {"processor": pipe.ledger.Bells(), "late_topic": late_topic, "max_timers_per_batch": 40}
    query = pipe.start(process=process)
    try:
        wait_for_all(pipe, query, dict.fromkeys(map(str, range(5000)), 0))
    finally:
        query.stop()
    check(pipe, late_topic, dict.fromkeys(map(str, range(5000)), 0))
    firing = [batch for batch in query.batches if not batch.max_rows and batch.records]
    assert max(batch.records for batch in firing) == 4 * 40  # of four partitions
    assert len(firing) >= 5000 / 160 - 1
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    times = [record.timestamp_ms for record in seen]
    assert (max(times) - min(times)) / 1000 < len(firing) / 2


@pytest.mark.long
def test_bounded_timers_on_a_cluster(make_state_pipe: Any, late_topic: str) -> None:
    """Batches without rows run in tasks there, and have no source partitions that these could follow."""
    pipe = make_state_pipe()
    independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.bell_inputs(1000))
    driver = pipe.driver(
        processor="Bells",
        process={"late_topic": late_topic, "max_timers_per_batch": 100},
        master="local-cluster[2,1,600]",
        spark={"spark.executor.memory": "600m"},
        forever=True,
    )
    try:
        wait_until(
            lambda: sum(fired(pipe).values()) >= 1000,
            120,
            lambda: f"1000 timers fire, not only {sum(fired(pipe).values())}",
            useless=lambda: driver.poll() is not None and driver.communicate()[0],
            poll_s=0.5,
        )
    finally:
        driver.kill()
        pipe.end_driver(driver)
        driver.wait()
    check(pipe, late_topic, dict.fromkeys(map(str, range(1000)), 0))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("inside", [False, True])
def test_a_million_timers_of_one_moment(make_state_pipe: Any, late_topic: str, inside: bool) -> None:
    """Bounded batches and bounded memory, with a driver that is killed on the way, twice."""
    count = 200_000 if inside else 1_000_000  # inside the query they wait for the clock
    pipe = make_state_pipe()
    independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.bell_inputs(count))

    def fired_so_far() -> int:
        return sum(independent.end_offsets(pipe.bootstrap, pipe.target).values())

    most_kib = 0
    for until in (count // 10, count // 2, count):
        driver = pipe.driver(
            processor="Bells",
            process={"late_topic": late_topic, **({"max_timers_per_batch": 5000} if inside else {})},
            records_per_batch=50_000,
            forever=True,
            inside=inside,
        )

        def reached(until: int = until, pid: int = driver.pid) -> bool:
            nonlocal most_kib
            # Ends count markers, too: the last word has the topic itself.
            if fired_so_far() >= until and (until < count or sum(fired(pipe).values()) >= count):
                return True
            most_kib = max(most_kib, rss_kib(pid)) if until > count // 10 else 0
            return False

        began = time.monotonic()
        try:
            wait_until(
                reached,
                400,
                lambda until=until: f"{until} timers fire, not only {fired_so_far()}",
                useless=lambda driver=driver: driver.poll() is not None and driver.communicate()[0],
                poll_s=0.1,
            )
            driver.send_signal(signal.SIGKILL)
        finally:
            pipe.end_driver(driver)
            driver.wait()
        print(until, fired_so_far(), f"{time.monotonic() - began:.1f} s, {most_kib} KiB")
    check(pipe, late_topic, dict.fromkeys(map(str, range(count)), 0))
    assert most_kib < 500_000  # all timers in one batch would need several times as much

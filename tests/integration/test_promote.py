"""`onceflow promote` on a real broker: outputs and state are those of one program that was never interrupted."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import onceflow
from onceflow import hooks
from onceflow.admin.versions import promote as promoter
from onceflow.admin.versions import promotion_plan as promote
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.record.progress_log import partition_of
from onceflow.driver.record.session import DriverSession
from onceflow.protocol.names import Names
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    from moving_flows import Call, feeding, progress_of, refused, told
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration


def copied(pipe: Any, call: Call, target: str, name: str = "next") -> Any:
    """What runs a new copy of the flow."""
    flow = f"{pipe.flow}-{name}"
    tables = told(call("fork", pipe.flow, flow, "--yes", "--json"))["tables"]
    table = {"table": tables[pipe.table]} if hasattr(pipe, "table") else {}
    return replace(pipe, flow=flow, target=target, sent=pipe.sent, **table)


def successor(pipe: Any, copy: Any) -> Any:
    """What runs the program of the copy as the flow whose place it has taken."""
    return replace(pipe, table=copy.table, sent=pipe.sent)


def promotion(pipe: Any, copy: Any, *more: str) -> tuple[str, ...]:
    return ("promote", copy.flow, "--replaces", pipe.flow, "--yes", "--json", *more)


@pytest.mark.long
def test_under_load(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    pipe = make_state_pipe(partitions=3)
    pipe.fill(300)
    with feeding(pipe):
        old = pipe.start()
        wait_until(lambda: len(old.batches) > 2, 60, "batches")
        copy = copied(pipe, call, make_topic("out", 2))
        new = copy.start()
        wait_until(lambda: len(new.batches) > 2, 60, "batches of the copy")
        done = told(call(*promotion(pipe, copy)))
        for query in (old, new):
            with pytest.raises(onceflow.FencedError):
                query.awaitTermination(60)
        after = successor(pipe, copy)
        last = after.start()
        wait_until(lambda: len(last.batches) > 2, 60, "batches of the successor")
    last.processAllAvailable()
    last.stop()
    after.check()
    assert done["tables"] == {pipe.table: copy.table}
    assert (progress_of(copy) or {})["became"] == pipe.flow
    assert (progress_of(after) or {}).get("handover") is None
    assert told(call(*promotion(pipe, copy)))["already"]
    # The old program cannot go on, and the copy is gone.
    with pytest.raises(onceflow.ProgressConflictError, match="not this flow's any more") as stopped:
        pipe.start()
    assert copy.table in stopped.value.next_step
    with pytest.raises(onceflow.ProgressConflictError, match="has taken the place of"):
        copy.start()
    assert told(call(*promotion(pipe, copy)))["already"]
    # A third version.
    third = copied(after, call, make_topic("out", 2), "third")
    pipe.fill(100)
    after.run()
    told(call(*promotion(pipe, third)))
    for _ in range(2):
        with pytest.raises(onceflow.ProgressConflictError, match=f"does not use table {third.table}: it names"):
            replace(third, flow=pipe.flow, target=pipe.target, table=f"{third.table}s").start()
    successor(after, third).run()
    successor(after, third).check()
    with pytest.raises(onceflow.ProgressConflictError, match="not this flow's any more"):
        pipe.start()


def behind(make_state_pipe: Any, make_topic: Any, call: Call) -> tuple[Any, Any]:
    """A flow, and a copy that has not run yet while the flow went on. The progress of both is in one partition."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(200)
    pipe.run()
    names = (f"next-{n}" for n in itertools.count())
    partition = partition_of(pipe.flow)
    name = next(name for name in names if partition_of(f"{pipe.flow}-{name}") == partition)
    copy = copied(pipe, call, make_topic("out", 2), name)
    pipe.fill(150)
    pipe.run()
    return pipe, copy


def check_promotion(pipe: Any, copy: Any, call: Call, **options: Any) -> None:
    told(call(*promotion(pipe, copy)))
    assert (progress_of(copy) or {})["became"] == pipe.flow
    pipe.fill(100)
    after = successor(pipe, copy)
    after.run(**options)
    after.check()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"inside": True, "engine": "tasks"},
        pytest.param({"engine": "tasks"}, marks=pytest.mark.long),
    ],
    ids=["by the driver", "two stages", "by reading tasks"],
)
def test_a_gap(make_state_pipe: Any, make_topic: Any, call: Call, options: dict[str, Any]) -> None:
    pipe, copy = behind(make_state_pipe, make_topic, call)
    shown = call(*promotion(pipe, copy)[:4], "--dry-run").stdout
    assert "is at most 150 records behind" in shown
    refused(call(*promotion(pipe, copy, "--max-gap", "149")), onceflow.ProgressConflictError, "150 records behind")
    check_promotion(pipe, copy, call, **options)


@pytest.mark.long
def test_a_copy_that_is_started_again_meanwhile(
    make_state_pipe: Any, make_topic: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager starts the copy again when it is fenced. Both flows go on as they were."""
    pipe, copy = behind(make_state_pipe, make_topic, call)
    announce, before = hooks.at, progress_of(copy)

    def start(name: str, **fields: Any) -> None:
        announce(name, **fields)
        if name == "progress" and fields["flow"] == pipe.flow:
            with contextlib.closing(Cluster(ClientSettings(pipe.bootstrap))) as cluster:
                DriverSession(cluster, Names(copy.flow)).init(Deadline(30, "starting"))

    with monkeypatch.context() as patched:
        patched.setattr(hooks, "at", start)
        refused(call(*promotion(pipe, copy)), onceflow.ProgressConflictError, "was started again meanwhile")
    pipe.fill(50)
    pipe.run()
    pipe.check()
    assert progress_of(copy) == before
    check_promotion(pipe, copy, call)


def test_without_state(make_pipe: Any, make_topic: Any, call: Call) -> None:
    """The new version continues where the old one is, wherever the copy was."""
    pipe = make_pipe(partitions=2)
    pipe.fill(40)
    pipe.run()
    copy = copied(replace(pipe), call, make_topic("out", 2))
    pipe.fill(30)
    copy.run()
    pipe.fill(30)
    assert told(call(*promotion(pipe, copy)))["gap_max"] == 0
    pipe.fill(20)
    pipe.run()
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("broken", ["outputs of the gap are written", "state without the gap"])
def test_broken_promotions_are_found_out(
    make_state_pipe: Any, make_topic: Any, call: Call, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    pipe, copy = behind(make_state_pipe, make_topic, call)
    original = promote.promoted_progress

    def wrong(old: Any, new: Any, *more: Any) -> Any:
        progress = replace(original(old, new, *more), handover=None)
        return progress if broken == "outputs of the gap are written" else replace(progress, offsets=old.offsets)

    monkeypatch.setattr(promoter, "promoted_progress", wrong)
    with pytest.raises(AssertionError):
        check_promotion(pipe, copy, call)


@pytest.mark.long
def test_killed_at_each_step(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """Before `end` both flows go on as they were; after it the promotion holds. The command can be run again at once,
    while the transaction of the killed one is still open."""
    pipe, copy = behind(make_state_pipe, make_topic, call)
    before = progress_of(copy)
    for step, goes_on in (("init", 1), ("write", 0), ("progress", 1), ("progress", 0), ("end", 0)):
        environment = {**os.environ, hooks.VARIABLE: faults.fault(step, "kill", flow=pipe.flow)}
        line = [sys.executable, "-m", "onceflow.cli.main", *promotion(pipe, copy)]
        killed = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert killed.returncode == -9, killed.stderr
        if goes_on:
            pipe.fill(20)
            pipe.run()  # its start decides what the command has left open
            assert progress_of(copy) == before
            assert "promoted" not in (progress_of(pipe) or {})
            pipe.check()
    assert (progress_of(copy) or {})["became"] == pipe.flow
    assert told(call(*promotion(pipe, copy)))["already"]
    after = successor(pipe, copy)
    pipe.fill(50)
    after.run()
    after.check()


@pytest.mark.long
@pytest.mark.parametrize("state", [True, False], ids=["stateful", "stateless"])
def test_killed_and_both_are_started_again(
    make_state_pipe: Any, make_pipe: Any, make_topic: Any, call: Call, state: bool
) -> None:
    """The copy waits for the transaction of the killed command, and then reads only what it had not read: it has the
    outputs and the state of one run. `test_promotion_restarts.py` has all steps, without batches."""
    if state:
        pipe, copy = behind(make_state_pipe, make_topic, call)
    else:
        pipe = make_pipe(partitions=2)
        pipe.fill(200)
        pipe.run()
        copy = copied(pipe, call, make_topic("out", 2))
        pipe.fill(150)
        pipe.run()
    copy.run()
    pipe.fill(40)
    pipe.run()
    environment = {**os.environ, hooks.VARIABLE: faults.fault("progress", "kill", flow=pipe.flow)}
    line = [sys.executable, "-m", "onceflow.cli.main", *promotion(pipe, copy)]
    killed = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -9, killed.stderr
    again = threading.Thread(target=copy.run)
    again.start()
    pipe.run()  # its start aborts what the command has left open
    again.join(60)
    assert not again.is_alive()
    seen = Counter(record.value for record in independent.read_topic(pipe.bootstrap, copy.target, decided=True))
    assert seen.total() == 190, "what was sent since the fork, once"
    if state:
        assert copy.table_rows() == pipe.ledger.expected(pipe.sent)[1]
    pipe.check()
    done = told(call(*promotion(pipe, copy)))
    assert not done["already"]
    with pytest.raises(onceflow.ProgressConflictError, match="has taken the place of"):
        copy.run()
    pipe.fill(30)
    after = successor(pipe, copy) if state else pipe
    after.run()
    after.check()


@pytest.mark.long
def test_dead_letters_of_the_gap_are_not_counted(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """The old flow has written them, and counted them: neither in the batches nor against the limit."""
    letters = make_topic("letters", 1)
    pipe = make_state_pipe(partitions=2)
    process = {"on_error": "dead-letter", "dead_letter_topic": letters, "max_dead_letters": 3}
    options: dict[str, Any] = {"process": process}
    pipe.run(**options)
    copy = copied(pipe, call, make_topic("out", 2))
    bad = [(b"bad", json.dumps({"n": n, "op": "boom"}).encode()) for n in range(3)]
    independent.fill(pipe.bootstrap, pipe.source, bad)
    pipe.fill(40)
    old = pipe.run(**options)
    told(call(*promotion(pipe, copy)))
    with pytest.raises(onceflow.ProgressConflictError, match=f"43 more records of topic {pipe.source}"):
        replace(successor(pipe, copy), source=make_topic("another", 1)).start(**options)
    independent.fill(pipe.bootstrap, pipe.source, bad[:2])
    new = successor(pipe, copy).run(**options)
    assert [sum(batch.dead_letters for batch in query.batches) for query in (old, new)] == [3, 2]
    assert [sum(batch.records for batch in query.batches) for query in (old, new)] == [40, 0]
    assert len(independent.read_topic(pipe.bootstrap, letters, decided=True)) == 5
    (waiting,) = told(call("status", pipe.flow, "--tables", "--json"))["letters"]
    assert (waiting["topic"], waiting["role"], waiting["waiting"]) == (letters, "dead letter", 5)
    assert len(pipe.outputs()) == 40


@pytest.mark.long
def test_killed_in_the_batch_without_outputs(
    make_state_pipe: Any, make_topic: Any, call: Call, killed_together: Any
) -> None:
    """The first batch after the promotion is batch 2 of each flow. At every step of it, the next start completes it."""
    ready = {}
    for step in ("plan", "write", "progress", "end"):
        pipe = make_state_pipe(partitions=2)
        pipe.run()  # there is nothing to read yet
        copy = copied(pipe, call, make_topic("out", 2))
        pipe.fill(400)
        pipe.run()
        told(call(*promotion(pipe, copy)))
        assert (progress_of(pipe) or {})["batch_id"] == 1
        ready[step] = successor(pipe, copy)
        pipe.fill(300)
    killed_together(ready, {step: {"write": {"engine": "tasks"}} if step == "write" else {} for step in ready})
    for step, pipe in ready.items():
        assert len(pipe.outputs()) == 400, step
        pipe.run()
        pipe.check()


# ---- timers ----------------------------------------------------------------------------------------------


def alarms(pipe: Any, late: str, limit: int = 1000, idle: str = "30 seconds", **options: Any) -> Any:
    """Args:
    limit: how many timers may fire in a partition and a batch.
    idle: after how long without records event time does not wait for a partition.
    """
    process = {"processor": pipe.ledger.Alarms(), "late_topic": late, "max_timers_per_batch": limit}
    process["idle_timeout"] = idle
    return pipe.start(process=process, read={"max_records_per_batch": 150}, **options)


def fired(pipe: Any) -> Counter[str]:
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    return Counter(json.loads(record.value or b"")["timer"] for record in seen)


def check_outputs(query: Any, seen: Callable[[], Counter[Any]], expected: Mapping[Any, int]) -> None:
    """Wait until as many were seen as are expected, stop the query, and compare. Timers fire in batches after the last
    records: a clock wakes the flow up."""
    count = sum(expected.values())
    wait_until(lambda: seen().total() >= count, 60, f"{count} outputs", useless=lambda: query.failure, poll_s=0.1)
    query.stop()
    assert seen() == expected


def begun(make_state_pipe: Any, make_topic: Any, count: int = 300) -> tuple[Any, str]:
    """A flow that has processed some records, and its topic of late ones."""
    pipe, late = make_state_pipe(partitions=2), make_topic("late", 1)
    send(pipe, count)
    alarms(pipe, late, once=True).awaitTermination(60)
    return pipe, late


def send(pipe: Any, count: int) -> None:
    more = pipe.ledger.alarm_inputs(len(pipe.sent), count)
    independent.fill(pipe.bootstrap, pipe.source, more)
    pipe.sent += more


def finish(pipe: Any, late: str, before: Mapping[str, int] | None = None) -> None:
    """Event time passes all timers of the records. Each has fired once, or was cancelled.

    Args:
        before: timers that the last records come too late to cancel.
    """
    moment = len(pipe.sent) * 100 + 10_000
    last = pipe.ledger.alarm_inputs(len(pipe.sent) * 10 + 1, 40, at=moment)
    expected = {**pipe.ledger.expected_alarms(pipe.sent + last, moment - 1000), **(before or {})}
    independent.fill(pipe.bootstrap, pipe.source, last)
    check_outputs(alarms(pipe, late), lambda: fired(pipe), dict.fromkeys(expected, 1))
    assert independent.read_topic(pipe.bootstrap, late, decided=True) == []


@pytest.mark.long
@pytest.mark.parametrize("ticks", [pytest.param(True, marks=pytest.mark.long), False])
def test_timers_in_the_gap(make_state_pipe: Any, make_topic: Any, call: Call, ticks: bool) -> None:
    """The old flow has fired some timers that the copy has not; and, without ticks, others of them not yet."""
    pipe, late = begun(make_state_pipe, make_topic)
    copy = copied(pipe, call, make_topic("out", 2))
    send(pipe, 400)
    alarms(pipe, late, once=True).awaitTermination(60)
    before = sum(fired(pipe).values())
    assert before > 100
    if ticks:
        query = alarms(pipe, late)
        wait_until(lambda: sum(fired(pipe).values()) > before, 60, "more timers", poll_s=0.1)
        query.stop()
    told(call(*promotion(pipe, copy)))
    send(pipe, 200)
    finish(successor(pipe, copy), late)


@pytest.mark.long
def test_a_partition_that_was_idle(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """Without it, event time has gone on in the old flow. In the new one, the partition counts again."""
    pipe, late = begun(make_state_pipe, make_topic)
    copy = copied(pipe, call, make_topic("out", 2))
    homes = {record.key: record.partition for record in independent.read_topic(pipe.bootstrap, pipe.source)}
    more = [(key, value) for key, value in pipe.ledger.alarm_inputs(300, 100) if homes[key] == 0]
    independent.fill(pipe.bootstrap, pipe.source, more)
    pipe.sent += more
    expected = pipe.ledger.expected_alarms(pipe.sent, json.loads(more[-1][1])["at"] - 1000)
    query = alarms(pipe, late, idle="1 millisecond")
    check_outputs(query, lambda: fired(pipe), dict.fromkeys(expected, 1))
    told(call(*promotion(pipe, copy)))
    finish(successor(pipe, copy), late, expected)


@contextlib.contextmanager
def when_timers_are_left(pipe: Any, done: Callable[[], Result]) -> Iterator[list[Result]]:
    """Something happens once, after a batch of the flow that has fired timers, and has left others that are due."""
    announce, seen = hooks.at, list[Result]()

    def at(name: str, **fields: Any) -> None:
        announce(name, **fields)
        if name == "end" and fields["flow"] == pipe.flow and not seen:
            (table,) = (progress_of(pipe) or {})["tables"].values()
            if len(table.get("unfired", ())) == 2:
                seen.append(done())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hooks, "at", at)
        patched.setattr(promoter, "_TIMERS_SECONDS", 0.1)  # meanwhile, the flow waits for its batch to end
        yield seen


def fenced_while_timers_are_left(make_state_pipe: Any, make_topic: Any, call: Call) -> tuple[Any, Any, str]:
    """A flow, its promoted copy, and the topic of late records. The old flow had more timers that were due than one
    batch may fire."""
    pipe, late = begun(make_state_pipe, make_topic)
    copy = copied(pipe, call, make_topic("out", 2))
    send(pipe, 200)
    with when_timers_are_left(pipe, lambda: call(*promotion(pipe, copy))) as done:
        old = alarms(pipe, late, limit=10)
        with pytest.raises(onceflow.FencedError):
            old.awaitTermination(60)
    told(done[0])
    (left,) = (progress_of(pipe) or {})["handover"]["unfired"].values()
    assert left
    send(pipe, 100)
    return pipe, copy, late


@pytest.mark.long
def test_fenced_while_timers_are_left(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    pipe, copy, late = fenced_while_timers_are_left(make_state_pipe, make_topic, call)
    finish(successor(pipe, copy), late)


@pytest.mark.long
@pytest.mark.parametrize("step", ["write", "progress", "end"])
def test_killed_in_both_batches_without_outputs(make_state_pipe: Any, make_topic: Any, call: Call, step: str) -> None:
    """In the one with the records of the gap, and in the first one with timers of the old flow."""
    pipe, copy, late = fenced_while_timers_are_left(make_state_pipe, make_topic, call)
    after = successor(pipe, copy)
    first = (progress_of(pipe) or {})["batch_id"] + 1
    written = fired(pipe)
    for batch in (first, first + 1):
        options = {"processor": "Alarms", "process": {"late_topic": late}, "records_per_batch": 150, "forever": True}
        process = after.driver(faults.fault(step, "kill", flow=pipe.flow, batch=batch), **options)
        try:
            output = process.communicate(timeout=120)[0]
            assert process.returncode == -signal.SIGKILL, output
        finally:
            pipe.end_driver(process)
        assert fired(pipe) == written
    finish(after, late)


@pytest.mark.long
def test_refused_while_timers_are_left(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """The copy has fired some of them: their outputs would be lost. The old flow goes on."""
    pipe, late = begun(make_state_pipe, make_topic, 10)
    copy = copied(pipe, call, make_topic("out", 2))
    send(pipe, 300)
    alarms(copy, late, once=True, engine="tasks").awaitTermination(60)
    with when_timers_are_left(pipe, lambda: call(*promotion(pipe, copy, "--wait", "0.5"))) as done:
        old = alarms(pipe, late, limit=10)
        wait_until(lambda: done, 60, "timers that are left", useless=lambda: old.failure)
    refused(done[0], onceflow.ProgressConflictError, "nothing has changed")
    told(call(*promotion(pipe, copy)))
    old.stop()
    finish(successor(pipe, copy), late)


@pytest.mark.long
def test_timers_that_set_the_next_one(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """In the gap, each timer of the old flow has set the next one, which has fired, too."""
    late = make_topic("late", 1)
    pipe = make_state_pipe(partitions=2)

    def chimes(pipe: Any, at_ms: int, until_ms: int) -> None:
        """Event time passes some chimes of each key."""
        more = [(f"key-{n}".encode(), json.dumps({"at": at_ms}).encode()) for n in range(20)]
        independent.fill(pipe.bootstrap, pipe.source, more)
        expected = {(f"key-{n}", at): 1 for n in range(20) for at in range(1000, until_ms, 1000)}
        query = pipe.start(process={"processor": pipe.ledger.Chimes(), "late_topic": late})

        def seen() -> Counter[Any]:
            records = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
            return Counter((record.key.decode(), json.loads(record.value)["at"]) for record in records)

        check_outputs(query, seen, expected)

    chimes(pipe, 0, 0)
    copy = copied(pipe, call, make_topic("out", 2))
    chimes(pipe, 5500, 5001)
    told(call(*promotion(pipe, copy)))
    chimes(successor(pipe, copy), 9500, 9001)


@pytest.mark.long
def test_windows_in_the_gap(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """The timer of a key closes all its windows up to the watermark: to that at which the old flow has closed them."""
    late = make_topic("late", 1)
    pipe = make_state_pipe(partitions=2)

    def start(pipe: Any, **options: Any) -> Any:
        process = {"processor": pipe.ledger.Hops(), "late_topic": late}
        return pipe.start(process=process, read={"max_records_per_batch": 150}, **options)

    send(pipe, 300)
    start(pipe, once=True).awaitTermination(60)
    copy = copied(pipe, call, make_topic("out", 2))
    send(pipe, 400)
    start(pipe, once=True).awaitTermination(60)  # the windows that its last batch has made due are not closed
    told(call(*promotion(pipe, copy)))
    send(pipe, 100)
    must = Counter[tuple[Any, ...]]()
    for key, start_ms in itertools.product({key for key, _ in pipe.sent}, range(-6000, 100_000, 2000)):
        values = [json.loads(value) for sent, value in pipe.sent if sent == key]
        inside = [each["n"] for each in values if start_ms <= each["at"] < start_ms + 5000]
        if inside:
            must[key, start_ms, start_ms + 5000, len(inside), sum(inside)] += 1
    independent.fill(pipe.bootstrap, pipe.source, pipe.ledger.alarm_inputs(0, 40, at=110_000))

    def seen() -> Counter[tuple[Any, ...]]:
        records = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
        return Counter((record.key, *json.loads(record.value or b"").values()) for record in records)

    check_outputs(start(successor(pipe, copy)), seen, must)


@pytest.mark.long
def test_timers_in_processing_time(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """Each flow sets them at another time, so they are refused before anybody is fenced."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(20)
    options: dict[str, Any] = {"process": {"processor": pipe.ledger.Quiet()}}
    old = pipe.start(**options)
    old.processAllAvailable()
    copy = copied(pipe, call, make_topic("out", 2))
    new = copy.start(**options)
    refused(call(*promotion(pipe, copy)), onceflow.ProgressConflictError, "timers in processing time", "in place")
    pipe.fill(10)
    for query in (old, new):
        query.processAllAvailable()
    new.stop()
    (table,) = (progress_of(copy) or {})["tables"].values()
    assert table["processing_timers"] is True
    told(call(*promotion(pipe, copy, "--same-timers")))
    old.stop()


@pytest.mark.long
def test_a_copy_whose_timers_are_ahead(make_state_pipe: Any, make_topic: Any, call: Call) -> None:
    """At the same position, the copy has fired timers that the old flow has not: their outputs would be lost."""
    pipe, late = begun(make_state_pipe, make_topic, 10)
    copy = copied(pipe, call, make_topic("out", 2))
    send(pipe, 300)
    alarms(pipe, late, once=True).awaitTermination(60)
    count = sum(fired(pipe).values())
    query = alarms(copy, late)
    wait_until(lambda: sum(fired(copy).values()) > count, 60, "timers of the copy", poll_s=0.1)
    query.stop()
    answer = call(*promotion(pipe, copy, "--wait", "0.5"))
    refused(answer, onceflow.ProgressConflictError, "has not got as far", "timers of")
    query = alarms(pipe, late)
    told(call(*promotion(pipe, copy)))
    query.stop()
    finish(successor(pipe, copy), late)

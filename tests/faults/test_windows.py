"""Each window of each key has exactly one result, with every record exactly once, whatever is killed meanwhile."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter, defaultdict
from typing import Any

import pytest

from onceflow.state.api.maps import MapState
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

RECORDS, STEP_MS, LATENESS_MS = 1200, 100, 1000
START_MS = 1_700_000_000_000  # a time before 1970 is none
LAST_MS = START_MS + RECORDS * STEP_MS + 20_000
GAP_MS = 1500
BATCH = 2
RECORDS_PER_BATCH = 400

Results = Counter[tuple[bytes, int, int, int, int]]


def fill(pipe: Any) -> None:
    """Records out of order by less than the lateness, and in every partition one that closes all windows."""
    rng = random.Random(3)
    for n in range(RECORDS):
        at = START_MS + n * STEP_MS - rng.randrange(LATENESS_MS)
        key = f"key-{rng.randrange(8)}" if n % 50 < 40 else "key-0"  # gaps, so that sessions end
        pipe.sent.append((key.encode(), json.dumps({"n": n, "at": at}).encode()))
    closing = [(f"closing-{n}".encode(), json.dumps({"n": 0, "at": LAST_MS}).encode()) for n in range(40)]
    independent.fill(pipe.bootstrap, pipe.source, [*pipe.sent, *closing])


def expected(pipe: Any, processor: str) -> Results:
    """Computed without windows of ours."""
    by_key: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for key, raw in pipe.sent:
        by_key[key].append((json.loads(raw)["at"], json.loads(raw)["n"]))
    found: Results = Counter()
    for key, records in by_key.items():
        bounds = [(start, start + 5000) for start in range(START_MS - 6000, LAST_MS, 2000)]
        if processor == "Visits":
            times = sorted(at for at, _ in records)
            ends = [at for at, after in zip(times, [*times[1:], LAST_MS], strict=True) if after - at > GAP_MS]
            starts = [times[0], *(min(at for at in times if at > end) for end in ends[:-1])]
            bounds = [(start, end + GAP_MS) for start, end in zip(starts, ends, strict=True)]
        for start, end in bounds:
            inside = [n for at, n in records if start <= at < end]
            if inside:
                found[key, start, end, len(inside), sum(inside)] += 1
    return found


def written(pipe: Any) -> Results:
    found: Results = Counter()
    for record in independent.read_topic(pipe.bootstrap, pipe.target, decided=True):
        assert record.key is not None
        if not record.key.startswith(b"closing"):
            start, end, count, total = json.loads(record.value or b"").values()
            found[record.key, start, end, count, total] += 1
    return found


def finish(pipe: Any, processor: str, late: str, **options: Any) -> None:
    """Run the flow in this process until as many results are there as there must be, and compare them."""
    must = expected(pipe, processor)
    assert len(must) > 100
    process = {"processor": getattr(pipe.ledger, processor)(), "late_topic": late}
    query = pipe.start(process=process, read={"max_records_per_batch": RECORDS_PER_BATCH}, **options)
    try:
        query.processAllAvailable()
        wait_until(
            lambda: written(pipe).total() >= must.total(),
            60,
            lambda: f"{must.total()} windows close, not only {written(pipe).total()}",
            useless=lambda: None if query.isActive else query.failure or "the query has been stopped",
            poll_s=0.2,
        )
    finally:
        query.stop()
    assert written(pipe) == must
    assert independent.read_topic(pipe.bootstrap, late, decided=True) == []


def driver_options(processor: str, late: str) -> dict[str, Any]:
    return {"processor": processor, "process": {"late_topic": late}, "records_per_batch": RECORDS_PER_BATCH}


@pytest.mark.long
def test_driver_killed_among_windows(make_state_pipe: Any, make_topic: Any, killed_together: Any) -> None:
    """That batch closes windows of the batch before, and others are open."""
    kinds = {"write": "Visits", "end": "Hops"}
    pipes = {step: make_state_pipe() for step in kinds}
    late = {step: make_topic("late", 1) for step in kinds}
    for pipe in pipes.values():
        fill(pipe)
    killed_together(pipes, {step: driver_options(kinds[step], late[step]) for step in kinds})
    for step, pipe in pipes.items():
        finish(pipe, kinds[step], late[step])


@pytest.mark.long
@pytest.mark.parametrize("processor", ["Hops", "Visits"])
@pytest.mark.parametrize("step", ["begin", "write", "progress", "end", "settle"])
def test_driver_kills_itself_among_windows(make_state_pipe: Any, make_topic: Any, step: str, processor: str) -> None:
    pipe, late = make_state_pipe(), make_topic("late", 1)
    fill(pipe)
    rule = faults.fault(step, "kill", batch=BATCH)
    process = pipe.driver(rule, **driver_options(processor, late), forever=True)
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        finish(pipe, processor, late)
    finally:
        pipe.end_driver(process)


@pytest.mark.long
def test_task_dies_among_windows(
    make_state_pipe: Any, make_topic: Any, inject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceflow.planning import placement

    monkeypatch.setattr(placement, "TASK_ROWS", 50)
    pipe, late = make_state_pipe(), make_topic("late", 1)
    fill(pipe)
    once = pipe.tmp_path / "fired"
    inject("write", "kill", where="task", batch_from=BATCH, task=0, once_file=str(once))
    finish(pipe, "Hops", late, engine="tasks")
    assert once.exists()


@pytest.mark.parametrize("mutant", [pytest.param(False, marks=pytest.mark.long), True])
def test_accumulators_outside_of_the_state_are_found_out(
    make_state_pipe: Any, make_topic: Any, inject: Any, monkeypatch: pytest.MonkeyPatch, mutant: bool
) -> None:
    """A batch fails after its records were added. The mutant keeps accumulators in memory, and adds them once more."""
    pipe, late = make_state_pipe(partitions=1), make_topic("late", 1)
    fill(pipe)
    if mutant:
        memory: dict[bytes, Any] = {}
        put, get = MapState.put, MapState.get

        def remembering(self: Any, key: Any, value: Any, ttl: Any = None) -> None:
            memory[self._row_key(key)] = value
            put(self, key, value, ttl)

        def remembered(self: Any, key: Any, default: Any = None) -> Any:
            return memory.get(self._row_key(key), get(self, key, default))

        monkeypatch.setattr(MapState, "put", remembering)
        monkeypatch.setattr(MapState, "get", remembered)
    inject("write", "raise", batch=BATCH, once_file=str(pipe.tmp_path / "fired"))
    with pytest.raises(Exception, match="injected at"):
        finish(pipe, "Hops", late)
    if mutant:
        with pytest.raises(AssertionError):
            finish(pipe, "Hops", late)
    else:
        finish(pipe, "Hops", late)

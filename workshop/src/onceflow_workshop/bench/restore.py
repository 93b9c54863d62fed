"""Tables whose local copy is lost and comes back, and what memory ordinary batches over a large table take."""

from __future__ import annotations

import logging
import re
import shutil
import statistics
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from onceflow_workshop.bench.balance_runs import (
    batches_of,
    local_rows,
    rate_of,
    start_flow,
    state_mib,
    steps_ms,
    table_topics,
)
from onceflow_workshop.bench.balances import (
    ColumnBalance,
    Expected,
    expected,
    payment,
    problem_of,
    shuffled,
    some_accounts,
)
from onceflow_workshop.bench.environment import Bench, wait
from onceflow_workshop.bench.processes import worker_memory

SMALL_BATCH, TASK_BATCH = 400, 30_000
_RESTORED = re.compile(r"table (\S+): restored, (\d+) records read in ([\d.]+) s")


def restore(bench: Bench, keys: int) -> Iterator[dict[str, Any]]:
    """A table of so many keys loses its local copy; a batch by the driver brings it back, then one by tasks."""
    source, name = bench.topic("bench-keys"), f"bench-restore-{uuid.uuid4().hex[:6]}"
    yield fill_table(bench, name, source, keys)
    known = {b"acc-%07d" % account: (1, 1) for account in range(keys)}
    first_id = keys
    for how, records, write in (("driver", SMALL_BATCH, {}), ("tasks", TASK_BATCH, {"engine": "tasks"})):
        shutil.rmtree(bench.folder / name)
        accounts = range(0, keys, max(1, keys // records))
        sent = [payment(account, 5, first_id + turn) for turn, account in enumerate(accounts)]
        first_id += bench.fill(source, sent)
        want = expected(sent, known)
        known |= want[1]
        with bench.meter(f"restore {how}") as meter, LogLines() as log:
            batches, problem = update_table(bench, name, source, want, keys, **write)
            cpu_s = meter.cpu_s()
        restored, seconds = restored_of(log.lines)
        if not problem and local_rows(bench, name) != known:
            problem = "the local copy differs"
        step_s = batches[0].seconds["write"]
        yield {
            "bench": "restore",
            "how": f"{how} ({batches[0].path})",
            "keys": keys,
            "state_mib": state_mib(bench, name),
            "records_restored": restored,
            "records_per_s_of_a_process": round(restored / max(seconds, 1e-3)),
            "records_per_s": round(restored / max(step_s, 1e-3)),
            "step_s": round(step_s, 2),
            "cpu_s": {who: round(spent, 2) for who, spent in cpu_s.items()},
            **worker_memory([meter]),
            "correct": problem or "yes",
        }
    bench.delete(source, *table_topics(name))


def large(bench: Bench, keys: int, records: int) -> Iterator[dict[str, Any]]:
    """Ordinary batches over a large table: memory of a worker must not follow the table's size."""
    source = bench.topic("bench-large")
    name = f"bench-large-{uuid.uuid4().hex[:6]}"
    yield fill_table(bench, name, source, keys)
    sent = [payment(account, 5, keys + turn) for turn, account in enumerate(some_accounts(records, keys))]
    bench.fill(source, sent)
    want = expected(sent, {key: (1, 1) for key, _ in sent})
    per_batch = max(1000, records // 10)
    with bench.meter("large") as meter:
        batches, problem = update_table(bench, name, source, want, per_batch, engine="tasks")
    full = [batch for batch in batches[1:] if batch.max_rows * 2 >= per_batch]
    rates = [batch.max_rows / sum(batch.seconds.values()) for batch in full]
    yield {
        "bench": "large_table",
        "keys": keys,
        "state_mib": state_mib(bench, name),
        "records_per_batch": per_batch,
        "records_per_s": round(statistics.median(rates)) if rates else None,
        "steps_ms_median": steps_ms(batches),
        **worker_memory([meter]),
        "correct": problem or "yes",
    }
    bench.delete(source, *table_topics(name))


def fill_table(bench: Bench, name: str, source: str, keys: int) -> dict[str, Any]:
    """A table with one record for each key."""
    bench.say(f"filling a table of {keys:,} keys")
    # In no order: a store that is filled in the order of its keys is smaller, and faster, than it will ever be.
    bench.fill(source, (payment(account, 1, account) for account in shuffled(keys)))
    target = bench.topic("bench-out")
    with bench.meter("fill") as meter:
        query = start_flow(bench, name, source, target, ColumnBalance(), 100_000)
        wait(query)
    rate, _ = rate_of(batches_of(query.recentProgress))
    bench.delete(target)
    return {
        "bench": "fill",
        "keys": keys,
        "records_per_s": round(rate),
        "state_mib": state_mib(bench, name),
        "steps_ms_median": steps_ms(query.batches),
        **worker_memory([meter]),
    }


def update_table(
    bench: Bench, name: str, source: str, want: Expected, records_per_batch: int, **write: Any
) -> tuple[list[Any], str]:
    """Process what is new in the source. Returns the batches, and what is wrong with the outputs."""
    target = bench.topic("bench-out")
    query = start_flow(bench, name, source, target, ColumnBalance(), records_per_batch, **write)
    wait(query)
    problem = problem_of(bench.outputs(target), None, want)
    bench.delete(target)
    return query.batches, problem


def restored_of(messages: Iterable[str]) -> tuple[int, float]:
    """Records and seconds of all partitions that log lines say were restored."""
    found = [match for match in map(_RESTORED.fullmatch, messages) if match]
    return sum(int(match[2]) for match in found), sum(float(match[3]) for match in found)


class LogLines(logging.Handler):
    """What ``onceflow.state`` says while this is open."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._logger = logging.getLogger("onceflow.state")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> LogLines:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

"""The processor of the state tests, and the same by itself: what its outputs and its state must be.

Pickled by value into tasks, which cannot import test modules: ``use()`` sees to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

import onceflow

KEYS = 40


class Ledger(onceflow.Processor):
    """Sum and count per key, entries of a map per last digit; ``forget`` deletes both."""

    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        known = state.get() or {"sum": 0, "count": 0}
        digits = state.map("digits")
        for record in records:
            n = record.value["n"]
            if record.value.get("op") == "boom":
                raise ValueError(f"boom at {n}")
            if record.value.get("op") == "forget":
                known = {"sum": 0, "count": 0}
                state.delete()
                digits.clear()
            else:
                known = {"sum": known["sum"] + n, "count": known["count"] + 1}
                state.put(known)
                digits.put(str(n % 10), digits.get(str(n % 10), 0) + 1)
            yield onceflow.Record(key, {"n": n, **known})


def answer(trap: dict[str, Any] | None, n: int) -> int:
    """Another service, which takes a while. At one number, the first call goes into a trap.

    Args:
        trap: ``at``: the number; ``once``: a file that shows that it has happened; ``kill``: whether the process is
            killed, which otherwise waits.
    """
    time.sleep((n * 7 % 5) / 1000)  # answers come in another order than they were asked for
    if trap is not None and trap["at"] == n:
        with contextlib.suppress(FileExistsError):
            Path(trap["once"]).open("x").close()
            if trap.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(20)
    return n


class Charged(Ledger):
    """The same as ``Ledger``, with two calls for each record: before its change and output, and after them."""

    def __init__(self, trap: dict[str, Any] | None = None, order: str | None = "key") -> None:
        self.ask = onceflow.concurrently(partial(answer, trap), limit=8, timeout="30 seconds", retries=0, order=order)
        self.tell = onceflow.concurrently(partial(answer, None), limit=8, order=order)

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            record.value = {**record.value, "n": self.ask(record.value["n"])}
            yield from super().process(key, [record], state)
            self.tell(record.value["n"])


class Priced(onceflow.Processor):
    """Every record with the rate of its currency, and the position at which the table of rates was seen."""

    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        rates = state.table("rates")
        state.put(state.get(0) + len(records))
        for record in records:
            rate = rates.get(record.value["currency"])
            found = {"rate": None if rate is None else json.loads(rate), "at": rates.position}
            yield onceflow.Record(key, {**record.value, **found})


class Timed(onceflow.Processor):
    """Event time is in the field ``at``, epoch milliseconds."""

    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON
    allowed_lateness = "1 second"

    def event_time(self, record: onceflow.Record) -> int:
        return int(record.value["at"])


class Alarms(Timed):
    """Every record sets a timer five seconds of event time later; every third cancels the one of the record before."""

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> None:
        for record in records:
            n = record.value["n"]
            state.timers.register(f"timer-{n}", record.value["at"] + 5000)
            last = state.get()
            if n % 3 == 0 and last is not None:
                state.timers.cancel(f"timer-{last}")
            state.put(n)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        yield onceflow.Record(key, {"timer": timer.name, "at": timer.at_ms})


class Quiet(onceflow.Processor):
    """Counts the records and the timers of a key, and yields nothing."""

    state = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> None:
        known = state.get() or {"records": 0, "rung": 0}
        state.put({**known, "records": known["records"] + len(records)})
        state.timers.register("bell", state.now_ms, clock="processing")

    def on_timer(self, key: bytes, timer: Any, state: Any) -> None:
        known = state.get()
        state.put({**known, "rung": known["rung"] + 1})


class Hops(onceflow.windows.WindowProcessor):
    """The numbers of overlapping windows, added up."""

    value = onceflow.serdes.JSON
    window: Any = onceflow.windows.Hopping("5 seconds", every="2 seconds")
    allowed_lateness = "1 second"
    aggregates = {"count": onceflow.windows.Count(), "sum": onceflow.windows.Sum("n")}  # noqa: RUF012

    def event_time(self, record: onceflow.Record) -> int:
        return int(record.value["at"])


class Visits(Hops):
    """The same of sessions."""

    window = onceflow.windows.Session("1500 milliseconds")


class Bells(Timed):
    """Every record sets a timer for the same moment."""

    at_ms = 1_000_000

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> None:
        for record in records:
            if record.value["at"] < self.at_ms:
                state.timers.register(str(record.value["n"]), self.at_ms)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        yield onceflow.Record(key, {"timer": timer.name})


class Chimes(Timed):
    """A chime of each key for every second of event time; its timer sets the next one."""

    allowed_lateness = "500 milliseconds"

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> None:
        if state.get() is None:
            state.put(1)
            state.timers.register("chime", 1000)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        state.timers.register("chime", timer.at_ms + 1000)
        yield onceflow.Record(key, {"at": timer.at_ms})


def bell_inputs(count: int) -> list[tuple[bytes, bytes]]:
    """Records that set the timers, and behind them some in every partition that bring event time to their moment."""
    sent = [(f"key-{n % 5000}".encode(), b'{"n": %d, "at": 1}' % n) for n in range(count)]
    last = json.dumps({"n": -1, "at": Bells.at_ms + 1000}).encode()
    return sent + [(f"key-{n}".encode(), last) for n in range(KEYS)]


def alarm_inputs(first: int, count: int, *, at: int | None = None) -> list[tuple[bytes, bytes]]:
    """Records ``first`` and on, a tenth of a second of event time apart, or all at ``at``."""
    return [
        (f"key-{n * 7919 % KEYS:03d}".encode(), json.dumps({"n": n, "at": n * 100 if at is None else at}).encode())
        for n in range(first, first + count)
    ]


def expected_alarms(sent: Iterable[tuple[bytes, bytes]], until: int) -> dict[str, int]:
    """Timers that fire when event time passes ``until``, with their times.

    A key comes back after four seconds of event time, so a timer is never due before it is cancelled.
    """
    timers: dict[str, int] = {}
    last: dict[bytes, int] = {}
    for key, raw in sent:
        value = json.loads(raw)
        n = value["n"]
        timers[f"timer-{n}"] = value["at"] + 5000
        if n % 3 == 0 and key in last:
            timers.pop(f"timer-{last[key]}", None)
        last[key] = n
    return {name: at for name, at in timers.items() if at <= until}


def inputs(first: int, count: int, *, keys: int = KEYS) -> list[tuple[bytes, bytes]]:
    """Records ``first`` and on; every 97th forgets its key."""
    found = []
    for n in range(first, first + count):
        op = "forget" if n % 97 == 96 else "add"
        found.append((f"key-{n * 7919 % keys:03d}".encode(), json.dumps({"n": n, "op": op}).encode()))
    return found


def expected(sent: Iterable[tuple[bytes, bytes]]) -> tuple[dict[int, dict[str, Any]], dict[bytes, Any], dict[Any, int]]:
    """Outputs by number, state by key, map entries by key and digit."""
    outputs: dict[int, dict[str, Any]] = {}
    sums: dict[bytes, dict[str, int]] = {}
    digits: dict[tuple[bytes, str], int] = {}
    for key, raw in sent:
        value = json.loads(raw)
        n = value["n"]
        if value["op"] == "forget":
            sums.pop(key, None)
            for entry in [entry for entry in digits if entry[0] == key]:
                del digits[entry]
            outputs[n] = {"n": n, "sum": 0, "count": 0}
        else:
            known = sums.get(key, {"sum": 0, "count": 0})
            sums[key] = {"sum": known["sum"] + n, "count": known["count"] + 1}
            entry = (key, str(n % 10))
            digits[entry] = digits.get(entry, 0) + 1
            outputs[n] = {"n": n, **sums[key]}
    return outputs, sums, digits


def use() -> None:
    """Make tasks get this module's classes with their code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])

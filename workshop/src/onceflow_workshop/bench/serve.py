"""The query server: look-ups over HTTP, idle and while a flow writes, by one instance and by two that share a table."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.testing.waiting import wait_until
from onceflow_workshop.bench import serve_processes
from onceflow_workshop.bench.serve_load import KEYS_AT_ONCE, KINDS, Plan, child, key_of, load
from onceflow_workshop.bench.serve_processes import Instance, instances
from onceflow_workshop.bench.serve_writer import row

PARTITIONS = 4
ONE, PARAMETER, MANY, RANGE = KINDS
_TOPIC, _SOURCE = "bench-serve", "bench-serve-in"
_FLOW_START_S = 120.0
_HEAP = "512m"
_NUMBERS = {1: "one", 2: "two"}

#: Shows what is going on: a text, and how many steps of how many are done.
Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        keys: of the table. connections: that ask at the same time. seconds: how long each figure is measured.
        records_per_second: that are written; 0: no part with a writer.
        writer: ``flow`` or ``producer``. trigger_ms: how often it commits.
    """

    keys: int
    connections: int
    seconds: float
    records_per_second: int
    writer: str
    trigger_ms: int

    @property
    def steps(self) -> int:
        return 1 + len(KINDS) * (4 if self.records_per_second else 2)


def run(choices: Choices, show: Show) -> Iterator[dict[str, Any]]:
    """Run all parts; yields one result (a JSON object) after the other, the summary last.

    ``correct`` says whether all answers were as expected.
    """
    from onceflow.broker.local import LocalBroker

    with tempfile.TemporaryDirectory(prefix="onceflow-") as folder, ExitStack() as stack:
        show("starting a broker", 0, choices.steps)
        broker = stack.enter_context(LocalBroker(Path(folder) / "broker", heap=_HEAP))
        bench = _Bench(choices, show, broker.bootstrap_servers, Path(folder))
        bench.fill()
        yield from bench.floor()
        for writing in (False, True) if choices.records_per_second else (False,):
            if writing:
                stack.enter_context(bench.writing())
            for count in (1, 2):
                yield from bench.asked(count, writing=writing)
        yield bench.summary()


class _Bench:
    def __init__(self, choices: Choices, show: Show, servers: str, folder: Path) -> None:
        self._choices, self._show = choices, show
        self._servers, self._folder = servers, folder
        self._done = 0
        self._results: dict[tuple[str, int, bool], dict[str, Any]] = {}
        self._wrong: list[str] = []

    def fill(self) -> None:
        """A table with a row for each key."""
        from onceflow.testing.broker import create_topic
        from onceflow.testing.independent import fill

        self._say(f"filling a table of {self._choices.keys:,} keys")
        create_topic(self._servers, _TOPIC, PARTITIONS, {"cleanup.policy": "compact"})
        fill(self._servers, _TOPIC, ((key_of(n).encode(), row(n, 0)) for n in range(self._choices.keys)))

    def floor(self) -> Iterator[dict[str, Any]]:
        """The same reads without a server."""
        choices = self._choices
        self._say("reading a Table in its own process")
        argument = {
            "servers": self._servers,
            "topic": _TOPIC,
            "keys": choices.keys,
            "seconds": min(2.0, choices.seconds),
            "folder": str(self._folder / "floor"),
        }
        for found in child("onceflow_workshop.bench.serve_floor", argument, choices.seconds + 90):
            wrong = self._noted(found.pop("wrong"))
            yield {"bench": "serve_floor", **found, "correct": wrong}
        self._done += 1

    def asked(self, count: int, *, writing: bool) -> Iterator[dict[str, Any]]:
        """One instance, or one of several: requests of each kind."""
        where = "one instance" if count == 1 else "one of two instances"
        during = f"{self._choices.records_per_second:,} records/s are written" if writing else "idle"
        self._say(f"{where}, {during}: starting")
        folder = self._folder / f"{count}-{writing}"
        folder.mkdir()
        with instances(self._servers, _TOPIC, count, folder) as found:
            for what in KINDS:
                self._say(f"{where}, {during}: {what}")
                result = self._measured(what, found)
                self._results[what, count, writing] = result
                yield {"bench": f"serve_{_NUMBERS[count]}_{'writing' if writing else 'idle'}", **result}
                self._done += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While this is open, records are written to the table."""
        from onceflow.testing.broker import create_topic

        choices = self._choices
        self._say(f"starting the {choices.writer} that writes")
        argument = {"servers": self._servers, "keys": choices.keys, "per_s": choices.records_per_second}
        by_flow = choices.writer == "flow"
        before = self._written()
        with ExitStack() as stack:
            if by_flow:
                create_topic(self._servers, _SOURCE, PARTITIONS)
                ended = stack.enter_context(
                    serve_processes.flow(self._servers, _SOURCE, _TOPIC, choices.trigger_ms, self._folder)
                )
                argument |= {"topic": _SOURCE, "commit_ms": None}
            else:
                argument |= {"topic": _TOPIC, "commit_ms": choices.trigger_ms}
            producing = stack.enter_context(serve_processes.producer(self._folder, **argument))
            # The flow has a backlog from its start. It has written that when it writes no more than is produced.
            wait_until(
                lambda: self._written() - before > 3 * choices.records_per_second,
                _FLOW_START_S,
                "records are written",
                useless=lambda: producing() or (ended() if by_flow else ""),
                poll_s=0.5,
            )
            wait_until(lambda: self._rate(1.0) < 1.5 * choices.records_per_second, 30, "the backlog is written")
            yield

    def summary(self) -> dict[str, Any]:
        """The figures that goals are set for."""

        def of(what: str, count: int, writing: bool) -> dict[str, Any]:
            return self._results.get((what, count, writing), {})

        one, many, two = of(ONE, 1, False), of(MANY, 1, False), of(ONE, 2, False)
        busy = of(ONE, 1, True)
        return {
            "bench": "serve_summary",
            "lookups_per_s": one["keys_per_s"],
            "p99_ms": one["p99_ms"],
            "multi_get_keys_per_s": many["keys_per_s"],
            "lookups_per_s_while_writing": busy.get("keys_per_s"),
            "p99_ms_while_writing": busy.get("p99_ms"),
            "lookups_per_s_of_two": two["keys_per_s"],
            "p99_ms_of_two": two["p99_ms"],
            "connections": self._choices.connections,
            "keys": self._choices.keys,
            "writer": self._choices.writer if self._choices.records_per_second else None,
            "correct": "; ".join(dict.fromkeys(self._wrong)) or "yes",
        }

    # ---- inside --------------------------------------------------------------------------------------

    def _measured(self, what: str, found: list[Instance]) -> dict[str, Any]:
        choices = self._choices
        connections = 1 if what == RANGE else choices.connections
        before, cpu = self._written(), [each.cpu_s() for each in found]
        since = time.monotonic()
        loaded = load(Plan(found[0].url, _TOPIC, choices.keys, what, connections, choices.seconds))
        seconds = time.monotonic() - since
        spent = [each.cpu_s() - spent for each, spent in zip(found, cpu, strict=True)]
        return {
            "what": what,
            "connections": connections,
            "keys_per_s": loaded.per_s * (KEYS_AT_ONCE if what == MANY else 1),
            **{name: getattr(loaded, name) for name in ("p50_ms", "p99_ms", "max_ms", "age_p50_ms", "age_p99_ms")},
            "cores": " + ".join(f"{each / seconds:.2f}" for each in spent),
            "load_cores": loaded.cores,
            "written_per_s": round((self._written() - before) / seconds),
            "correct": self._noted(loaded.wrong),
        }

    def _noted(self, wrong: str) -> str:
        if wrong:
            self._wrong.append(wrong)
        return wrong or "yes"

    def _written(self) -> int:
        """Committed offsets of the table's topic: its records, and a marker for each transaction."""
        from onceflow.testing.independent import end_offsets

        return sum(end_offsets(self._servers, _TOPIC).values())

    def _rate(self, seconds: float) -> float:
        before, since = self._written(), time.monotonic()
        time.sleep(seconds)
        return (self._written() - before) / (time.monotonic() - since)

    def _say(self, text: str) -> None:
        self._show(text, self._done, self._choices.steps)

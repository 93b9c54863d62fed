"""Runs ``onceflow status``, ``transactions list`` and ``verify`` beside the flows, and checks what they say.

``verify`` compares records by their ids, runs processors again (``--replay``), and compares the local copies of tables
(``--state-dir``).

Each command is a process of its own, as an operator would start it, and talks to the brokers directly. While a fault is
under way it may fail, or name what it could not ask. But what it says must be true:

- A flow's batch and offsets are those of one of its committed progress records. They never go back. They are at most
  one batch older than what the driver had reported as committed before the command was started: Kafka answers a commit
  before its markers are in all partitions, but not the commit after it.
- Nothing is lost, doubled or misplaced, no state differs from a replay and no local copy from its topic, because at the
  end of the run nothing does. Only where a fault damages copies on purpose, they are compared at the end alone.
- No transaction hangs, unless the setup can lose transaction markers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from onceflow.testing.final import read_final
from onceflow_workshop.chaos.flows import COPY, JOINER, LEDGER, SORTER, UNLOGGED, Names
from onceflow_workshop.chaos.verify import Findings

STATUS, TRANSACTIONS, VERIFY = "status", "transactions", "verify"
REPLAY, LOCAL = "verify --replay", "verify --state-dir"
_COMMAND_S = 150.0
# A replay reads everything from the beginning. When it takes longer than this, it is left to the end of the run.
_REPLAY_S = 20.0
_PAUSE_S = 0.2
_READ_S = 180.0


@dataclass(frozen=True)
class Told:
    """What ``onceflow status`` has said of a flow. ``offsets``: by partition of the source."""

    flow: str
    batch: int
    offsets: Mapping[int, int]


class Observer:
    """As a context manager it ends with it.

    Args:
        kinds: of the flows.
        committed: the batches that drivers have reported as committed, by flow.
        markers_get_lost: whether the setup loses transaction markers.
        copies_get_torn: whether faults damage local copies.
        copies_on_hosts: whether hosts keep them, in folders of their own. The run compares these itself.

    Attributes:
        answered, failed: how many commands of each name have answered, and how many have ended with an error.
        problems: what they have said that is not true, as kind and text.
        errors: texts of errors, each counted.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        names: Names,
        kinds: Sequence[str],
        committed: Mapping[str, int],
        *,
        markers_get_lost: bool = False,
        copies_get_torn: bool = False,
        copies_on_hosts: bool = False,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._names = names
        self._kinds = kinds
        self._committed = committed
        self._markers_get_lost = markers_get_lost
        self._copies_get_torn = copies_get_torn
        self._copies_on_hosts = copies_on_hosts
        self._processors = names.folder / "replayed.py"
        self._replayed_s: dict[str, float] = {}
        self._told: list[Told] = []
        self._over = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="observer")
        self.answered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.problems: list[tuple[str, str]] = []

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start(self) -> None:
        """Ask from now on. Every flow must have committed."""
        self._write_processors()
        self._thread.start()

    def finish(self, findings: Findings) -> None:
        """Stop, ask once more, and check everything that was said. The flows must have processed everything."""
        self._stop()
        for look in self._looks():
            if not look():
                findings.unknown.append(f"a command of the observer has failed at the end: {list(self.errors)[-1:]}")
        self._check_told()
        for kind, text in self.problems:
            findings.see(kind, text)

    def as_json(self) -> dict[str, Any]:
        return {"answered": dict(self.answered), "failed": dict(self.failed), "errors": dict(self.errors)}

    # ---- commands ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.is_set():
            for look in self._looks():
                if self._over.wait(_PAUSE_S):
                    return
                look()

    def _looks(self) -> Iterable[Callable[[], bool]]:
        yield self._look_at_status
        yield self._look_at_transactions
        for name, flow, options in self._audits():
            yield partial(self._look_at_records, name, flow, options)

    def _audits(self) -> Iterable[tuple[str, str, list[str]]]:
        names = self._names
        letters = ["--dead-letter", names.dead, "--dead-letter", names.late]
        if COPY in self._kinds:
            yield VERIFY, names.flow(COPY), ["--id", "record"]
        if LEDGER in self._kinds:
            yield VERIFY, names.flow(LEDGER), ["--id", "$.n", "--output", names.output(LEDGER)]
        if SORTER in self._kinds:
            yield VERIFY, names.flow(SORTER), ["--id", "$.n", "--output", names.output(SORTER), *letters]
        if LEDGER in self._kinds:  # its outputs name the attempt that has written them
            yield REPLAY, names.flow(LEDGER), ["--replay", f"{self._processors}:ledger", "--tables-only"]
        if SORTER in self._kinds:
            processor = f"{self._processors}:sorter"
            yield REPLAY, names.flow(SORTER), ["--replay", processor, "--output", names.output(SORTER), *letters]
        for kind in () if self._copies_on_hosts else (LEDGER, SORTER, JOINER, UNLOGGED):
            if kind in self._kinds and (self._over.is_set() or not self._copies_get_torn):
                yield LOCAL, names.flow(kind), ["--state-dir", str(names.state)]

    def _write_processors(self) -> None:
        """Write the module that names the processors for ``--replay``, with their arguments."""
        names = self._names
        self._processors.write_text(
            "from onceflow_workshop.chaos.flows import Ledger, Sorter\n\n"
            f"ledger = Ledger({names.flow(LEDGER)!r}, {names.alarms!r})\nsorter = Sorter()\n"
        )

    def _look_at_status(self) -> bool:
        before = {self._names.flow(kind): self._committed.get(self._names.flow(kind), 0) for kind in self._kinds}
        lines = self._call(STATUS, [STATUS])
        flows = {line["flow"]: line for line in lines or ()}
        for flow, batch in before.items():
            if lines is None or (flow not in flows and batch <= 1):
                continue
            if flow not in flows:
                self._problem(STATUS, f"{flow} is missing, although it has committed batch {batch}")
            elif flows[flow]["batch"] is not None:
                self._hear(flows[flow], batch)
        return lines is not None

    def _hear(self, line: Mapping[str, Any], batch: int) -> None:
        flow, said = line["flow"], int(line["batch"])
        known = max([each.batch for each in self._told if each.flow == flow], default=0)
        if said < max(batch - 1, known):
            self._problem(STATUS, f"{flow} is at batch {said}; committed was {batch}, and said before was {known}")
        for source in line["sources"]:
            if source["topic"] == self._names.source:
                offsets = {int(partition): int(offset) for partition, offset in source["offsets"].items()}
                self._told.append(Told(flow, said, offsets))
            for part in source["partitions"] or ():
                if min(part["lag"], part["held_back"]) < 0 or (part["offset"] or 0) > part["stable"]:
                    self._problem(STATUS, f"{flow}: {source['topic']}: {part}")

    def _look_at_transactions(self) -> bool:
        lines = self._call(TRANSACTIONS, [TRANSACTIONS, "list"])
        for line in lines or ():
            if line["hanging"] and not self._markers_get_lost:
                self._problem(TRANSACTIONS, f"is said to hang: {line}")
            name = line["transactional_id"]
            if name is not None and not name.startswith(f"onceflow.{self._names.prefix}-"):
                self._problem(TRANSACTIONS, f"of somebody else: {line}")
        return lines is not None

    def _look_at_records(self, name: str, flow: str, options: list[str]) -> bool:
        if name == REPLAY and not self._over.is_set() and self._replayed_s.get(flow, 0.0) > _REPLAY_S:
            return True
        begun = time.monotonic()
        lines = self._call(name, [VERIFY, flow, *options])
        if name == REPLAY:
            self._replayed_s[flow] = time.monotonic() - begun
        # What a promotion has left behind is not judged; everything else must be as it should be.
        if lines is not None and (lines[-1]["found"] or lines[-1]["not_checked"]):
            self._problem(name, f"{flow}: {lines[-1]['found']}, for example {lines[0]}")
        return lines is not None

    def _call(self, name: str, arguments: list[str]) -> list[dict[str, Any]] | None:
        """The lines of JSON that a command has printed; None: it has failed."""
        given = [*arguments, "--json", "--bootstrap-servers", self._bootstrap_servers]
        with subprocess.Popen(
            [sys.executable, "-m", "onceflow.cli.main", *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._names.folder,
        ) as child:
            self._child = child
            try:
                out, err = child.communicate(timeout=_COMMAND_S)
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                self._problem(name, f"no answer within {_COMMAND_S:g} s: {err[-500:]}")
        lines = [json.loads(line) for line in out.splitlines()]
        if child.returncode == 0 or (arguments[0] == VERIFY and lines and "exact" in lines[-1]):
            self.answered[name] += 1
            return lines
        if not self._over.is_set() or child.returncode > 0:
            self.failed[name] += 1
            self.errors[f"{name}: {err.strip().splitlines()[0][:200] if err.strip() else child.returncode}"] += 1
            if "Traceback" in err:
                self._problem(name, f"traceback: {err[-500:]}")
        return None

    def _stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _COMMAND_S)

    # ---- what is true ------------------------------------------------------------------------------------

    def _check_told(self) -> None:
        """Batches and offsets must be those of committed progress records."""
        for flow in sorted({each.flow for each in self._told}):
            final = read_final(self._bootstrap_servers, flow, [], [], seconds=_READ_S)
            # A promotion is committed under the number of the last batch, with the offsets of the copy.
            true: dict[int, list[Mapping[int, int]]] = defaultdict(list)
            for batch, offsets in final.progress:
                true[batch].append(offsets.get(self._names.source, {}))
            for each in self._told:
                if each.flow == flow and each.offsets not in true[each.batch]:
                    self._problem(STATUS, f"{each}, but committed was {true[each.batch]}")

    def _problem(self, name: str, text: str) -> None:
        self.problems.append((f"onceflow {name} was wrong", text))

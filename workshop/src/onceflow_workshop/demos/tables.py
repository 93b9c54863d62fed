"""The demo ``tables``: a table is served by two instances, which are killed, and so is the flow that writes it.

generator -> movements -> [balances] -> balances (table) -> two instances of the query server <- askers
                                             \\-> auditor: every answer, against a fold of the topic
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from onceflow.client.deadline import Deadline
from onceflow.errors import OnceflowError
from onceflow.testing.broker import create_topic
from onceflow_workshop.demos import tables_questions as questions
from onceflow_workshop.demos.display import Display, print_result
from onceflow_workshop.demos.generator import Generator, Input
from onceflow_workshop.demos.harness import Service, Supervisor
from onceflow_workshop.demos.reading import GroupLag
from onceflow_workshop.demos.service_files import service_file
from onceflow_workshop.demos.tables_asking import Asker, Stream
from onceflow_workshop.demos.tables_audit import Auditor
from onceflow_workshop.demos.tables_check import Change, Offsets
from onceflow_workshop.demos.tables_data import Movements, wrong_rows
from onceflow_workshop.demos.tables_questions import Question
from onceflow_workshop.demos.tables_report import Killed, answers_table, kills_table, lines, silences
from onceflow_workshop.demos.workplace import workplace

SERVICE = service_file("balances-api/balances_api.py")
PARTITIONS: Mapping[str, int] = {"movements": 4, "statements": 2, "rejected": 2}
_TABLE_PARTITIONS = 4  # as many as the source has
_RATE = 300  # movements a second
_SESSION_S = 6  # no broker allows less, unless it is told to
_LOOK_S, _ANSWER_S = 0.5, 2.0
_COMPARED_S = 30.0
_NOTICED_S = 1.0  # until somebody who is asked does not think any more that a dead instance lives


@dataclass(frozen=True)
class TablesChoices:
    """Options of the command.

    Args:
        seconds: how long the table is asked and the processes are killed.
        kills: how often the flow's driver is killed, and how often an instance.
    """

    seconds: float = 50.0
    seed: int = 0
    kills: int = 3
    bootstrap_servers: str | None = None
    timeout_s: float = 600.0


class Tables:
    """One run of the demo.

    Args:
        folder: for logs, local state and copies.
        deadline: for the whole run.
    """

    def __init__(self, choices: TablesChoices, bootstrap_servers: str, folder: Path, deadline: Deadline) -> None:
        self.choices = choices
        self.servers = bootstrap_servers
        self.folder = folder
        self.deadline = deadline
        self.suffix = f"-{uuid.uuid4().hex[:6]}"
        self.topics = {name: name + self.suffix for name in PARTITIONS}
        self.table = f"balances{self.suffix}"
        ports = _free_ports(2)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.flow = self._flow()
        self.instances = [self._instance(f"instance-{port}", port) for port in ports]
        self.movements = Movements(choices.seed)
        self.auditor = Auditor(bootstrap_servers, self.table, _TABLE_PARTITIONS)
        self.askers: list[Asker] = []
        self.streams: list[Stream] = []
        self.kills: list[Killed] = []
        self._changed: deque[tuple[str, str]] = deque(maxlen=4)  # keys and the positions after their changes
        self._enough = threading.Event()
        self._generator = Generator(bootstrap_servers, self.topics, self._inputs())
        self._rng = random.Random(f"kills-{choices.seed}")

    def run(self) -> dict[str, Any]:
        """Run the demo and return its verdict, as it is printed."""
        totals = {"seconds": int(self.choices.seconds), "kills": 2 * self.choices.kills}
        with Display(totals) as display, contextlib.ExitStack() as stack:
            display.say(f"seed {self.choices.seed}, brokers {self.servers}")
            for name, topic in self.topics.items():
                create_topic(self.servers, topic, PARTITIONS[name])
            stack.callback(self._end_threads)
            self._generator.start()
            supervisor = stack.enter_context(Supervisor([self.flow]))
            supervisor.run(lambda: self.flow.batch > 0, self.deadline)
            self.auditor.start()
            for instance in self.instances:
                supervisor.add(instance)
            supervisor.run(_now_and_then(self._served), self.deadline)
            display.say(f"table {self.table} is served at {' and '.join(self.urls)}")
            self._ask_all()
            began_at = time.monotonic()
            supervisor.run(lambda: self._kill_some(time.monotonic() - began_at, display), self.deadline)
            display.say("the last movements are written")
            self._enough.set()
            with contextlib.closing(GroupLag(self.servers, self.flow.flow, self._sources())) as lag:
                supervisor.run(_now_and_then(lambda: self._read(lag)), self.deadline)
            display.say("all movements are committed; the last answers are compared")
            self._ask_last(supervisor)
            supervisor.stop()
        return self.report()

    # ---- processes -----------------------------------------------------------------------------------

    def _flow(self) -> Service:
        state = self.folder / "state"
        command = [sys.executable, str(SERVICE), "--bootstrap-servers", self.servers, f"--suffix={self.suffix}"]
        return Service(self.table, [*command, "--state-dir", str(state)], (), self.folder, state=state / self.table)

    def _instance(self, name: str, port: int) -> Service:
        state = self.folder / name
        command = [sys.executable, "-m", "onceflow.cli.main", "table", "serve", self.table]
        command += ["--bootstrap-servers", self.servers, "--instances", f"{self.table}-servers", "--copies", "2"]
        command += [
            "--peer-secret-file",
            str(self._peer_secret()),
            "--port",
            str(port),
            "--session-timeout",
            f"{_SESSION_S}s",
            "--no-access-log",
        ]
        return Service(name, [*command, "--state-dir", str(state)], (), self.folder, state=state)

    def _peer_secret(self) -> Path:
        """The file by which the instances recognise each other."""
        found = self.folder / "peer-secret.txt"
        if not found.exists():
            found.touch(mode=0o600)
            found.write_text(secrets.token_urlsafe(32) + "\n")
        return found

    def _served(self) -> bool:
        """Whether both instances have up-to-date copies of all partitions."""
        for url in self.urls:
            if _get(f"{url}/ready") is None or (found := _get(f"{url}/tables/{self.table}")) is None:
                return False
            if any(sorted(each["instances"]) != sorted(self.urls) for each in found["partitions"]):
                return False
        return True

    def _kill_some(self, passed_s: float, display: Display) -> bool:
        """Kill the flow and an instance in turns, each when it is well again. Returns whether it is over."""
        self._check()
        display.count(seconds=int(passed_s), kills=len(self.kills))
        for each in self.kills:
            if each.back_s is None and self._back(each):
                each.back_s = time.monotonic() - each.at
        planned = 2 * self.choices.kills
        if len(self.kills) == planned:
            return passed_s >= self.choices.seconds and all(each.back_s is not None for each in self.kills)
        number, of_instance = divmod(len(self.kills), 2)
        due_s = self.choices.seconds * (len(self.kills) + 0.3) / planned
        # An instance may die while the flow is down, but not while the other one lacks a copy.
        if passed_s >= due_s and all(each.back_s is not None for each in self.kills[of_instance::2]):
            self._kill(self.instances[(number + self.choices.seed) % 2] if of_instance else self.flow, display)
        return False

    def _kill(self, victim: Service, display: Display) -> None:
        # At the last kill at the latest, the disk is lost, too.
        loses = len(self.kills) >= 2 * (self.choices.kills - 1) or self._rng.random() < 0.3
        self.kills.append(Killed(victim.flow, time.monotonic(), loses))
        victim.kill(loses_state=loses)
        display.say(f"{victim.flow}: SIGKILL" + (", local state deleted" if loses else ""))

    def _back(self, killed: Killed) -> bool:
        if killed.name == self.flow.flow:
            return bool(deaths := self.flow.deaths) and deaths[-1].at > killed.at and deaths[-1].back_s is not None
        return time.monotonic() - killed.at > _NOTICED_S and self._served()

    def _sources(self) -> dict[str, int]:
        return {self.topics["movements"]: PARTITIONS["movements"]}

    def _read(self, lag: GroupLag) -> bool:
        """Whether the flow has committed all movements."""
        self._check()
        found = lag.read() if self._generator.check() else None
        return found is not None and found[0] == found[1]

    def _check(self) -> None:
        """Raise an error if a thread has ended."""
        self._generator.check()
        self.auditor.check()
        for each in self._asking:
            if each.problem is not None:
                raise OnceflowError(
                    f"{each.name} has ended by itself",
                    detail=f"{type(each.problem).__name__}: {each.problem}",
                    next_step="report this to onceflow, with the logs",
                ) from each.problem

    # ---- questions -----------------------------------------------------------------------------------

    def _inputs(self) -> Iterator[Input]:
        """Movements at a steady rate. Where the last one of each account is will be asked for."""
        began_at = time.monotonic()
        for number, each in enumerate(self.movements, 1):
            yield Input("movements", each.account.encode(), each.value, None if each.amount is None else each.account)
            if self._enough.wait(max(0.0, began_at + number / _RATE - time.monotonic())):
                return

    def _ask_all(self) -> None:
        kinds: Sequence[tuple[Callable[[random.Random], Question | None], float]] = (
            (questions.one_key, 0.01),
            (questions.one_key, 0.01),
            (questions.many_keys, 0.03),
            (questions.a_range, 0.05),
            (questions.all_rows, 0.5),
            (questions.a_count, 0.1),
            (self._own, 0.005),
        )
        for n, (next_one, pause_s) in enumerate(kinds):
            self.askers.append(self._asker(self.urls, next_one, pause_s, n))
        for urls in (self.urls, self.urls[::-1]):
            self.streams.append(Stream(urls, self.table, self._teller()))
        for each in self._asking:
            each.start()

    @property
    def _asking(self) -> list[Asker | Stream]:
        return [*self.askers, *self.streams]

    def _asker(
        self, urls: Sequence[str], next_one: Callable[[random.Random], Question | None], pause_s: float, n: int
    ) -> Asker:
        rng = random.Random(f"asker-{n}-{self.choices.seed}")
        return Asker(urls, self.table, next_one, self.auditor.answers, pause_s, rng)

    def _teller(self) -> Callable[[Offsets | Change, str], None]:
        """What a new stream of changes tells goes to the auditor."""
        found = self.auditor.stream()

        def tell(what: Offsets | Change, position: str) -> None:
            found.append(what)
            if isinstance(what, Change):
                self._changed.append((what.key, position))

        return tell

    def _own(self, rng: random.Random) -> Question | None:
        """A key that has just changed, at the position of the change: who has written it must find it."""
        try:
            key, position = self._changed.pop()
        except IndexError:
            return None
        return questions.key_of(key, "own writes", position)

    def _ask_last(self, supervisor: Supervisor) -> None:
        """Every instance, for the whole table at its end."""
        for each in self.askers:
            each.stop()
        for each in self.askers:
            each.join()
        until = time.monotonic() + _COMPARED_S

        def compared() -> bool:
            return self.auditor.check() or time.monotonic() > until

        supervisor.run(compared, self.deadline)
        end = ".".join(str(self.auditor.fold.ends[partition]) for partition in range(_TABLE_PARTITIONS))
        last = questions.all_rows(kind="at the end", least=f"{self.table}:{end}")
        asked = [self._asker([url], _once(last), 0.0, n) for n, url in enumerate(self.urls)]
        self.askers += asked
        for each in asked:
            each.start()
        supervisor.run(lambda: all(each.figures.answered for each in asked) and compared(), self.deadline)

    def _end_threads(self) -> None:
        self._enough.set()
        self._generator.leave.set()
        threads = [*self._asking, self.auditor]
        for each in threads:
            each.stop()
        for thread in (*threads, self._generator):
            if thread.is_alive():
                thread.join(5.0)

    # ---- the verdict ---------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Print what was found; the last line."""
        figures = [each.figures for each in self._asking]
        silences(self.kills, [each.figures for each in self.askers if each.figures.kind not in _NOT_ALWAYS])
        found = lines(figures, self.auditor.checked)
        rows = self.auditor.fold.now()
        total = sum(row["balance"] for row in rows.values())
        problems = [*self._problems(), *wrong_rows(self.movements, self._generator.origins, rows)]
        print_result([answers_table(found), kills_table(self.kills)], problems)
        keys = next(each for each in found if each.kind == "key")
        wrong = sum(each.checked.wrong for each in found)
        return {
            "demo": "tables",
            "in": self._generator.delivered,
            "answers": sum(each.checked.answers for each in found),
            "wrong": wrong,
            "stale": sum(each.checked.stale for each in found),
            "newer": sum(each.checked.newer for each in found),
            "refused": sum(each.refused for each in found),
            "missing_cents": self.movements.sum - total,
            "p50_ms": None if keys.p50_ms is None else round(keys.p50_ms, 1),
            "p99_ms": None if keys.p99_ms is None else round(keys.p99_ms, 1),
            "longest_silence_s": round(max((each.silent_s for each in self.kills), default=0.0), 2),
            "kills": len(self.kills),
            "seconds": round(self.deadline.seconds - self.deadline.remaining, 1),
            "seed": self.choices.seed,
            "verdict": "failed" if problems or wrong else "passed",
        }

    def _problems(self) -> Iterator[str]:
        for kind, checked in self.auditor.checked.items():
            yield from (f"{kind}: {example}" for example in checked.examples)
        for each in self._asking:
            yield from each.figures.problems[:5]
            if not each.figures.answered:
                yield f"{each.figures.kind}: nothing was answered"
        if not self.auditor.check():
            yield f"not everything could be compared: streams lack {self.auditor.behind} changes"


#: Kinds that are not asked all the time: changes and the end have their own.
_NOT_ALWAYS = ("own writes", "at the end")


def run(choices: TablesChoices) -> dict[str, Any]:
    """Run the demo; the result is what its last line says. Leaves nothing behind unless it fails.

    Raises:
        OnceflowError: it could not be brought to its end; the logs are kept.
    """
    deadline = Deadline(choices.timeout_s, "the demo tables")
    with workplace(choices.bootstrap_servers) as place:
        tables = Tables(choices, place.servers, place.folder, deadline)
        result = tables.run()
        place.end(result, [*tables.topics.values(), tables.table, f"{tables.table}-internal"])
        return result


def _now_and_then(condition: Callable[[], bool]) -> Callable[[], bool]:
    """A condition that costs something is looked at less often than ten times a second."""
    looked_at = 0.0

    def look() -> bool:
        nonlocal looked_at
        if time.monotonic() - looked_at < _LOOK_S:
            return False
        looked_at = time.monotonic()
        return condition()

    return look


def _once(question: Question) -> Callable[[random.Random], Question | None]:
    """Asks a question, and then nothing."""
    left = [question]
    return lambda _: left.pop() if left else None


def _get(url: str) -> Any:
    """The document at a URL; None: there is none now."""
    try:
        with urlopen(url, timeout=_ANSWER_S) as response:
            return json.load(response)
    except (OSError, ValueError):
        return None


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]

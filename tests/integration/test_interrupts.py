"""Ctrl-C of every command: exit code 130, one line at most on stderr, no traceback, and nothing is half done.

A proxy in front of the broker holds everything back from one request on: the command waits there when it gets SIGINT.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from confluent_kafka import KafkaException

import onceflow
from onceflow.broker.local import LocalBroker
from onceflow.cli.main import cli
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.network import REQUEST, Network
from onceflow_workshop.testing.proxy import Proxy, proxied_broker

sys.path.insert(0, str(Path(__file__).parent))
try:
    from command_world import ARGUMENTS, CommandWorld
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long]

#: Commands that can wait for brokers for long: they take a connection. They are interrupted at requests to them.
CONNECTING = {label.split(" --")[0] for label in ARGUMENTS} | {"doctor", "table serve"}
_SECONDS = 60  # doctor starts a session of Spark before it asks brokers
#: Kafka's number of the request that ends a transaction.
END_TXN = 26
#: Commands that start processes of their own.
STARTING = {"broker start", "chaos", "bench", "demo"}
#: Commands that end by themselves, soon.
SHORT = {"broker status", "broker stop", "completion", "new", "setup"}
#: Commands that change several things in one transaction.
TRANSACTIONS = [
    "fork",
    "parked drop",
    "parked retry",
    "progress import",
    "progress import --state delete",
    "promote",
    "reset",
    "reset --to",
    "reset --to --state delete",
    "table repartition",
]


class Stall(Network):
    """Holds everything back from the ``nth`` request on, or from the ``nth`` one with an API key."""

    def __init__(self, proxy: Proxy, nth: int, api_key: int | None) -> None:
        super().__init__(0, [])
        self._proxy, self._left, self._api_key = proxy, nth, api_key
        self._lock, self._over = threading.Lock(), False
        self.reached = threading.Event()

    def decide(self, api_key: int, direction: str) -> None:
        with self._lock:
            if self._over or direction != REQUEST or self._api_key not in (None, api_key):
                return
            self._left -= 1
            if self._left == 0:
                self._proxy.pause()
                self.reached.set()

    def end(self) -> None:
        """A last request of a command that has ended holds nothing back any more."""
        with self._lock:
            self._over = True


class Forks:
    """Processes of commands, see ``command_forks.py``."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("command_forks.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._folder = folder
        self.out, self.err = folder / "stdout", folder / "stderr"

    def _ask(self, line: str) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, arguments: list[str], stdin: str = "") -> int:
        given = self._folder / "stdin"
        given.write_text(stdin)
        for file in (self.out, self.err):
            file.write_text("")  # what an earlier one has said
        files = {"stdin": str(given), "stdout": str(self.out), "stderr": str(self.err)}
        return self._ask(json.dumps({"arguments": arguments, **files}))

    def wait(self, pid: int, seconds: float) -> int:
        killer = threading.Timer(seconds, os.kill, (pid, signal.SIGABRT))
        killer.start()
        try:
            return self._ask(f"wait {pid}")
        finally:
            killer.cancel()

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()


@dataclass
class Bench:
    """A broker behind a proxy, and what commands find there."""

    direct: str
    through: str
    proxy: Proxy
    forks: Forks
    commands: CommandWorld

    def interrupted(
        self, words: list[str], nth: int, *, goes_on: bool = False, api_key: int | None = None
    ) -> tuple[int, str]:
        """Exit code and stderr of a command that gets SIGINT while its ``nth`` request is held back. 0: it has fewer.

        Args:
            goes_on: what was held back goes on after the signal. Otherwise the broker never gets it.
            api_key: count requests of this kind only.
        """
        stall = Stall(self.proxy, nth, api_key)
        self.proxy.faults(stall)
        try:
            stdin = '{"value": "x"}\n' if words[0] == "produce" else ""
            pid = self.forks.start([*words, "--bootstrap-servers", self.through], stdin)
            ended: list[int] = []
            waiter = threading.Thread(target=lambda: ended.append(self.forks.wait(pid, _SECONDS)))
            waiter.start()
            wait_until(lambda: stall.reached.wait(0.01) or ended, _SECONDS, f"{words} sends its request {nth}, or ends")
            if not ended:
                os.kill(pid, signal.SIGINT)
                if goes_on:
                    self.proxy.resume()
            waiter.join()
            return ended[0], self.forks.err.read_text()
        finally:
            stall.end()
            self.proxy.faults(None)
            self.proxy.cut_all()
            self.proxy.resume()

    def state(self, label: str) -> tuple[Any, ...]:
        """What is committed of a row: positions in progress and in the group, and live rows by topic and partition."""
        names = self.commands.names[label]
        flow, table = names["FLOW"], names["TABLE"]
        flows = [flow, names["NEW"]] if label in ("fork", "promote") else [flow]
        last = {seen.key: seen.value for seen in independent.read_topic(self.direct, PROGRESS_TOPIC)}
        records = [json.loads(last.get(name.encode()) or "null") for name in flows]
        topics = [table, f"{table}-internal"] if "parked" not in label else [names["PARKED"], names["RETRY"]]
        there = self.commands.topics(label)
        live: dict[tuple[str, int, bytes | None], bytes | None] = {}
        for topic in topics:
            seen = independent.read_topic(self.direct, topic) if topic in there else []
            live |= {(topic, each.partition, each.key): each.value for each in seen}
        places = sorted(str(place) for place, value in live.items() if value is not None)
        positions = [record and record["offsets"] for record in records]
        return positions, independent.committed_offsets(self.direct, flow), places


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    with proxied_broker(folder / "broker") as (direct, through, proxy):
        forks = Forks(folder)
        commands = CommandWorld(direct, folder)
        yield Bench(direct, through, proxy, forks, commands)
        forks.close()
        for producer in commands.left_open:
            with contextlib.suppress(KafkaException):  # a command has aborted it
                producer.abort_transaction(30)


def check(code: int, said: str, trace: str = "Traceback") -> None:
    """It says what it has done so far, and that it was interrupted."""
    assert code == 130, said
    assert said.splitlines()[-1] == "onceflow: interrupted", said
    assert trace not in said


def test_each_command_is_known() -> None:
    """A new command has to be put into one of the lists."""

    def leaves(group: click.Group, *path: str) -> Iterator[str]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from leaves(command, *path, name)
            else:
                yield " ".join((*path, name))

    found = {name.split()[0] if name.split()[0] in STARTING else name for name in leaves(cli)}
    assert found == CONNECTING | STARTING | SHORT


@pytest.mark.parametrize("label", ARGUMENTS)
def test_waiting_for_a_broker(bench: Bench, label: str) -> None:
    check(*bench.interrupted(bench.commands.words(label), 4))


@pytest.mark.parametrize("label", ["reset --to --state delete", "table repartition"])
def test_in_the_middle_of_a_transaction(bench: Bench, label: str) -> None:
    """It is aborted, and the next call does all of it."""
    before = bench.state(label)
    check(*bench.interrupted(bench.commands.words(label), 25, goes_on=True))
    assert bench.state(label) == before
    assert bench.interrupted(bench.commands.words(label), 1000)[0] == 0
    assert bench.state(label) != before


@pytest.mark.parametrize("label", ["fork", "progress import", "promote", "reset", "reset --to", "table repartition"])
def test_while_a_transaction_is_committed(bench: Bench, label: str) -> None:
    """It says that the outcome is not known, and how to look. `test_at_each_request` looks itself."""
    code, said = bench.interrupted(bench.commands.words(label), 1, api_key=END_TXN, goes_on=True)
    check(code, said)
    flow = bench.commands.names[label]["NEW" if label == "fork" else "FLOW"]
    assert f"onceflow: Ctrl-C came while the change of flow {flow} was being committed" in said
    assert f"`onceflow status {flow}` shows" in said


@pytest.mark.parametrize("label", ["parked drop", "parked retry"])
def test_while_parked_records_are_changed(bench: Bench, label: str) -> None:
    """As above."""
    code, said = bench.interrupted(bench.commands.words(label), 1, api_key=END_TXN, goes_on=True)
    check(code, said)
    topic = bench.commands.names[label]["PARKED"]
    assert f"onceflow: Ctrl-C came while the change of topic {topic} was being committed" in said
    assert f"`onceflow parked list {topic}` shows" in said


def test_the_doctor(bench: Bench) -> None:
    check(*bench.interrupted(["doctor"], 4))


@pytest.mark.parametrize(
    "words, said",
    [
        (["status", "--watch", "0.2"], "LAST COMMIT"),
        (["consume", "TOPIC", "--follow"], "row-"),
        (["table", "tail", "TABLE", "--from-start", "--state-dir", "FOLDER"], "row-"),
    ],
    ids=lambda given: "" if isinstance(given, str) else " ".join(given[:2]),
)
def test_without_an_end(bench: Bench, words: list[str], said: str) -> None:
    """Ctrl-C is their only end, so there is no message."""
    names = bench.commands.names["consume"] | {"TABLE": bench.commands.names["table tail"]["TABLE"]}
    pid = bench.forks.start([*(names.get(word, word) for word in words), "--bootstrap-servers", bench.direct])
    wait_until(lambda: said in bench.forks.out.read_text(), 20, lambda: bench.forks.err.read_text())
    os.kill(pid, signal.SIGINT)
    assert bench.forks.wait(pid, 20) == 130
    left = [line for line in bench.forks.err.read_text().splitlines() if line and not line.startswith("Following")]
    assert left == []


def test_a_server(bench: Bench) -> None:
    """Requests that are under way are answered first."""
    names = bench.commands.names["table tail"]
    words = ["table", "serve", names["TABLE"], "--port", "0", "--state-dir", names["FOLDER"]]
    pid = bench.forks.start([*words, "--bootstrap-servers", bench.direct])
    wait_until(lambda: "Serving" in bench.forks.out.read_text(), 20, lambda: bench.forks.err.read_text())
    address = bench.forks.out.read_text().split(" at ")[1].split()[0]
    wait_until(lambda: httpx.get(f"{address}/health").status_code == 200, 20, "the server answers")
    os.kill(pid, signal.SIGINT)
    assert bench.forks.wait(pid, 20) == 0
    assert "Traceback" not in bench.forks.err.read_text()


def on_a_terminal(words: list[str], said: str) -> tuple[int, str]:
    """Exit code and output of a command on a terminal; Ctrl-C is pressed when it has said something."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "onceflow.cli.main", *words], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output = ""
    with contextlib.suppress(OSError):  # the end of a terminal
        while said not in output:
            output += os.read(ours, 4096).decode()
        process.send_signal(signal.SIGINT)
        while some := os.read(ours, 4096):
            output += some.decode()
    os.close(ours)
    return process.wait(20), output


def test_the_terminal_is_left_in_order(bench: Bench) -> None:
    code, output = on_a_terminal(["status", "--watch", "--bootstrap-servers", bench.direct], "LAST COMMIT")
    assert code == 130
    hidden, shown = output.rfind("\x1b[?25l"), output.rfind("\x1b[?25h")
    assert 0 <= hidden < shown, "the cursor is there again"


@pytest.mark.long
@pytest.mark.parametrize(
    "words, seconds",
    [
        (["broker", "start", "--data-dir", "FOLDER"], 2.0),
        (["demo", "deposits", "--records", "2000"], 4.0),
        (["demo", "deposits", "--records", "200000"], 25.0),
        (["bench", "sink", "--records", "100000", "--output", "FOLDER/results"], 20.0),
        (["bench", "latency", "--output", "FOLDER/results"], 15.0),
        (["chaos", "--seconds", "60"], 20.0),
    ],
    ids=lambda given: "" if isinstance(given, float) else " ".join(given[:2]),
)
def test_nothing_is_left_behind(tmp_path: Path, words: list[str], seconds: float) -> None:
    """As a terminal does it: the signal goes to the whole group of processes, in the middle of the work."""
    given = [word.replace("FOLDER", str(tmp_path)) for word in words]
    process = subprocess.Popen(
        [sys.executable, "-m", "onceflow.cli.main", *given],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    # Workers of PySpark may print a traceback when Spark ends. There is none of onceflow's own code.
    ours = str(Path(onceflow.__file__).parent)
    check(process.returncode, said, ours if words[0] == "bench" else "Traceback")
    left = [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in command_of(each)]
    assert left == [], [command_of(each) for each in left]
    if words[0] == "broker":  # what is half made is no obstacle
        with LocalBroker(tmp_path) as broker:
            assert broker.status().ready


def command_of(file: Path) -> str:
    """The command line of a process; empty: it has ended."""
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.long
@pytest.mark.parametrize("label", ARGUMENTS)
def test_at_each_request(bench: Bench, label: str) -> None:
    """All or nothing of a transaction: also when Ctrl-C comes while it is committed."""
    states = [bench.state(label)] if label in TRANSACTIONS else []
    for nth in range(1, 200):
        code, said = bench.interrupted(bench.commands.words(label), nth, goes_on=label in TRANSACTIONS)
        if label in TRANSACTIONS:
            states.append(bench.state(label))
        if code == 0 or "exists already" in said:  # the topic was created by the call before, which asked for more then
            break
        check(code, said)
    assert nth > 4
    assert all(state in (states[0], states[-1]) for state in states), states

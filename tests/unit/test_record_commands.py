"""`onceflow produce`, `consume` and `topic` without Kafka: which cluster, which lines, and what they say."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from onceflow.admin.records import topic_records
from onceflow.broker import process
from onceflow.broker.config import Cluster, Node
from onceflow.broker.folder import Folder
from onceflow.cli.connection import LAST_RESORT, VARIABLE, default_servers
from onceflow.cli.interrupts import interruptible
from onceflow.cli.main import cli
from onceflow.client.offsets import EARLIEST, LATEST
from onceflow.errors import BadRecordError, DeadlineExceededError, OptionError
from onceflow.state.api.record import Record

# ---- which cluster ---------------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ONCEFLOW_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "broker"


def test_the_cluster_of_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_servers() == LAST_RESORT
    monkeypatch.setenv(VARIABLE, " kafka-1:9092,kafka-2:9092 ")
    assert default_servers() == "kafka-1:9092,kafka-2:9092"
    monkeypatch.setenv(VARIABLE, "")
    assert default_servers() == LAST_RESORT


def test_the_local_broker_when_it_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(1, home / "node-1", 20_123, 20_124)
    node.data_dir.mkdir(parents=True)
    Folder(home).write(Cluster("cluster", "4.3.1", (node,)))
    with pytest.raises(OptionError, match=r"The local broker \(127.0.0.1:20123\) is stopped") as caught:
        default_servers()  # what listens at Kafka's usual address may be somebody else's
    assert "onceflow broker start" in caught.value.next_step
    node.pid_file.write_text(json.dumps({"pid": os.getpid(), "started": process._start_time(os.getpid())}))
    assert default_servers() == "127.0.0.1:20123"
    monkeypatch.setenv(VARIABLE, "kafka:1")
    assert default_servers() == "kafka:1"


# ---- produce ---------------------------------------------------------------------------------------------


class FakeWriter:
    """Takes records of at most 100 bytes."""

    made: list[FakeWriter]
    unconfirmed = 0
    failure: BaseException | None = None

    def __init__(self, cluster: Any, topic: str) -> None:
        self.settings, self.topic = cluster.settings, topic
        self.records: list[Record] = []
        FakeWriter.made.append(self)

    @property
    def written(self) -> int:
        return len(self.records)

    def check(self, record: Record) -> None:
        if len(record.value or b"") > 100:
            raise BadRecordError("the record takes 101 bytes, the topic at most 100", topic=self.topic)

    def write(self, records: Sequence[Record]) -> None:
        self.unconfirmed = len(records)
        if self.failure is not None:
            raise self.failure
        self.unconfirmed = 0
        self.records += records


@pytest.fixture(autouse=True)
def _fake_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWriter.made = []
    monkeypatch.setattr(topic_records, "TopicWriter", FakeWriter)


def produce(lines: bytes, *arguments: str) -> tuple[Result, list[Record]]:
    answer = CliRunner().invoke(cli, ["produce", "t", "--bootstrap-servers", "localhost:1", *arguments], input=lines)
    return answer, [record for writer in FakeWriter.made for record in writer.records]


@pytest.mark.parametrize(
    "arguments, lines, expected",
    [
        ([], b"a:1\n\nb\r\nlast", [(None, b"a:1"), (None, b""), (None, b"b"), (None, b"last")]),
        (["--key-separator", ":"], b"a:1\nb:2:3\n", [(b"a", b"1"), (b"b", b"2:3")]),
        (["--json"], b'{"key": "a", "value": {"n": 1}}\n\n{"value": null}\n', [(b"a", b'{"n":1}'), (None, None)]),
        ([], b"", []),
    ],
)
def test_lines_become_records(arguments: list[str], lines: bytes, expected: list[tuple[Any, Any]]) -> None:
    answer, records = produce(lines, *arguments, "--option", "client.id=me")
    assert answer.exit_code == 0, answer.output
    assert [(record.key, record.value) for record in records] == expected
    said = "1 record" if len(expected) == 1 else f"{len(expected)} records"
    assert answer.stdout == f"{said} written to t.\n"
    assert FakeWriter.made[0].settings.options == {"client.id": "me"}


@pytest.mark.parametrize(
    "bad, why",
    [
        (b"no separator", "there is no ':' between a key and a value"),
        (b"k:" + b"x" * 101, "the record takes 101 bytes"),
    ],
)
def test_a_bad_line_is_named_and_what_was_written(bad: bytes, why: str) -> None:
    # More than is read at once, so that numbers have to go on.
    good = [b"key-%d:%s" % (n, b"v" * 90) for n in range(20_000)]
    answer, records = produce(b"\n".join([*good, bad, b"k:v"]), "--key-separator", ":")
    assert answer.exit_code == 1
    assert isinstance(answer.exception, BadRecordError)
    text = str(answer.exception)
    assert text.startswith(f"Line 20001 cannot be written: {why}")
    assert f"the line is {bad[:60]!r}" in text
    assert "; 20,000 records of the lines before it are written\n" in text
    assert [record.key for record in records] == [b"key-%d" % n for n in range(20_000)]


def test_what_may_have_been_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWriter, "failure", DeadlineExceededError("Gave up", detail="no leader"))
    answer, _ = produce(b"a\nb\n")
    assert isinstance(answer.exception, DeadlineExceededError)
    assert answer.exception.detail == "no leader; 0 records written before; some of the next 2 may be written, too"


def test_an_interrupt_tells_what_may_have_been_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWriter, "failure", KeyboardInterrupt())
    answer, _ = produce(b"a\nb\n")
    assert answer.exit_code == 1
    assert "0 records written to t; some of the next 2 may be written, too.\n" in answer.stderr


@pytest.mark.parametrize("arguments", [["--json", "--key-separator", ":"], ["--key-separator", ""], ["--option", "x"]])
def test_wrong_usage_of_produce(arguments: list[str]) -> None:
    answer, _ = produce(b"a\n", *arguments)
    assert answer.exit_code == 2


# ---- consume ---------------------------------------------------------------------------------------------


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a topic has, in two lots, and how it was asked for."""
    evil = Record(b"\xff", b"a\x1b[2J\nb", "t", [("h\x07", b"\r"), ("n", None)], 7, 0, 3)
    lots = [[Record(b"ada", "ä".encode(), "t", (), 5, 0, 1), Record(None, None, "t", (), -1, 0, 2)], [evil]]
    world: dict[str, Any] = {"lots": lots, "held": {}}

    def read(_: Any, topic: str, *, check: Callable[[], None], **asked: Any) -> Iterator[list[Record]]:
        world["asked"] = (topic, asked)
        yield from world["lots"]

    monkeypatch.setattr(topic_records, "read", read)
    monkeypatch.setattr(topic_records, "stable_offsets", lambda *_: {0: 4})
    monkeypatch.setattr(topic_records, "held_back", lambda *_: world["held"])
    return world


def consume(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["consume", "t", "--bootstrap-servers", "localhost:1", *arguments])


def test_lines_for_people(there: dict[str, Any]) -> None:
    answer = consume()
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert answer.stdout.splitlines() == [
        "ada\tä",
        "null\tnull",
        "b'\\xff'\ta\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b",
    ]
    assert there["asked"] == ("t", {"start": EARLIEST, "partition": None, "follow": False})
    headers = consume("--headers").stdout.splitlines()
    assert headers[0] == "ada\tä\t"
    assert headers[2].endswith("\th\N{REPLACEMENT CHARACTER}=\N{REPLACEMENT CHARACTER}, n=null")


def test_lines_of_json(there: dict[str, Any]) -> None:
    first, second, third = map(json.loads, consume("--json").stdout.splitlines())
    assert first == {
        "topic": "t",
        "partition": 0,
        "offset": 1,
        "timestamp_ms": 5,
        "key": "ada",
        "value": "ä",
        "headers": [],
    }
    assert (second["key"], second["value"], second["timestamp_ms"]) == (None, None, None)
    assert (third["key_base64"], third["value"]) == ("/w==", "a\x1b[2J\nb")
    assert third["headers"] == [{"name": "h\x07", "value": "\r"}, {"name": "n", "value": None}]


@pytest.mark.parametrize("most, count", [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_no_more_than_asked_for(there: dict[str, Any], most: int, count: int) -> None:
    assert len(consume("--max", str(most), "--follow").stdout.splitlines()) == count


def test_where_it_begins(there: dict[str, Any]) -> None:
    for given, start in (("latest", LATEST), ("17", 17), ("0", 0)):
        assert consume("--from", given, "--partition", "2").exit_code == 0
        assert there["asked"] == ("t", {"start": start, "partition": 2, "follow": False})
    for wrong in ("first", "-3", "²"):
        answer = consume("--from", wrong)
        assert answer.exit_code == 2
        assert "neither earliest nor latest nor an offset" in answer.stderr


def test_what_is_not_shown(there: dict[str, Any]) -> None:
    there["held"] = {1: 12, 3: 1}
    assert consume().stderr.splitlines() == [
        "t-1: 12 offsets not shown, behind an open transaction",
        "t-3: 1 offset not shown, behind an open transaction",
    ]
    there["lots"], there["held"] = [], {}
    answer = consume("--from", "latest")
    assert (answer.exit_code, answer.stdout, answer.stderr) == (0, "", "No committed records in t from latest on.\n")


# ---- topics, and Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["topic", "create"], ["topic", "delete", "--yes"]], ids=["create", "delete"])
def test_internal_topics_are_left_alone(command: list[str]) -> None:
    answer = CliRunner().invoke(cli, [*command, "orders", "__onceflow_progress", "--bootstrap-servers", "localhost:1"])
    assert isinstance(answer.exception, OptionError)
    assert "__onceflow_progress is an internal topic" in str(answer.exception)


def test_an_interrupt_that_was_swallowed_is_not_forgotten() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as check:
        check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_confirmation_without_a_terminal_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import click

    from onceflow.cli import main as entry

    @click.command()
    def ask() -> None:
        click.confirm("Sure?", abort=True, err=True)

    monkeypatch.setattr(entry, "cli", ask)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        entry.main([])
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("not confirmed, nothing was done (without a terminal, give --yes)\n")

"""`onceflow topic`, `produce` and `consume` on a real Kafka, checked with librdkafka."""

from __future__ import annotations

import base64
import json
import random
import signal
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from subprocess import Popen
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer

from onceflow.cli.main import cli, main
from onceflow.errors import OptionError, UnknownTopicError
from onceflow.testing import independent

pytestmark = pytest.mark.integration

Call = Callable[..., Result]
Command = Callable[..., AbstractContextManager[Popen[str]]]


@pytest.fixture
def call(onceflow_broker: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A command on the broker of the tests, which the environment names."""
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", onceflow_broker)

    def run(*arguments: str, lines: str | bytes = b"", fails: bool = False) -> Result:
        answer = CliRunner().invoke(cli, arguments, input=lines)
        assert answer.exit_code == (1 if fails else 0), answer.output + repr(answer.exception)
        return answer

    return run


# ---- topics ----------------------------------------------------------------------------------------------


def test_topics_come_and_go(call: Call) -> None:
    one, two = f"one-{uuid.uuid4().hex[:8]}", f"two-{uuid.uuid4().hex[:8]}"
    made = call("topic", "create", one, two, "--partitions", "3", "--config", "cleanup.policy=compact")
    assert made.stdout == f"Topic {one} created with 3 partitions.\nTopic {two} created with 3 partitions.\n"
    again = call("topic", "create", one, "another", fails=True)
    assert isinstance(again.exception, OptionError)
    assert f"Topic {one} exists already, with 3 partitions; no topic was created" in str(again.exception)
    assert call("topic", "create", one, "--if-not-exists").stdout == f"Topic {one} exists already, with 3 partitions.\n"

    listed = [json.loads(line) for line in call("topic", "list", "--json").stdout.splitlines()]
    assert {"topic": one, "partitions": 3} in listed
    assert "another" not in {each["topic"] for each in listed}
    assert not [each for each in listed if each["topic"].startswith("__")]
    assert f"\n{one} " in call("topic", "list").stdout

    call("produce", one, "--key-separator", ":", lines="a:1\na:2\nb:3\n")
    told = json.loads(call("topic", "describe", one, "--json").stdout)
    assert told["settings"] == {"cleanup.policy": "compact"}
    assert [each["partition"] for each in told["partitions"]] == [0, 1, 2]
    assert sum(each["end_offset"] - each["first_offset"] for each in told["partitions"]) == 3
    assert all(each["replicas"] == each["in_sync"] == [each["leader"]] for each in told["partitions"])
    first, setting, columns, *rows = call("topic", "describe", one).stdout.splitlines()
    assert (first, setting, columns.split()[0]) == (f"{one}: 3 partitions", "cleanup.policy=compact", "PARTITION")
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]

    gone = call("topic", "delete", one, "never-made", "--yes", fails=True)
    assert isinstance(gone.exception, UnknownTopicError)  # and so nothing is deleted
    assert "check the name" in gone.exception.next_step
    assert call("topic", "delete", one, two, "--yes").stdout == f"Topic {one} deleted.\nTopic {two} deleted.\n"
    with pytest.raises(AssertionError, match="UnknownTopicError"):
        call("topic", "describe", one)


@pytest.mark.parametrize(
    "arguments",
    ["consume T", "peek T", "produce T", "topic describe T", "topic create T", "topic create new --config a=T",
     "topic delete T --yes", "table get T key", "table describe T", "status T", "transactions describe T",
     "parked list T", "topic list --option client.id=T", "topic list --bootstrap-servers T:9092"],
)  # fmt: skip
def test_an_argument_that_is_not_utf8(
    onceflow_broker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    """Python has surrogates for its bytes, which no request can have."""
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", onceflow_broker)
    with pytest.raises(SystemExit) as ended:
        main([each.replace("T", "t\udce4") for each in arguments.split()])
    told = capsys.readouterr().err
    assert ended.value.code in (1, 2)
    assert "Traceback" not in told
    assert r"t\udce4" in told


def test_a_question_without_standard_input(
    onceflow_broker: str, make_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    topic = make_topic("kept", 1)
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", onceflow_broker)
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it if it is closed
    with pytest.raises(SystemExit) as ended:
        main(["topic", "delete", topic])
    assert ended.value.code == 1
    assert capfd.readouterr().err == "onceflow: not confirmed, nothing was done (without a terminal, give --yes)\n"


@pytest.mark.parametrize("command", ["produce", "consume", "describe", "delete"])
def test_a_name_that_is_nearly_right(call: Call, make_topic: Callable[..., str], command: str) -> None:
    topic = make_topic("Clicks_of_people", 1)
    wrong = topic.lower().replace("_", "-")
    group = ["topic"] if command in ("describe", "delete") else []
    answer = call(*group, command, wrong, fails=True)
    assert isinstance(answer.exception, UnknownTopicError)
    text = str(answer.exception)
    assert text.startswith(f"Topic {wrong!r} does not exist")
    create = f"create it: `onceflow topic create {wrong} --partitions N`"
    then = "check the name: `onceflow topic list` shows the topics" if command == "delete" else create
    assert f"did you mean {topic}? If not, {then}" in text


# ---- produce ---------------------------------------------------------------------------------------------


def test_keys_go_where_the_java_client_puts_them(
    call: Call, onceflow_broker: str, make_topic: Callable[..., str]
) -> None:
    mine, theirs = make_topic("mine", 7), make_topic("theirs", 7)
    sent = [(b"key-%d" % (n % 50), b"value %d" % n) for n in range(1000)]
    lines = b"".join(key + b"=>" + value + b"\n" for key, value in sent)
    assert call("produce", mine, "--key-separator", "=>", lines=lines).stdout == f"1,000 records written to {mine}.\n"
    independent.fill(onceflow_broker, theirs, sent)  # partitioner=murmur2_random

    def where(topic: str) -> dict[int, list[tuple[Any, Any]]]:
        found: dict[int, list[tuple[Any, Any]]] = {}
        for seen in independent.read_topic(onceflow_broker, topic):
            found.setdefault(seen.partition, []).append((seen.key, seen.value))
        return found

    assert where(mine) == where(theirs)


def test_records_without_keys_are_spread(call: Call, onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    topic = make_topic("round_robin", 3)
    for _ in range(2):
        call("produce", topic, lines="1\n2\n3\n")
    assert independent.end_offsets(onceflow_broker, topic) == {(topic, 0): 2, (topic, 1): 2, (topic, 2): 2}


def test_lines_before_a_bad_one_are_written(call: Call, onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    topic = make_topic("limited", 2, max_message_bytes=1000)
    noise = base64.b64encode(random.Random(7).randbytes(3000))  # it does not become much smaller by compression
    answer = call("produce", topic, lines=b"1\n2\n" + noise + b"\n3\n", fails=True)
    text = str(answer.exception)
    assert text.startswith("Line 3 cannot be written: the record takes 4,0")
    assert "the topic at most 1,000 (max.message.bytes)" in text
    assert "2 records of the lines before it are written" in text
    assert {seen.value for seen in independent.read_topic(onceflow_broker, topic)} == {b"1", b"2"}
    call("produce", topic, lines=b"y" * 930)  # as large as it may be, nearly
    call("produce", topic, lines=b"z" * 5000)  # what is compressed may be larger


@pytest.mark.long
def test_input_is_written_as_it_comes(command: Command, onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    """A producer that waits for the next line has written the last one; Ctrl-C tells how many there are."""
    topic = make_topic("slow", 1)
    where = ["--bootstrap-servers", onceflow_broker]
    with command("consume", topic, "--follow", *where) as reader, command("produce", topic, *where) as writer:
        assert writer.stdin
        assert reader.stdout
        for line in ("first\n", "second\n"):
            writer.stdin.write(line)
            writer.stdin.flush()
            assert reader.stdout.readline() == f"null\t{line}"
        counts = (
            f"2 records written to {topic}.",
            f"1 record written to {topic}; some of the next 1 may be written, too.",
        )
        # The reader can see a record before the writer has its acknowledgement.
        for running, said in ((writer, [f"{each}\nonceflow: interrupted\n" for each in counts]), (reader, [""])):
            running.send_signal(signal.SIGINT)
            assert running.wait(30) == 130
            assert running.stderr
            assert running.stderr.read().replace("\n\n", "\n").lstrip() in said


# ---- consume ---------------------------------------------------------------------------------------------


def test_only_what_is_committed(
    command: Command, call: Call, onceflow_broker: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic("committed", 1)
    options: dict[str, Any] = {"bootstrap.servers": onceflow_broker, "transactional.id": topic, "log_level": 0}
    producer = Producer(options)
    producer.init_transactions(30)
    for value, commit in (("aborted", False), ("committed", True)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    producer.begin_transaction()
    producer.produce(topic, "open")
    producer.flush(30)
    independent.fill(onceflow_broker, topic, [(None, b"behind it")])
    # Markers are written a little after the commit has returned.
    for _ in range(100):
        answer = call("consume", topic)
        if answer.stdout:
            break
    assert answer.stdout == "null\tcommitted\n"
    assert answer.stderr == f"{topic}-0: 2 offsets not shown, behind an open transaction\n"
    with command("consume", topic, "--follow", "--max", "3", "--bootstrap-servers", onceflow_broker) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == "null\tcommitted\n"
        producer.commit_transaction(30)
        assert reader.stdout.read() == "null\topen\nnull\tbehind it\n"
        assert reader.wait(30) == 0


def test_a_place_and_a_number(call: Call, make_topic: Callable[..., str]) -> None:
    topic = make_topic("places", 2)
    call("produce", topic, lines="".join(f"{n}\n" for n in range(10)))  # even ones to partition 0
    values = [json.loads(line)["value"] for line in call("consume", topic, "--json").stdout.splitlines()]
    assert values == [*"02468", *"13579"]
    places = {
        ("--partition", "1", "--from", "3"): "79",
        ("--from", "4"): "89",
        ("--max", "6"): "024681",
        ("--from", "99"): "",
        ("--from", "latest"): "",
    }
    for arguments, expected in places.items():
        found = call("consume", topic, "--json", *arguments).stdout.splitlines()
        assert [json.loads(line)["value"] for line in found] == [*expected], arguments
    answer = call("consume", topic, "--partition", "2", fails=True)
    assert f"Topic {topic} has no partition 2" in str(answer.exception)


def test_from_topic_to_topic(call: Call, onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    """What consume --json prints, produce --json takes: keys, values, headers and timestamps are the same."""
    first, second = make_topic("first", 2, retention_ms=-1), make_topic("second", 3, retention_ms=-1)
    producer = Producer({"bootstrap.servers": onceflow_broker, "log_level": 0})
    headers: list[Any] = [("a", b"\xff"), ("b", None), ("a", "ä".encode())]
    sent = [(b"k", b"v"), (None, None), (b"\xff", b"\0\n"), ("ä".encode(), b""), (b"", b'{"a": 1}')]
    for key, value in sent:
        producer.produce(first, value, key, headers=headers, timestamp=1_700_000_000_000)
    producer.flush(30)
    call("produce", second, "--json", lines=call("consume", first, "--json").stdout)

    def contents(topic: str) -> list[Any]:
        seen = independent.read_topic(onceflow_broker, topic)
        return sorted(((s.key, s.value, s.headers, s.timestamp_ms) for s in seen), key=repr)

    assert contents(second) == contents(first)
    assert {(key, value) for key, value, *_ in contents(first)} == set(sent)


@pytest.mark.long
def test_a_reader_that_goes_away(
    command: Command, call: Call, onceflow_broker: str, make_topic: Callable[..., str]
) -> None:
    """`| head -1`: no error, and no trace of one."""
    topic = make_topic("long", 1)
    call("produce", topic, lines="x" * 100 + "\n")
    call("produce", topic, lines=("x" * 100 + "\n") * 50_000)
    with command("consume", topic, "--bootstrap-servers", onceflow_broker) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == "null\t" + "x" * 100 + "\n"
        reader.stdout.close()
        reader.wait(30)
        assert reader.stderr
        assert reader.stderr.read() == ""

"""`onceflow parked` on a real Kafka: what it shows, what it moves, and that nothing is retried twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer

from onceflow import hooks
from onceflow.admin.records import parked as parking
from onceflow.cli.main import cli
from onceflow.client.settings import ClientSettings
from onceflow.errors import BadRecordError, FencedError, OptionError, UnknownTopicError
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.record import Record
from onceflow.state.engine import dead_letters
from onceflow.state.engine.retry import Retry
from onceflow.testing import independent
from onceflow.testing.faults import fault
from onceflow.testing.processor_driver import ProcessorDriver

pytestmark = pytest.mark.integration

# The broker must not delete what has timestamps of long ago.
KEPT = {"retention_ms": -1}


@dataclass
class Lot:
    """A topic of parked records, and the retry topic that they tell."""

    servers: str
    parked: str
    retry: str

    @property
    def settings(self) -> ClientSettings:
        return ClientSettings(self.servers)

    def park(
        self, *records: tuple[str, bytes | None, bytes | None], producer: Any = None, named: bool = True
    ) -> list[bytes]:
        """Origin, key and value of each; written by a producer that is not onceflow's. Returns their keys.

        Args:
            named: False: with the origins alone as keys, as earlier versions have written them.
        """
        keys = []
        policy = Retry(retry_topic=self.retry, parked_topic=self.parked, permanent={"KeyError"})
        driver = ProcessorDriver(policy)
        given = producer or Producer(
            {"bootstrap.servers": self.servers, "partitioner": "murmur2_random", "log_level": 0}
        )
        for origin, key, value in records:
            headers: list[Any] = [("onceflow.error.class", b"KeyError"), ("onceflow.attempt", b"3"), ("trace", b"x")]
            headers += [] if key is None else [("onceflow.key", key)]
            (found,) = driver.send(origin, value, headers=headers, timestamp_ms=1_700_000_000_000)
            keys.append(found.key.encode() if named else origin.encode())
            given.produce(self.parked, found.value, keys[-1], headers=list(found.headers), timestamp=found.timestamp_ms)
        if producer is None:
            given.flush(30)
        return keys

    def call(self, command: str, *arguments: str) -> Result:
        return CliRunner().invoke(
            cli, ["parked", command, self.parked, *arguments, "--bootstrap-servers", self.servers]
        )

    def origins(self) -> list[str]:
        """What is parked, by the command."""
        answer = self.call("list", "--json")
        assert answer.exit_code == 0, answer.output
        return [json.loads(line)["origin"] for line in answer.stdout.splitlines()]

    def retried(self) -> list[independent.Seen]:
        return independent.read_topic(self.servers, self.retry, decided=True)

    def rows(self) -> list[str]:
        """The origins of what is parked, by a consumer that shares no code with the command."""
        last = {seen.key: seen.value for seen in independent.read_topic(self.servers, self.parked, decided=True)}
        names = [(key or b"").decode() for key, value in last.items() if value is not None]
        return sorted("/".join(name.split("/")[:3]) for name in names)

    def ends(self) -> dict[tuple[str, int], int]:
        return independent.end_offsets(self.servers, self.parked, isolation="read_uncommitted")


@pytest.fixture
def lot(onceflow_broker: str, make_topic: Callable[..., str]) -> Lot:
    return Lot(onceflow_broker, make_topic("parked", 3, cleanup_policy="compact"), make_topic("retry", 4, **KEPT))


MANY = [(f"orders/{n % 3}/{n}", b"key-%d" % n, b"value-%d" % n) for n in range(40)]


def test_list_and_show(lot: Lot) -> None:
    lot.park(*MANY, ("orders/0/100", None, None), ("orders/0/101", b"\xff", b"\xfe"))
    assert lot.origins() == sorted(
        [*(origin for origin, _, _ in MANY), "orders/0/100", "orders/0/101"], key=parking._order
    )
    answer = lot.call("list")
    assert answer.stdout.splitlines()[1] == "orders/0/0           3  permanent  KeyError: "
    shown = json.loads(lot.call("show", "orders/1/7", "--json").stdout)
    assert (shown["key"], shown["value"], shown["attempt"]) == ("key-7", "value-7", 3)
    assert shown["timestamp_ms"] == 1_700_000_000_000
    nulls = json.loads(lot.call("show", "orders/0/100", "--json").stdout)
    assert (nulls["key"], nulls["value"]) == (None, None)
    raw = json.loads(lot.call("show", "orders/0/101", "--json").stdout)
    assert (raw["key_base64"], raw["value_base64"]) == ("/w==", "/g==")


def test_a_record_that_is_not_there_is_told(lot: Lot) -> None:
    lot.park(*MANY[:3])
    before = lot.ends()
    for command in (("show",), ("retry", MANY[0][0]), ("drop", "--yes", MANY[0][0])):
        answer = lot.call(*command, "orders/9/9")
        assert answer.exit_code == 1
        assert isinstance(answer.exception, OptionError)
        assert "orders/9/9 is not parked" in str(answer.exception)
    assert lot.ends() == before
    assert lot.retried() == []


def test_retry_moves_a_record_as_it_was(lot: Lot) -> None:
    lot.park(*MANY)
    answer = lot.call("retry", "orders/1/7", "orders/2/8")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == f"2 records went from {lot.parked} to {lot.retry}.\n"
    found = sorted(lot.retried(), key=lambda seen: seen.value or b"")
    assert [(seen.key, seen.value) for seen in found] == [(b"key-7", b"value-7"), (b"key-8", b"value-8")]
    places = key_partitions(pa.array([seen.key for seen in found], pa.binary()), 4).tolist()
    assert [seen.partition for seen in found] == places
    assert {seen.timestamp_ms for seen in found} == {1_700_000_000_000}
    assert dict(found[0].headers) == {
        "onceflow.error.class": b"KeyError",
        "trace": b"x",
        "onceflow.origin.topic": b"orders",
        "onceflow.origin.partition": b"1",
        "onceflow.origin.offset": b"7",
        "onceflow.retry.topic": lot.retry.encode(),
    }
    assert lot.rows() == sorted({origin for origin, _, _ in MANY} - {"orders/1/7", "orders/2/8"})
    assert set(lot.origins()) == set(lot.rows())


def test_null_key_and_null_value_survive(lot: Lot) -> None:
    lot.park(
        ("orders/0/1", None, None), ("orders/0/2", b"", b""), ("orders/0/3", None, b"x"), ("orders/0/4", b"k", None)
    )
    assert lot.call("retry", "--all").exit_code == 0
    found = {dict(seen.headers)["onceflow.origin.offset"]: (seen.key, seen.value) for seen in lot.retried()}
    assert found == {b"1": (None, None), b"2": (b"", b""), b"3": (None, b"x"), b"4": (b"k", None)}
    assert lot.rows() == []


def test_all_are_retried_once(lot: Lot) -> None:
    lot.park(*MANY, named=False)
    lot.park(MANY[5], named=False)  # written twice is there once
    assert lot.call("retry", "--all").stdout == f"40 records went from {lot.parked} to {lot.retry}.\n"
    answer = lot.call("retry", "--all")
    assert (answer.exit_code, answer.stdout) == (0, f"Nothing is parked in {lot.parked}.\n")
    assert sorted(seen.value or b"" for seen in lot.retried()) == sorted(value or b"" for _, _, value in MANY)
    assert lot.origins() == lot.rows() == []


def test_records_of_one_origin_are_several(lot: Lot) -> None:
    """Such as rows that were made of one record; one of them was parked by an earlier version."""
    lot.park(("orders/0/1", b"a", b"1"), named=False)
    _, second = lot.park(("orders/0/1", b"b", b"2"), ("orders/0/1", b"b", b"2"))
    lot.park(MANY[0])
    assert lot.rows() == lot.origins() == ["orders/0/0", "orders/0/1", "orders/0/1", "orders/0/1"]
    assert second.decode() in lot.call("list").stdout
    assert len(lot.call("show", "orders/0/1", "--json").stdout.splitlines()) == 3
    assert lot.call("retry", second.decode()).exit_code == 0
    assert [seen.value for seen in lot.retried()] == [b"2"]
    assert lot.call("retry", "orders/0/1").stdout == f"2 records went from {lot.parked} to {lot.retry}.\n"
    assert sorted(seen.value or b"" for seen in lot.retried()) == [b"1", b"2", b"2"]
    assert lot.rows() == lot.origins() == ["orders/0/0"]


def test_the_same_record_twice(lot: Lot) -> None:
    lot.park(*MANY[:3])
    assert lot.call("retry", MANY[0][0], MANY[0][0]).exit_code == 0
    answer = lot.call("retry", MANY[0][0])
    assert answer.exit_code == 1
    assert "was retried or dropped already" in str(answer.exception)
    assert len(lot.retried()) == 1


def test_what_fails_again_is_parked_again(lot: Lot) -> None:
    lot.park(MANY[0])
    assert lot.call("retry", MANY[0][0]).exit_code == 0
    lot.park(MANY[0])
    assert lot.origins() == [MANY[0][0]]
    assert lot.call("retry", MANY[0][0]).exit_code == 0
    assert len(lot.retried()) == 2


def test_retry_somewhere_else(lot: Lot, make_topic: Callable[..., str]) -> None:
    elsewhere = make_topic("elsewhere", 1, **KEPT)
    lot.park(*MANY[:3])
    assert lot.call("retry", MANY[0][0], "--to", elsewhere).exit_code == 0
    assert len(independent.read_topic(lot.servers, elsewhere, decided=True)) == 1
    assert lot.retried() == []


def test_drop(lot: Lot) -> None:
    lot.park(*MANY)
    assert lot.call("drop", "--yes", *[origin for origin, _, _ in MANY[:10]]).exit_code == 0
    assert lot.rows() == sorted(origin for origin, _, _ in MANY[10:])
    answer = lot.call("drop", "--yes", "--all")
    assert answer.stdout == f"30 records dropped from {lot.parked}.\n"
    assert (lot.rows(), lot.retried()) == ([], [])


def begun(lot: Lot) -> Producer:
    """A producer in a transaction of its own."""
    producer = Producer(
        {
            "bootstrap.servers": lot.servers,
            "partitioner": "murmur2_random",
            "log_level": 0,
            "transactional.id": lot.parked,
        }
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    return producer


def test_what_was_aborted_is_not_there(lot: Lot) -> None:
    producer = begun(lot)
    lot.park(*MANY[:5], producer=producer)
    producer.flush(30)
    producer.abort_transaction(30)
    assert lot.origins() == []
    producer.begin_transaction()
    lot.park(*MANY[5:7], producer=producer)
    producer.commit_transaction(30)
    assert lot.origins() == [MANY[6][0], MANY[5][0]]


@pytest.mark.long
def test_what_was_done_behind_an_open_transaction_is_seen(lot: Lot) -> None:
    """The flow that parks has a transaction open, and behind its beginning the record was dropped."""
    (name,) = lot.park(MANY[0], named=False)
    producer = begun(lot)
    lot.park((MANY[0][0], b"key", b"aborted"), producer=producer, named=False)
    producer.flush(30)
    independent.fill(lot.servers, lot.parked, [(name, None)])
    # A consumer that reads as far as it may now does not see the tombstone.
    seen = independent.read_topic(lot.servers, lot.parked)
    assert [each.value for each in seen] == [b"value-0"]
    ended = threading.Timer(2.0, producer.abort_transaction, [30])
    ended.start()
    answer = lot.call("retry", MANY[0][0])
    ended.join()
    assert "was retried or dropped already" in str(answer.exception)
    assert lot.retried() == []


def test_of_two_at_once_the_first_is_fenced(lot: Lot) -> None:
    """The second starts when the first has written everything and not committed yet."""
    lot.park(*MANY[:3])
    steps: list[str] = []
    answers: list[Result] = []

    def second(step: str, **_: Any) -> None:
        steps.append(step)
        if steps == ["init", "write"]:
            answers.append(lot.call("retry", MANY[0][0], MANY[1][0]))

    forget = hooks.observe(second)
    try:
        with pytest.raises(FencedError, match="Another command"):
            parking.retry(lot.settings, lot.parked, [MANY[0][0]])
    finally:
        forget()
    assert answers[0].exit_code == 0, answers[0].output
    assert sorted(seen.value or b"" for seen in lot.retried()) == [b"value-0", b"value-1"]
    assert lot.origins() == [MANY[2][0]]


@pytest.mark.long_but("write-False")
@pytest.mark.faults
@pytest.mark.parametrize("step, done", [("init", False), ("write", False), ("end", True)])
def test_killed_it_has_done_all_or_nothing(lot: Lot, tmp_path: Path, step: str, done: bool) -> None:
    lot.park(*MANY)
    marker = tmp_path / "killed"
    command = [sys.executable, "-m", "onceflow.cli.main", "parked", "retry", lot.parked, "--all"]
    command += ["--bootstrap-servers", lot.servers]
    rule = fault(step, "kill", once_file=str(marker))
    subprocess.run(command, env={**os.environ, hooks.VARIABLE: rule}, capture_output=True, timeout=60, check=False)
    assert marker.exists()
    answer = lot.call("retry", "--all")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.startswith("Nothing" if done else "40 records")
    assert sorted(seen.value or b"" for seen in lot.retried()) == sorted(value or b"" for _, _, value in MANY)
    assert lot.rows() == []


def test_a_record_that_is_too_large_for_the_retry_topic_stays_and_so_do_all(
    lot: Lot, make_topic: Callable[..., str]
) -> None:
    """It is in the last partition: others have been written when it is found, and are taken back."""
    small = make_topic("small", 1, max_message_bytes=1000, **KEPT)
    origins = [f"orders/9/{n}" for n in range(100)]
    last = origins[key_partitions(pa.array(origins), 3).tolist().index(2)]
    lot.park(*MANY, (last, b"k", random.Random(7).randbytes(5000)), named=False)  # compression does not help
    for _ in range(10):  # until others were on their way when it was found
        answer = lot.call("retry", "--all", "--to", small)
        assert isinstance(answer.exception, BadRecordError)
        written = independent.read_topic(lot.servers, small, isolation="read_uncommitted")
        if written:
            break
    assert written
    assert independent.read_topic(lot.servers, small, decided=True) == []
    assert len(lot.origins()) == len(MANY) + 1
    assert lot.call("retry", "--all").exit_code == 0


def test_an_ordinary_topic_of_dead_letters(lot: Lot, make_topic: Callable[..., str]) -> None:
    """Its keys are those of the records: every letter is listed, also those that share a key, and none is changed."""
    lot.parked = make_topic("failed", 3)
    failed = [Record(b"key-%d" % (n % 3), b"value-%d" % n, "orders", (), 7, 0, n) for n in range(50)]
    failed += [Record(None, None, "orders", (), 7, 1, 0), Record(b"orders/7/7", None, "orders", (), 7, 1, 1)]
    producer = Producer({"bootstrap.servers": lot.servers, "log_level": 0})
    for record in failed:
        letter = dead_letters.dead_letter(record, lot.parked, ValueError("never"))
        producer.produce(lot.parked, letter.value, letter.key, headers=list(letter.headers))
    producer.flush(30)

    origins = [*(f"orders/0/{n}" for n in range(50)), "orders/1/0", "orders/1/1"]
    assert lot.origins() == origins
    listed = lot.call("list")
    assert listed.stdout.splitlines()[1].split() == ["orders/0/0", "1", "-", "ValueError:", "never"]
    assert listed.stderr.startswith(f"52 dead letters not replayed; `onceflow parked replay {lot.parked} --all")
    shown = json.loads(lot.call("show", "orders/0/17", "--json").stdout)
    assert (shown["key"], shown["value"], shown["retry_topic"]) == ("key-2", "value-17", None)
    assert "onceflow.error.stack" in {header["name"] for header in shown["headers"]}
    assert json.loads(lot.call("show", "orders/1/0", "--json").stdout)["key"] is None

    before = lot.ends()
    for command in (["retry", "--all"], ["retry", "orders/0/17"], ["drop", "--yes", "--all"]):
        answer = lot.call(*command, *(["--to", lot.retry] if command[0] == "retry" else []))
        assert isinstance(answer.exception, OptionError), answer.output
        assert "is an ordinary dead letter" in str(answer.exception)
        assert f"onceflow parked replay {lot.parked}" in answer.exception.next_step
    assert lot.ends() == before
    assert lot.retried() == []


def test_a_topic_of_other_records_is_no_list_of_dead_letters(lot: Lot, make_topic: Callable[..., str]) -> None:
    lot.parked = make_topic("out", 1)
    independent.fill(lot.servers, lot.parked, [(b"k", b"v"), (b"k", b"w")])
    answer = lot.call("list")
    assert isinstance(answer.exception, OptionError), answer.output
    assert "None of the 2 records" in str(answer.exception)


def test_topics_that_are_not_there(lot: Lot) -> None:
    lot.park(MANY[0])
    answer = lot.call("retry", "--all", "--to", "nowhere-at-all")
    assert isinstance(answer.exception, UnknownTopicError)
    assert lot.origins() == [MANY[0][0]]
    with pytest.raises(UnknownTopicError):
        parking.read(lot.settings, "nowhere-at-all")


def test_large_records(lot: Lot) -> None:
    large = [(f"orders/0/{n}", b"k%d" % n, bytes([n]) * 300_000) for n in range(40)]
    lot.park(*large)
    assert lot.call("retry", "--all").exit_code == 0
    assert sorted(seen.value or b"" for seen in lot.retried()) == sorted(value for _, _, value in large)


def test_the_record_that_the_flow_parks_is_the_one_that_is_read(lot: Lot) -> None:
    """`park` above stands for the flow; both come from the same processor."""
    driver = ProcessorDriver(Retry(retry_topic=lot.retry, parked_topic=lot.parked, permanent={"KeyError"}))
    (record,) = driver.send_many([Record("orders/0/1", b"v", headers=[("onceflow.error.class", b"KeyError")])])
    lot.park(("orders/0/1", None, b"v"))
    (found,) = parking.read(lot.settings, lot.parked, ["orders/0/1"])
    assert (found.origin, found.value, found.retry_topic) == ("orders/0/1", record.value, lot.retry)
    assert found.name.rpartition("/")[0] == record.key.rpartition("/")[0] == "orders/0/1"

"""``onceflow parked replay``: dead letters go back to where their records were read, each once, whatever happens."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

import onceflow
from onceflow import hooks
from onceflow.admin.records import letter_replay
from onceflow.admin.records.writer import Writer
from onceflow.cli.main import cli
from onceflow.errors import FencedError, OptionError, UnknownTopicError
from onceflow.state.api.record import Record
from onceflow.state.api.timers import Timer
from onceflow.state.engine import dead_letters
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.faults import fault
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

STAMP = 1_700_000_000_000


@dataclass
class Letters:
    """Two sources, and the topic of dead letters of a flow that reads them."""

    servers: str
    failed: str
    orders: str
    visits: str
    sent: list[tuple[str, int, bytes | None, bytes | None]] = field(default_factory=list)

    def fail(self, count: int, error: Exception | None = None, *, source: str = "", key: bool = True) -> None:
        """Write letters with onceflow's headers, by a producer that is not onceflow's."""
        producer = Producer({"bootstrap.servers": self.servers, "log_level": 0})
        source = source or self.orders
        for _ in range(count):
            n = len(self.sent)
            own = Record(
                b"key-%d" % (n % 7) if key else None, b"value-%d" % n, source, [("own", b"%d" % n)], STAMP + n, n % 3, n
            )
            letter = dead_letters.dead_letter(own, self.failed, error or KeyError("missing"))
            producer.produce(
                self.failed, letter.value, letter.key, headers=list(letter.headers), timestamp=letter.timestamp_ms
            )
            self.sent.append((source, n % 3, own.key, own.value))
        producer.flush(30)

    def call(self, *arguments: str) -> Result:
        return CliRunner().invoke(
            cli, ["parked", "replay", self.failed, *arguments, "--bootstrap-servers", self.servers]
        )

    def replay(self, *arguments: str) -> Any:
        answer = self.call(*arguments, "--json")
        assert answer.exit_code == 0, (answer.output, answer.exception)
        return json.loads(answer.stdout)

    def there(self, topic: str) -> list[independent.Seen]:
        return independent.read_topic(self.servers, topic, decided=True)

    def check(self, wanted: list[tuple[str, int, bytes | None, bytes | None]] | None = None) -> None:
        """Each record is back, once, in its partition, and in the order in which they failed."""
        wanted = self.sent if wanted is None else wanted
        for topic in (self.orders, self.visits):
            found = [(topic, seen.partition, seen.key, seen.value) for seen in self.there(topic)]
            assert Counter(found) == Counter(each for each in wanted if each[0] == topic)


@pytest.fixture
def letters(onceflow_broker: str, make_topic: Callable[..., str]) -> Letters:
    kept = {"retention_ms": -1}
    names = [make_topic(name, count, **kept) for name, count in (("failed", 2), ("orders", 3), ("visits", 3))]
    return Letters(onceflow_broker, *names)


def test_all_go_back_once(letters: Letters) -> None:
    letters.fail(40)
    letters.fail(10, source=letters.visits)
    letters.fail(3, ValueError("other"), key=False)
    would = letters.replay("--all", "--dry-run")
    assert would["dry_run"] is True
    assert letters.there(letters.orders) == []
    done = letters.replay("--all")
    wanted = [
        {"to": letters.orders, "error": "KeyError", "records": 40},
        {"to": letters.orders, "error": "ValueError", "records": 3},
        {"to": letters.visits, "error": "KeyError", "records": 10},
    ]
    assert would["replayed"] == done["replayed"] == sorted(wanted, key=lambda each: (each["to"], each["error"]))
    letters.check()
    # As they were: with their own headers and timestamps, and the origin, by which a flow knows them.
    one = next(seen for seen in letters.there(letters.orders) if seen.value == b"value-5")
    headers = dict(one.headers)
    assert (one.timestamp_ms, headers.pop("own"), headers.pop("onceflow.retry.topic")) == (
        STAMP + 5,
        b"5",
        letters.orders.encode(),
    )
    origin = {"topic": letters.orders.encode(), "partition": b"2", "offset": b"5"}
    assert headers == {f"onceflow.origin.{name}": each for name, each in origin.items()}
    again = letters.replay("--all")
    assert (again["replayed"], again["replayed_before"]) == ([], 53)
    letters.check()
    # What fails later is a new letter, also if it is the same record.
    letters.fail(2)
    assert letters.replay("--all")["replayed_before"] == 53
    letters.check()
    listed = CliRunner().invoke(
        cli, ["parked", "list", letters.failed, "--json", "--bootstrap-servers", letters.servers]
    )
    assert all(json.loads(line)["replayed"] for line in listed.stdout.splitlines())
    told = letters.call("--all")
    assert told.stdout.startswith(f"Nothing to replay among 55 letters of {letters.failed}.")
    assert "55 letters: replayed before." in told.stderr


def test_filters(letters: Letters) -> None:
    letters.fail(10)
    letters.fail(10, ValueError("no number"))
    letters.fail(5, ValueError("no date"), source=letters.visits)
    sent = letters.sent
    chosen = []
    for arguments, low, high in (
        (("--cause", "ValueError", "--message", "number"), 10, 20),
        (("--source", letters.visits), 20, 25),
        ((f"{letters.orders}/0/3", f"{letters.orders}/1/4"), 3, 5),
        (("--cause", "KeyErr"), 0, 0),
    ):
        letters.replay(*arguments)
        chosen += sent[low:high]
        letters.check(chosen)
    letters.replay("--all")
    letters.check()


def test_what_cannot_be_replayed(letters: Letters) -> None:
    letters.fail(3)
    timer = dead_letters.timer_letter(b"k", Timer("t", 5, "event"), letters.failed, "table-0", ValueError("no"))
    producer = Producer({"bootstrap.servers": letters.servers, "log_level": 0})
    producer.produce(letters.failed, timer.value, timer.key, headers=list(timer.headers))
    producer.produce(
        letters.failed, b"cut", b"k", headers=[("onceflow.error.class", b"E"), ("onceflow.shortened", b"{}")]
    )
    producer.produce(letters.failed, b"nothing of onceflow", b"k")
    producer.produce(letters.failed, b"no origin", b"k", headers=[("onceflow.error.class", b"E")])
    producer.flush(30)
    done = letters.replay("--all")
    assert sorted(done["not_replayed"].values()) == [1, 1, 1, 1]
    assert any("timer" in why for why in done["not_replayed"])
    letters.check()
    assert letters.replay("--cause", "E", "--to", letters.visits)["replayed"] == [
        {"to": letters.visits, "error": "E", "records": 1}
    ]
    for arguments, message in (
        (("nowhere/0/1",), "There is no letter of nowhere/0/1"),
        (("--all", "--to", "not-there"), "'not-there' does not exist"),
    ):
        answer = letters.call(*arguments)
        assert isinstance(answer.exception, (OptionError, UnknownTopicError))
        assert message in str(answer.exception)
    for arguments in ((), ("--all", "--cause", "E")):
        assert letters.call(*arguments).exit_code == 2


def test_parked_records_are_not_replayed(letters: Letters) -> None:
    producer = Producer({"bootstrap.servers": letters.servers, "log_level": 0})
    producer.produce(letters.failed, b"v", f"{letters.orders}/0/1", headers=[("onceflow.error.class", b"E")])
    producer.flush(30)
    answer = letters.call("--all")
    assert isinstance(answer.exception, OptionError)
    assert f"onceflow parked retry {letters.failed}" in answer.exception.next_step


def test_another_topic(letters: Letters, make_topic: Callable[..., str]) -> None:
    """The order of a key stays there, too."""
    letters.fail(60)
    only_ours = make_topic("only-ours", 4, retention_ms=-1)
    letters.replay("--all", "--to", only_ours)
    found = letters.there(only_ours)
    assert Counter(seen.value for seen in found) == Counter(value for *_, value in letters.sent)
    places: dict[bytes | None, set[int]] = {}
    for seen in found:
        places.setdefault(seen.key, set()).add(seen.partition)
    assert all(len(each) == 1 for each in places.values())
    letters.check([])


def test_letters_of_several_flows(letters: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is sent once, whichever flows it has failed in, and noted in the transaction of the first letter."""
    monkeypatch.setattr(letter_replay, "_LETTERS", 2)
    sizes = []
    write = letter_replay._Replay._write

    def noted(self: Any, info: Any, first: Any, all_: Any) -> None:
        sizes.append((len(first), len(all_)))
        write(self, info, first, all_)

    monkeypatch.setattr(letter_replay._Replay, "_write", noted)
    producer = Producer({"bootstrap.servers": letters.servers, "log_level": 0})
    for flow in ("alpha", "beta", "gamma"):
        for n in range(4):
            own = Record(b"k", b"%d" % n, letters.orders, (), STAMP, 1, n)
            letter = dead_letters.dead_letter(own, letters.failed, KeyError("x"), flow)
            producer.produce(letters.failed, letter.value, letter.key, headers=list(letter.headers))
    producer.flush(30)
    assert letters.replay("--flow", "alph")["replayed"] == []
    assert letters.replay("--flow", "alpha", "--dry-run")["replayed"][0]["records"] == 4
    done = letters.replay("--all")
    assert (done["replayed"][0]["records"], done["doubles"], done["causes"]) == (4, 8, {"KeyError": 12})
    assert letters.replay("--all")["replayed_before"] == 12
    assert sizes == [(1, 3)] * 4
    assert [seen.value for seen in letters.there(letters.orders)] == [b"0", b"1", b"2", b"3"]
    told = letters.call("--cause", "KeyErr")
    assert told.stderr.startswith("Their causes: KeyError: 12.")


def test_records_of_a_key_come_back_in_their_order(letters: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch writes letters of records that it cannot decode before others."""
    monkeypatch.setattr(letter_replay, "_LETTERS", 7)
    monkeypatch.setattr(letter_replay, "_SORTED_LETTERS", 30)
    chance = random.Random(5)
    producer = Producer({"bootstrap.servers": letters.servers, "log_level": 0})
    order = list(range(100))
    for start in range(0, 100, 10):  # out of order within ten
        part = order[start : start + 10]
        chance.shuffle(part)
        order[start : start + 10] = part
    for n in order:
        own = Record(b"k", b"%d" % n, letters.orders, (), STAMP, 1, n)
        letter = dead_letters.dead_letter(own, letters.failed, KeyError("x"))
        producer.produce(letters.failed, letter.value, letter.key, headers=list(letter.headers), partition=0)
    producer.flush(30)
    letters.replay("--all")
    assert [int(seen.value or b"") for seen in letters.there(letters.orders)] == list(range(100))


@pytest.mark.parametrize("forged", ["whole", "topic alone", "garbage"])
def test_headers_of_whoever_wrote_the_record_are_not_believed(letters: Letters, forged: str) -> None:
    """A record goes back where it was read, not where its producer says."""
    named = {"topic": letters.visits, "partition": "0", "offset": "1"}
    if forged == "topic alone":
        named = {"topic": letters.visits}
    elif forged == "garbage":
        named = {"topic": "../..", "partition": "-1", "offset": "x"}
    headers = [
        (f"onceflow.{what}.{name}", each.encode()) for what in ("origin", "error") for name, each in named.items()
    ]
    producer = Producer({"bootstrap.servers": letters.servers, "log_level": 0})
    for n, place in enumerate([(letters.orders, 2, 7), (None, None, None)]):
        own = Record(b"k", b"%d" % n, place[0], headers, STAMP, place[1], place[2])
        letter = dead_letters.dead_letter(own, letters.failed, KeyError("x"))
        producer.produce(letters.failed, letter.value, letter.key, headers=list(letter.headers))
    producer.flush(30)
    done = letters.replay("--all")
    assert done["replayed"] == [{"to": letters.orders, "error": "KeyError", "records": 1}]
    assert [why for why in done["not_replayed"] if "do not say where its record was read" in why]
    (back,) = letters.there(letters.orders)
    assert (back.partition, back.value) == (2, b"0")
    if forged != "whole":
        assert dict(back.headers)["onceflow.origin.topic"] == letters.orders.encode()
    assert letters.there(letters.visits) == []


def test_a_topic_that_was_created_again(letters: Letters) -> None:
    """Its offsets begin again: nothing of it was replayed."""
    letters.fail(5)
    letters.replay("--all")
    admin = AdminClient({"bootstrap.servers": letters.servers})
    admin.delete_topics([letters.failed])[letters.failed].result(30)
    create_topic(letters.servers, letters.failed, 2, {"retention.ms": "-1"})
    letters.fail(5)
    assert letters.replay("--all")["replayed_before"] == 0
    letters.check()


@pytest.mark.long_but("steps2-25", "steps4-50")
@pytest.mark.faults
@pytest.mark.parametrize(
    "steps, replayed",
    [(["init"], 0), (["write"], 0), (["commit"], 25), (["end"], 60), (["commit", "write", "commit"], 50)],
)
def test_killed(letters: Letters, steps: list[str], replayed: int, tmp_path: Path) -> None:
    """In the middle of its transactions, too: the next one continues."""
    letters.fail(60)
    program = (
        "import sys; from onceflow.admin.records import letter_replay; letter_replay._LETTERS = 25; "
        "from onceflow.cli.main import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "parked", "replay", letters.failed, "--all"]
    for number, step in enumerate(steps):
        done = tmp_path / f"killed-{number}"
        environment = {**os.environ, hooks.VARIABLE: fault(step, "kill", once_file=str(done))}
        subprocess.run(
            [*command, "--bootstrap-servers", letters.servers],
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.exists()
    # A transaction may be open, and the markers of the last one follow its commit in each partition.
    wait_until(
        lambda: len(independent.read_topic(letters.servers, letters.orders)) == replayed, 30, f"{replayed} are replayed"
    )
    assert letters.replay("--all")["replayed_before"] == replayed
    letters.check()


def test_of_two_at_once_the_first_is_fenced(letters: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    letters.fail(10)
    at = hooks.at

    def second(step: str, **fields: Any) -> None:
        at(step, **fields)
        if step == "write":
            monkeypatch.setattr(hooks, "at", at)
            letters.replay("--all")

    monkeypatch.setattr(hooks, "at", second)
    answer = letters.call("--all")
    assert isinstance(answer.exception, FencedError), answer.output
    letters.check()


def test_without_notes_records_come_twice(letters: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests look for is there: a replay that forgets its notes is broken on purpose."""
    write = Writer.write

    def forgetful(self: Writer, topic: str, partition: int, found: Any) -> None:
        if not topic.endswith(letter_replay.SUFFIX):
            write(self, topic, partition, found)

    monkeypatch.setattr(Writer, "write", forgetful)
    letters.fail(3)
    letters.replay("--all")
    letters.replay("--all")
    with pytest.raises(AssertionError):
        letters.check()


class Doubled(onceflow.Processor):
    """Doubles numbers. With the fault, those that can be divided by three cannot be processed."""

    value = output = state = onceflow.serdes.JSON

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty

    def process(self, key: Any, records: Any, state: Any) -> Any:
        for record in records:
            if self.faulty and record.value % 3 == 0:
                raise KeyError(f"no price for {record.value}")
            state.put((state.get() or 0) + 1)
            yield Record(key, 2 * record.value)


def test_mend_the_flow_and_replay(
    onceflow_spark: Any, letters: Letters, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    """As a user does: a bug makes dead letters, it is mended, and they are replayed. All outputs are there, once."""
    out = make_topic("out", 1)
    table = f"table-{letters.orders}"
    flow = onceflow.Flow(f"flow-{letters.orders}", onceflow_spark, bootstrap_servers=letters.servers)

    def run(faulty: bool) -> None:
        rows = flow.process(
            flow.read(letters.orders, include_headers=True),
            Doubled(faulty),
            table=table,
            on_error="dead-letter",
            dead_letter_topic=letters.failed,
            state_dir=tmp_path / "state",
        )
        query = flow.write(rows, topic=out, once=True).start()
        assert query.awaitTermination(120)

    independent.fill(letters.servers, letters.orders, [(b"k%d" % (n % 5), b"%d" % n) for n in range(90)])
    run(faulty=True)
    assert len(letters.there(out)) == 60
    assert letters.replay("--cause", "KeyError")["replayed"][0]["records"] == 30
    run(faulty=False)
    assert Counter(int(seen.value or b"") for seen in letters.there(out)) == Counter(2 * n for n in range(90))
    assert letters.replay("--all")["replayed"] == []

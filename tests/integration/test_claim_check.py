"""The claim check with a bucket, and in queries: large values do not pass through Kafka, and come back unchanged."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka.admin
import pytest
from click.testing import CliRunner

import onceflow
from onceflow import ClaimCheck, ClaimCheckError, Record
from onceflow.admin.records import record_lines
from onceflow.admin.records.claim_collector import Collector
from onceflow.claim_check import objects as objects_module
from onceflow.claim_check.reference import PREFIX, Reference
from onceflow.cli.main import cli
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.driver.external import refused_rows
from onceflow.driver.record.progress_log import PROGRESS_PARTITIONS
from onceflow.errors import (
    EnvironmentUnusableError,
    OnceflowError,
    OptionError,
    StorageUnavailableError,
    UnknownTopicError,
)
from onceflow.external.sink import RefusedRow
from onceflow.object_storage import Bucket
from onceflow.protocol.progress import (
    PROGRESS_TOPIC,
    CheckpointProgress,
    LocalTable,
    Progress,
    TableProgress,
    encode,
)
from onceflow.state.format import rows
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow_workshop.testing.s3 import S3Server

pytestmark = pytest.mark.integration

DAY_MS = objects_module.DAY_MS


def large(n: int, size: int = 20_000) -> bytes:
    return b"%d " % n * (size // len(b"%d " % n))


def bucket_claim(s3: S3Server, **options: Any) -> ClaimCheck:
    return ClaimCheck(f"s3://{s3.make_bucket()}/claims", above=10_000, storage_options=s3.options, **options)


def objects_of(claim: ClaimCheck) -> set[str]:
    found = claim.objects
    return {name for day in found.days(clock_ms() + 2 * DAY_MS) for name, _ in found.names(day)}


# ---- a bucket ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_values_in_a_bucket(s3: S3Server, tmp_path: Path) -> None:
    claim = bucket_claim(s3)
    value = os.urandom(20 << 20)  # in several parts
    raw = claim.encode(value)
    assert claim.encode(value) == raw
    assert claim.decode(raw) == value
    (tmp_path / "file").write_bytes(value)
    assert claim.put_file(tmp_path / "file") == raw
    claim.get_file(raw, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == value
    other = claim.put_file(Path(__file__))
    (tmp_path / "file").write_bytes(value + b"1")
    assert claim.decode(claim.put_file(tmp_path / "file")) == value + b"1"
    assert objects_of(claim) >= {Reference.parse(raw).name, Reference.parse(other).name}
    assert len(objects_of(claim)) == 3


@pytest.mark.long
def test_missing_and_altered_objects_of_a_bucket(s3: S3Server) -> None:
    claim = bucket_claim(s3)
    raw = claim.encode(large(1))
    path = f"{claim.objects.url.removeprefix('s3://')}/{Reference.parse(raw).name}"
    s3.filesystem().pipe_file(path, large(2))
    with pytest.raises(ClaimCheckError, match="was altered"):
        claim.decode(raw)
    s3.filesystem().rm(path)
    with pytest.raises(ClaimCheckError, match="is missing"):
        claim.decode(raw)


@pytest.mark.long
def test_a_bucket_that_is_not_there(s3: S3Server) -> None:
    claim = bucket_claim(s3)
    raw = claim.encode(large(1))
    elsewhere = ClaimCheck("s3://no-such-bucket/claims", above=10_000, storage_options=s3.options)
    with pytest.raises(StorageUnavailableError, match="There is no store"):
        elsewhere.decode(raw)
    with pytest.raises(StorageUnavailableError, match="cannot be used"):
        elsewhere.encode(large(1))
    options = {**s3.options, "aws_endpoint_url": "http://127.0.0.1:9"}
    refused = ClaimCheck(claim.objects.url, storage_options=options)
    with pytest.raises(StorageUnavailableError) as caught:
        refused.decode(raw)
    assert "test-secret" not in f"{caught.value}{caught.value.__cause__!r}"


_MEMORY = """
import json, os, resource, sys
from pathlib import Path
import onceflow
from onceflow_workshop.testing.s3 import S3Server

def peak():  # of this process: ru_maxrss also has what its parent had
    return next(int(l.split()[1]) * 1024 for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)

url, store, folder = sys.argv[1:]
options = S3Server(url).options if store.startswith("s3") else None
claim = onceflow.ClaimCheck(store, storage_options=options)
claim.encode(os.urandom(20 << 20))  # loads what is needed
base = peak()
raw = claim.put_file(folder + "/large")
claim.get_file(raw, folder + "/got")
files = peak() - base
value = claim.decode(raw)
decoded = peak() - base
del value
value = Path(folder + "/large").read_bytes()
claim.objects.delete([json.loads(raw.partition(b" ")[2])["name"]])
assert claim.encode(value) == raw
print(json.dumps({"files": files, "decoded": decoded, "encoded": peak() - base}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.long
@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_memory_of_large_values(s3: S3Server, tmp_path: Path, kind: str) -> None:
    """100 MB: files in pieces, values in memory once."""
    size = 100_000_000
    store = f"s3://{s3.make_bucket()}/claims" if kind == "bucket" else str(tmp_path / "store")
    with (tmp_path / "large").open("wb") as file:
        for _ in range(100):
            file.write(os.urandom(size // 100))
    found = subprocess.run(
        [sys.executable, "-c", _MEMORY, s3.url, store, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    peaks = json.loads(found.stdout)
    assert peaks["files"] < 0.8 * size
    assert peaks["decoded"] < 1.5 * size
    assert peaks["encoded"] < 2.0 * size


# ---- queries -----------------------------------------------------------------------------------------------


class Keep(onceflow.Processor):
    """Keeps the last value of a key in its state, and yields both."""

    def __init__(self, claim: ClaimCheck) -> None:
        self.value = self.output = self.state = claim

    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            yield Record(key, (state.get() or b"none")[:8] + record.value)
            state.put(record.value)


def run(query: Any) -> None:
    try:
        query.processAllAvailable()
    finally:
        query.stop()


@pytest.mark.long_but("auto")
@pytest.mark.parametrize("engine", ["auto", "tasks"])
def test_a_processor(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], s3: S3Server, tmp_path: Path,
    engine: str,
) -> None:  # fmt: skip
    """By the driver and by tasks: values, outputs and state; a missing object is a dead letter."""
    claim = bucket_claim(s3)
    source, target, dead = make_topic("in", 2), make_topic("out", 3), make_topic("dead", 1)
    raws = [(b"k%d" % (n % 3), claim.encode(large(n))) for n in range(6)]
    claim.objects.delete([Reference.parse(raws[4][1]).name])
    independent.fill(onceflow_broker, source, [*raws, (b"k0", b"small"), (b"k1", None), (b"k2", PREFIX + b"2 ")])
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        outputs = flow.process(
            flow.read(source).where("value is not null"),
            Keep(claim),
            table=f"table-{source}",
            on_error="dead-letter",
            dead_letter_topic=dead,
            state_dir=tmp_path,
        )
        run(flow.write(outputs, topic=target, engine=engine).start())
    seen = independent.read_topic(onceflow_broker, target)
    assert all(len(record.value or b"") < 500 for record in seen)
    got = [claim.decode(record.value or b"") for record in seen if record.key == b"k0"]
    assert got == [b"none" + large(0), large(0)[:8] + large(3), large(3)[:8] + b"small"]
    letters = independent.read_topic(onceflow_broker, dead)
    assert {record.value for record in letters} == {raws[4][1], PREFIX + b"2 "}
    with onceflow.Table(
        f"table-{source}", bootstrap_servers=onceflow_broker, value=claim, state_dir=tmp_path / "view"
    ) as table:
        table.wait_until_current()
        assert table.get(b"k2") == large(5)


@pytest.mark.long
def test_columns_of_a_query(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    """Without a processor: loaded, made larger, stored before the shuffle; then read by a second flow."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    source, target, sizes = make_topic("in", 2), make_topic("out", 3), make_topic("sizes", 1)
    sent = [(b"k%d" % n, claim.encode(large(n)) if n % 2 else b"small %d" % n) for n in range(20)]
    independent.fill(onceflow_broker, source, [*sent, (b"null", None)])
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        twice = claim.load(flow.read(source)).selectExpr("key", "concat(value, value) AS value")
        run(flow.write(claim.store(twice), topic=target).start())
    seen = {record.key: record.value for record in independent.read_topic(onceflow_broker, target)}
    expected = {b"k%d" % n: (large(n) if n % 2 else b"small %d" % n) * 2 for n in range(20)}
    assert {key: None if raw is None else claim.decode(raw) for key, raw in seen.items()} == {**expected, b"null": None}
    assert max(len(raw or b"") for raw in seen.values()) < 500
    with onceflow.Flow(f"flow-{target}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = claim.load(flow.read(target)).selectExpr("key", "string(length(value)) AS value")
        run(flow.write(rows, topic=sizes).start())
    lengths = {
        record.key: int(record.value) for record in independent.read_topic(onceflow_broker, sizes) if record.value
    }
    assert lengths == {key: len(value) for key, value in expected.items()}


def test_a_missing_object_of_a_column_is_looked_for_once(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    source = make_topic("in", 1)
    raw = claim.encode(large(1))
    claim.objects.delete([Reference.parse(raw).name])
    independent.fill(onceflow_broker, source, [(b"k", raw)])
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        query = flow.write(claim.load(flow.read(source)).select("key", "value"), topic=make_topic("out", 1)).start()
        with pytest.raises(ClaimCheckError, match=r"(?s)is missing in .*at offset 0.*collected too early"):
            query.processAllAvailable()
    assert "attempt 1 of 4" not in caplog.text


# ---- collecting ----------------------------------------------------------------------------------------------


@pytest.fixture
def at_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``at_day(-30)``: what is stored from now on was stored that many days ago."""

    def set_(days: int) -> None:
        monkeypatch.setattr(objects_module, "clock_ms", lambda: clock_ms() + days * DAY_MS)

    return set_


def orphans_of(servers: str, claim: ClaimCheck, topics: list[str], days: int = 0) -> set[str]:
    with Collector(
        ClientSettings(servers), claim.objects, topics, older_than_ms=7 * DAY_MS, now_ms=clock_ms() + days * DAY_MS
    ) as collector:
        found = collector.find()
        names = {name for name, _ in collector.orphans()}
        assert found.orphans == len(names)
        return names


def test_what_a_collector_leaves(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """Committed records count, and those of open transactions; aborted ones do not. Young objects stay."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    topic = make_topic("claims", 2)
    at_day(-30)
    names = {
        what: claim.encode(large(n)) for n, what in enumerate(["committed", "embedded", "aborted", "open", "none"])
    }
    at_day(-7)
    young = claim.encode(large(9))
    independent.fill(onceflow_broker, topic, [(b"k", names["committed"]), (b"m", b"\0" + names["embedded"])])
    producers = []
    for what in ("aborted", "open"):
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": onceflow_broker, "transactional.id": f"{topic}-{what}"}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic, names[what], b"k")
        producer.flush(30)
        producers.append(producer)
        if what == "aborted":
            producer.abort_transaction(30)
    expected = {Reference.parse(names[what]).name for what in ("aborted", "none")}
    assert orphans_of(onceflow_broker, claim, [topic]) == expected
    assert orphans_of(onceflow_broker, claim, [topic], days=2) == expected | {Reference.parse(young).name}
    producers[1].commit_transaction(30)
    assert orphans_of(onceflow_broker, claim, [topic]) == expected
    with pytest.raises(UnknownTopicError, match="claimz"):
        orphans_of(onceflow_broker, claim, [topic, topic.replace("claims", "claimz")])


# Every way in which the product can put a reference into a record: key, value and headers of it.
Parts = tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]


def _refused(raw: bytes, *, record: bool = False) -> Record:
    """The dead letter of a row that a database has refused."""
    given = {"key": b"k", "value": raw, "headers": [{"key": "h", "value": b"v"}]} if record else {}
    return refused_rows._letter(RefusedRow({"k": 1, "v": raw}, "IntegrityError", f"no: {raw!r}", given), "dead", [])


def _progress_row(raw: bytes) -> bytes:
    """A progress row with dead letters that are not written yet."""
    progress = Progress("f", 1, {}, {}, 1)
    return refused_rows.progress_row(progress, refused_rows._table([_refused(raw)])).encode()


WAYS: dict[str, Callable[[bytes], Parts]] = {
    "value": lambda raw: (b"k", raw, []),
    "key": lambda raw: (raw, b"v", []),
    "header": lambda raw: (b"k", b"v", [("picture", raw)]),
    "header of a tombstone": lambda raw: (b"k", None, [("picture", raw)]),
    "part of a value": lambda raw: (b"k", b"\0\0" + raw + b"\0", []),
    "entry of a map in a companion topic": lambda raw: (rows.MAP + b"k\0\0m\0\0e", rows.pack(raw, 10**13, 3), []),
    "key of a map in a companion topic": lambda raw: (rows.MAP + b"k\0\0m\0\0" + raw, rows.pack(b"v"), []),
    "dead letter of a record": lambda raw: (b"k", _refused(raw, record=True).value, []),
    "dead letter of a row": lambda raw: (b"k", _refused(raw).value, []),
    "dead letter of a dead letter": lambda raw: (b"k", _refused(_refused(raw).value or b"").value, []),
    "dead letters in a progress row": lambda raw: (b"k", _progress_row(raw), []),
    "line of JSON": lambda raw: (b"k", json.dumps(record_lines.field("value", raw)).encode(), []),
    "base64 of Spark": lambda raw: (b"k", base64.encodebytes(raw).replace(b"\n", b"\r\n"), []),
    "digits of Spark": lambda raw: (b"k", raw.hex().upper().encode(), []),
    "name alone": lambda raw: (b"k", json.dumps({"picture": Reference.parse(raw).name}).encode(), []),
}  # fmt: skip


def test_every_way_in_which_a_reference_is_stored(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """What is referred to in any of them is there after a collection, and what is not is gone."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    topic = make_topic("ways", 1)
    at_day(-30)
    raws = {way: claim.encode(large(n)) for n, way in enumerate(WAYS)}
    held, lost = claim.encode(large(100)), claim.encode(large(101))
    at_day(0)
    raws["in another object"] = claim.encode(held)  # it looks like a reference, so it is stored
    producer = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker})
    for key, value, headers in [*(put(raws[way]) for way, put in WAYS.items()), (b"k", raws["in another object"], [])]:
        producer.produce(topic, value, key, headers=headers)
    assert producer.flush(30) == 0
    with Collector(
        ClientSettings(onceflow_broker), claim.objects, [topic], older_than_ms=7 * DAY_MS, now_ms=clock_ms()
    ) as collector:
        collector.find()
        collector.delete()
    wrong = {way for way, raw in raws.items() if Reference.parse(raw).name not in objects_of(claim)}
    assert wrong == set()
    assert claim.decode(claim.decode(raws["in another object"])) == large(100)
    with pytest.raises(ClaimCheckError, match="is missing"):
        claim.decode(lost)


def test_what_only_begins_like_a_reference(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """An odd value blocks no collection, and is named. One that can be of a newer format is refused with its place."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    topic = make_topic("odd", 1)
    at_day(-30)
    kept, orphan = claim.encode(large(1)), claim.encode(large(2))
    odd = PREFIX + b"1 {}"
    independent.fill(onceflow_broker, topic, [(b"k", b"small"), (b"k", odd), (b"k", kept), (b"k", PREFIX)])
    command = ["claim-check", "collect", "--bootstrap-servers", onceflow_broker, "--store", claim.objects.url]
    command += ["--topic", topic, "--dry-run", "--json"]

    def called(*arguments: str) -> Any:
        return CliRunner().invoke(cli, [*command, *arguments])

    found = called()
    assert found.exit_code == 0, found.output
    named, sums = map(json.loads, found.stdout.splitlines())
    assert named["name"] == Reference.parse(orphan).name
    assert sums["references"] == {topic: 1}
    assert [place.partition(":")[0] for place in sums["not_references"]] == [
        f"record {topic}-0 at offset {offset}" for offset in (1, 3)
    ]
    told = CliRunner().invoke(cli, [each for each in command if each != "--json"])
    assert f"begins like a reference, and is none: record {topic}-0 at offset 1: b'\\xffonce" in told.stderr

    independent.fill(onceflow_broker, topic, [(b"k", PREFIX + b'2 {"object":"' + b"7" * 70 + b'"}')])
    refused = str(called().exception)
    assert f"newer format, in record {topic}-0 at offset 4. Nothing was deleted" in refused
    assert "--no-newer-format" in refused
    sums = json.loads(called("--no-newer-format").stdout.splitlines()[-1])
    assert sums["orphans"] == 1
    assert len(sums["not_references"]) == 3


def test_commands_for_rows(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """A failure anywhere in the command is seen, and so is one that prints no reference any more."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    topic, flow = make_topic("in", 1), "ledger"
    at_day(-30)
    raw = claim.encode(large(1))
    dump = tmp_path / "rows.txt"
    dump.write_text(f"{raw.hex()}\n")
    command = ["claim-check", "collect", "--bootstrap-servers", onceflow_broker, "--store", claim.objects.url]
    command += ["--topic", topic, "--yes"]

    def called(rows: str, *arguments: str) -> Any:
        return CliRunner().invoke(cli, [*command, "--rows", flow, rows, *arguments])

    for failing in (f"cat {dump}-away | sort", f"cat {dump}-away; cat {dump}"):
        failed = called(failing)
        assert isinstance(failed.exception, EnvironmentUnusableError), (failing, failed.output)
        assert "has failed, so nothing is deleted" in str(failed.exception)
    assert "has not read everything" in str(called("yes | head -1").exception)
    assert len(objects_of(claim)) == 1

    worked = called(f"sort {dump} | cat")
    assert worked.exit_code == 0, worked.output
    assert claim.objects.check().referring == (flow,)
    for empty in ("true", "echo '(0 rows)'"):
        refused = called(empty)
        assert isinstance(refused.exception, OptionError), refused.output
        assert f"rows of flow {flow} has printed no reference, although an earlier" in str(refused.exception)
        assert f"--without-rows {flow}" in str(refused.exception)
    assert len(objects_of(claim)) == 1

    dump.write_text("no rows")
    emptied = called(f"cat {dump}", "--without-rows", flow)
    assert emptied.exit_code == 0, emptied.output
    assert objects_of(claim) == set()
    assert claim.objects.check().referring == ()
    assert called(f"cat {dump}").exit_code == 0, "it is known now"

    twice = called(f"cat {dump}", "--rows", flow, "true")
    assert twice.exit_code == 2
    assert "give --rows once for a flow" in twice.output


def test_unreadable_progress_of_another_flow(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """Nobody knows where that flow keeps references: a collection is refused by its name, unless the user vouches."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    topic = make_topic("in", 1)
    flow = f"newer-{topic}"
    at_day(-30)
    claim.encode(large(1))
    write_progress(onceflow_broker)
    independent.fill(onceflow_broker, PROGRESS_TOPIC, [(flow.encode(), b'{"format": 99}')])
    try:
        command = ["claim-check", "collect", "--bootstrap-servers", onceflow_broker, "--store", claim.objects.url]
        command += ["--topic", topic, "--yes"]
        for everything in ([], ["--dry-run"]):
            refused = CliRunner().invoke(cli, [*command, *everything])
            assert isinstance(refused.exception, OptionError), refused.output
            assert f"The progress of flow {flow} cannot be read" in str(refused.exception)
            assert f"--without-rows {flow}" in str(refused.exception)
        assert len(objects_of(claim)) == 1
        assert CliRunner().invoke(cli, [*command, "--without-rows", flow]).exit_code == 0
        assert objects_of(claim) == set()
    finally:
        independent.fill(onceflow_broker, PROGRESS_TOPIC, [(flow.encode(), None)])


def test_progress_in_an_open_transaction(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """A transaction that hangs hides what flows have committed after it; a collection knows of them all the same."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    topic = make_topic("in", 1)
    hanging, hidden = f"hanging-{topic}", f"hidden-{topic}"
    at_day(-30)
    claim.encode(large(1))
    write_progress(onceflow_broker)
    key, value = encode(Progress(hidden, 0, {topic: {0: 0}}, {}, clock_ms(), external="bank:ledger"))
    partition = 0
    producer = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker, "transactional.id": hanging})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(PROGRESS_TOPIC, b"{}", hanging.encode(), partition=partition)
    assert producer.flush(30) == 0
    try:
        plain = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker})
        plain.produce(PROGRESS_TOPIC, value, key, partition=partition)
        assert plain.flush(30) == 0
        with pytest.raises(OptionError, match=f"progress of flow {hanging} cannot be read"):
            orphans_of(onceflow_broker, claim, [topic])
        with (
            pytest.raises(OptionError, match=f"(?s){hidden} may keep references .*it writes bank:ledger"),
            Collector(
                ClientSettings(onceflow_broker), claim.objects, [topic], older_than_ms=DAY_MS, now_ms=clock_ms(),
                without_rows=[hanging],
            ) as collector,
        ):  # fmt: skip
            collector.find()
    finally:
        producer.abort_transaction(30)
        plain.produce(PROGRESS_TOPIC, None, key, partition=partition)
        assert plain.flush(30) == 0


def test_earlier_topics_are_remembered(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """A run over other topics, or over all, forgets none of those that were given before or had references."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    first, added, more = (make_topic(name, 1) for name in ("first", "added", "more"))
    flow, now = f"flow-{first}", clock_ms()
    at_day(-30)
    for topic, n in ((first, 1), (added, 2)):
        independent.fill(onceflow_broker, topic, [(b"k", claim.encode(large(n)))])
    write_progress(onceflow_broker, Progress(flow, 1, {first: {0: 1}}, {}, now, outputs=(added,)))

    def collected(topics: list[str] | None, **options: Any) -> Any:
        age = 7 * DAY_MS
        with Collector(
            ClientSettings(onceflow_broker), claim.objects, topics, older_than_ms=age, now_ms=now, **options
        ) as collector:
            collector.find()
            collector.remember()
        return claim.objects.check()

    try:
        found = collected([first])
        assert (found.topics, found.found) == ((first,), (added,))
        found = collected([more], without=[first])
        assert (found.topics, found.found) == ((more,), (added,)), "what was found stays"
        with pytest.raises(OptionError, match=f"has also read {more}"):
            collected([first])
        found = collected([first, more])
        assert (set(found.topics), found.found) == ({first, more}, (added,))
        others = [name for name in topics_of(onceflow_broker) if name not in (first, added, more)]
        found = collected(None, without=others)
        assert set(found.topics) == {first, more}
        assert set(found.found) == {added}
        found = collected([first, more], without=[added])
        assert found.found == ()
    finally:
        independent.fill(onceflow_broker, PROGRESS_TOPIC, [(flow.encode(), None)])


def topics_of(servers: str) -> list[str]:
    with contextlib.closing(Cluster(ClientSettings(servers))) as cluster:
        return list(cluster.topics(None, Deadline(30, "listing topics")))


def write_progress(servers: str, *progress: Progress) -> None:
    with contextlib.suppress(OnceflowError):
        create_topic(servers, PROGRESS_TOPIC, PROGRESS_PARTITIONS, {"cleanup.policy": "compact"})
    independent.fill(servers, PROGRESS_TOPIC, [encode(each) for each in progress])


def test_what_flows_write_is_read_too_or_nothing_is_deleted(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, at_day: Callable[[int], None]
) -> None:
    """Tables, outputs and letters of flows that read the topics; rows of other systems, which the user reads."""
    claim = ClaimCheck(tmp_path / "store", above=10_000)
    source, out, letters, table, end, other = (make_topic(name, 1) for name in ("in", "out", "dead", "t", "end", "no"))
    companion = f"{table}-internal"
    create_topic(onceflow_broker, companion, 1, {})
    at_day(-30)
    places = (source, out, letters, table, companion, end, other)
    raws = {topic: claim.encode(large(n)) for n, topic in enumerate(places)}
    in_rows = claim.encode(large(50))
    for topic, raw in raws.items():
        independent.fill(onceflow_broker, topic, [(b"k", raw)])
    now, first, second = clock_ms(), f"one-{source}", f"two-{source}"
    flows = [
        Progress(first, 1, {source: {0: 1}}, {}, now, {table: {0: 1}}, outputs=(out,), side_topics={letters: "late"}),
        Progress(second, 1, {out: {0: 1}}, {}, now, outputs=(end,)),
    ]
    write_progress(onceflow_broker, *flows)

    def orphans(*topics: str, remember: bool = False, **options: Any) -> set[str]:
        settings, age = ClientSettings(onceflow_broker), 7 * DAY_MS
        with Collector(settings, claim.objects, topics or None, older_than_ms=age, now_ms=now, **options) as found:
            found.find()
            if remember:
                found.remember()
            return {name for name, _ in found.orphans()}

    unseen = {Reference.parse(raw).name for raw in (raws[other], in_rows)}
    assert orphans(source) == unseen
    assert orphans(source, without=[end]) == unseen | {Reference.parse(raws[end]).name}
    of_others = [name for name in topics_of(onceflow_broker) if name not in places]
    assert orphans(without=of_others) == {Reference.parse(in_rows).name}

    # The same with a flow that writes another system, keeps state in a checkpoint, or in local stores alone.
    for kept in (
        {"external": "bank:ledger"},
        {"checkpoint": CheckpointProgress("id", 1, "digest")},
        {"tables": {"rows": TableProgress(local=LocalTable("id", 1))}},
    ):
        write_progress(onceflow_broker, replace(flows[1], **kept))  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"(?s){second} may keep references where .*--rows {second}"):
            orphans(source)
        assert orphans(source, without_rows=[second]) == unseen
    dump = tmp_path / "rows.csv"
    dump.write_text(f"1,\\x{in_rows.hex()}\n")
    command = f"cat {dump}"
    assert orphans(source, rows={second: command}, remember=True) == {Reference.parse(raws[other]).name}
    with pytest.raises(EnvironmentUnusableError, match=r"(?s)has failed, so nothing is deleted.*No such file"):
        orphans(source, rows={second: "cat /nowhere"})

    # The store remembers: the flow, and the topics in which there were references.
    write_progress(onceflow_broker, *(replace(flow, offsets={}, changelogs={}, outputs=()) for flow in flows))
    with pytest.raises(OptionError, match=f"(?s){second} may keep references .*an earlier collection"):
        orphans(source)
    assert orphans(source, without_rows=[second]) == unseen
    independent.fill(onceflow_broker, PROGRESS_TOPIC, [(flow.flow.encode(), None) for flow in flows])


def test_the_command(
    onceflow_broker: str, make_topic: Callable[..., str], s3: S3Server, at_day: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    claim = ClaimCheck(f"s3://{s3.make_bucket()}/claims", above=10_000)
    topic = make_topic("claims", 2)
    at_day(-30)
    kept, orphan = claim.encode(large(1)), claim.encode(large(2))
    independent.fill(onceflow_broker, topic, [(b"k", kept)])
    command = ["claim-check", "collect", "--bootstrap-servers", onceflow_broker, "--store", claim.objects.url]
    command += ["--topic", topic]

    def called(*arguments: str, **options: Any) -> Any:
        return CliRunner().invoke(cli, [*command, *arguments], **options)

    dry = called("--dry-run")
    assert dry.exit_code == 0, dry.output
    assert dry.stdout == f"{Reference.parse(orphan).name}  20,000 bytes\n"
    assert f"{topic} 1" in dry.stderr
    assert "nothing deleted" in dry.stderr
    refused = called(input="n\n")
    assert refused.exit_code == 1
    assert "Delete 1 object (20.0 KB)" in refused.stderr
    assert len(objects_of(claim)) == 2
    assert called("--older-than", "1 hour", "--yes").exit_code == 2
    deleted = called("--yes", "--json")
    lines = [json.loads(line) for line in deleted.stdout.splitlines()]
    assert lines[0]["name"] == Reference.parse(orphan).name
    assert lines[1] == {
        "orphans": 1, "orphan_bytes": 20_000, "deleted": True, "old_objects": 2, "references": {topic: 1},
        "not_references": [],
    }  # fmt: skip
    assert objects_of(claim) == {Reference.parse(kept).name}
    other = make_topic("more", 1)
    forgotten = called("--yes", "--topic", other)
    assert forgotten.exit_code == 0, "one topic more"
    command = [name if name != topic else other for name in command]
    assert "has also read" in str(called("--dry-run").exception)
    command = [*command, "--without-topic", topic]
    assert called("--dry-run").exit_code == 0
    assert called("--all-topics").exit_code == 2, "not both"
    elsewhere = called("--yes", "--store", f"s3://{s3.make_bucket()}")
    assert isinstance(elsewhere.exception, StorageUnavailableError)


# ---- a bucket and its client -------------------------------------------------------------------------------


def test_a_store_is_made_once(s3: S3Server) -> None:
    """A writer that has found no marker does not overwrite what a collection has written down in between."""
    bucket = Bucket(f"s3://{s3.make_bucket()}/claims", s3.options)
    assert bucket.create("marker", b"1")
    assert not bucket.create("marker", b"2")
    assert bucket.read("marker") == b"1"


@pytest.mark.parametrize(
    "size, stored_by_another",
    [
        (20_000, False),
        (20_000, True),
        *(pytest.param(20_000_000, each, marks=pytest.mark.long) for each in (False, True)),
    ],
)
def test_a_file_that_changes_while_it_is_uploaded(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, stored_by_another: bool
) -> None:
    """An object never has other content than its name says, and what another writer has stored stays."""
    url, path, content = f"s3://{s3.make_bucket()}/claims", tmp_path / "file", large(1, size)
    claim = ClaimCheck(url, above=10_000, storage_options=s3.options)
    path.write_bytes(content)

    def changed(reference: Reference) -> bool:
        if stored_by_another:
            ClaimCheck(url, above=10_000, storage_options=s3.options).encode(content)
        path.write_bytes(content[:-1] + b"!")
        return False

    claim.encode(large(2))
    with monkeypatch.context() as patched:
        patched.setattr(claim.objects, "_has", changed)
        with pytest.raises(StorageUnavailableError, match=r"The file .*file was changed while it was stored"):
            claim.put_file(path)
    there = objects_of(claim)
    assert there == {Reference.parse(claim.encode(each)).name for each in (large(2), *[content] * stored_by_another)}
    if stored_by_another:
        assert claim.decode(claim.encode(content)) == content
    assert claim.decode(claim.put_file(path)) == content[:-1] + b"!"


def test_options_of_a_bucket(s3: S3Server) -> None:
    with pytest.raises(OptionError, match="'bogus' is not valid"):
        ClaimCheck("s3://bucket/claims", storage_options={"bogus": "1"}).objects.check()
    claim = ClaimCheck(f"s3://{s3.make_bucket()}/claims", above=10, storage_options={
        "access_key_id": "test", "secret_access_key": "test-secret", "endpoint": s3.url, "region": "us-east-1",
    })  # fmt: skip
    assert claim.decode(claim.encode(b"x" * 100)) == b"x" * 100


def test_a_forked_process_is_told(s3: S3Server) -> None:
    """The client's threads are not there in it: it would wait for ever."""
    code = """
import os, sys
import onceflow
from onceflow_workshop.testing.s3 import S3Server
url, store = sys.argv[1:]
claim = onceflow.ClaimCheck(store, above=10, storage_options=S3Server(url).options)
claim.encode(b"x" * 100)
if not os.fork():
    try:
        claim.encode(b"y" * 100)
    except onceflow.EnvironmentUnusableError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    command = [sys.executable, "-c", code, s3.url, f"s3://{s3.make_bucket()}/claims"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "forked" in ran.stdout

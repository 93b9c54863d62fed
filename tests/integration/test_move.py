"""`onceflow reset --to` and `onceflow progress export|import` on a real broker; what is committed afterwards is read by
independent consumers."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from sqlite_sink import SqliteSink

import onceflow
from onceflow import hooks
from onceflow.cli.main import main
from onceflow.driver.record import progress_log
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.protocol.transaction import Event
from onceflow.testing import faults, independent
from onceflow.testing.broker import create_topic

sys.path.insert(0, str(Path(__file__).parent))
try:
    from moving_flows import Call, refused, told
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

TIME_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Seen:
    """What a flow has committed, as an independent consumer sees it: offsets in progress and in the group, and how many
    rows its table has."""

    progress: dict[int, int]
    group: dict[int, int]
    rows: int


def seen(pipe: Any) -> Seen:
    records = independent.read_topic(pipe.bootstrap, PROGRESS_TOPIC, decided=True)
    last = [record.value for record in records if record.key == pipe.flow.encode()][-1]
    progress = {int(p): offset for p, offset in json.loads(last or b"")["offsets"][pipe.source].items()}
    group = {p: offset for (_, p), offset in independent.committed_offsets(pipe.bootstrap, pipe.flow).items()}
    table = getattr(pipe, "table", None)
    return Seen(progress, group, 0 if table is None else len(pipe.table_rows()))


def at(*offsets: int, rows: int = 0) -> Seen:
    found = dict(enumerate(offsets))
    return Seen(found, found, rows)


def fill(bootstrap: str, topic: str, counts: list[int]) -> None:
    """Records with the values p:n in partition p, a second apart."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for partition, count in enumerate(counts):
        for n in range(count):
            producer.produce(topic, b"%d:%d" % (partition, n), b"k", partition, timestamp=TIME_MS + 1000 * n)
    assert producer.flush(30) == 0


def values(pipe: Any) -> Counter[bytes | None]:
    return Counter(s.value for s in independent.read_topic(pipe.bootstrap, pipe.target, decided=True))


@pytest.mark.long
def test_back_and_forth(make_pipe: Any, call: Call) -> None:
    pipe = make_pipe(partitions=3)
    fill(pipe.bootstrap, pipe.source, [50, 30, 0])
    pipe.run()
    move = ("reset", pipe.flow, "--yes", "--json", "--to")
    once = {b"%d:%d" % (p, n): 1 for p, count in enumerate([50, 30]) for n in range(count)}
    # Only looked at.
    looked = told(call(*move, "timestamp=2023-11-14T22:14:00Z", "--dry-run"))  # 40 s after the first record
    assert (looked["dry_run"], looked["written_twice_max"], looked["skipped_max"]) == (True, 10, 0)
    assert seen(pipe) == at(50, 30, 0)
    answer = call("reset", pipe.flow, "--to", "earliest", "--dry-run")
    assert f"{pipe.source}-0    50   0  50 again" in answer.stdout
    assert "At most 80 records will be read and written a second time" in answer.stdout
    # Not confirmed.
    answer = call("reset", pipe.flow, "--to", "earliest", input="n\n")
    assert type(answer.exception).__name__ == "Abort"
    assert f"{pipe.source}-0    50   0  50 again" in answer.stderr
    assert seen(pipe) == at(50, 30, 0)
    # By time, by offsets in both forms, to the end.
    assert told(call("status", pipe.flow, "--json"))["committed_by"]["pid"] == os.getpid()
    assert told(call(*move, f"timestamp={TIME_MS + 40_000}"))["partitions"][0]["to"] == 40
    assert told(call("status", pipe.flow, "--json"))["committed_by"] is None, "a command is no driver"
    assert seen(pipe) == at(40, 30, 0)
    pipe.run()
    assert values(pipe) == once | {b"0:%d" % n: 2 for n in range(40, 50)}
    assert told(call(*move, f"offsets={pipe.source}:0=20,{pipe.source}:1=5"))["written_twice_max"] == 55
    assert seen(pipe) == at(20, 5, 0)
    assert told(call(*move, f'offsets={{"{pipe.source}": {{"0": 49}}}}'))["skipped_max"] == 29
    assert seen(pipe) == at(49, 5, 0)
    assert "its next start reads" in call("reset", pipe.flow, "--yes", "--to", "latest").stdout
    assert seen(pipe) == at(50, 30, 0)
    pipe.run()
    assert values(pipe) == once | {b"0:%d" % n: 2 for n in range(40, 50)}
    # From the beginning, until that has expired.
    told(call(*move, "beginning"))
    assert seen(pipe) == at(0, 0, 0)
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    (deleted,) = admin.delete_records([TopicPartition(pipe.source, 0, 7)]).values()
    deleted.result(30)
    refused(call(*move, "beginning"), onceflow.DataLossError, "starts at 7", "--to earliest")
    told(call(*move, "earliest"))
    assert seen(pipe) == at(7, 0, 0)
    refused(call(*move, f"offsets={pipe.source}:0=6"), onceflow.OptionError, "out of range", "7 to 50")
    refused(call(*move, f"offsets={pipe.source}:0=51"), onceflow.OptionError, "out of range")
    assert seen(pipe) == at(7, 0, 0)
    pipe.run()
    assert values(pipe)[b"0:45"] == 3


def test_what_is_refused_fences_nobody(make_pipe: Any, call: Call) -> None:
    """A running driver goes on after every refusal; a move ends it."""
    pipe = make_pipe(partitions=2)
    pipe.fill(100)
    flow = pipe.open()
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    query.processAllAvailable()
    move = ("reset", pipe.flow, "--yes", "--to")
    for wrong, text in {
        "yesterday": "not a place",
        "timestamp=yesterday": "not a point in time",
        "timestamp=2025-01-31T08:00:00": "no time zone",
        "offsets=": "TOPIC:PARTITION=OFFSET",
        f"offsets={pipe.source}:0=-1": "TOPIC:PARTITION=OFFSET",
        f"offsets={pipe.source}:0=1,{pipe.source}:0=2": "named twice",
        f"offsets={pipe.source}:7=1": "has no partition 7",
        "offsets=other:0=1": "does not read other",
        f"offsets={pipe.source}:0=999999": "out of range",
        "offsets={broken": "not JSON",
        'offsets={"a": 1}': "not an object of partitions",
        'offsets={"a": {"0": "1"}}': "not a partition and its offset",
    }.items():
        refused(call(*move, wrong), (onceflow.OptionError, click.UsageError), text)
    refused(call("reset", pipe.flow + "x", "--yes", "--to", "latest"), onceflow.ProgressConflictError, "no progress")
    assert "--state and --dry-run need --to" in str(call("reset", pipe.flow, "--dry-run").exception)
    assert "not one of" in str(call(*move, "latest", "--state", "rebuild").exception)
    pipe.fill(50)
    query.processAllAvailable()
    assert query.isActive
    told(call(*move, "earliest", "--json"))
    pipe.fill(10)
    with pytest.raises(onceflow.FencedError):
        query.awaitTermination(60)
    pipe.run()
    assert Counter(values(pipe).values()) == {2: 150, 1: 10}


def test_state(make_state_pipe: Any, call: Call) -> None:
    """Deleted and built anew, it is what it was; kept, records are applied to it again. The table topic, the local
    stores and a fold of the sent records agree."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(400)
    pipe.run()
    ends = seen(pipe).progress
    outputs, sums, _ = pipe.ledger.expected(pipe.sent)
    move = ("reset", pipe.flow, "--yes", "--json", "--to")
    refused(call(*move, "earliest"), onceflow.OptionError, "--state keep", f"tables: {pipe.table}")
    done = told(call(*move, "earliest", "--state", "delete"))
    assert (done["state"], done["rows_deleted"] > len(sums)) == ("delete", True)
    assert seen(pipe) == at(0, 0)
    pipe.run(engine="tasks")
    assert Counter(value["n"] for value in pipe.outputs()) == dict.fromkeys(outputs, 2)
    assert {value["n"]: value for value in pipe.outputs()} == outputs
    assert pipe.table_rows() == sums
    stored = {key: json.loads(value) for key, value in onceflow.Table.of_flow(pipe.folder).range()}
    assert stored == sums
    # Forwards, with its state as it is.
    pipe.fill(100)
    told(call(*move, "latest", "--state", "keep"))
    assert pipe.table_rows() == sums
    pipe.sent = pipe.sent[:400]
    pipe.run()
    assert pipe.table_rows() == sums
    back = ",".join(f"{pipe.source}:{p}={end - 1}" for p, end in ends.items())
    done = told(call(*move, f"offsets={back}", "--state", "keep"))
    assert done["rows_deleted"] == 0
    pipe.run()
    assert sum(row["count"] for row in pipe.table_rows().values()) > sum(row["count"] for row in sums.values())


def command(pipe: Any, step: str, *arguments: str) -> None:
    """Run a command that is killed at a step."""
    environment = {**os.environ, hooks.VARIABLE: faults.fault(step, "kill", flow=pipe.flow)}
    line = [sys.executable, "-m", "onceflow.cli.main", *arguments]
    killed = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -9, killed.stderr


def check_all_or_nothing(pipe: Any, old: Seen, new: Seen) -> Seen:
    """Progress, group offsets and rows of the table are those of before, or those of afterwards. (A transaction that
    was left open is aborted by the next start; its records are not to be seen.)"""
    found = seen(pipe)
    assert found in (old, new), found
    return found


@pytest.mark.long
def test_killed_at_each_step(make_state_pipe: Any, call: Call) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(200)
    pipe.run()
    old, new = seen(pipe), at(0, 0)
    move = ("reset", pipe.flow, "--yes", "--json", "--state", "delete", "--to", "earliest")
    for step in ("init", "write", "progress", "end"):
        command(pipe, step, *move)
        told(call("reset", pipe.flow, "--yes", "--json", "--state", "keep", "--to", "latest"))  # decides what is open
        ends = old.progress.values()
        assert check_all_or_nothing(pipe, old, at(*ends)) == (old if step != "end" else at(*ends)), step
    told(call(*move))
    assert seen(pipe) == new
    outputs, sums, _ = pipe.ledger.expected(pipe.sent)
    pipe.run()
    assert pipe.table_rows() == sums
    assert Counter(value["n"] for value in pipe.outputs()) == dict.fromkeys(outputs, 2)


@pytest.mark.long
def test_an_import_killed_at_each_step(make_state_pipe: Any, call: Call, tmp_path: Path) -> None:
    """With the tombstones of the rows, and without state. Run again, it does all of it."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(100)
    pipe.run()
    file = tmp_path / "progress.json"
    exported(call, pipe, file)
    positions = seen(pipe).progress.values()
    pipe.fill(100)
    pipe.run()
    old, new = seen(pipe), at(*positions)
    restore = ("progress", "import", pipe.flow, str(file), "--yes", "--json", "--state", "delete")
    for step in ("init", "write", "progress", "end"):
        command(pipe, step, *restore)
        # The next driver, or command, aborts what is open.
        told(call("reset", pipe.flow, "--yes", "--json", "--state", "keep", "--to", f"offsets={pipe.source}:0=0"))
        moved = Seen({**old.progress, 0: 0}, {**old.group, 0: 0}, old.rows)
        done = Seen({**new.progress, 0: 0}, {**new.group, 0: 0}, 0)
        assert check_all_or_nothing(pipe, moved, done) == (done if step == "end" else moved), step
    told(call(*restore))
    assert seen(pipe) == new
    pipe.run()
    _, sums, _ = pipe.ledger.expected(pipe.sent[100:])
    assert pipe.table_rows() == sums


def test_a_build_with_progress_outside_of_the_transaction_is_found_out(
    make_state_pipe: Any, call: Call, inject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(100)
    pipe.run()
    old = seen(pipe)
    original = progress_log.write_progress

    def outside(cluster: Any, transactions: Any, *rest: Any, **more: Any) -> int:
        transactions.machine.on(Event.PROGRESS_WRITTEN)
        return original(cluster, None, *rest, **more)

    inject("progress", "raise")
    with monkeypatch.context() as mutant:
        mutant.setattr(progress_log, "write_progress", outside)
        answer = call("reset", pipe.flow, "--yes", "--state", "delete", "--to", "earliest")
    assert isinstance(answer.exception, faults.InjectedFaultError)
    with pytest.raises(AssertionError):
        check_all_or_nothing(pipe, old, at(0, 0))


@pytest.mark.long
def test_state_in_spark(make_pipe: Any, call: Call) -> None:
    pipe = make_pipe(partitions=2)
    fill(pipe.bootstrap, pipe.source, [30, 20])

    def count(folder: str, **options: Any) -> None:
        flow = pipe.open()
        counts = flow.read(pipe.source).groupBy("partition").count()
        rows = counts.selectExpr("CAST(partition AS STRING) key", "CAST(count AS STRING) value")
        checkpoint = {"checkpoint": pipe.tmp_path / folder, "output_mode": "update", "once": True, **options}
        flow.write(rows, topic=pipe.target, **checkpoint).start().awaitTermination(120)

    count("one")
    assert values(pipe) == {b"30": 1, b"20": 1}
    move = ("reset", pipe.flow, "--yes", "--json", "--to", "earliest")
    for more in ((), ("--state", "keep")):
        refused(call(*move, *more), onceflow.OptionError, "Spark checkpoint", 'on_checkpoint_conflict="resume"')
    told(call(*move, "--state", "delete"))
    with pytest.raises(onceflow.ProgressConflictError, match="checkpoint"):
        count("one")
    count("two", on_checkpoint_conflict="resume")
    assert values(pipe) == {b"30": 2, b"20": 2}


def test_another_system(make_pipe: Any, call: Call) -> None:
    pipe = make_pipe(partitions=2)
    fill(pipe.bootstrap, pipe.source, [30, 20])
    database = pipe.tmp_path / "rows.db"
    with closing(sqlite3.connect(database)) as created:
        created.execute("CREATE TABLE rows (v TEXT)")

    def written() -> int:
        flow = pipe.open()
        rows = flow.read(pipe.source).selectExpr("CAST(value AS STRING) v")
        sink = SqliteSink(str(database), "rows")
        flow.write_external(rows, sink, once=True).start().awaitTermination(60)
        with closing(sqlite3.connect(database)) as connected:
            found: int = connected.execute("SELECT count(*) FROM rows").fetchone()[0]
        return found

    assert written() == 50
    told(call("reset", pipe.flow, "--yes", "--json", "--to", f"offsets={pipe.source}:1=15"))
    assert written() == 55


def test_ctrl_c(make_pipe: Any, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipe(partitions=1)
    pipe.fill(10)
    pipe.run()
    announce = hooks.at

    def press(name: str, **fields: Any) -> None:
        announce(name, **fields)
        if name == "progress":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hooks, "at", press)
        with pytest.raises(SystemExit) as ended:
            main(["reset", pipe.flow, "--yes", "--to", "earliest"])
    assert ended.value.code == 130
    assert seen(pipe) == at(10)


# ---- files -----------------------------------------------------------------------------------------------


def exported(call: Call, pipe: Any, path: Path) -> dict[str, Any]:
    answer = call("progress", "export", pipe.flow)
    assert answer.exception is None, answer.output
    path.write_text(answer.stdout)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


@pytest.mark.long
def test_export_and_import(make_pipe: Any, call: Call, tmp_path: Path) -> None:
    pipe = make_pipe(partitions=2)
    fill(pipe.bootstrap, pipe.source, [20, 10])
    pipe.run()
    file = tmp_path / "progress.json"
    content = exported(call, pipe, file)
    assert (content["version"], content["flow"]) == (1, pipe.flow)
    assert content["progress"]["offsets"] == {pipe.source: {"0": 20, "1": 10}}
    assert content["progress"]["producer_epoch"] >= 0
    restore = ("progress", "import", pipe.flow, str(file), "--json", "--yes")
    # Back to an earlier position.
    fill(pipe.bootstrap, pipe.source, [5, 5])
    pipe.run()
    looked = told(call(*restore, "--dry-run"))
    assert (looked["written_twice_max"], seen(pipe)) == (10, at(25, 15))
    told(call(*restore))
    assert seen(pipe) == at(20, 10)
    pipe.run()
    # After the progress was lost.
    assert call("reset", pipe.flow, "--yes").exception is None
    refused(call("progress", "export", pipe.flow), onceflow.ProgressConflictError, "no progress")
    told(call(*restore))
    assert seen(pipe) == at(20, 10)
    assert pipe.committed_progress()[-1].batch_id == content["progress"]["batch_id"]
    # For another flow.
    told(call("progress", "import", f"{pipe.flow}-2", str(file), "--json", "--yes"))
    pipe.flow += "-2"
    assert seen(pipe) == at(20, 10)
    assert pipe.committed_progress()[-1].batch_id == 0
    # By standard input, and by hand.
    content["progress"]["offsets"] = {pipe.source: {"0": 1}}
    content["progress"]["flow"] = pipe.flow
    answer = call("progress", "import", pipe.flow, "-", "--yes", "--json", input=json.dumps(content))
    assert [(each["partition"], each["to"]) for each in told(answer)["partitions"]] == [(0, 1), (1, 0)]
    assert seen(pipe) == at(1, 0)


@pytest.mark.long
def test_prefixes(make_pipe: Any, call: Call, tmp_path: Path) -> None:
    pipe = make_pipe(partitions=1)
    fill(pipe.bootstrap, pipe.source, [20])
    prefixes = {"transactional_id_prefix": "team-a.", "group_id_prefix": "team-b."}
    flow = pipe.open(**prefixes)
    flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target, once=True).start().awaitTermination(60)
    name = pipe.flow
    named = ("--transactional-id-prefix", "team-a.")
    answer = call("progress", "export", name, *named)
    file = tmp_path / "progress.json"
    file.write_text(answer.stdout)
    named += ("--group-id-prefix", "team-b.", "--yes", "--json")
    refused(call("reset", name, "--to", "earliest"), onceflow.ProgressConflictError, "--transactional-id-prefix")
    told(call("reset", name, "--to", f"offsets={pipe.source}:0=5", *named))
    (key, group) = (f"team-a.{name}", f"team-b.{name}")

    def offsets() -> tuple[int, int]:
        records = independent.read_topic(pipe.bootstrap, PROGRESS_TOPIC, decided=True)
        last = [record.value for record in records if record.key == key.encode()][-1]
        progress: int = json.loads(last or b"")["offsets"][pipe.source]["0"]
        return progress, independent.committed_offsets(pipe.bootstrap, group)[pipe.source, 0]

    assert offsets() == (5, 5)
    told(call("progress", "import", name, str(file), *named))
    assert offsets() == (20, 20)


def test_a_file_that_does_not_fit(make_pipe: Any, call: Call, tmp_path: Path) -> None:
    pipe = make_pipe(partitions=1)
    fill(pipe.bootstrap, pipe.source, [20])
    pipe.run()
    file = tmp_path / "progress.json"
    content = exported(call, pipe, file)
    record = content["progress"]
    restore = ("progress", "import", pipe.flow, str(file), "--yes")

    def given(**changed: Any) -> Result:
        file.write_text(json.dumps({**content, "progress": {**record, **changed}}))
        return call(*restore)

    conflict = onceflow.ProgressConflictError
    refused(given(offsets={pipe.source: {"0": 21}}), onceflow.OptionError, "out of range", "0 to 20")
    refused(given(offsets={pipe.source: {"5": 1}}), conflict, "no partition 5")
    refused(given(offsets={"nowhere": {"0": 1}}), conflict, "nowhere", "does not exist")
    refused(given(topic_ids={pipe.source: "other"}), conflict, "not the one of the file")
    refused(given(offsets="all"), onceflow.OptionError, "progress.json is not an export")
    for text in ("", "[]", "{}", "nonsense", '{"version": 1, "progress": {}}'):
        file.write_text(text)
        refused(call(*restore), onceflow.OptionError, "progress.json is not an export", "onceflow progress export")
    file.write_text(json.dumps({**content, "version": 2}))
    refused(call(*restore), onceflow.OptionError, "version 2", "upgrade")
    answer = call("progress", "import", pipe.flow, str(tmp_path / "missing"), "--yes")
    assert "missing cannot be read: No such file" in str(answer.exception)
    assert seen(pipe) == at(20)
    # The topic is another one now, with the same name.
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    admin.delete_topics([pipe.source])[pipe.source].result(30)
    create_topic(pipe.bootstrap, pipe.source, 1)
    file.write_text(json.dumps(content))
    refused(call(*restore), conflict, "not the one of the file")
    moved = told(call("reset", pipe.flow, "--yes", "--json", "--to", "latest"))  # it takes up the new topic
    assert [each["from"] for each in moved["partitions"]] == [None]
    assert seen(pipe) == at(0)


@pytest.mark.long
def test_a_file_with_state(make_state_pipe: Any, call: Call, tmp_path: Path) -> None:
    pipe = make_state_pipe(partitions=2)
    pipe.fill(200)
    pipe.run()
    old = seen(pipe)
    file = tmp_path / "progress.json"
    exported(call, pipe, file)
    restore = ("progress", "import", pipe.flow, str(file), "--json", "--yes")
    # Its progress is lost, its tables are as they were: all goes on.
    assert call("reset", pipe.flow, "--yes").exception is None
    told(call(*restore))
    assert seen(pipe) == old
    pipe.fill(100)
    pipe.run()
    pipe.check()
    # They have changed since.
    refused(call(*restore), onceflow.OptionError, "changed since the export", "--state keep")
    refused(
        call("progress", "import", f"{pipe.flow}-2", str(file), "--yes"), onceflow.ProgressConflictError, "has state"
    )
    told(call(*restore, "--state", "delete"))
    assert seen(pipe) == at(*old.progress.values())
    pipe.run()
    _, sums, _ = pipe.ledger.expected(pipe.sent[200:])
    assert pipe.table_rows() == sums

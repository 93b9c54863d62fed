"""Local state that was deleted, damaged or replaced by another copy: repaired from Kafka, never served wrong."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import onceflow
from onceflow.protocol.partitioners import key_partitions
from onceflow.testing import independent

ROWS = 5_000_000

pytestmark = [pytest.mark.integration, pytest.mark.faults]


def copy(source: Path, target: Path) -> None:
    """By another process: one that closes any handle of a lock file loses all its locks of it (POSIX)."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True, timeout=60)


def keep(pipe: Any, name: str) -> Path:
    """A copy of the local state as it is now."""
    kept = Path(pipe.tmp_path / name)
    copy(pipe.folder, kept)
    return kept


def replace(pipe: Any, partition: int, other: Path) -> None:
    shutil.rmtree(pipe.folder / str(partition))
    copy(other, pipe.folder / str(partition))


def flip_bytes(path: Path, seed: int, count: int = 60) -> None:
    raw = bytearray(path.read_bytes())
    chooser = random.Random(seed)
    for _ in range(count):
        at = chooser.randrange(len(raw))
        raw[at] ^= 1 << chooser.randrange(8)
    path.write_bytes(raw)


def goes_on(pipe: Any, **options: Any) -> None:
    pipe.fill(600)
    pipe.run(**options)
    pipe.check()


@pytest.fixture
def pipe(make_state_pipe: Any) -> Any:
    """A flow that has state of two runs; ``first`` is a copy of the first."""
    made = make_state_pipe()
    made.fill(900)
    made.run()
    made.first = keep(made, "first")
    made.fill(900)
    made.run()
    return made


@pytest.mark.long
def test_deleted(pipe: Any) -> None:
    shutil.rmtree(pipe.folder / "0")
    (pipe.folder / "1" / "data.mdb").unlink()
    goes_on(pipe)


@pytest.mark.long
def test_older_copy(pipe: Any) -> None:
    for partition in range(4):
        replace(pipe, partition, pipe.first / str(partition))
    goes_on(pipe)


@pytest.mark.long
def test_copy_of_another_partition(pipe: Any) -> None:
    now = keep(pipe, "now")
    replace(pipe, 0, now / "1")
    replace(pipe, 2, pipe.first / "3")
    goes_on(pipe)


@pytest.mark.long
def test_newer_than_kafka(pipe: Any, make_state_pipe: Any) -> None:
    """A copy from a flow's life before a reset: the table starts empty, the copy is ahead of it."""
    from onceflow.admin.change.reset import reset
    from onceflow.client.settings import ClientSettings
    from onceflow.protocol.names import Names

    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.delete_topics([pipe.table, f"{pipe.table}-internal", pipe.target]).values():
        future.result(30)
    reset(ClientSettings(pipe.bootstrap, {}), Names(pipe.flow), [pipe.source])
    from onceflow.testing.broker import create_topic

    create_topic(pipe.bootstrap, pipe.target, 4)
    goes_on(pipe)


@pytest.mark.long
@pytest.mark.parametrize(
    "seed,tasks",
    [(0, False), (2, True), *(pytest.param(*more, marks=pytest.mark.long) for more in ((1, False), (3, True)))],
)
def test_flipped_bytes(pipe: Any, seed: int, tasks: bool) -> None:
    """Also where a damaged page makes LMDB crash the worker that reads it: then the batch runs twice."""
    for partition in range(4):
        flip_bytes(pipe.folder / str(partition) / "data.mdb", seed * 10 + partition)
    goes_on(pipe, **({"engine": "tasks"} if tasks else {}))


def test_garbage_and_cut_files(pipe: Any) -> None:
    (pipe.folder / "0" / "data.mdb").write_bytes(b"no such thing")
    whole = (pipe.folder / "1" / "data.mdb").read_bytes()
    (pipe.folder / "1" / "data.mdb").write_bytes(whole[: len(whole) // 2])
    (pipe.folder / "2" / "lock.mdb").unlink()
    (pipe.folder / "2" / "lock.mdb").write_bytes(random.Random(1).randbytes(4096))
    (pipe.folder / "3" / "data.mdb").write_bytes(b"")
    goes_on(pipe, engine="tasks")


@pytest.mark.long
def test_readable_while_the_flow_writes(pipe: Any) -> None:
    """Another process reads whole committed states only: every sum it sees was a sum after some batch."""
    script = (
        "import json, sys, time, onceflow\n"
        "table = onceflow.Table.of_flow(sys.argv[1])\n"
        "is_there = False\n"
        "while not is_there:\n"
        "    try:\n"
        "        is_there = table.get(b'') is None\n"
        "    except onceflow.OptionError:\n"  # the flow has not begun its first batch
        "        time.sleep(0.02)\n"
        "for _ in range(300):\n"
        "    print(json.dumps({key.decode(): json.loads(value) for key, value in table.range()}))\n"
    )
    pipe.fill(3000)
    query = pipe.start(read={"max_records_per_batch": 200})
    reader = subprocess.run(
        [sys.executable, "-c", script, str(pipe.folder)], capture_output=True, text=True, timeout=120, check=True
    )
    query.processAllAvailable()
    query.stop()
    pipe.check()
    outputs, _, _ = pipe.ledger.expected(pipe.sent)
    known = {(value["sum"], value["count"]) for value in outputs.values()}
    lines = reader.stdout.splitlines()
    assert len(lines) == 300
    for line in lines:
        for value in json.loads(line).values():
            assert (value["sum"], value["count"]) in known
    assert onceflow.Table.of_flow(pipe.folder).get(b"no such key") is None


def test_pages_lost_when_the_machine_went_down_under_a_living_driver(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LMDB is not synced: what a machine finds after it has started again is not what was verified before."""
    from onceflow.host import identity

    query = pipe.start()
    try:
        pipe.fill(600)
        query.processAllAvailable()
        monkeypatch.setattr(identity, "boot_id", lambda: "the next one")
        for partition in range(4):
            assert other_rows(pipe.folder / str(partition) / "data.mdb")
        pipe.fill(600)
        query.processAllAvailable()
    finally:
        query.stop()
    assert {batch.path for batch in query.batches} == {"driver"}  # this process has another boot, workers have not
    # Which check finds it first depends on the page that the row is in.
    assert len(re.findall(r"local copy restored \((its checksum does not match|a page of)", caplog.text)) == 4
    pipe.check()


def other_rows(path: Path) -> int:
    """Change rows to other well-formed ones, in place, as an older page among newer ones would; how many."""
    with path.open("r+b") as raw:
        found = [*re.finditer(rb'"count":\s?(\d)', raw.read())]
        for row in found:
            raw.seek(row.start(1))
            raw.write(b"8" if row[1] == b"9" else b"9")
    return len(found)


@pytest.mark.long
def test_executors_go_by_their_own_environment(make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster each host says where its copies are; the driver, elsewhere, knows nothing of such a folder."""
    pipe = make_state_pipe()
    pipe.fill(900)
    of_driver, of_executors = pipe.tmp_path / "of-driver", pipe.tmp_path / "of-executors"
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(of_driver))
    process = pipe.driver(
        master="local-cluster[2,1,600]",
        spark={"spark.executor.memory": "600m", "spark.executorEnv.ONCEFLOW_STATE_DIR": str(of_executors)},
        process={"state_dir": None},
    )
    try:
        output = process.communicate(timeout=150)[0]
        assert process.returncode == 0, output
    finally:
        pipe.end_driver(process)
    pipe.check(local=False)
    places = {f"{pipe.flow}/{pipe.table}/{partition}" for partition in range(4)}
    assert {str(file.parent.relative_to(of_executors)) for file in of_executors.rglob("data.mdb")} == places
    assert not of_driver.exists()


@pytest.mark.long
def test_state_moves_between_the_driver_and_executors(make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster, with one and the other. Each host restores what the other one has changed."""
    pipe = make_state_pipe()
    of_driver, of_executors = pipe.tmp_path / "of-driver", pipe.tmp_path / "of-executors"
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(of_driver))
    for engine, reader in (("driver", "driver"), ("auto", "reading task"), ("driver", "driver")):
        pipe.fill(300)
        process = pipe.driver(
            master="local-cluster[2,1,600]",
            spark={"spark.executor.memory": "600m", "spark.executorEnv.ONCEFLOW_STATE_DIR": str(of_executors)},
            process={"state_dir": None},
            write={"engine": engine},
        )
        try:
            output = process.communicate(timeout=150)[0]
            assert process.returncode == 0, output
        finally:
            pipe.end_driver(process)
        assert reader in output, output
    pipe.check(local=False)
    for folder in (of_driver, of_executors):
        assert len([*folder.rglob("data.mdb")]) == 4


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prepared", [True, False], ids=["before a transaction is open", "in a batch"])
def test_five_million_rows_are_restored(make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch, prepared: bool) -> None:
    """All in one partition: the tasks of the others begin to write, and the transaction times out. It costs no attempt,
    but once: nobody prepares copies when tasks run on several hosts."""
    from onceflow.driver.step import state_step
    from onceflow.planning import placement, write_options

    monkeypatch.setattr(placement, "TASK_ROWS", 10)
    monkeypatch.setattr(write_options, "SinkOptions", functools.partial(write_options.SinkOptions, max_attempts=1))
    if not prepared:
        monkeypatch.setattr(state_step, "prepare", lambda *_, **__: None)
    pipe = make_state_pipe()
    compact = {"config": {"cleanup.policy": "compact"}}
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    topics = [NewTopic(name, 4, **compact) for name in (pipe.table, f"{pipe.table}-internal")]
    for future in admin.create_topics(topics).values():
        future.result(30)
    keys = [f"key-{n:03d}".encode() for n in range(pipe.ledger.KEYS)]
    before = b'{"sum": 1000, "count": 1}'
    independent.fill(pipe.bootstrap, pipe.table, [(key, before) for key in keys])
    independent.fill(pipe.bootstrap, pipe.table, ((key, before) for key in islice(keys_of_partition(0, 4), ROWS)))
    sent = [(key, json.dumps({"n": n, "op": "add"}).encode()) for n, key in enumerate(keys)]
    independent.fill(pipe.bootstrap, pipe.source, sent)
    timeout = "10 seconds" if prepared else "5 seconds"
    query = pipe.start(process={"adopt_existing": True}, transaction_timeout=timeout, engine="tasks")
    began = time.monotonic()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    print([(batch.attempts, batch.seconds) for batch in query.batches], time.monotonic() - began)
    assert [batch.attempts for batch in query.batches] == [1 if prepared else 2]
    seen = [json.loads(record.value or b"") for record in independent.read_topic(pipe.bootstrap, pipe.target)]
    assert sorted(value["n"] for value in seen) == [*range(len(keys))]
    assert {(value["sum"] - value["n"], value["count"]) for value in seen} == {(1000, 2)}
    assert sum(1 for _ in onceflow.Table.of_flow(pipe.folder).range()) == ROWS + len(keys)


def keys_of_partition(partition: int, partitions: int) -> Iterator[bytes]:
    for first in itertools.count(0, 100_000):
        keys = [b"row-%d" % n for n in range(first, first + 100_000)]
        placed = key_partitions(pa.array(keys, pa.binary()), partitions)
        yield from itertools.compress(keys, placed == partition)

"""Flows that are recorded, tagged and verified, on a real broker and a real Spark."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.errors import StreamingQueryException

import onceflow
from onceflow import hooks
from onceflow.testing import faults, final, independent
from onceflow.testing.final import read_final
from onceflow.testing.history import FAILED, FOREIGN, HEADER, KINDS, LOST, PASSED, STATE, TORN, UNKNOWN, Tag
from onceflow.testing.recorder import Recorder, load, tagged, verify

pytestmark = pytest.mark.integration


def start(pipe: Any, *, columns: Callable[[Any], Any] = lambda df: df, n: str | None = None, **write: Any) -> Any:
    flow = pipe.open()
    df = flow.read(pipe.source, max_records_per_batch=1000, include_headers=True)
    query = flow.write(tagged(columns(df), flow, n=n), topic=pipe.target, **write).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return query


def verdict_on(pipe: Any, path: Path, **options: Any) -> Any:
    return verify(path, pipe.bootstrap, pipe.flow, sources=[pipe.source], outputs=[pipe.target], **options)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["tasks", pytest.param("driver", marks=pytest.mark.long)])
def test_a_flow_with_an_aborted_attempt(
    make_pipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    """A task fails after it has written, and the driver: both attempts are aborted, and run again."""
    pipe, path = make_pipe(), tmp_path / "history"
    pipe.fill(2500)
    task = {"where": "task", "task": 0, "once_file": str(tmp_path / "task")} if engine == "tasks" else {}
    faults._fired.clear()
    rules = [{"step": "write", "action": "raise", "batch": 2, **task}, {"step": "audit", "action": "raise", "batch": 3}]
    monkeypatch.setenv(hooks.VARIABLE, faults.value_of(*rules))
    ends: list[str] = []
    while "done" not in ends:
        with Recorder(path, driver=f"driver-{len(ends)}"):
            try:
                start(pipe, engine=engine)
                ends.append("done")
            except StreamingQueryException as error:
                ends.append(str(error))
    assert ["injected at" in end for end in ends] == [True, True, False][engine == "tasks" :]
    verdict = verdict_on(pipe, path)
    assert verdict.verdict == PASSED, verdict
    assert (verdict.counts["ok"], verdict.counts["fail"], verdict.counts["info"]) == (3, 2, 0)
    assert verdict.counts["reads"] == verdict.counts["expected"] == 2500
    pipe.check()
    # The aborted rows are in the log, for those who ignore transactions.
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, isolation="read_uncommitted")) > 2500
    assert {op.driver for op in load(path).ops} == {f"driver-{n}" for n in range(len(ends))}


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_headers_are_kept_and_rows_numbered(make_pipe: Any, tmp_path: Path, engine: str) -> None:
    """Three rows of every record, which has headers of its own or none."""
    from pyspark.sql import functions as F

    pipe, path = make_pipe(), tmp_path / "history"
    producer = Producer({"bootstrap.servers": pipe.bootstrap})
    for number in range(300):
        headers = [("origin", b"x" * (number % 3)), ("empty", None)][: number % 3]
        producer.produce(pipe.source, b"value", b"key-%d" % (number % 7), headers=headers)
    assert producer.flush(60) == 0

    def columns(df: Any) -> Any:
        return df.select("*", F.explode(F.array(*map(F.lit, range(3)))).alias("number"))

    with Recorder(path):
        start(pipe, columns=columns, n="number", engine=engine)
    verdict = verdict_on(pipe, path, outputs_of=3)
    assert verdict.verdict == PASSED, verdict
    sources = {(s.topic, s.partition, s.offset): s for s in independent.read_topic(pipe.bootstrap, pipe.source)}
    for record in independent.read_topic(pipe.bootstrap, pipe.target):
        *before, (name, value) = record.headers
        tag = Tag.decode(value or b"")
        assert name == HEADER
        assert tuple(before) == sources[tag[3:6]].headers
        assert record.key == sources[tag[3:6]].key


def test_filtered_records_have_no_outputs(make_pipe: Any, tmp_path: Path) -> None:
    pipe, path = make_pipe(), tmp_path / "history"
    pipe.fill(800)
    with Recorder(path):
        start(pipe, columns=lambda df: df.where("offset % 3 = 1"))
    assert verdict_on(pipe, path, outputs_of=lambda topic, partition, offset: offset % 3 == 1).verdict == PASSED
    assert verdict_on(pipe, path).kinds == {LOST, TORN}


@pytest.mark.long
def test_records_that_the_flow_has_not_written(make_pipe: Any, tmp_path: Path) -> None:
    pipe, path = make_pipe(), tmp_path / "history"
    pipe.fill(500)
    with Recorder(path):
        start(pipe)
    independent.fill(pipe.bootstrap, pipe.target, [(b"key", b"by hand")])
    verdict = verdict_on(pipe, path)
    assert verdict.kinds == {FOREIGN}
    assert verdict_on(pipe, path, foreign=True).verdict == PASSED


@pytest.mark.long
def test_what_was_not_recorded_or_cannot_be_read_is_unknown(make_pipe: Any, tmp_path: Path) -> None:
    pipe, path = make_pipe(), tmp_path / "history"
    pipe.fill(500)
    start(pipe, engine="tasks")  # they tag rows also if nothing is recorded
    assert verdict_on(pipe, path).why == "nothing was recorded"
    pipe.fill(500)
    with Recorder(path):
        start(pipe)
    assert verdict_on(pipe, path).kinds == {FOREIGN}  # of the first run
    assert verdict_on(pipe, path, foreign=True).verdict == PASSED
    missing = verify(path, pipe.bootstrap, pipe.flow, sources=[pipe.source], outputs=[f"{pipe.target}-missing"])
    assert missing.verdict == UNKNOWN
    assert f"{pipe.target}-missing" in missing.why
    # Somebody's open transaction hides what comes after it.
    producer = Producer({"bootstrap.servers": pipe.bootstrap, "transactional.id": f"t-{pipe.source}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(pipe.target, b"value")
    assert producer.flush(30) == 0
    undecided = verdict_on(pipe, path, foreign=True, seconds=2)
    assert undecided.verdict == UNKNOWN
    assert undecided.why.startswith("the final read is not complete: ")
    assert undecided.why.endswith(" was not read to its end in time")
    producer.abort_transaction(30)
    assert verdict_on(pipe, path, foreign=True).verdict == PASSED


@pytest.mark.long
def test_a_flow_that_runs_is_unknown(make_pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, path = make_pipe(), tmp_path / "history"
    pipe.fill(500)
    with Recorder(path):
        start(pipe)
        read = final._Reader.records

        def slow(self: Any, topic: str, *partitions: Any, **options: Any) -> Any:
            if topic == pipe.target:  # progress has been read for the first time, the outputs have not
                pipe.fill(10)
                start(pipe)
            return read(self, topic, *partitions, **options)

        monkeypatch.setattr(final._Reader, "records", slow)
        verdict = verdict_on(pipe, path)
    assert verdict.verdict == UNKNOWN
    assert "the flow is running" in verdict.why


def make_doubling(flow: str) -> Any:
    """A processor with two outputs for each record; tasks get it by value, as it is made here."""

    class Doubling(onceflow.Processor):
        value = onceflow.serdes.JSON
        state = onceflow.serdes.JSON
        output = onceflow.serdes.JSON

        def process(self, key: bytes, records: Any, state: Any) -> Iterator[Any]:
            from onceflow.testing.recorder import tag_of

            for record in records:
                state.put((state.get() or 0) + record.value["n"])
                for n in range(2):
                    yield onceflow.Record(key, record.value["n"], headers=[tag_of(record, n, flow=flow)])

    return Doubling()


def sums(records: Iterable[independent.Seen]) -> dict[bytes | None, int]:
    found: dict[bytes | None, int] = {}
    for record in records:
        found[record.key] = found.get(record.key, 0) + json.loads(record.value or b"")["n"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("tasks", id="tasks"), pytest.param("auto", id="driver")])
def test_a_process_step(make_state_pipe: Any, inject: Callable[..., None], tmp_path: Path, engine: str) -> None:
    """State is what a replay of the source makes, and every output is there, with an aborted attempt in between."""
    pipe, path = make_state_pipe(), tmp_path / "history"
    pipe.fill(2500)
    inject("write", "raise", batch=2)
    run = {"process": {"processor": make_doubling(pipe.flow)}, "engine": engine}
    with Recorder(path):
        with pytest.raises(StreamingQueryException, match="injected at"):
            pipe.run(**run)
        query = pipe.run(**run)
    assert {batch.path == "driver" for batch in query.batches} == {engine == "auto"}
    state = {"table": pipe.table, "state_value": json.loads}
    verdict = verdict_on(pipe, path, outputs_of=2, replay=sums, **state)
    assert verdict.verdict == PASSED, verdict
    assert (verdict.counts["reads"], verdict.counts["state"], verdict.counts["fail"]) == (5000, pipe.ledger.KEYS, 1)
    wrong = verdict_on(pipe, path, outputs_of=2, replay=lambda records: sums(list(records)[1:]), **state)
    assert wrong.kinds == {STATE}


def test_what_is_recorded_and_read(make_pipe: Any, tmp_path: Path) -> None:
    pipe, path = make_pipe(), tmp_path / "history"
    pipe.fill(300)
    with Recorder(path):
        start(pipe)
    final = read_final(pipe.bootstrap, pipe.flow, [pipe.source], [pipe.target])
    assert final.complete
    assert [batch for batch, _ in final.progress] == [0, 1]
    ends = independent.end_offsets(pipe.bootstrap, pipe.source)
    assert {place: list(offsets) for place, offsets in final.sources.items()} == {
        place: list(range(end)) for place, end in ends.items()
    }
    assert len(final.reads) == 300
    begun, done = load(path).ops
    assert (begun.kind, done.kind) == ("invoke", "ok")
    assert {(topic, p): offset for topic, found in begun.end.items() for p, offset in found.items()} == ends
    assert begun.attempt == done.attempt
    assert begun.time_ms <= done.time_ms <= time.time() * 1000
    (name,) = {name[2] for name in final.reads.writers}
    assert name == begun.attempt


def test_the_example_of_the_page(onceflow_broker: str, onceflow_spark: Any, make_topic: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    deposits, validated, path = make_topic("deposits", 2), make_topic("validated", 3), tmp_path / "history"
    names = {"localhost:9092": onceflow_broker, '"deposits"': f'"{deposits}"', '"validated"': f'"{validated}"'}
    for name, other in {**names, '"validated-deposits"': f'"flow-{deposits}"', '"history.jsonl"': f'"{path}"'}.items():
        assert name in code
        code = code.replace(name, other)
    records = [(b"account-%d" % (n % 7), b"%d" % n) for n in range(200)]
    independent.fill(onceflow_broker, deposits, records)
    found: dict[str, Any] = {}
    exec(code, found)  # noqa: S102
    assert found["verdict"].verdict == PASSED
    assert found["verdict"].counts["reads"] == 200


def test_every_anomaly_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    assert re.findall(r"^\| `([a-z ]+)` \|", page, re.MULTILINE) == [*KINDS, PASSED, FAILED, UNKNOWN]

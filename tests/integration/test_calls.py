"""Calls of other services in flows: in a process step in each place where it runs, and row by row with Flow.enrich."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import onceflow
from onceflow import Record, serdes
from onceflow.errors import DeadLetterLimitError, OptionError, ProcessorError, UnsupportedQueryError
from onceflow.testing import independent

pytestmark = pytest.mark.integration


def double(amount: int) -> int:
    if amount % 10 == 7:
        raise ValueError(f"{amount} is refused")
    return amount * 2


async def double_value(record: Record) -> Any:
    if record.value is None:
        return None
    return {"was": record.value, "is": double(record.value), "id": onceflow.idempotency_key(record)}


class Charge(onceflow.Processor):
    value = state = output = serdes.JSON
    call = onceflow.concurrently(double, retries=0)

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            doubled = self.call(record.value)
            state.put(state.get(0) + doubled)
            yield Record(key, doubled)


def values(bootstrap: str, topic: str) -> Counter[str]:
    return Counter((record.value or b"").decode() for record in independent.read_topic(bootstrap, topic))


@pytest.mark.parametrize("where", ["driver", "tasks", "two stages"])
def test_a_process_step(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, where: str
) -> None:
    source, target, failed = make_topic(partitions=2), make_topic(partitions=3), make_topic(partitions=1)
    independent.fill(onceflow_broker, source, [(b"k%d" % (n % 9), b"%d" % n) for n in range(60)])
    with onceflow.Flow(f"charge-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.process(
            flow.read(source), Charge(), table=f"{source}-sums", on_error="dead-letter", dead_letter_topic=failed,
            state_dir=tmp_path,
        )  # fmt: skip
        if where == "two stages":
            rows = rows.where(F.length("value") > 0)
        query = flow.write(rows, topic=target, once=True, engine="driver" if where == "driver" else "tasks").start()
        query.awaitTermination(60)
        summary = query.batches[-1]
    good = [n for n in range(60) if n % 10 != 7]
    assert values(onceflow_broker, target) == Counter(str(2 * n) for n in good)
    assert values(onceflow_broker, failed) == Counter(str(n) for n in range(60) if n % 10 == 7)
    assert (summary.records, summary.dead_letters) == (len(good), 6)
    assert ("driver" in summary.path) == (where == "driver")


def test_rows(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    source, target, failed = make_topic(partitions=2), make_topic(partitions=3), make_topic(partitions=1)
    inputs: list[tuple[bytes | None, bytes | None]] = [(b"k%d" % (n % 3), b"%d" % n) for n in range(30)]
    independent.fill(onceflow_broker, source, [*inputs, (None, b"100"), (b"k0", None), (b"k1", b"no JSON")])
    calls = onceflow.concurrently(double_value, limit=8, retries=0)
    with onceflow.Flow(f"double-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        df = flow.read(source, include_headers=True)
        rows = flow.enrich(df, calls, topic=target, dead_letter_topic=failed, value=serdes.JSON, output=serdes.JSON)
        with pytest.raises(OptionError, match="would also get the dead letters"):
            flow.write(rows, topic=target)
        with pytest.raises(UnsupportedQueryError, match="Operators follow"):
            flow.write(rows.where("key is not null"))
        with pytest.raises(UnsupportedQueryError, match="would get the dead letters"):
            flow.process(rows, Charge(), table="t")
        with pytest.raises(OptionError, match="takes what onceflow"):
            flow.enrich(df, double, topic=target)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="cannot write to"):
            flow.enrich(df, calls, topic=source)
        with pytest.raises(OptionError, match="Results and dead letters would both go to"):
            flow.enrich(df, calls, topic=failed, dead_letter_topic=failed)
        with pytest.raises(OptionError, match="there are no dead letters"):
            flow.enrich(df, calls, topic=target, max_dead_letters=5)
        query = flow.write(rows, once=True).start()
        query.awaitTermination(60)
        assert [(batch.records, batch.dead_letters) for batch in query.batches] == [(28, 4)]
    assert f"the first dead letters of this run went to {failed}: 3 x ValueError, first {source}-" in caplog.text
    assert "1 x JSONDecodeError" in caplog.text
    found = [
        json.loads(record.value or b"") for record in independent.read_topic(onceflow_broker, target, decided=True)
    ]
    good = [n for n in range(30) if n % 10 != 7]
    assert sorted(each["was"] for each in found) == [*good, 100]
    assert all(each["is"] == 2 * each["was"] for each in found)
    assert len({each["id"] for each in found}) == len(found)
    letters = list(independent.read_topic(onceflow_broker, failed))
    assert Counter(record.value for record in letters) == Counter([b"7", b"17", b"27", b"no JSON"])
    assert {dict(record.headers)["onceflow.error.class"] for record in letters} == {b"ValueError", b"JSONDecodeError"}
    in_order: dict[bytes | None, list[int]] = {}
    for record in independent.read_topic(onceflow_broker, target):
        in_order.setdefault(record.key, []).append(json.loads(record.value or b"")["was"])
    assert in_order[b"k1"] == [n for n in good if n % 3 == 1]


@pytest.mark.long
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("engine", ["auto", "tasks"])
def test_rows_behind_a_process_step(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, guarantee: str,
    engine: str,
) -> None:  # fmt: skip
    """Dead letters of both are counted, also when they go to one topic."""
    source, target, failed = make_topic(partitions=2), make_topic(partitions=3), make_topic(partitions=1)
    independent.fill(onceflow_broker, source, [(b"k%d" % (n % 3), b"%d" % n) for n in range(30)])
    with onceflow.Flow(f"behind-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.process(
            flow.read(source), Charge(), table=f"{source}-sums", on_error="dead-letter", dead_letter_topic=failed,
            state_dir=tmp_path,
        )  # fmt: skip
        rows = flow.enrich(
            rows.select("key", "value"), onceflow.concurrently(refuse_some, retries=0), topic=target,
            dead_letter_topic=failed,
        )  # fmt: skip
        query = flow.write(rows, once=True, engine=engine, guarantee=guarantee).start()
        query.awaitTermination(60)
        assert [(batch.records, batch.dead_letters) for batch in query.batches] == [(24, 6)]
    assert sum(values(onceflow_broker, target).values()) == 24
    assert values(onceflow_broker, failed) == Counter(["7", "17", "27", "0", "20", "40"])


def refuse_some(record: Record) -> bytes | None:
    if int(record.value) % 20 == 0:
        raise ValueError(f"{record.value!r} is refused")
    return record.value


class SlowOnce:
    """A service that takes long for the records of the first attempt."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, record: Record) -> bytes | None:
        if not self.file.exists():
            if record.value == b"2":
                self.file.touch()
            time.sleep(0.8)
        return record.value


def refuse(record: Record) -> None:
    raise ValueError(f"{record.value!r} is refused")


@pytest.mark.long
@pytest.mark.parametrize("engine", ["auto", "tasks"])
def test_rows_that_stop_a_flow(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, caplog: Any,
    engine: str,
) -> None:  # fmt: skip
    """Too many dead letters, a call that fails, calls that take too long: as with a processor."""
    source, target, failed = make_topic(partitions=1), make_topic(partitions=1), make_topic(partitions=1)
    independent.fill(onceflow_broker, source, [(b"k%d" % n, b"%d" % n) for n in range(10)])
    with onceflow.Flow(f"stops-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:

        def write(function: Any, dead_letter_topic: str | None, most: int | None, timeout: str = "1 minute") -> Any:
            calls = onceflow.concurrently(function, limit=1, retries=0, timeout="1 second")
            rows = flow.enrich(
                flow.read(source), calls, topic=target, dead_letter_topic=dead_letter_topic, max_dead_letters=most
            )
            query = flow.write(rows, once=True, engine=engine, transaction_timeout=timeout).start()
            query.awaitTermination(60)
            return query.batches[-1]

        with pytest.raises(DeadLetterLimitError, match=r"10 of 10 records .*max_dead_letters is 9"):
            write(refuse, failed, 9)
        with pytest.raises(ProcessorError, match=r"refuse failed for a record: ValueError: b'0' is refused"):
            write(refuse, None, None)
        assert not values(onceflow_broker, failed)
        assert not values(onceflow_broker, target)
        batch = write(SlowOnce(tmp_path / "done"), failed, 0, "2 seconds")
    assert batch.attempts >= 2
    assert "The calls of a batch take longer than 2 s" in caplog.text
    assert values(onceflow_broker, target) == Counter(map(str, range(10)))


class Slow(onceflow.Processor):
    def __init__(self, begun: Path) -> None:
        self.begun = begun
        self.call = onceflow.concurrently(self.ask, limit=1)

    def ask(self, _: bytes) -> bytes:
        self.begun.touch()
        time.sleep(1)
        return b""

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        yield Record(key, self.call(key))


def test_a_flow_that_is_stopped_does_not_wait_for_its_calls(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target, begun = make_topic(partitions=1), make_topic(partitions=1), tmp_path / "begun"
    independent.fill(onceflow_broker, source, [(b"k%d" % n, b"") for n in range(50)])
    with onceflow.Flow(f"stop-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.process(flow.read(source), Slow(begun), table=f"{source}-state", state_dir=tmp_path)
        query = flow.write(rows, topic=target).start()
        end = time.monotonic() + 30
        while not begun.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        began = time.monotonic()
        query.stop()
        assert time.monotonic() - began < 20, "all calls together take 50 seconds"
        assert query.failure is None
    assert not values(onceflow_broker, target)


def test_calls_that_cannot_end_before_the_transaction(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    source, target = make_topic(partitions=1), make_topic(partitions=1)
    with onceflow.Flow(f"slow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        calls = onceflow.concurrently(double, timeout="30 seconds", retries=2)
        rows = flow.enrich(flow.read(source), calls, topic=target)
        with pytest.raises(OptionError, match=r"One call of double can take 90\.6 s .*transaction_timeout is 60 s"):
            flow.write(rows).start()
        rows = flow.enrich(flow.read(source), onceflow.concurrently(double), topic=target)
        flow.write(rows, once=True, transaction_timeout="2 minutes").start().awaitTermination(60)
    assert (
        "200,000 records. With limit=16, a task makes all calls of double in time only if one takes less" in caplog.text
    )

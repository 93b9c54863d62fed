"""How a processor is tested: no Spark, no Kafka, no waiting. Read it as an example for tests of your own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from onceflow.errors import ProcessorError
from onceflow.state.api.json_columns import format_json, parse_json
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import JSON, STRING
from onceflow.testing.processor_driver import ProcessorDriver


class Balance(Processor):
    """Running balance per account; refuses overdrafts, reports accounts that were silent for an hour."""

    key = STRING
    value = state = output = JSON

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        account = state.get({"balance": 0, "count": 0})
        for record in records:
            account["balance"] += record.value["amount"]
            account["count"] += 1
            if account["balance"] < 0:
                raise ValueError(f"{key} is overdrawn")
            yield Record(key, {"balance": account["balance"]})
        state.put(account)
        state.timers.register("silent", state.now_ms + 3_600_000, "processing")

    def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[Record]:
        yield Record(key, {"silent": True, **state.get()}, topic="reminders")


def test_a_record_goes_in_and_records_come_out() -> None:
    driver = ProcessorDriver(Balance())
    assert driver.send("ada", {"amount": 5}) == [Record("ada", {"balance": 5})]
    assert driver.send_many([("ada", {"amount": 7}), ("bob", {"amount": 1})]) == [
        Record("ada", {"balance": 12}),
        Record("bob", {"balance": 1}),
    ]
    assert driver.state("ada") == {"balance": 12, "count": 2}
    assert driver.states == {"ada": {"balance": 12, "count": 2}, "bob": {"balance": 1, "count": 1}}
    assert len(driver.take()) == 3
    assert driver.outputs == []


def test_time_moves_when_the_test_says_so() -> None:
    driver = ProcessorDriver(Balance())
    driver.send("ada", {"amount": 5})
    assert [(key, timer.name, timer.at_ms) for key, timer in driver.timers] == [("ada", "silent", 3_600_000)]
    assert driver.advance(3599) == []
    assert driver.advance(1) == [Record("ada", {"silent": True, "balance": 5, "count": 1}, "reminders")]
    assert driver.timers == []


def test_what_happens_to_bad_records() -> None:
    with pytest.raises(ProcessorError, match="ada is overdrawn"):
        ProcessorDriver(Balance()).send("ada", {"amount": -5})

    driver = ProcessorDriver(Balance(), on_error="dead-letter")
    driver.send_many([("ada", {"amount": 5}), ("ada", {"amount": -7}), ("ada", b"not JSON"), ("ada", {"amount": 1})])
    assert driver.state("ada")["balance"] == 6
    assert [letter.value for letter in driver.dead_letters] == [b"not JSON", b'{"amount":-7}']
    assert dict(driver.dead_letters[1].headers)["onceflow.error.message"] == b"ada is overdrawn"


def test_a_batch_that_fails_leaves_nothing_in_any_partition() -> None:
    driver = ProcessorDriver(Balance(), partitions=4)
    keys = [f"account-{i}" for i in range(20)]
    driver.send_many([(key, {"amount": 1}) for key in keys])
    with pytest.raises(ProcessorError):
        driver.send_many([*((key, {"amount": 1}) for key in keys), ("account-7", {"amount": -50})])
    assert driver.outputs[20:] == []
    assert set(map(str, driver.states.values())) == {"{'balance': 1, 'count': 1}"}
    driver.send("account-7", {"amount": 2})
    assert driver.state("account-7")["balance"] == 3


class PerMinute(Processor):
    """Counts by event time: one result per key and minute, when the watermark has passed its end."""

    key = value = STRING
    state = output = JSON
    allowed_lateness = "10 seconds"

    def process(self, key: str, records: Sequence[Record], state: Any) -> None:
        counts = state.map("counts")
        for record in records:
            start = (record.timestamp_ms or 0) // 60_000 * 60_000
            counts.put(str(start), counts.get(str(start), 0) + 1)
            state.timers.register(str(start), start + 60_000)

    def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[Record]:
        counts = state.map("counts")
        yield Record(key, counts.get(timer.name), timestamp_ms=timer.at_ms)
        counts.delete(timer.name)


def test_event_time_follows_the_records() -> None:
    driver = ProcessorDriver(PerMinute())
    assert driver.send_many([Record("a", "", timestamp_ms=at) for at in (1_000, 59_000, 61_000)]) == []
    assert driver.watermark_ms == 51_000
    assert driver.map("a", "counts", key=STRING) == {"0": 2, "60000": 1}
    assert driver.send("a", "", timestamp_ms=70_000) == [Record("a", 2, timestamp_ms=60_000)]
    driver.send("a", "", timestamp_ms=59_999)
    assert [letter.timestamp_ms for letter in driver.late] == [59_999]
    # The slowest source partition counts.
    driver.send("a", "", timestamp_ms=500_000, partition=1)
    assert driver.watermark_ms == 60_000
    driver.watermark_ms = 600_000  # as if all partitions had come this far
    assert [record.value for record in driver.run()] == [2, 1]


def test_records_can_be_queued_for_one_batch() -> None:
    driver = ProcessorDriver(Balance())
    assert driver.send("ada", {"amount": 1}, run=False) == []
    assert driver.states == {}
    assert len(driver.send("ada", {"amount": 1})) == 2


def test_a_newer_version_meets_older_state() -> None:
    driver = ProcessorDriver(Balance())
    driver.send("ada", {"amount": 5})

    class InCents(Balance):
        version = 1

        def migrate(self, payload: bytes, from_version: int) -> Any:
            old = JSON.decode(payload)
            return {**old, "balance": old["balance"] * 100}

    driver.processor = InCents()
    assert driver.state("ada") == {"balance": 500, "count": 1}
    assert driver.send("ada", {"amount": 1}) == [Record("ada", {"balance": 501})]


def test_timers_that_never_stop_are_noticed() -> None:
    class Restless(Balance):
        def on_timer(self, key: str, timer: Any, state: Any) -> Any:
            state.timers.register("silent", timer.at_ms, "processing")

    driver = ProcessorDriver(Restless())
    driver.send("ada", {"amount": 5})
    with pytest.raises(ProcessorError, match="due again"):
        driver.advance(3600)


class ColumnBalance(ColumnProcessor):
    """The balances again, a column at a time."""

    state_fields = {"balance": "int64"}  # noqa: RUF012

    def process(self, records: pa.Table, states: pa.Table, context: Any) -> tuple[Any, Any]:
        amounts = parse_json(records["value"], pa.schema([("amount", pa.int64())]))["amount"].to_numpy()
        sums = np.zeros(states.num_rows, dtype=np.int64)
        np.add.at(sums, records["state"].to_numpy(), amounts)
        balance = pc.add(pc.fill_null(states["balance"], 0), pa.array(sums))
        new_states = pa.table({"key": states["key"], "balance": balance})
        return pa.table({"key": states["key"], "value": format_json(new_states.select(["balance"]))}), new_states


def test_column_processors_are_tested_alike() -> None:
    driver = ProcessorDriver(ColumnBalance(), partitions=2, on_error="dead-letter")
    driver.send_many([("ada", {"amount": 5}), ("bob", {"amount": 1}), ("ada", {"amount": 7})])
    assert sorted((record.key, record.value) for record in driver.take()) == [
        (b"ada", b'{"balance":12}'),
        (b"bob", b'{"balance":1}'),
    ]
    assert driver.state("ada") == {"balance": 12}
    assert driver.states == {b"ada": {"balance": 12}, b"bob": {"balance": 1}}
    driver.send_many([("ada", "no JSON"), ("ada", {"amount": 1})])
    assert driver.state("ada") == {"balance": 13}
    assert [letter.value for letter in driver.dead_letters] == [b"no JSON"]

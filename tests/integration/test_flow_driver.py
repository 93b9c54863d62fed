"""``FlowDriver``: flows on topics in memory. Spark is real, brokers are not needed."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame

import onceflow
from onceflow import Record, serdes, windows
from onceflow.client import in_process
from onceflow.errors import OptionError, ProcessorError, ProgressConflictError, UnknownTopicError, UnsupportedQueryError
from onceflow.testing.flow_driver import START_MS, FlowDriver

pytestmark = pytest.mark.integration

AMOUNT = "CAST(get_json_object(CAST(value AS STRING), '$.amount') AS INT)"


@pytest.fixture(autouse=True)
def _spark(onceflow_spark: Any) -> None:
    """The session of the tests is the one that is active."""


class Total(onceflow.Processor):
    key = serdes.STRING
    value = state = output = serdes.JSON

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        total = state.get(0)
        for record in records:
            total += record.value["amount"]
        state.put(total)
        yield Record(key, {"balance": total})


def totals_flow(flow: onceflow.Flow) -> Any:
    rows = flow.read("deposits").where(f"{AMOUNT} <> 0").select("key", "value")
    return flow.write(flow.process(rows, Total(), table="totals"), topic="balances")


def letters_flow(flow: onceflow.Flow) -> Any:
    rows = flow.process(
        flow.read("deposits"), Total(), table="totals", on_error="dead-letter", dead_letter_topic="failed"
    )
    return flow.write(rows, topic="balances")


def driver_of(flow: Any, **options: Any) -> FlowDriver:
    return FlowDriver(flow, **options)


# ---- records in, records out ---------------------------------------------------------------------------


def test_read_sql_process_write() -> None:
    driver = FlowDriver(totals_flow)
    assert driver.send("deposits", "ada", {"amount": 5}) == [Record("ada", {"balance": 5}, "balances")]
    assert driver.send("deposits", "ada", {"amount": 0}) == []
    driver.send_many("deposits", [("ada", {"amount": 2}), Record("bob", {"amount": 1})])
    assert driver.read("balances") == [
        Record("ada", {"balance": 5}),
        Record("ada", {"balance": 7}),
        Record("bob", {"balance": 1}),
    ]
    assert driver.table("totals") == {"ada": 7, "bob": 1}
    assert len(driver.take("balances")) == 3
    driver.send("deposits", "bob", {"amount": 1})
    assert driver.take("balances") == [Record("bob", {"balance": 2})]


def test_records_of_one_run_are_one_batch_and_wait_for_it() -> None:
    driver = FlowDriver(totals_flow)
    for _ in range(3):
        assert driver.send("deposits", "ada", {"amount": 1}, run=False) == []
    assert driver.read("balances") == []
    assert driver.run() == [Record("ada", {"balance": 3}, "balances")]
    assert driver.run() == []


def test_partitions_headers_and_times() -> None:
    def copied(flow: onceflow.Flow) -> Any:
        rows = flow.read("in", include_headers=True)
        return flow.write(rows.select("key", "value", "headers", "timestamp"), topic="out", partitioner="source")

    driver = FlowDriver(copied, topics={"in": 3, "out": 3})
    driver.send("in", "a", b"\xff", partition=2, headers=[("h", b"1")], timestamp_ms=START_MS - 5)
    driver.send("in", None, "text", partition=0)
    first, second = driver.read("out", places=True)
    assert first == Record("a", b"\xff", "out", (("h", b"1"),), START_MS - 5, 2, 0)
    assert second == Record(None, b"text", "out", (), START_MS, 0, 0)


def test_keys_are_where_kafka_puts_them_and_rows_without_one_take_turns() -> None:
    driver = FlowDriver(totals_flow, partitions=4)
    for key in ("ada", "bob", "eve", "joe", "kim"):
        driver.send("deposits", key, {"amount": 1})
    deposits = {each.key: each.partition for each in driver.read("deposits", places=True)}
    assert {each.key: each.partition for each in driver.read("balances", places=True)} == deposits
    assert len(set(deposits.values())) > 1

    def copied(flow: onceflow.Flow) -> Any:
        return flow.write(flow.read("in").select("value"), topic="out")

    driver = FlowDriver(copied, topics={"in": 2, "out": 1})
    driver.send_many("in", [(None, str(number)) for number in range(4)])
    assert [each.partition for each in driver.read("in", places=True)] == [0, 1, 0, 1]


def test_rows_name_their_topics_and_more_rows_come_of_one() -> None:
    def split(flow: onceflow.Flow) -> Any:
        words = flow.read("text").selectExpr("explode(split(CAST(value AS STRING), ' ')) AS word")
        return flow.write(
            words.selectExpr("word AS key", "CAST(length(word) AS STRING) AS value", "left(word, 1) AS topic")
        )

    driver = FlowDriver(split)
    assert driver.send("text", None, "apple bee ant") == [
        Record("apple", 5, "a"),
        Record("ant", 3, "a"),
        Record("bee", 3, "b"),
    ]


def test_a_function_over_arrow_batches_and_two_sources() -> None:
    def upper(batch: pa.RecordBatch) -> pa.RecordBatch:
        value = pc.utf8_upper(batch["value"].cast(pa.string())).cast(pa.binary())
        return batch.set_column(batch.schema.get_field_index("value"), "value", value)

    def shouted(flow: onceflow.Flow) -> Any:
        both = flow.read("one").union(flow.read("other"))
        return flow.write(flow.map(both, upper).select("key", "value"), topic="out")

    driver = FlowDriver(shouted)
    driver.send("one", "a", "x")
    driver.send("other", "b", "y")
    assert driver.read("out", value=serdes.STRING) == [Record("a", "X"), Record("b", "Y")]


def test_other_serdes() -> None:
    driver = FlowDriver(totals_flow, key=serdes.BYTES)
    driver.send("deposits", b"ada", b'{"amount": 5}')
    assert driver.read("balances", value=serdes.STRING) == [Record(b"ada", '{"balance":5}')]
    assert driver.table("totals", key=serdes.STRING) == {"ada": 5}


# ---- errors --------------------------------------------------------------------------------------------


def test_a_dead_letter() -> None:
    driver = FlowDriver(letters_flow)
    assert driver.send_many("deposits", [("ada", {"amount": 1}), ("ada", "no JSON"), ("ada", {"amount": 2})])
    (letter,) = driver.read("failed")
    assert (letter.key, letter.value) == ("ada", b"no JSON")
    assert dict(letter.headers)["onceflow.error.class"] == b"JSONDecodeError"
    assert driver.table("totals") == {"ada": 3}


def test_a_batch_that_fails_leaves_nothing_behind_and_a_new_version_goes_on() -> None:
    driver = FlowDriver(totals_flow)
    driver.send("deposits", "ada", {"amount": 1})
    with pytest.raises(ProcessorError, match="TypeError"):
        driver.send_many("deposits", [("bob", {"amount": 1}), ("ada", {"amount": "2"})])
    assert driver.read("balances") == [Record("ada", {"balance": 1})]
    assert driver.table("totals") == {"ada": 1}
    with pytest.raises(ProcessorError):
        driver.run()  # it is stopped, and started again with the same record in front of it

    class Fixed(Total):
        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                record.value["amount"] = int(record.value["amount"])
            return super().process(key, records, state)

    def fixed(flow: onceflow.Flow) -> Any:
        return flow.write(flow.process(flow.read("deposits"), Fixed(), table="totals"), topic="balances")

    assert driver.restart(fixed) == [
        Record("bob", {"balance": 1}, "balances"),
        Record("ada", {"balance": 3}, "balances"),
    ]


def test_a_migration_and_one_that_is_missing() -> None:
    class Counted(Total):
        version = 2

        def migrate(self, payload: bytes, from_version: int) -> Any:
            assert from_version == 0
            return int(payload) * 100

    class Missing(Total):
        version = 2

    def with_processor(processor: onceflow.Processor) -> Any:
        def flow_of(flow: onceflow.Flow) -> Any:
            return flow.write(flow.process(flow.read("deposits"), processor, table="totals"), topic="balances")

        return flow_of

    driver = FlowDriver(with_processor(Total()))
    driver.send("deposits", "ada", {"amount": 1})
    with pytest.raises(ProgressConflictError, match="migrate"):
        driver.restart(with_processor(Missing()))
    driver.restart(with_processor(Counted()))
    assert driver.send("deposits", "ada", {"amount": 1}) == [Record("ada", {"balance": 101}, "balances")]


# ---- time ----------------------------------------------------------------------------------------------


class PerMinute(windows.WindowProcessor):
    key = serdes.STRING
    value = serdes.JSON
    window = windows.Tumbling("1 minute")
    allowed_lateness = "10 seconds"
    aggregates = {"sum": windows.Sum("amount")}  # noqa: RUF012


def windows_flow(flow: onceflow.Flow) -> Any:
    rows = flow.process(flow.read("deposits"), PerMinute(), table="minutes", late_topic="late")
    return flow.write(rows, topic="sums")


def test_windows_and_late_records_over_partitions() -> None:
    # Times may not be ahead of the clock, and it may not go on: silent partitions are waited for.
    driver = FlowDriver(windows_flow, partitions=2, now_ms=START_MS + 600_000)

    def send(seconds: float, amount: int, partition: int) -> list[Record]:
        return driver.send(
            "deposits",
            f"key-{partition}",
            {"amount": amount},
            timestamp_ms=START_MS + int(1000 * seconds),
            partition=partition,
        )

    assert send(10, 1, 0) == send(20, 2, 0) == send(15, 4, 1) == []
    assert driver.watermark_ms("minutes") == START_MS + 5_000
    assert send(130, 8, 0) == []  # the other partition is at 15 s
    assert {each.key: each.value["sum"] for each in send(130, 16, 1)} == {"key-0": 3, "key-1": 4}
    assert driver.watermark_ms("minutes") == START_MS + 120_000
    assert send(30, 32, 0) == [Record("key-0", {"amount": 32}, "late", driver.read("late")[0].headers)]


def test_a_silent_partition_is_waited_for_as_long_as_the_clock_says() -> None:
    driver = FlowDriver(windows_flow, partitions=2, now_ms=START_MS + 600_000)
    driver.send("deposits", "a", {"amount": 1}, timestamp_ms=START_MS, partition=0)
    driver.send("deposits", "a", {"amount": 1}, timestamp_ms=START_MS + 100_000, partition=0)
    assert driver.advance(29) == []
    (closed,) = driver.advance(2)  # idle_timeout is 30 seconds
    assert closed.value["sum"] == 1


def test_the_clock_moves_only_when_told_and_timers_fire() -> None:
    class Remind(onceflow.Processor):
        key = value = state = output = serdes.STRING

        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            state.timers.register("soon", state.now_ms + 60_000, "processing")
            yield Record(key, str(state.now_ms))

        def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[Record]:
            yield Record(key, f"{timer.name} at {state.now_ms}")

    def remind(flow: onceflow.Flow) -> Any:
        return flow.write(flow.process(flow.read("in"), Remind(), table="reminders"), topic="out")

    driver = FlowDriver(remind, now_ms=1_000_000, value=serdes.STRING)
    assert driver.send("in", "a", "x") == [Record("a", "1000000", "out")]
    assert driver.advance(59.999) == []
    assert driver.advance(0.001) == [Record("a", "soon at 1060000", "out")]
    assert driver.now_ms == 1_060_000
    assert driver.read("out", places=True)[-1].timestamp_ms == 1_060_000


def test_rows_expire() -> None:
    def kept_for_a_minute(flow: onceflow.Flow) -> Any:
        rows = flow.process(flow.read("deposits"), Total(), table="totals", retention="1 minute")
        return flow.write(rows, topic="balances")

    driver = FlowDriver(kept_for_a_minute)
    driver.send("deposits", "ada", {"amount": 1})
    driver.advance(30)
    assert driver.table("totals") == {"ada": 1}
    driver.advance(31)
    assert driver.table("totals") == {}
    assert driver.send("deposits", "ada", {"amount": 1}) == [Record("ada", {"balance": 1}, "balances")]


def test_duplicates() -> None:
    def once(flow: onceflow.Flow) -> Any:
        rows = flow.read("in", include_headers=True)
        first = flow.deduplicate(rows, id="key", within="1 hour", late="too-late", duplicates_topic="again")
        return flow.write(first, topic="out")

    driver = FlowDriver(once)
    driver.send_many("in", [("a", 1), ("b", 2), ("a", 3)])
    assert driver.read("out") == [Record("a", 1), Record("b", 2)]
    assert [each.value for each in driver.read("again")] == [3]


# ---- tables and calls ----------------------------------------------------------------------------------


def joined_flow(flow: onceflow.Flow) -> Any:
    rates = onceflow.JoinTable("rates", key=serdes.STRING, value=serdes.JSON)
    orders = flow.read("orders").selectExpr("key", "CAST(value AS STRING) AS currency")
    joined = flow.join_table(orders, rates, on="currency", columns={"rate": "double"}, how="left")
    return flow.write(joined.selectExpr("key", "to_json(struct(rate)) AS value"), topic="priced")


def test_a_joined_table() -> None:
    driver = FlowDriver(joined_flow, tables={"rates": {"EUR": {"rate": 1.5}}})
    assert driver.send("orders", "a", "EUR") == [Record("a", {"rate": 1.5}, "priced")]
    assert driver.send("orders", "b", "CHF") == [Record("b", {}, "priced")]
    driver.send("rates", "CHF", {"rate": 2.0})
    driver.send("rates", "EUR", None)
    assert driver.table("rates") == {"CHF": {"rate": 2.0}}
    driver.send_many("orders", [("c", "CHF"), ("d", "EUR")])
    assert driver.read("priced")[-2:] == [Record("c", {"rate": 2.0}), Record("d", {})]


def test_a_table_that_a_processor_asks() -> None:
    class Rated(onceflow.Processor):
        key = serdes.STRING
        value = output = serdes.JSON

        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                yield Record(key, state.table("rates").get(record.value))

    def rated(flow: onceflow.Flow) -> Any:
        rates = onceflow.JoinTable("rates-of-today", key=serdes.STRING, value=serdes.JSON)
        rows = flow.process(flow.read("in"), Rated(), table="none", tables={"rates": rates})
        return flow.write(rows, topic="out")

    driver = FlowDriver(rated, tables={"rates-of-today": {"EUR": 3}})
    assert driver.send("in", "a", '"EUR"') == [Record("a", 3, "out")]


def ask(record: Record) -> Any:
    if record.value["amount"] < 0:
        raise ValueError("negative")
    return {"checked": record.value["amount"]}


def test_calls_of_another_service() -> None:
    def called(flow: onceflow.Flow) -> Any:
        calls = onceflow.concurrently(ask, limit=4, retries=0)
        rows = flow.enrich(
            flow.read("deposits"), calls, topic="checked", dead_letter_topic="failed",
            value=serdes.JSON, output=serdes.JSON,
        )  # fmt: skip
        return flow.write(rows)

    driver = FlowDriver(called)
    driver.send_many("deposits", [("a", {"amount": 1}), ("b", {"amount": -1}), ("c", {"amount": 3})])
    assert driver.read("checked") == [Record("a", {"checked": 1}), Record("c", {"checked": 3})]
    assert [each.key for each in driver.read("failed")] == ["b"]


# ---- several flows -------------------------------------------------------------------------------------


def doubled_flow(flow: onceflow.Flow) -> Any:
    rows = flow.read("balances")
    value = "to_json(named_struct('amount', 2 * CAST(get_json_object(CAST(value AS STRING), '$.balance') AS INT)))"
    return flow.write(rows.selectExpr("key", f"{value} AS value"), topic="doubled")


def test_flows_that_read_from_each_other() -> None:
    driver = FlowDriver(totals_flow, doubled_flow)
    driver.send("deposits", "ada", {"amount": 5})
    driver.send("deposits", "ada", {"amount": 1})
    assert driver.read("doubled") == [Record("ada", {"amount": 10}), Record("ada", {"amount": 12})]


def test_a_retry() -> None:
    policy = onceflow.Retry(
        retry_topic="deposits-again", parked_topic="parked", base=1, ceiling=1, jitter=0, max_attempts=3
    )

    def deposits(flow: onceflow.Flow) -> Any:
        both = flow.read("deposits", include_headers=True).unionByName(
            flow.read("deposits-again", include_headers=True)
        )
        rows = flow.process(both, Total(), table="totals", on_error="dead-letter", dead_letter_topic="failed")
        return flow.write(rows, topic="balances")

    def retries(flow: onceflow.Flow) -> Any:
        rows = flow.process(
            onceflow.Retry.by_origin(flow.read("failed", include_headers=True)), policy, table="waiting"
        )
        return flow.write(rows, topic="deposits-again")

    driver = FlowDriver(deposits, retries)
    driver.send("deposits", "ada", {"amount": "1"})
    assert driver.read("deposits-again") == []
    driver.advance(1)
    assert len(driver.read("deposits-again")) == 1
    driver.advance(1)
    assert len(driver.read("deposits-again")) == 2
    assert len(driver.read("parked")) == 1


# ---- guarantees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_weaker_guarantees(guarantee: str) -> None:
    def weaker(flow: onceflow.Flow) -> Any:
        return flow.write(flow.read("in").select("key", "value"), topic="out", guarantee=guarantee)

    driver = FlowDriver(weaker)
    driver.send("in", "a", 1)
    driver.send_many("in", [("a", 2), ("b", 3)])
    assert [each.value for each in driver.read("out")] == [1, 2, 3]


def test_state_without_a_changelog_outlives_a_restart() -> None:
    def local(flow: onceflow.Flow) -> Any:
        rows = flow.process(flow.read("deposits"), Total(), table="totals", changelog=False)
        return flow.write(rows, topic="balances")

    driver = FlowDriver(local)
    driver.send("deposits", "ada", {"amount": 1})
    driver.restart()
    assert driver.send("deposits", "ada", {"amount": 1}) == [Record("ada", {"balance": 2}, "balances")]


def test_a_restart_restores_state_and_reads_on() -> None:
    driver = FlowDriver(totals_flow)
    driver.send("deposits", "ada", {"amount": 1})
    driver.send("deposits", "ada", {"amount": 2}, run=False)
    assert driver.restart() == [Record("ada", {"balance": 3}, "balances")]


@pytest.mark.parametrize("engine", ["auto", "driver", "tasks"])
def test_how_a_flow_runs_in_production_makes_no_difference(engine: str) -> None:
    def options(flow: onceflow.Flow) -> Any:
        rows = flow.read("in", max_records_per_batch=2).select("key", "value")
        return flow.write(rows, topic="out", once=True, engine=engine, compression="zstd")

    driver = FlowDriver(options)
    driver.send_many("in", [("a", number) for number in range(7)])
    driver.send("in", "b", 7)
    assert [each.value for each in driver.read("out")] == [*range(8)]


def test_where_a_read_ends() -> None:
    driver = FlowDriver(lambda flow: flow.write(flow.read("in").select("key", "value"), topic="out"))
    driver.send_many("in", [("a", number) for number in range(3)])

    def later(flow: onceflow.Flow) -> Any:
        rows = flow.read("in", until="latest")
        return flow.write(rows.select("key", "value"), topic="out")

    driver.send("in", "a", 3, run=False)
    driver.restart(later)
    driver.send_many("in", [("a", number) for number in range(4, 6)])
    assert [each.value for each in driver.read("out")] == [0, 1, 2, 3]


def test_drivers_share_nothing_but_spark_and_end_by_themselves() -> None:
    one, other = FlowDriver(totals_flow), FlowDriver(totals_flow)
    one.send("deposits", "ada", {"amount": 1})
    assert other.send("deposits", "ada", {"amount": 5}) == [Record("ada", {"balance": 5}, "balances")]
    address = one._world.broker.address.partition(":")[0]
    folder = one._world.folder
    del one
    gc.collect()
    assert in_process.broker_at(address) is None
    assert not folder.exists()
    with other:
        pass
    assert in_process.broker_at(other._world.broker.address.partition(":")[0]) is None


# ---- wrong use -----------------------------------------------------------------------------------------


def test_a_topic_that_nobody_reads() -> None:
    driver = FlowDriver(totals_flow)
    with pytest.raises(OptionError, match="No flow reads topic 'deposit'") as caught:
        driver.send("deposit", "ada", {"amount": 1})
    assert "did you mean 'deposits'?" in str(caught.value)
    with pytest.raises(OptionError, match="did you mean 'balances'"):
        driver.read("balance")
    with pytest.raises(OptionError, match="did you mean 'totals'"):
        driver.watermark_ms("total")
    with pytest.raises(OptionError, match="has no partition 7"):
        driver.send("deposits", "ada", {"amount": 1}, partition=7)
    with pytest.raises(OptionError, match="topic is of type int"):
        driver.send(5, "ada")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="JSON"):
        driver.send("deposits", "ada", {1, 2})


def test_topics_that_exist_are_named() -> None:
    with pytest.raises(UnknownTopicError, match="did you mean Deposits"):
        FlowDriver(totals_flow, topics={"Deposits": 1, "balances": 1}, partitions=2)
    with pytest.raises(UnknownTopicError, match="Output topic 'balances'"):
        FlowDriver(totals_flow, topics={"deposits": 1})


def test_what_is_no_flow() -> None:
    with pytest.raises(OptionError, match="takes functions that build flows"):
        FlowDriver()
    with pytest.raises(OptionError, match="'3' is no number of partitions, given for deposits"):
        FlowDriver(totals_flow, topics={"deposits": "3"})  # type: ignore[dict-item]
    with pytest.raises(OptionError, match="did you mean 'partitions'"):
        FlowDriver(totals_flow, partition=3)  # type: ignore[call-arg]

    def rows_only(flow: onceflow.Flow) -> DataFrame:
        return flow.read("in")

    with pytest.raises(OptionError, match="rows-only returns DataFrame"):
        FlowDriver(rows_only)
    driver = FlowDriver(totals_flow)
    with pytest.raises(OptionError, match="got 2 functions, there are 1 flows"):
        driver.restart(totals_flow, totals_flow)


def test_queries_with_state_in_spark_are_refused(tmp_path: Any) -> None:
    def counted(flow: onceflow.Flow, **options: Any) -> Any:
        rows = flow.read("in").groupBy("key").count().selectExpr("key", "CAST(count AS STRING) AS value")
        return flow.write(rows, topic="out", **options)

    with pytest.raises(UnsupportedQueryError, match="checkpoint"):
        FlowDriver(counted)
    with pytest.raises(UnsupportedQueryError, match="FlowDriver cannot run a query with checkpoint="):
        FlowDriver(lambda flow: counted(flow, checkpoint=tmp_path, output_mode="update"))


# ---- cost ----------------------------------------------------------------------------------------------


def test_a_record_takes_milliseconds() -> None:
    driver = FlowDriver(totals_flow)
    driver.send("deposits", "ada", {"amount": 1})
    took = []
    for _ in range(20):
        began = time.monotonic()
        driver.send("deposits", "ada", {"amount": 1})
        took.append(time.monotonic() - began)
    assert min(took) < 0.05

"""Streams joined with tables of other programs: each batch sees a table at fixed, recorded offsets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import onceflow
from onceflow import ColumnProcessor, JoinTable, OptionError, Processor, Record, SchemaError, serdes
from onceflow.driver.start import checkpoint_location
from onceflow.driver.step.joins import Joins
from onceflow.protocol import progress as progress_format
from onceflow.state.local.format import partition_folder
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

Run = Callable[..., Any]
WAYS = pytest.mark.parametrize(
    "write",
    [{}, {"engine": "tasks"}],
    ids=["driver", "tasks"],
)


class Priced(Processor):
    """Writes each record with the rate of its currency, and the position at which the table was seen."""

    key = serdes.STRING
    value = output = state = serdes.JSON

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        rates = state.table("rates")
        state.put(state.get(0) + len(records))
        for record in records:
            rate = rates.get(record.value["currency"])
            yield Record(key, {"n": record.value["n"], "rate": rate, "at": rates.position})


class PricedColumns(ColumnProcessor):
    def process(self, records: pa.Table, states: pa.Table, context: Any) -> tuple[Any, Any]:
        parsed = onceflow_json(records["value"])
        rates = context.tables["rates"].values_of(parsed["currency"])
        values = [
            json.dumps({"n": n, "rate": None if rate is None else json.loads(rate)}).encode()
            for n, rate in zip(parsed["n"].to_pylist(), rates.to_pylist(), strict=True)
        ]
        return pa.table({"key": records["key"], "value": pa.array(values)}), None


def onceflow_json(values: Any) -> pa.Table:
    from onceflow.state.api.json_columns import parse_json

    return parse_json(values, pa.schema([("n", pa.int64()), ("currency", pa.string())]))


class Joined:
    """A flow that joins orders with rates, and what it should write."""

    def __init__(self, bootstrap: str, spark: Any, make_topic: Callable[..., str], folder: Path) -> None:
        self.bootstrap, self.spark, self.folder = bootstrap, spark, folder
        self.orders, self.out = make_topic("orders", 3), make_topic("priced", 3)
        self.rates = make_topic("rates", 2, cleanup_policy="compact")
        self.flow = f"flow-{self.orders}"
        self.sent = 0

    def put(self, **rates: Any) -> None:
        rows = [(name.encode(), None if rate is None else json.dumps(rate).encode()) for name, rate in rates.items()]
        independent.fill(self.bootstrap, self.rates, rows)

    def order(self, *currencies: str) -> list[int]:
        numbers = list(range(self.sent, self.sent + len(currencies)))
        self.sent += len(currencies)
        rows = [
            (b"key-%d" % (n % 5), json.dumps({"n": n, "currency": c}).encode())
            for n, c in zip(numbers, currencies, strict=True)
        ]
        independent.fill(self.bootstrap, self.orders, rows)
        return numbers

    def run(self, processor: Any = None, join: Any = None, **write: Any) -> Any:
        flow = onceflow.Flow(self.flow, self.spark, bootstrap_servers=self.bootstrap)
        df = flow.read(self.orders)
        if join is not None:
            df = join(flow, df)
        else:
            rates = JoinTable(self.rates, key=serdes.STRING, value=serdes.JSON, state_dir=self.folder / "copies")
            df = flow.process(
                df, processor or Priced(), table=f"table-{self.orders}", tables={"rates": rates}, state_dir=self.folder
            )
        query = flow.write(df, topic=self.out, once=True, **write).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return query

    def written(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for record in independent.read_topic(self.bootstrap, self.out, decided=True):
            value = json.loads(record.value or b"")
            assert value["n"] not in found, "doubled"
            found[value["n"]] = value
        return found

    def ends(self) -> dict[str, dict[int, int]]:
        found = independent.end_offsets(self.bootstrap, self.rates)
        return {self.rates: {partition: end for (_, partition), end in found.items()}}

    def pinned(self) -> Any:
        """The offsets in the progress record."""
        records = independent.read_topic(self.bootstrap, progress_format.PROGRESS_TOPIC, decided=True)
        mine = [record for record in records if record.key == self.flow.encode()]
        return progress_format.decode(mine[-1].key, mine[-1].value or b"").joined


@pytest.fixture
def joined(onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path) -> Joined:
    return Joined(onceflow_broker, onceflow_spark, make_topic, tmp_path)


@pytest.mark.long_but("tasks")
@WAYS
def test_each_batch_sees_the_table_at_one_offset(joined: Joined, write: dict[str, Any]) -> None:
    joined.put(EUR=1.0, USD=1.1, GBP=0.8)
    first = joined.order("EUR", "USD", "XXX", "GBP", "EUR")
    joined.run(**write)
    ends = joined.pinned()
    assert ends == joined.ends()
    joined.put(EUR=2.0, GBP=None, XXX=9)
    second = joined.order("EUR", "USD", "XXX", "GBP")
    joined.run(**write)
    written = joined.written()
    assert [written[n]["rate"] for n in first] == [1.0, 1.1, None, 0.8, 1.0]
    assert [written[n]["rate"] for n in second] == [2.0, 1.1, 9, None]
    listed = ".".join(str(end) for _, end in sorted(ends[joined.rates].items()))
    assert {written[n]["at"] for n in first} == {f"{joined.rates}:{listed}"}
    assert len({written[n]["at"] for n in second}) == 1


def read_from_a_compacted_log(folder: Path, exact_from: int) -> None:
    """Make a copy look as if it had been read from a log that was compacted meanwhile."""
    store = LmdbStore.open(folder)
    store.write((), {"exact from": b"%d" % exact_from})
    store.close()


@pytest.mark.long
def test_rows_that_were_joined_before_a_shuffle(
    joined: Joined, make_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark keeps shuffle files of a failed attempt of a micro-batch, whose offsets do not hold any more."""
    second = make_topic("second", 1, cleanup_policy="compact")
    copies = joined.folder / "copies"

    def join(flow: Any, df: Any) -> Any:
        tables = [JoinTable(topic, value=serdes.STRING, state_dir=copies) for topic in (joined.rates, second)]
        df = flow.join_table(df.selectExpr("key", "value", "'k' AS k"), tables[0], on="k", columns="one")
        df = flow.join_table(df.repartition(2, "key"), tables[1], on="k", columns="two")
        columns = "'n', get_json_object(string(value), '$.n'), 'one', one, 'two', two"
        return df.selectExpr("key", f"to_json(map({columns})) AS value")

    def put(value: bytes) -> None:
        for topic in (joined.rates, second):
            independent.fill(joined.bootstrap, topic, [(b"k", value)])

    def failed(self: Joins, *arguments: Any) -> bool:
        put(b"later")
        return real(self, *arguments)

    put(b"first")
    joined.order("EUR")
    joined.run(join=join, engine="tasks", checkpoint=joined.folder / "checkpoint")
    read_from_a_compacted_log(partition_folder(copies, joined.flow, second, 0), 2)
    real = Joins.failed
    monkeypatch.setattr(Joins, "failed", failed)
    joined.order("EUR")
    joined.run(join=join, engine="tasks", checkpoint=joined.folder / "checkpoint")
    rows = [(row["one"], row["two"]) for _, row in sorted(joined.written().items())]
    assert rows == [("first", "first"), ("later", "later")]
    assert sum(joined.pinned()[joined.rates].values()) == 2
    assert joined.pinned()[second] == {0: 2}


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("auto", marks=pytest.mark.long), "tasks"], ids=["driver", "tasks"])
def test_at_most_once_loses_nothing_because_of_a_copy(
    joined: Joined, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Copies are exact at the offsets of a batch before progress moves: after that nothing may be tried again."""
    copies = joined.folder / "copies"

    def join(flow: Any, df: Any) -> Any:
        table = JoinTable(joined.rates, value=serdes.STRING, state_dir=copies)
        parsed = df.selectExpr("key", "get_json_object(string(value), '$.n') AS n", "'EUR' AS currency")
        found = flow.join_table(parsed, table, on="currency", columns="rate")
        return found.selectExpr("key", "to_json(named_struct('n', int(n), 'rate', rate)) AS value")

    def failed(self: Joins, *arguments: Any) -> bool:
        joined.put(EUR=2, USD=2, GBP=2, XXX=2)
        return real(self, *arguments)

    real = Joins.failed
    monkeypatch.setattr(Joins, "failed", failed)
    options = {"guarantee": "at_most_once", "engine": engine}
    joined.put(EUR=1, USD=1, GBP=1, XXX=1)
    joined.order("EUR")
    joined.run(join=join, **options)
    ((_, end), (_, other)) = sorted(joined.ends()[joined.rates].items())
    for partition, exact_from in enumerate((end + 1, other + 1)):
        read_from_a_compacted_log(partition_folder(copies, joined.flow, joined.rates, partition), exact_from)
    joined.order("EUR")
    (batch,) = joined.run(join=join, **options).batches
    assert (batch.attempts, batch.lost) == (2, False)
    assert {n: each["rate"] for n, each in joined.written().items()} == {0: "1", 1: "2"}


def test_a_column_processor_joins(joined: Joined) -> None:
    joined.put(EUR=1.0, USD=1.1)
    numbers = joined.order("EUR", "USD", "XXX")
    joined.run(PricedColumns())
    written = joined.written()
    assert [written[n]["rate"] for n in numbers] == [1.0, 1.1, None]


@pytest.mark.parametrize("how", ["left", "inner"])
def test_join_table(joined: Joined, how: str) -> None:
    long = "EUR" * 300  # longer than a key of LMDB may be
    joined.put(**{long: {"rate": 1.5, "name": "euro"}, "USD": {"rate": 2, "name": None}})
    numbers = joined.order(long, "USD", "XXX", long)

    def join(flow: Any, df: Any) -> Any:
        from pyspark.sql import functions as F

        parsed = df.withColumn("currency", F.get_json_object(F.col("value").cast("string"), "$.currency"))
        rates = JoinTable(joined.rates, value=serdes.JSON, state_dir=joined.folder)
        found = flow.join_table(parsed, rates, on="currency", columns={"rate": "double", "name": "string"}, how=how)
        n = F.get_json_object(F.col("value").cast("string"), "$.n").cast("int").alias("n")
        return found.select("key", F.to_json(F.struct(n, "rate", "name")).alias("value"))

    joined.run(join=join)
    written = joined.written()
    assert written[numbers[0]] == {"n": 0, "rate": 1.5, "name": "euro"}
    assert written[numbers[1]] == {"n": 1, "rate": 2.0}
    assert (numbers[2] in written) == (how == "left")
    assert len(written) == (4 if how == "left" else 3)
    assert joined.pinned() == joined.ends()


@pytest.mark.long
def test_join_table_with_other_serdes_and_operators(joined: Joined, make_topic: Callable[..., str]) -> None:
    """Keys and values of other types, null keys, an empty table, and operators, steps and Spark's state around it."""
    from pyspark.sql import functions as F

    tiers = serdes.struct(tier="int32", name="string")
    numbers, names, empty = (make_topic(name, 3, cleanup_policy="compact") for name in ("numbers", "names", "empty"))
    rows = [
        (serdes.LONG.encode(n), tiers.encode({"tier": n % 3, "name": None if n == 4 else f"n{n}"})) for n in range(8)
    ]
    independent.fill(joined.bootstrap, numbers, rows)
    independent.fill(joined.bootstrap, names, [(b"key-1", "öne".encode()), (b"key-2", b"two")])
    sent = joined.order("EUR", "USD", "EUR", "USD", "EUR", "USD", "EUR", "USD", "EUR", "USD")
    independent.fill(joined.bootstrap, joined.orders, [(None, b'{"n": 10, "currency": "EUR"}')])

    def join(flow: Any, df: Any) -> Any:
        n = F.get_json_object(F.col("value").cast("string"), "$.n").cast("long")
        by_number = JoinTable(numbers, key=serdes.LONG, value=tiers)
        found = flow.join_table(
            df.withColumn("n", n), by_number, on="n", columns={"tier": "int", "name": "string"}, how="left"
        ).repartition(3)
        found = flow.join_table(found, JoinTable(names, value=serdes.STRING), on="key", columns="word", how="left")
        found = flow.join_table(found, empty, on="key", columns="nothing", how="left")
        value = F.to_json(F.struct("n", "tier", "name", "word", "nothing"), {"ignoreNullFields": "false"})
        return found.select("key", value.alias("value"))

    joined.run(join=join)
    written = joined.written()
    assert sorted(written) == [*sent, 10]
    assert written[4] == {"n": 4, "tier": 1, "name": None, "word": None, "nothing": None}
    assert written[6] == {"n": 6, "tier": 0, "name": "n6", "word": "öne", "nothing": None}
    assert written[10] == {"n": 10, "tier": None, "name": None, "word": None, "nothing": None}

    joined.flow, joined.out = f"{joined.flow}-step", make_topic("stepped", 3)
    joined.put(EUR=2.5)

    def behind(flow: Any, df: Any) -> Any:
        word = JoinTable(names, value=serdes.STRING, state_dir=joined.folder)
        rows = flow.join_table(df, word, on="key", columns="word", how="inner").drop("word")
        rates = JoinTable(joined.rates, key=serdes.STRING, value=serdes.JSON)
        step = flow.process(
            rows, Priced(), table=f"stepped-{joined.orders}", tables={"rates": rates}, state_dir=joined.folder
        )
        return flow.join_table(step.repartition(2), names, on="key", columns="again", how="inner").where(
            "again <> 'two'"
        )

    joined.run(join=behind)
    assert {n: each["rate"] for n, each in joined.written().items()} == {1: None, 6: 2.5}
    assert set(joined.pinned()) == {names, joined.rates}


@pytest.mark.long
def test_keys_that_are_structs(joined: Joined, make_topic: Callable[..., str]) -> None:
    """Also keys of text for a binary column, JSON in other bytes, and rows that come out of Spark's state."""
    from pyspark.sql import functions as F

    pair = serdes.struct(a="int64", b="string")
    pairs, documents, names = (make_topic(name, 2, cleanup_policy="compact") for name in ("pairs", "docs", "names"))
    independent.fill(joined.bootstrap, pairs, [(pair.encode({"a": n, "b": f"b{n}"}), b"p%d" % n) for n in range(3)])
    independent.fill(joined.bootstrap, documents, [(b'{"n": %d }' % n, b"d%d" % n) for n in range(1, 4)])
    independent.fill(joined.bootstrap, names, [(b"key-%d" % n, b"n%d" % n) for n in range(2)])
    joined.order("EUR", "USD", "GBP", "XXX", "EUR")

    def join(flow: Any, df: Any) -> Any:
        df = df.groupBy("key", F.get_json_object(F.col("value").cast("string"), "$.n").cast("int").alias("n")).count()
        df = df.selectExpr(
            "*", "named_struct('n', n) AS j", "IF(n < 4, named_struct('a', n, 'b', concat('b', n)), NULL) AS s"
        )
        for topic, key, on, column in (
            (pairs, pair, "s", "p"),
            (documents, serdes.JSON, "j", "d"),
            (names, serdes.STRING, "key", "name"),
        ):
            table = JoinTable(topic, key=key, value=serdes.STRING, state_dir=joined.folder)
            df = flow.join_table(df, table, on=on, columns=column, how="left")
        return df.select("key", F.to_json(F.struct("n", "p", "d", "name")).alias("value"))

    joined.run(join=join, checkpoint=str(joined.folder / "checkpoint"), output_mode="update")
    assert joined.written() == {
        0: {"n": 0, "p": "p0", "name": "n0"},
        1: {"n": 1, "p": "p1", "d": "d1", "name": "n1"},
        2: {"n": 2, "p": "p2", "d": "d2"},
        3: {"n": 3, "d": "d3"},
        4: {"n": 4},
    }


@pytest.mark.parametrize("what", ["key", "value"])
def test_a_row_that_cannot_be_joined(joined: Joined, what: str) -> None:
    """It stops the flow at once: no other attempt would get further."""
    joined.put(EUR={"rate": "high"})
    joined.order("EUR")

    def join(flow: Any, df: Any) -> Any:
        key = serdes.Serde(lambda text: b"%d" % int(text) if what == "key" else text.encode(), bytes.decode)
        table = JoinTable(joined.rates, key=key, value=serdes.JSON, state_dir=joined.folder)
        return flow.join_table(df.selectExpr("key", "'EUR' AS c"), table, on="c", columns={"rate": "double"})

    with pytest.raises(onceflow.BadRecordError) as raised:
        joined.run(join=lambda flow, df: join(flow, df).selectExpr("key", "string(rate) AS value"))
    error = raised.value
    assert (error.flow, error.topic, error.batch) == (joined.flow, joined.rates, 1)
    expected = {
        "key": f"A value of column 'c' is no key of table {joined.rates}",
        "value": f"A value of table {joined.rates} cannot be read as rate double",
    }
    assert error.what == expected[what]
    assert what == "key" or "key 'EUR': JsonRowError: " in error.detail
    assert "EUR" in error.detail
    assert "the column before join_table" in error.next_step or "correct the row" in error.next_step


@pytest.mark.parametrize("engine", ["driver", "tasks"])
def test_rows_of_a_table_that_cannot_be_read(joined: Joined, engine: str) -> None:
    """The flow goes on: these values have a column of their own, and their rows go to another topic."""
    values = {f"K{n}": b"%d" % n if n % 5 else b"{broken" for n in range(40)}
    values["TEXT"], values["BYTES"] = b'"no object"', b"\xff\xfe"
    documents = {key: b'{"rate": %s}' % value if value.isdigit() else value for key, value in values.items()}
    independent.fill(joined.bootstrap, joined.rates, [(key.encode(), value) for key, value in documents.items()])
    joined.order(*values, "NONE", *values)

    def join(flow: Any, df: Any) -> Any:
        from pyspark.sql import functions as F

        parsed = df.withColumn("currency", F.get_json_object(F.col("value").cast("string"), "$.currency"))
        table = JoinTable(joined.rates, value=serdes.JSON, state_dir=joined.folder)
        rows = flow.join_table(
            parsed, table, on="currency", columns={"rate": "double"}, how="left", corrupt_column="bad"
        )
        return rows.selectExpr("key", "to_json(struct(currency, rate, hex(bad) AS bad)) AS value")

    joined.run(join=join, engine=engine)
    found = [
        json.loads(seen.value or b"") for seen in independent.read_topic(joined.bootstrap, joined.out, decided=True)
    ]
    wanted: list[Any] = [{"currency": "NONE"}]
    for key, value in values.items():
        good = {"currency": key, "rate": float(value)} if value.isdigit() else None
        wanted += 2 * [good or {"currency": key, "bad": value.hex().upper()}]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_a_text_of_a_table_that_is_none(joined: Joined) -> None:
    independent.fill(joined.bootstrap, joined.rates, [(b"EUR", b"\xff")])
    joined.order("EUR")

    def join(flow: Any, df: Any) -> Any:
        table = JoinTable(joined.rates, value=serdes.STRING, state_dir=joined.folder)
        return flow.join_table(df.selectExpr("key", "'EUR' AS c"), table, on="c", columns="value")

    with pytest.raises(
        onceflow.BadRecordError, match=f"A value of table {joined.rates} cannot be read as value string"
    ):
        joined.run(join=lambda flow, df: join(flow, df).selectExpr("key", "value"))


class Zones:
    """Counts orders by a column of the table, in Spark's state; started again and again with one checkpoint."""

    def __init__(self, joined: Joined, **write: Any) -> None:
        self.joined = joined
        self.checkpoint = joined.folder / "checkpoint"
        self.write = {"checkpoint": str(self.checkpoint), "output_mode": "update", **write}

    def join(self, flow: Any, df: Any) -> Any:
        from pyspark.sql import functions as F

        parsed = df.withColumn("currency", F.get_json_object(F.col("value").cast("string"), "$.currency"))
        rates = JoinTable(self.joined.rates, value=serdes.JSON, state_dir=self.joined.folder)
        zones = flow.join_table(parsed, rates, on="currency", columns={"zone": "string"})
        counts = zones.groupBy("zone").count().selectExpr("zone AS key", "count AS n")
        return counts.select("key", F.to_json(F.struct("n", F.col("key"))).alias("value"))

    def run(self, *currencies: str, **write: Any) -> Any:
        self.joined.order(*currencies)
        return self.joined.run(join=self.join, **{**self.write, **write})

    def forget_last_commit(self) -> None:
        """As a crash between Kafka's commit and Spark's leaves the checkpoint."""
        commits = self.checkpoint / "commits"
        last = max((path for path in commits.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)

    def seen(self) -> list[tuple[str, int]]:
        values = independent.read_topic(self.joined.bootstrap, self.joined.out, decided=True)
        counts = [json.loads(record.value or b"") for record in values]
        return sorted((each["key"], each["n"]) for each in counts)


def test_a_join_before_state_in_spark(joined: Joined) -> None:
    """Counts by a column of the table, over two runs with one checkpoint."""
    zones = Zones(joined)
    joined.put(EUR={"zone": "a"}, USD={"zone": "b"}, GBP={"zone": "a"})
    zones.run("EUR", "USD", "GBP")
    joined.put(USD={"zone": "a"})
    zones.run("EUR", "USD")
    assert zones.seen() == [("a", 2), ("a", 4), ("b", 1)]


@pytest.mark.long
def test_a_batch_is_drained_with_the_tables_as_they_were(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its offsets and at its time, so that the state is that of the rows that were committed."""
    monkeypatch.setattr(checkpoint_location, "COMPLETE_COMMIT_LOG", False)
    times: list[int] = []
    publish = Joins.publish

    def noted(self: Joins, df: Any, ends: Any, now_ms: int) -> None:
        times.append(now_ms)
        publish(self, df, ends, now_ms)

    monkeypatch.setattr(Joins, "publish", noted)
    zones = Zones(joined)
    joined.put(EUR={"zone": "a"}, USD={"zone": "b"})
    zones.run("EUR", "USD")
    zones.forget_last_commit()
    joined.put(EUR={"zone": "c"}, USD=None)
    assert zones.run("EUR", "USD").drained == [1]
    assert zones.seen() == [("a", 1), ("b", 1), ("c", 1)]
    first, drained, second = times
    assert first == drained < second


def create_again(bootstrap: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(30)

    def created() -> bool:
        try:
            create_topic(bootstrap, topic, 2, {"cleanup.policy": "compact"})
        except onceflow.BrokerUnreachableError:
            return False
        return True

    wait_until(created, 30, "the topic is deleted")


@pytest.mark.long
@pytest.mark.parametrize("what", ["compacted", "created again"])
def test_a_batch_that_cannot_be_drained(joined: Joined, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The error says what has happened and what can be done; with an empty checkpoint the flow goes on."""
    monkeypatch.setattr(checkpoint_location, "COMPLETE_COMMIT_LOG", False)
    zones = Zones(joined)
    joined.put(EUR={"zone": "a"}, USD={"zone": "b"})
    zones.run("EUR", "USD")
    zones.forget_last_commit()
    if what == "compacted":
        for partition, end in joined.ends()[joined.rates].items():
            folder = partition_folder(joined.folder, joined.flow, joined.rates, partition)
            read_from_a_compacted_log(folder, end + 1)
    else:
        create_again(joined.bootstrap, joined.rates)
    joined.put(EUR={"zone": "c"}, USD={"zone": "c"}, GBP={}, XXX={})
    for _ in range(2):
        with pytest.raises(onceflow.ProgressConflictError) as raised:
            zones.run("EUR")
        error = raised.value
        assert (error.flow, error.topic, error.batch) == (joined.flow, joined.rates, 1)
        assert what in error.what
        assert "Spark's state" in error.what
        for words in ('on_checkpoint_conflict="resume"', f"onceflow reset {joined.flow}"):
            assert words in error.next_step
    again = zones.run("EUR", checkpoint=str(joined.folder / "empty"), on_checkpoint_conflict="resume")
    assert [batch.batch for batch in again.batches] == [2]
    assert zones.seen() == [("a", 1), ("b", 1), ("c", 3)]


def test_wrong_arguments(joined: Joined, make_topic: Callable[..., str]) -> None:
    plain = make_topic("plain", 1)
    flow = onceflow.Flow(joined.flow, joined.spark, bootstrap_servers=joined.bootstrap)
    df = flow.read(joined.orders)
    table = f"table-{joined.orders}"

    def process(tables: Any) -> Any:
        return flow.process(df, Priced(), table=table, tables=tables, state_dir=joined.folder)

    def join(table: Any = joined.rates, on: str = "key", columns: Any = "rate", **more: Any) -> Any:
        return flow.join_table(df, table, on=on, columns=columns, **more)

    def columns_of(*columns: str, key: Any = None, on: str = "key", value: Any = serdes.BYTES, field: Any = "r") -> Any:
        table = JoinTable(joined.rates, key=key, value=value)
        return flow.join_table(df.selectExpr(*columns), table, on=on, columns=field)

    join(columns="rate")
    columns_of("key", "int(offset) AS n", key=serdes.LONG, on="n")
    columns_of("key", "NULL AS n", key=serdes.LONG, on="n")
    for call, what in [
        (lambda: columns_of("key", "value", "key"), "The DataFrame has two columns 'key'"),
        (lambda: columns_of("key", "1 AS R"), "The DataFrame has a column 'R' already"),
        (lambda: columns_of("key", "interval '1' year AS i"), "Spark cannot give all columns"),
        (
            lambda: columns_of("key", key=serdes.LONG),
            f"Keys of table {joined.rates} are 64-bit integers; column 'key' is",
        ),
        (lambda: columns_of("key", key=serdes.struct(a="int64")), f"Keys of table {joined.rates} are dicts for"),
        (
            lambda: columns_of("key", value=serdes.struct(a="int64"), field={"b": "int"}),
            f"Values of table {joined.rates} have no field 'b'",
        ),
        (lambda: columns_of("struct(key) AS s", on="s.key"), "The DataFrame has no column 's.key'"),
        (lambda: flow.process(df, Priced(), table=joined.rates), f"The flow joins with {joined.rates}"),
        (lambda: process({"rates": f"{table}-internal"}), f"{table}-internal is a table of this flow"),
        (lambda: process("rates"), "tables='rates' is not a dict"),
        (lambda: process({"rates": 7}), "7 is not a table to join with"),
        (lambda: process({"rates": table}), f"{table} is a table of this flow"),
        (lambda: process({"rates": plain}), f"Topic {plain} is not compacted"),
        (lambda: process({"rates": "nothing-like-it"}), "Table topic 'nothing-like-it' does not exist"),
        (
            lambda: process({"rates": JoinTable(joined.rates, co_partitioned=True)}),
            f"{joined.rates} has 2 partitions and",
        ),
        (lambda: join(how="outer"), "how='outer' is unknown"),
        (lambda: join(on="currency"), "The DataFrame has no column 'currency'"),
        (lambda: join(on="offset"), f"Keys of table {joined.rates} are bytes or text"),
        (lambda: join(columns="value"), "The DataFrame has a column 'value' already"),
        (lambda: join(columns={"rate": "double"}), f"Fields of table {joined.rates} are asked for"),
        (
            lambda: join(JoinTable(joined.rates, value=serdes.JSON), columns={"rate": "decimal"}),
            "columns= gives 'rate'",
        ),
        (lambda: join(columns={}), "columns={} names no columns"),
        (lambda: join(JoinTable(joined.rates, key="text")), "key='text' of the table"),  # type: ignore[arg-type]
    ]:
        with pytest.raises((OptionError, SchemaError, onceflow.UnknownTopicError)) as raised:
            call()
        assert raised.value.what.startswith(what)
        assert raised.value.next_step

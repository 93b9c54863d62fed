"""Bad input of every kind: one clear error with a next step, and nothing written."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.broker.folder import free_ports
from onceflow.driver.batch import blame
from onceflow.testing import independent

pytestmark = pytest.mark.integration


@pytest.fixture
def pipe(make_pipe: Callable[..., Any]) -> Any:
    pipe = make_pipe()
    pipe.fill(300)
    return pipe


def select(pipe: Any, *columns: Any) -> tuple[Any, Any]:
    flow = pipe.open()
    return flow, flow.read(pipe.source).select(*columns)


def run_to_error(flow: Any, df: Any, kind: type[onceflow.OnceflowError], **write: Any) -> str:
    """The query must stop with this error, name the flow and the batch, and say what to do next."""
    query = flow.write(df, **write).start()
    with pytest.raises(kind) as caught:
        query.awaitTermination(90)
    error = caught.value
    assert error.flow == flow.name
    assert error.batch == 1
    assert error.next_step
    return str(error)


def check_nothing_written(pipe: Any) -> None:
    assert independent.read_topic(pipe.bootstrap, pipe.target, decided=True) == []


# ---- found before anything runs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns, words",
    [
        (["key"], "column 'value' is missing"),
        (["value", "CAST(offset AS BIGINT) AS key"], "column 'key' is bigint"),
        (["named_struct('a', 1) AS value"], "column 'value' is struct"),
        (["value", "CAST(1 AS BIGINT) AS partition"], "column 'partition' is bigint"),
        (["value", "1 AS topic"], "column 'topic' is int"),
        (["value", "map('a', 'b') AS headers"], "column 'headers' is map"),
        (["value", "'2024' AS timestamp"], "column 'timestamp' is string"),
        (["value", "value"], "there are two columns 'value'"),
    ],
)
def test_wrong_columns(pipe: Any, columns: list[str], words: str) -> None:
    flow = pipe.open()
    df = flow.read(pipe.source).selectExpr(*columns)
    with pytest.raises(onceflow.SchemaError, match=words) as caught:
        flow.write(df, topic=pipe.target)
    assert "the sink takes value" in caught.value.next_step
    flow.close()


class Silent(onceflow.Processor):
    """Sends nothing."""

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[onceflow.Record]:
        yield from ()


def test_a_column_that_spark_finds_by_another_spelling(pipe: Any) -> None:
    flow = pipe.open()
    rows = flow.read(pipe.source, include_headers=True)
    for columns in (["KEY", "value"], ["key", "value", "Headers"]):
        with pytest.raises(onceflow.SchemaError, match=f"it looks for '({'|'.join(columns).lower()})'"):
            flow.write(rows.select(*columns), topic=pipe.target)
    with pytest.raises(onceflow.SchemaError, match="would ignore the column 'Timestamp'"):
        flow.process(rows.select("key", "value", "Timestamp"), Silent(), table="not-made")
    with pytest.raises(onceflow.SchemaError, match="have two columns 'VALUE'"):
        flow.map(rows, lambda batch: batch, schema="value binary, VALUE binary")
    flow.close()


def test_no_topic_at_all(pipe: Any) -> None:
    flow, df = select(pipe, "key", "value")
    with pytest.raises(onceflow.SchemaError, match="neither a topic= argument nor a 'topic' column") as refused:
        flow.write(df)
    assert 'topic="NAME"' in refused.value.next_step
    flow.close()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"guarantee": "exactly-once"}, "guarantee='exactly-once' is unknown"),
        ({"partitioner": "random"}, "partitioner='random' is unknown"),
        ({"engine": "spark"}, "engine='spark' is unknown"),
        ({"engine": None}, "engine=None is unknown"),
        ({"compression": "brotli"}, "brotli"),
        ({"trigger": "often"}, "trigger='often' is not a duration"),
        ({"transaction_timeout": "soon"}, "transaction_timeout='soon' is not a duration"),
        ({"transaction_timeout": "10 ms"}, "is too short"),
    ],
)
def test_wrong_arguments(pipe: Any, arguments: dict[str, str], words: str) -> None:
    flow, df = select(pipe, "key", "value")
    with pytest.raises(onceflow.OptionError, match=words) as caught:
        flow.write(df, topic=pipe.target, **arguments)
    assert caught.value.next_step
    flow.close()


def test_transaction_timeout_above_the_brokers_limit(pipe: Any) -> None:
    flow, df = select(pipe, "key", "value")
    with pytest.raises(onceflow.OptionError, match=r"(?s)timeout.*next step"):
        flow.write(df, topic=pipe.target, transaction_timeout="60 minutes").start()
    flow.close()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"security.protcol": "SSL"}, "did you mean 'security.protocol'"),
        ({"kafka.acks": "1"}, "is set by onceflow itself"),
        ({"transactional.id": "mine"}, "is set by onceflow itself"),
        ({"security.protocol": "SSLv3"}, "unknown value"),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism"),
        ({"request.timeout.ms": "soon"}, "whole number of milliseconds"),
    ],
)
def test_unknown_options(pipe: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(onceflow.OptionError, match=words):
        onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap, options=options)


@pytest.mark.parametrize("name", ["", "a b", "x" * 201, "ümlaut"])
def test_unusable_flow_names(pipe: Any, name: str) -> None:
    with pytest.raises(onceflow.OptionError):
        onceflow.Flow(name, pipe.spark, bootstrap_servers=pipe.bootstrap)


def test_unknown_reader_option(pipe: Any) -> None:
    flow = pipe.open()
    with pytest.raises(onceflow.OptionError, match="unknown option 'maxOffsetPerTrigger'"):
        flow.read(pipe.source, options={"maxOffsetPerTrigger": "5"})
    with pytest.raises(onceflow.OptionError, match="starting_offsets"):
        flow.read(pipe.source, options={"startingOffsets": "latest"})
    flow.close()


def test_stateful_query_without_checkpoint(pipe: Any) -> None:
    flow = pipe.open()
    source = flow.read(pipe.source)
    stateful = {
        "aggregation": source.groupBy("key").count().selectExpr("key", "CAST(count AS STRING) AS value"),
        "dropDuplicates": source.dropDuplicates(["key"]).select("key", "value"),
        "dropDuplicatesWithinWatermark": source.withWatermark("timestamp", "1 minute")
        .dropDuplicatesWithinWatermark(["key"])
        .select("key", "value"),
        "a join of two streams": source.alias("a").join(source.alias("b"), "key").select("key", "a.value"),
        "limit": source.limit(5).select("key", "value"),
    }
    for what, df in stateful.items():
        with pytest.raises(onceflow.UnsupportedQueryError, match=f"(?s){what}.*checkpoint"):
            flow.write(df, topic=pipe.target)
    static = pipe.spark.createDataFrame([("key-1", "x")], "k string, other string")
    joined = source.join(static.groupBy("k").count(), source["key"].cast("string") == static["k"])
    flow.write(joined.select("key", "value"), topic=pipe.target)  # a static aggregation keeps no state
    flow.close()


def test_streams_of_others_and_no_streams(pipe: Any) -> None:
    flow = pipe.open()
    flow.read(pipe.source)
    foreign = (
        pipe.spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", pipe.bootstrap)
        .option("subscribe", pipe.source)
        .load()
    )
    with pytest.raises(onceflow.UnsupportedQueryError, match=r"made by spark\.readStream"):
        flow.write(foreign.select("key", "value"), topic=pipe.target)
    rate = pipe.spark.readStream.format("rate").load().selectExpr("CAST(value AS STRING) AS value")
    with pytest.raises(onceflow.UnsupportedQueryError, match=r"made by spark\.readStream"):
        flow.write(rate, topic=pipe.target)
    with pytest.raises(onceflow.UnsupportedQueryError, match="is not a stream"):
        flow.write(pipe.spark.createDataFrame([("a",)], "value string"), topic=pipe.target)
    flow.close()


def test_unknown_source_and_output_topic(pipe: Any) -> None:
    flow = pipe.open()
    with pytest.raises(onceflow.UnknownTopicError, match=r"^Source topic 'no-such-topic' does not exist") as missing:
        flow.read("no-such-topic")
    assert "create it: `onceflow topic create no-such-topic --partitions N`" in missing.value.next_step
    nearly = pipe.source.replace("-", "_")
    with pytest.raises(onceflow.UnknownTopicError, match=f"^Source topic '{nearly}' does not exist") as missing:
        flow.read(nearly)
    assert missing.value.next_step.startswith(f"did you mean {pipe.source}? If not, create it: ")
    df = flow.read(pipe.source).select("key", "value")
    with pytest.raises(onceflow.UnknownTopicError, match=r"^Output topic 'nor-this' does not exist"):
        flow.write(df, topic="nor-this").start()
    flow.close()


def test_unknown_topics_of_letters(pipe: Any, ledger: Any, tmp_path: Path) -> None:
    """They are looked for at the start, not when the first letter is written."""
    letters = {"on_error": "dead-letter", "dead_letter_topic": "no-letters"}
    flow = pipe.open()
    with pytest.raises(onceflow.UnknownTopicError, match=r"^Dead letter topic 'no-letters' does not exist"):
        flow.process(
            flow.read(pipe.source), ledger.Ledger(), table=f"table-{pipe.source}", state_dir=tmp_path, **letters
        )
    flow.close()


@pytest.mark.parametrize("text, words", [("soon", "is not a duration"), ("100 ms", "is too short")])
def test_unusable_connect_timeout(pipe: Any, text: str, words: str) -> None:
    with pytest.raises(onceflow.OptionError, match=words):
        onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap, connect_timeout=text)


@pytest.mark.long
def test_no_broker(pipe: Any) -> None:
    servers = f"127.0.0.1:{free_ports(1)[0]}"
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=servers, connect_timeout="1 second")
    with pytest.raises(
        onceflow.BrokerUnreachableError, match=rf"(?s){servers} within 1 s.*refused.*next step"
    ) as caught:
        flow.read(pipe.source)
    assert caught.value.flow == pipe.flow


class MadeUp:
    """Answers as a broker before Kafka 0.11: no InitProducerId among its APIs. (No such broker resolves.)

    Args:
        host: the address that it gives to clients; its own port.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._host, self._port = host, self._server.getsockname()[1]
        self.servers = f"127.0.0.1:{self._port}"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        socket.create_connection(("127.0.0.1", self._port)).close()  # wakes accept
        self._thread.join(5)
        self._server.close()

    def _answer(self, api_key: int, version: int) -> bytes | None:
        from kafka.protocol.metadata import ApiVersionsResponse, MetadataResponse

        if api_key == 18:
            apis = [(0, 0, 2), (1, 0, 3), (2, 0, 1), (3, 0, 4), (10, 0, 1), (18, 0, 0)]
            rows = [ApiVersionsResponse.ApiVersion(api_key=k, min_version=a, max_version=b) for k, a, b in apis]
            error = 0 if version == 0 else 35
            return ApiVersionsResponse[0](error_code=error, api_keys=rows).encode(version=0)
        if api_key == 3:
            broker = MetadataResponse.MetadataResponseBroker(node_id=1, host=self._host, port=self._port, rack=None)
            return MetadataResponse[version](
                throttle_time_ms=0, brokers=[broker], cluster_id="old", controller_id=1, topics=[]
            ).encode(version=version)
        return None

    def _serve(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as stream:
            while len(size := stream.read(4)) == 4:
                frame = stream.read(struct.unpack(">i", size)[0])
                api_key, version, correlation = struct.unpack_from(">hhi", frame)
                body = self._answer(api_key, version)
                if body is None:
                    return
                link.sendall(struct.pack(">ii", len(body) + 4, correlation) + body)

    def _accept(self) -> None:
        while not self._done.is_set():
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()


@pytest.fixture
def made_up() -> Iterator[Callable[[str], MadeUp]]:
    made: list[MadeUp] = []

    def make(host: str) -> MadeUp:
        made.append(MadeUp(host))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


def test_broker_without_transactions(pipe: Any, made_up: Callable[[str], MadeUp], monkeypatch: Any) -> None:
    monkeypatch.setattr("onceflow.driver.start.takeover.START_SECONDS", 5.0)
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=made_up("127.0.0.1").servers)
    with pytest.raises(onceflow.BrokerUnsupportedError, match=r"(?s)transactions.*2\.8 or later"):
        flow.read(pipe.source)


def test_a_broker_that_names_an_unknown_host(pipe: Any, made_up: Callable[[str], MadeUp]) -> None:
    """As in a container whose advertised.listeners have its name in there."""
    servers = made_up("kafka.invalid").servers
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=servers, connect_timeout="1 second")
    with pytest.raises(onceflow.BrokerUnreachableError, match=f"{servers} answers, but none of the brokers") as caught:
        flow.read(pipe.source)
    assert "the name kafka.invalid does not resolve" in caught.value.detail
    assert "advertised.listeners" in caught.value.next_step


# ---- found in the rows ---------------------------------------------------------------------------------


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_null_topic(pipe: Any, engine: str) -> None:
    flow = pipe.open()
    df = flow.read(pipe.source).selectExpr(
        "key", "value", f"IF(value = '000000007', CAST(NULL AS STRING), '{pipe.target}') AS topic"
    )
    text = run_to_error(flow, df, onceflow.BadRecordError, engine=engine)
    assert "1 row with a null topic" in text
    check_nothing_written(pipe)


@pytest.mark.parametrize("engine", [pytest.param("tasks", marks=pytest.mark.long), "driver"])
def test_unknown_topic_in_a_column(pipe: Any, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker may not know a topic yet that was just made, so it is asked again for some seconds."""
    monkeypatch.setattr("onceflow.client.cluster.UNKNOWN_TOPIC_S", 1.0)  # tasks take ten
    flow = pipe.open()
    df = flow.read(pipe.source).selectExpr(
        "key", "value", f"IF(value = '000000007', 'never-made', '{pipe.target}') AS topic"
    )
    text = run_to_error(flow, df, onceflow.UnknownTopicError, engine=engine)
    assert "Output topic 'never-made' does not exist" in text
    check_nothing_written(pipe)


@pytest.mark.long_but("2147483647-tasks", "4-driver")
@pytest.mark.parametrize(
    "partition, engine",
    [
        *((partition, "tasks") for partition in (-1, 4, 2**31 - 1)),
        (4, "driver"),
        *(pytest.param(partition, "driver", marks=pytest.mark.long) for partition in (-1, 2**31 - 1)),
    ],
)
def test_partition_out_of_range(pipe: Any, partition: int, engine: str) -> None:
    flow = pipe.open()
    df = flow.read(pipe.source).selectExpr("key", "value", f"IF(value = '000000007', {partition}, 1) AS partition")
    text = run_to_error(flow, df, onceflow.BadRecordError, topic=pipe.target, engine=engine)
    assert f"asks for partition {partition} " in text
    assert "partitions 0 to 3" in text
    check_nothing_written(pipe)


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_record_larger_than_the_broker_allows(pipe: Any, engine: str) -> None:
    flow = pipe.open()
    large = "CAST(repeat('x', 2000000) AS BINARY)"
    df = flow.read(pipe.source).selectExpr("key", f"IF(value = '000000007', {large}, value) AS value")
    text = run_to_error(flow, df, onceflow.BadRecordError, topic=pipe.target, engine=engine)
    assert "1048588" in text
    assert pipe.target in text
    check_nothing_written(pipe)


def test_null_header_key(pipe: Any) -> None:
    flow = pipe.open()
    df = flow.read(pipe.source).selectExpr(
        "key", "value", "array(named_struct('key', CAST(NULL AS STRING), 'value', value)) AS headers"
    )
    text = run_to_error(flow, df, onceflow.BadRecordError, topic=pipe.target)
    assert "header" in text
    check_nothing_written(pipe)


def test_source_partitioner_needs_the_same_partitions(make_pipe: Any) -> None:
    pipe = make_pipe(partitions=4, target_partitions=3)
    pipe.fill(50)
    flow, df = select(pipe, "key", "value")
    text = run_to_error(
        flow, df, onceflow.OptionError, topic=pipe.target, partitioner="source", checkpoint=pipe.tmp_path / "c"
    )
    assert "has 3" in text
    with pytest.raises(onceflow.OptionError, match="has 3"):  # the direct engine needs no batch to find out
        flow.write(flow.read(pipe.source), topic=pipe.target, partitioner="source").start()
    check_nothing_written(pipe)


def test_source_partitioner_needs_unmixed_partitions(pipe: Any) -> None:
    flow, df = select(pipe, "key", "value")
    text = run_to_error(
        flow,
        df.repartition(2),
        onceflow.OptionError,
        topic=pipe.target,
        partitioner="source",
        checkpoint=pipe.tmp_path / "checkpoint",
    )
    assert "keeps every source partition in one task" in text
    check_nothing_written(pipe)


@pytest.mark.parametrize("kind", ["udf", pytest.param("mapInArrow", marks=pytest.mark.long)])
def test_user_code_that_raises(pipe: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error tells what its own traceback would: the exception's text, and the line of the user's file. It names the
    record if one fails by itself in the same way; with `mapInArrow` each of them fails, but with another error."""
    from pyspark.sql import functions as F

    monkeypatch.setattr(blame, "_SECONDS", 60.0)  # of the search for the record: a slow machine finds it, too

    def check(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            int(batch.column("value")[7].as_py() + b" EUR")
            yield batch

    parse = F.udf(lambda value: str(1 // (int(value) - 7)), "string")
    flow = pipe.open()
    rows = flow.read(pipe.source).select("key", "value")
    if kind == "udf":
        df, name, line = (
            rows.select("key", parse("value").alias("value")),
            "<lambda>",
            check.__code__.co_firstlineno + 5,
        )
        told = "ZeroDivisionError: integer division or modulo by zero"
    else:
        df, name, line = rows.mapInArrow(check, rows.schema), "check", check.__code__.co_firstlineno + 2
        told = "ValueError: invalid literal for int() with base 10: b'"
    error = run_to_error(flow, df, onceflow.BatchAbortedError, topic=pipe.target)
    (detail,) = [text for text in error.splitlines() if text.startswith("  detail: ")]
    record = f"record {re.escape(pipe.source)}-\\d@\\d+, key b'[\\w-]+'; " if kind == "udf" else ""
    assert re.match(f"  detail: {record}{re.escape(told)}", detail)
    assert detail.endswith(f" (raised in {name}, test_bad_input.py:{line})")
    check_nothing_written(pipe)


# ---- sources that are not what they were ----------------------------------------------------------------


@pytest.mark.long
def test_expired_source_records(make_pipe: Any) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    pipe = make_pipe(partitions=1)
    pipe.fill(100)
    pipe.run()
    pipe.fill(100)
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.delete_records([TopicPartition(pipe.source, 0, 150)]).values():
        future.result(30)
    flow = pipe.open()
    with pytest.raises(onceflow.DataLossError, match=r"(?s)offsets 100 to 149 have expired.*fail_on_data_loss=False"):
        flow.read(pipe.source)
    flow.close()
    pipe.run(read={"fail_on_data_loss": False})
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    expected = [v for _, v in pipe.sent[:100] + pipe.sent[150:]]
    assert sorted(s.value or b"" for s in seen) == sorted(v or b"" for v in expected)


def test_source_topic_created_again(make_pipe: Any) -> None:
    from confluent_kafka.admin import AdminClient

    from onceflow.testing.broker import create_topic

    pipe = make_pipe(partitions=2)
    pipe.fill(50)
    pipe.run()
    admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
    for future in admin.delete_topics([pipe.source]).values():
        future.result(30)
    create_topic(pipe.bootstrap, pipe.source, 2)
    independent.fill(pipe.bootstrap, pipe.source, [(None, b"new")] * 10)
    flow = pipe.open()
    with pytest.raises(onceflow.ProgressConflictError, match="deleted and created again"):
        flow.read(pipe.source)
    flow.close()


def test_progress_of_a_newer_version(make_pipe: Any) -> None:
    """A progress record this version cannot read stops the flow: it must not start from the beginning."""
    from confluent_kafka import Producer

    from onceflow.driver.record import progress_log
    from onceflow.protocol.progress import PROGRESS_TOPIC

    pipe = make_pipe()
    pipe.fill(50)
    pipe.run()
    producer = Producer({"bootstrap.servers": pipe.bootstrap})
    value = b'{"format": 99, "flow": "%s"}' % pipe.flow.encode()
    producer.produce(PROGRESS_TOPIC, value, pipe.flow, progress_log.partition_of(pipe.flow))
    assert producer.flush(30) == 0
    flow = pipe.open()
    try:
        with pytest.raises(onceflow.ProgressConflictError, match="newer onceflow"):
            flow.read(pipe.source)
    finally:  # other tests collect claim checks at this broker: they must be able to read all progress
        producer.produce(PROGRESS_TOPIC, None, pipe.flow, progress_log.partition_of(pipe.flow))
        assert producer.flush(30) == 0
        flow.close()

"""Flows on topics of Avro, Protobuf and JSON Schema: what becomes a dead letter, what stops the flow, what waits."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.schema_registry import (
    Schema,
    SchemaReference,
    dual_schema_id_deserializer,
    header_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto

import onceflow
from onceflow import EnvironmentUnusableError, Record, RegistryUnavailableError, SchemaRegistry
from onceflow.broker.folder import free_ports
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.apicurio import Apicurio, running_apicurio

pytestmark = pytest.mark.integration

PAYMENT = json.dumps(
    {
        "type": "record",
        "name": "Payment",
        "fields": [{"name": "cents", "type": "int"}, {"name": "note", "type": ["null", "string"], "default": None}],
    }
)
DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
BALANCE = json.dumps({"type": "record", "name": "Balance", "fields": [{"name": "cents", "type": "long"}]})


class Balances(onceflow.Processor):
    """Sums of payments."""

    def __init__(self, value: Any, state: Any) -> None:
        self.value, self.state, self.output = value, state, state

    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        row = state.get() or {"cents": 0}
        for record in records:
            row["cents"] += record.value["cents"]
            yield Record(key, {**row})
        state.put(row)


def flow_of(
    broker: str,
    spark: Any,
    registry: SchemaRegistry,
    names: tuple[str, str, str],
    state_dir: Path,
    engine: str = "auto",
) -> Any:
    """The query of a flow from the first topic to the second, with letters in the third; not yet started."""
    source, target, dead = names
    processor = Balances(registry.avro(f"{source}-value"), registry.avro(f"{target}-value", BALANCE, register=True))
    flow = onceflow.Flow(f"flow-{source}", spark, bootstrap_servers=broker)
    rows = flow.process(
        flow.read(source),
        processor,
        table=f"table-{source}",
        on_error="dead-letter",
        dead_letter_topic=dead,
        state_dir=state_dir,
    )
    return flow, flow.write(rows, topic=target, engine=engine)


def results(broker: str, registry: SchemaRegistry, target: str) -> list[Any]:
    serde = registry.avro(f"{target}-value")
    return [serde.decode(record.value or b"") for record in independent.read_topic(broker, target, decided=True)]


def test_bad_values_are_dead_letters_with_their_cause(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    registry = SchemaRegistry(f"mock://{uuid.uuid4()}")
    names = make_topic("in", 1), make_topic("out", 1), make_topic("dead", 1)
    good = registry.avro(f"{names[0]}-value", PAYMENT, register=True).encode
    other = registry.avro("other-value", '"string"', register=True).encode("x")
    bad = {
        b'{"cents": 1}': "first byte is 123",
        b"\0\0\0\x30\x39\x02\0": "no schema with id 12345",
        good({"cents": 1})[:-1]: "ends too early",
        other: "cannot be read with that of",
        b"": "it is empty",
    }
    sent = [good({"cents": 5}), *bad, good({"cents": 7, "note": "é"})]
    independent.fill(onceflow_broker, names[0], [(b"ada", value) for value in sent])
    flow, writer = flow_of(onceflow_broker, onceflow_spark, registry, names, tmp_path)
    with flow:
        query = writer.start()
        query.processAllAvailable()
        query.stop()
    assert results(onceflow_broker, registry, names[1]) == [{"cents": 5}, {"cents": 12}]
    letters = independent.read_topic(onceflow_broker, names[2], decided=True)
    assert [letter.value for letter in letters] == [*bad]
    for letter, said in zip(letters, bad.values(), strict=True):
        assert said in str(letter.headers)


def test_what_is_wrong_with_a_schema_is_said_where_the_flow_is_defined(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    registry = SchemaRegistry(f"mock://{uuid.uuid4()}")
    names = make_topic("in", 1), make_topic("out", 1), make_topic("dead", 1)
    with pytest.raises(EnvironmentUnusableError, match=rf"has no subject '{names[0]}-value' \[flow=flow-{names[0]}\]"):
        flow_of(onceflow_broker, onceflow_spark, registry, names, tmp_path)
    nobody = SchemaRegistry("http://127.0.0.1:9", wait="0.5 seconds")
    with pytest.raises(RegistryUnavailableError, match=r"was asked for the subject.*does not answer \[flow="):
        flow_of(onceflow_broker, onceflow_spark, nobody, names, tmp_path)


def test_ids_in_headers(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    """As Confluent's serializers write them when they are told to: for a processor, and for columns."""
    registry = SchemaRegistry(f"mock://{uuid.uuid4()}")
    source, target, dead = make_topic("in", 1), make_topic("out", 1), make_topic("dead", 1)
    payment = registry.avro(f"{source}-value", PAYMENT, register=True)
    own = payment.own()
    headers: list[tuple[str, bytes]] = []
    serializer = AvroSerializer(
        registry.client.library, own.text,
        conf={"auto.register.schemas": False, "schema.id.serializer": header_schema_id_serializer},
    )  # fmt: skip
    raw = serializer({"cents": 5, "note": None}, SerializationContext(source, MessageField.VALUE, headers)) or b""
    producer = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker})
    producer.produce(source, raw, b"ada", headers=headers)
    producer.produce(source, payment.encode({"cents": 6}), b"ada")
    assert producer.flush(30) == 0
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.process(
            flow.read(source, include_headers=True), Balances(payment, registry.avro("b", BALANCE, register=True)),
            table=f"table-{source}", on_error="dead-letter", dead_letter_topic=dead, state_dir=tmp_path,
        )  # fmt: skip
        query = flow.write(rows, topic=target).start()
        query.processAllAvailable()
        query.stop()
    found = independent.read_topic(onceflow_broker, target, decided=True)
    assert [registry.avro("b").decode(record.value or b"") for record in found] == [{"cents": 5}, {"cents": 11}]
    with onceflow.Flow(f"columns-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        columns = flow.read(source, include_headers=True, value_format=payment)
        query = flow.write(columns.selectExpr("key", "string(value.cents) AS value"), topic=dead).start()
        query.processAllAvailable()
        query.stop()
    assert [record.value for record in independent.read_topic(onceflow_broker, dead, decided=True)] == [b"5", b"6"]


class Copies(onceflow.Processor):
    """Yields what it reads, with its headers."""

    def __init__(self, value: Any, output: Any) -> None:
        self.value, self.output = value, output

    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            yield Record(key, record.value, headers=record.headers)


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("place", ["driver", "tasks"])
def test_ids_are_written_into_headers(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, place: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Confluent's deserializers read them, and the id of what was read is not passed on with its headers."""
    mock = f"mock://{uuid.uuid4()}"  # only this process has its schemas
    registry = SchemaRegistry(mock if place == "driver" else request.getfixturevalue("apicurio").url)
    source, target, last, Order = make_topic("in", 1), make_topic("out", 1), make_topic("last", 1), shop_order()
    payment = registry.avro(f"{source}-value", PAYMENT, register=True)
    other = json.dumps({**json.loads(PAYMENT), "doc": "another id"})
    out = registry.avro(f"{target}-value", other, register=True, ids_in_headers=True)
    independent.fill(
        onceflow_broker, source, [(b"a", payment.encode({"cents": 5, "note": "at least 6 bytes"})), (b"b", None)]
    )

    def run(topic: str, to: str, processor: Any) -> list[independent.Seen]:
        with onceflow.Flow(f"flow-{topic}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
            read = flow.read(topic, include_headers=True)
            rows = flow.process(read, processor, table=f"table-{topic}", state_dir=tmp_path)
            query = flow.write(rows, topic=to, engine=place).start()
            query.processAllAvailable()
            query.stop()
        return sorted(independent.read_topic(onceflow_broker, to, decided=True), key=lambda each: each.key or b"")

    found, empty = run(source, target, Copies(payment, out))
    assert (found.headers, empty.headers) == ((("__value_schema_id", out.head()),), ())
    assert out.head() + (found.value or b"") == out.encode({"cents": 5, "note": "at least 6 bytes"})
    deserializer = AvroDeserializer(
        registry.client.library, conf={"schema.id.deserializer": dual_schema_id_deserializer}
    )
    context = SerializationContext(target, MessageField.VALUE, [*found.headers])
    assert deserializer(found.value, context) == {"cents": 5, "note": "at least 6 bytes"}
    # What is written in front takes the place of the header that was read.
    found, _ = run(target, last, Copies(out, payment))
    assert (found.headers, payment.decode(found.value or b"")) == ((), {"cents": 5, "note": "at least 6 bytes"})
    orders = registry.protobuf(f"{target}-orders", Order, register=True, ids_in_headers=True)
    assert orders.encode(Order(cents=5)) == orders.head() + Order(cents=5).SerializeToString()


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("place", ["driver", "tasks", "spark"])
def test_columns_with_the_types_of_the_schema(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, place: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Through SQL, by all engines; and what cannot be read is told by a column."""
    mock = f"mock://{uuid.uuid4()}"  # only this process has its schemas
    registry = SchemaRegistry(mock if place == "driver" else request.getfixturevalue("apicurio").url)
    source, target = make_topic("in", 2), make_topic("out", 2)
    payment = registry.avro(f"{source}-value", PAYMENT, register=True)
    sent = [(b"k%d" % n, payment.encode({"cents": n, "note": None if n % 2 else f"é{n}"})) for n in range(20)]
    independent.fill(onceflow_broker, source, [*sent, (b"bad", b"bad"), (b"null", None)])
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.read(source, value_format=payment, corrupt_column="problem")
        assert rows.schema["value"].dataType.simpleString() == "struct<cents:int,note:string>"
        made = rows.selectExpr("key", "concat_ws('|', value.cents * 2, value.note, problem) AS value")
        options = {"checkpoint": str(tmp_path)} if place == "spark" else {"engine": place}
        query = flow.write(made, topic=target, **options).start()
        query.processAllAvailable()
        query.stop()
    found = {
        record.key: (record.value or b"").decode()
        for record in independent.read_topic(onceflow_broker, target, decided=True)
    }
    assert found.pop(b"bad").startswith("value: it does not begin with the id of a schema")
    assert found.pop(b"null") == ""
    assert found == {b"k%d" % n: f"{2 * n}" if n % 2 else f"{2 * n}|é{n}" for n in range(20)}


def shop_order() -> Any:
    """The class of a Protobuf message that no module has."""
    file = FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    message = file.message_type.add(name="Order")
    message.field.add(name="cents", number=1, type="TYPE_INT64", label="LABEL_OPTIONAL")
    message.field.add(name="notes", number=2, type="TYPE_STRING", label="LABEL_REPEATED")
    message.field.add(
        name="at", number=3, type="TYPE_MESSAGE", label="LABEL_OPTIONAL", type_name=".google.protobuf.Timestamp"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


@pytest.mark.long_but("driver")
@pytest.mark.parametrize("place", ["driver", "tasks", "spark"])
def test_columns_of_protobuf_and_of_json_with_a_schema(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, place: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """The key is JSON, the value is Protobuf."""
    mock = f"mock://{uuid.uuid4()}"  # only this process has its schemas
    registry = SchemaRegistry(mock if place == "driver" else request.getfixturevalue("apicurio").url)
    source, target, Order = make_topic("in", 2), make_topic("out", 2), shop_order()
    text = json.dumps({**DRAFT, "type": "object", "properties": {"n": {"type": "integer"}}, "title": source})
    account = registry.json_schema(f"{source}-key", text, register=True)
    order = registry.protobuf(f"{source}-value", Order, register=True)
    sent = [(account.encode({"n": n}), order.encode(Order(cents=n, notes=["a"] * n))) for n in range(3)]
    at = order.encode(Order(at={"seconds": 5, "nanos": 6000}))
    independent.fill(onceflow_broker, source, [*sent, (account.encode({"n": 7}), at), (b"bad", b"bad")])
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.read(source, key_format=account, value_format=order, corrupt_column="problem")
        kinds = [rows.schema[name].dataType.simpleString() for name in ("key", "value")]
        assert kinds == ["struct<n:bigint>", "struct<cents:bigint,notes:array<string>,at:timestamp>"]
        text = "concat_ws('|', value.cents, size(value.notes), unix_micros(value.at), problem)"
        made = rows.selectExpr("coalesce(string(key.n), 'bad') AS key", f"{text} AS value")
        options = {"checkpoint": str(tmp_path)} if place == "spark" else {"engine": place}
        query = flow.write(made, topic=target, **options).start()
        query.processAllAvailable()
        query.stop()
    found = {
        record.key: (record.value or b"").decode()
        for record in independent.read_topic(onceflow_broker, target, decided=True)
    }
    assert "key: it does not begin with the id of a schema" in found.pop(b"bad")
    assert found == {b"0": "0|0", b"1": "1|1", b"2": "2|2", b"7": "0|0|5000006"}


def test_a_value_that_cannot_be_read_stops_a_flow_without_such_a_column(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str]
) -> None:
    registry = SchemaRegistry(f"mock://{uuid.uuid4()}")
    source = make_topic("in", 1)
    payment = registry.avro(f"{source}-value", PAYMENT, register=True)
    independent.fill(onceflow_broker, source, [(b"a", payment.encode({"cents": 1})), (b"b", b"bad")])
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        with pytest.raises(onceflow.OptionError, match="is no format of columns"):
            flow.read(source, value_format=onceflow.serdes.JSON)
        with pytest.raises(onceflow.OptionError, match="is a column of Kafka"):
            flow.read(source, value_format=payment, corrupt_column="offset")
        with pytest.raises(EnvironmentUnusableError, match="has no subject"):
            flow.read(source, value_format=registry.avro("typo-value"))
        rows = flow.read(source, value_format=payment).selectExpr("key", "string(value.cents) AS value")
        query = flow.write(rows, topic=make_topic("out", 1)).start()
        with pytest.raises(onceflow.BadRecordError, match=rf"(?s)at offset 1.*{source}-0.*does not begin with the id"):
            query.processAllAvailable()


# ---- a real registry ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    (port,) = free_ports(1)
    with running_apicurio(tmp_path_factory.mktemp("apicurio"), port) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("engine", ["auto", "tasks"])
def test_a_registry_that_stops_answering_is_waited_for(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, apicurio: Apicurio,
    engine: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A new schema comes while the registry is away: its records wait, and none becomes a dead letter."""
    registry = SchemaRegistry(apicurio.url, {"timeout": 1})
    names = make_topic("in", 1), make_topic("out", 1), make_topic("dead", 1)
    old = registry.avro(f"{names[0]}-value", PAYMENT, register=True)
    independent.fill(onceflow_broker, names[0], [(b"ada", old.encode({"cents": 5}))])
    newer = json.dumps({**json.loads(PAYMENT), "doc": "another one"})
    flow, writer = flow_of(onceflow_broker, onceflow_spark, registry, names, tmp_path, engine)
    with flow:
        query = writer.start()
        query.processAllAvailable()
        raw = registry.avro(f"{names[0]}-value", newer, register=True).encode({"cents": 7})
        apicurio.process.send_signal(signal.SIGSTOP)
        try:
            independent.fill(onceflow_broker, names[0], [(b"ada", raw)])
            wait_until(lambda: "is asked again" in caplog.text or engine == "tasks", 60, "a warning")
        finally:
            apicurio.process.send_signal(signal.SIGCONT)
        query.processAllAvailable()
        query.stop()
    assert results(onceflow_broker, registry, names[1]) == [{"cents": 5}, {"cents": 12}]
    assert independent.read_topic(onceflow_broker, names[2], decided=True) == []


@pytest.mark.long
def test_confluents_serializers_and_ours_on_a_real_registry(apicurio: Apicurio) -> None:
    registry = SchemaRegistry(apicurio.url)
    client = registry.client.library
    context = SerializationContext("shop", MessageField.VALUE)
    known = {"auto.register.schemas": False}

    avro = registry.avro("shop-value", PAYMENT, register=True)
    value: Any = {"cents": 5, "note": "é"}
    assert AvroDeserializer(client)(avro.encode(value), context) == value
    assert avro.decode(AvroSerializer(client, PAYMENT, conf=known)(value, context) or b"") == value

    text = json.dumps({**DRAFT, "title": "Shop", "type": "object", "required": ["id"]})
    context = SerializationContext("documents", MessageField.VALUE)
    documents = registry.json_schema("documents-value", text, register=True)
    assert JSONDeserializer(None, schema_registry_client=client)(documents.encode({"id": 1}), context) == {"id": 1}
    assert documents.decode(JSONSerializer(text, client, conf=known)({"id": 2}, context) or b"") == {"id": 2}

    file = FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.message_type.add(name="Other")
    file.message_type.add(name="Order").field.add(name="id", number=1, type="TYPE_INT64", label="LABEL_OPTIONAL")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    Order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    orders = registry.protobuf("orders-by-number-value", Order, register=True)
    context = SerializationContext("orders-by-number", MessageField.VALUE)
    order = Order(id=5)
    assert orders.decode(orders.encode(order)) == order
    assert orders.decode(ProtobufSerializer(Order, client, conf=known)(order, context) or b"") == order
    assert ProtobufDeserializer(Order, schema_registry_client=client)(orders.encode(order), context) == order
    # A registry that gives the text of a file, in place of the binary form.
    text = 'syntax = "proto3"; package shop; message Other {} message Order { int64 id = 1; }'
    client.register_schema("text-value", Schema(text, "PROTOBUF"))
    assert registry.protobuf("text-value", Order).decode(registry.protobuf("text-value", Order).encode(order)) == order


@pytest.mark.long
def test_references_and_refusals_of_a_real_registry(apicurio: Apicurio) -> None:
    registry = SchemaRegistry(apicurio.url)
    money = {"type": "record", "name": "Money", "fields": [{"name": "cents", "type": "long"}]}
    order = {"type": "record", "name": "Order", "fields": [{"name": "price", "type": "Money"}]}
    registry.client.library.register_schema("money", Schema(json.dumps(money), "AVRO"))
    registry.client.library.register_schema(
        "orders-value", Schema(json.dumps(order), "AVRO", [SchemaReference("Money", "money", 1)])
    )
    orders = registry.avro("orders-value")
    assert orders.decode(orders.encode({"price": {"cents": 5}})) == {"price": {"cents": 5}}
    with pytest.raises(EnvironmentUnusableError, match=r"no subject 'ordres-value'[\s\S]*orders-value"):
        registry.avro("ordres-value").own()
    with pytest.raises(EnvironmentUnusableError, match="refuses a schema"):
        registry.avro("bad-value", '{"type": "recrod"}', register=True).own()
    with pytest.raises(EnvironmentUnusableError, match="does not have this schema"):
        registry.avro("orders-value", '"string"').own()
    registry.client.library.set_compatibility("orders-value", "BACKWARD")
    with pytest.raises(EnvironmentUnusableError, match="refuses a schema"):
        registry.avro("orders-value", '"string"', register=True).own()

"""The Produce request built around untouched record sections is, byte for byte, the one kafka-python encodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.producer import ProduceRequest

from onceflow.protocol.batches import (
    EncodedBatch,
    ProducerIdAndEpoch,
    encode_batches,
    encode_single,
)
from onceflow.protocol.produce import (
    API_KEY,
    MAX_VERSION,
    MIN_VERSION,
    encode_produce,
)

VERSIONS = range(MIN_VERSION, MAX_VERSION + 1)
Topics = Sequence[tuple[str, Sequence[tuple[int, EncodedBatch]]]]


def batch(size: int = 5, *, head: bytes = b"head") -> EncodedBatch:
    return EncodedBatch(head, memoryview(bytes(n % 251 for n in range(size))), 1)


def ours(topics: Topics, version: int, **changes: Any) -> list[Any]:
    options = {"transactional_id": "onceflow.f", "timeout_ms": 30_000, "correlation_id": 7, "client_id": "onceflow"}
    return encode_produce(topics, version=version, **{**options, **changes})


def theirs(topics: Topics, version: int, **changes: Any) -> bytes:
    options = {"transactional_id": "onceflow.f", "timeout_ms": 30_000, "correlation_id": 7, "client_id": "onceflow"}
    options.update(changes)
    data = ProduceRequest.TopicProduceData
    request = ProduceRequest(
        version=version,
        transactional_id=options["transactional_id"],
        acks=-1,
        timeout_ms=options["timeout_ms"],
        topic_data=[
            data(
                name=name,
                partition_data=[
                    data.PartitionProduceData(index=partition, records=one.head + bytes(one.body))
                    for partition, one in batches
                ],
            )
            for name, batches in topics
        ],
    )
    request.with_header(correlation_id=options["correlation_id"], client_id=options["client_id"])
    return bytes(request.encode(header=True, framed=True))


def joined(buffers: list[Any]) -> bytes:
    return b"".join(bytes(b) for b in buffers)


def parse(frame: bytes, version: int) -> Any:
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    return ProduceRequest.decode(frame[4:], version=version, header=True)


SHAPES: dict[str, Topics] = {
    "one": [("out", [(0, batch())])],
    "partitions": [("out", [(3, batch()), (0, batch(0)), (2**31 - 1, batch(300))])],
    "topics": [("a", [(0, batch()), (1, batch(1))]), ("b" * 249, [(0, batch(17_000))]), ("c-é", [(9, batch())])],
    "many partitions": [("out", [(n, batch(n)) for n in range(200)])],
    "many topics": [(f"t{n}", [(n, batch(3))]) for n in range(130)],
    "nothing": [],
    "a topic without partitions": [("out", [])],
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bytes_as_kafka_python(shape: str, version: int) -> None:
    assert joined(ours(SHAPES[shape], version)) == theirs(SHAPES[shape], version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "changes",
    [
        {"transactional_id": None},
        {"transactional_id": ""},
        {"transactional_id": "x" * 300},
        {"transactional_id": "prefix-é"},
        {"correlation_id": 0},
        {"correlation_id": 2**31 - 1},
        {"client_id": ""},
        {"client_id": "é" * 100},
        {"timeout_ms": 2**31 - 1},
    ],
)
def test_same_bytes_for_any_header(changes: dict[str, Any], version: int) -> None:
    topics = SHAPES["topics"]
    frame = joined(ours(topics, version, **changes))
    assert frame == theirs(topics, version, **changes)
    assert parse(frame, version).transactional_id == changes.get("transactional_id", "onceflow.f")


@pytest.mark.parametrize("version", VERSIONS)
def test_parsed_back(version: int) -> None:
    topics = SHAPES["topics"]
    request = parse(joined(ours(topics, version)), version)
    header = request.header
    assert (
        (header.request_api_key, header.request_api_version) == (API_KEY, version) == (ProduceRequest.API_KEY, version)
    )
    assert (header.correlation_id, header.client_id) == (7, "onceflow")
    assert (request.transactional_id, request.acks, request.timeout_ms) == ("onceflow.f", -1, 30_000)
    found = [(t.name, [(p.index, bytes(p.records)) for p in t.partition_data]) for t in request.topic_data]
    assert found == [(name, [(p, b.head + bytes(b.body)) for p, b in batches]) for name, batches in topics]


@pytest.mark.parametrize("size", [0, 1, 122, 123, 124, 16_378, 16_379, 16_380, 2_097_147])
def test_lengths_where_the_varint_grows(size: int) -> None:
    topics = [("out", [(0, batch(size))])]
    assert joined(ours(topics, 12)) == theirs(topics, 12)


def test_record_sections_are_not_copied() -> None:
    first, second = batch(100), batch(200)
    buffers = ours([("a", [(0, first)]), ("b", [(0, second)])], 12)
    assert [b for b in buffers if isinstance(b, memoryview)] == [first.body, second.body]
    assert buffers[1] is first.body
    assert buffers[3] is second.body


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_real_batches(compression: str) -> None:
    identity = ProducerIdAndEpoch(4711, 3)
    keys = pa.array([f"k{n}".encode() for n in range(500)], pa.binary())
    values = pa.array([b"v" * n for n in range(500)], pa.binary())
    encoded = encode_batches(
        keys,
        values,
        None,
        None,
        identity=identity,
        base_sequence=0,
        compression=compression,
        max_batch_bytes=1_000_000,
        default_timestamp_ms=1,
        target_batch_bytes=20_000,
    )
    single = encode_single(b"key", b"value", timestamp_ms=1, identity=identity, base_sequence=0)
    topics = [("out", list(enumerate(encoded))), ("__onceflow_progress", [(17, single)])]
    assert len(topics[0][1]) > 3
    assert joined(ours(topics, 12)) == theirs(topics, 12)


shapes = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20),
        st.lists(
            st.tuples(
                st.integers(0, 2**31 - 1),
                st.builds(
                    EncodedBatch,
                    head=st.binary(min_size=1, max_size=61),
                    body=st.binary(max_size=200).map(memoryview),
                    count=st.just(1),
                ),
            ),
            max_size=4,
        ),
    ),
    max_size=4,
)


@settings(max_examples=80, deadline=None, derandomize="CI" in os.environ)
@given(topics=shapes, version=st.sampled_from(VERSIONS), transactional_id=st.none() | st.text(max_size=8))
def test_same_bytes_for_any_content(topics: Topics, version: int, transactional_id: str | None) -> None:
    frame = joined(ours(topics, version, transactional_id=transactional_id))
    assert frame == theirs(topics, version, transactional_id=transactional_id)

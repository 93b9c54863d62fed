"""murmur2 and partitions are those of the Java client. (The Java test compares with Kafka's own class.)"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as murmur2_of_kafka_python

from onceflow.errors import BadRecordError, OptionError
from onceflow.protocol.partitioners import group_by_partition, key_partitions, murmur2

# org.apache.kafka.common.utils.UtilsTest.testMurmur2
JAVA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_known_vectors(kind: Any) -> None:
    keys, hashes = list(JAVA_VECTORS), list(JAVA_VECTORS.values())
    assert murmur2(pa.array(keys, kind)).tolist() == hashes
    # Above the number of keys that are worth a step for all of them.
    assert murmur2(pa.array(keys * 50, kind)).tolist() == hashes * 50
    assert murmur2(pa.array(keys, kind)).dtype == np.int32


@settings(max_examples=80, deadline=None, derandomize="CI" in os.environ)
@given(
    keys=st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=120),
    repeat=st.integers(1, 3),
    cut=st.integers(0, 5),
)
def test_agrees_with_another_implementation(keys: list[bytes | None], repeat: int, cut: int) -> None:
    keys = keys * repeat
    array = pa.array(keys, pa.binary()).slice(cut)
    partitions = key_partitions(array, 7).tolist()
    for key, partition in zip(keys[cut:], partitions, strict=True):
        expected = -1 if key is None else (murmur2_of_kafka_python(key) & 0x7FFF_FFFF) % 7
        assert partition == expected


def test_strings_hash_as_their_utf8() -> None:
    words = ["", "a", "größe", "日本語", None]
    as_bytes = [None if word is None else word.encode() for word in words]
    for kind in (pa.string(), pa.large_string()):
        assert key_partitions(pa.array(words, kind), 12).tolist() == key_partitions(pa.array(as_bytes), 12).tolist()


def test_one_long_key_among_short_ones() -> None:
    long = bytes(range(256)) * 500
    hashes = murmur2(pa.array([b"abc"] * 100 + [long] + [b"21"] * 100)).tolist()
    assert hashes[100] == murmur2(pa.array([long] * 40))[3]
    assert (hashes[0], hashes[-1]) == (JAVA_VECTORS[b"abc"], JAVA_VECTORS[b"21"])


def test_edges() -> None:
    assert murmur2(pa.array([], pa.binary())).tolist() == []
    assert key_partitions(pa.nulls(3, pa.binary()), 5).tolist() == [-1, -1, -1]
    assert key_partitions(pa.array([b"", b""]), 1).tolist() == [0, 0]
    with pytest.raises(OptionError):
        key_partitions(pa.array([b"a"]), 0)


@pytest.mark.parametrize("partition_count", [6, 40_000])
def test_groups_keep_the_order_of_rows(partition_count: int) -> None:
    partitions = np.random.default_rng(5).choice([0, 1, 5], 2000).astype(np.int32)
    groups = group_by_partition(partitions, partition_count)
    assert [partition for partition, _ in groups] == [0, 1, 5]
    for partition, rows in groups:
        assert rows.tolist() == np.flatnonzero(partitions == partition).tolist()


def test_groups_refuse_partitions_that_do_not_exist() -> None:
    assert group_by_partition(np.array([], dtype=np.int32), 3) == []
    for bad in (-1, 3):
        with pytest.raises(BadRecordError, match=f"partition {bad} ") as caught:
            group_by_partition(np.array([0, bad, 1], dtype=np.int32), 3)
        assert "record 1 " in caught.value.detail

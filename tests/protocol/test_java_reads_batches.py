"""Kafka's own Java classes read what we encode: all cases of this module in one JVM."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import onceflow.host.jars
from onceflow.protocol import batches, partitioners, progress
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches, encode_single

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
IDENTITY = ProducerIdAndEpoch(producer_id=2**40 + 7, producer_epoch=32_000)
DEFAULT_MS = 1_700_000_000_000
SEQUENCE_MAX = 2**31 - 1
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
JVM_SECONDS_MAX = 60

Row = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]


@dataclass(frozen=True)
class Case:
    """Rows given to the encoder, how they were encoded, and the bytes that came out."""

    rows: list[Row]
    encoded: list[batches.EncodedBatch]
    identity: ProducerIdAndEpoch = IDENTITY
    base_sequence: int = 0
    compression: str = "none"


def encode_rows(
    rows: list[Row],
    *,
    identity: ProducerIdAndEpoch = IDENTITY,
    base_sequence: int = 0,
    compression: str = "none",
    target: int = batches.TARGET_BATCH_BYTES,
    limit: int = 1_048_588,
) -> Case:
    headers = [[{"key": key, "value": value} for key, value in row[2]] or None for row in rows]
    encoded = encode_batches(
        pa.array([row[0] for row in rows], pa.binary()),
        pa.array([row[1] for row in rows], pa.large_binary()),
        pa.array(headers, HEADERS),
        pa.array([row[3] for row in rows], pa.int64()),
        identity=identity,
        base_sequence=base_sequence,
        compression=compression,
        max_batch_bytes=limit,
        default_timestamp_ms=DEFAULT_MS,
        target_batch_bytes=target,
    )
    return Case(rows, list(encoded), identity, base_sequence, compression)


def plain_rows(count: int, random_: random.Random) -> list[Row]:
    """Rows of every shape: nulls, empty bytes, headers, long values, timestamps that go back."""
    rows: list[Row] = []
    for index in range(count):
        value = f"value-{index % 9}-".encode() * random_.choice([0, 1, 5, 40])
        headers: list[tuple[str, bytes | None]] = [
            (random_.choice(["trace", "größe", ""]), random_.choice([None, b"", b"\x00\xff" * 70]))
            for _ in range(random_.choice([0, 0, 1, 3]))
        ]
        rows.append(
            (
                random_.choice([None, b"", b"key-%d" % index, b"k" * 200]),
                random_.choice([None, value, value]),
                headers,
                DEFAULT_MS + random_.randint(-100_000, 100_000),
            )
        )
    return rows


def make_cases() -> dict[str, Case]:
    random_ = random.Random(20)
    cases = {
        f"mixed-{name}": encode_rows(plain_rows(400, random_), compression=name, target=20_000) for name in COMPRESSIONS
    }
    # Several blocks of every framing, and a middle that cannot be compressed (stored lz4 blocks).
    noise = random_.randbytes(150_000)
    long = [b"a" * 200_000, noise, b"b" * 200_000]
    for name in COMPRESSIONS:
        rows: list[Row] = [(b"k", value, [], DEFAULT_MS) for value in long]
        cases[f"long-{name}"] = encode_rows(rows, compression=name)
        cases[f"noise-{name}"] = encode_rows([(None, noise, [], DEFAULT_MS)], compression=name)
    small: list[Row] = [(b"%d" % index, b"x", [], DEFAULT_MS) for index in range(20)]
    cases["wrap"] = encode_rows(small, base_sequence=SEQUENCE_MAX - 9, target=200)
    cases["wrap-inside"] = encode_rows(small, base_sequence=SEQUENCE_MAX - 9)
    cases["plain"] = encode_rows(small, identity=ProducerIdAndEpoch(-1, -1))
    cases["idempotent"] = encode_rows(small, identity=ProducerIdAndEpoch(5, 0, transactional=False))
    many: list[Row] = [(None, b"x", [], DEFAULT_MS + index) for index in range(9000)]
    cases["wide-deltas"] = encode_rows(many)
    record = progress.encode(progress.Progress("orders", 7, {"in": {0: 5}}, {"in": "id"}, time_ms=DEFAULT_MS))
    for key, row in {
        "single": (record[0], record[1], [("v", b"1"), ("n", None)], DEFAULT_MS),
        "single-null": (None, None, [], 0),
    }.items():
        one = encode_single(row[0], row[1], row[2], timestamp_ms=row[3], identity=IDENTITY, base_sequence=0)
        cases[key] = Case([row], [one])
    return cases


def make_keys() -> list[bytes]:
    random_ = random.Random(21)
    keys = [random_.randbytes(length) for length in range(70)]
    return [*keys, *(random_.randbytes(length) for length in (500, 1001, 4099, 30_002)), b"\xff" * 7, b"\x80"]


@dataclass(frozen=True)
class JavaAnswers:
    cases: dict[str, Case]
    batches: dict[str, Any]
    keys: list[bytes]
    hashes: list[int]


pytestmark = pytest.mark.slow  # a JVM starts


@pytest.fixture(scope="module")
def java() -> JavaAnswers:
    if shutil.which("java") is None:
        pytest.fail("no java on the PATH; onceflow needs Java 17 or later")
    import pyspark

    spark_jars = Path(pyspark.__file__).parent / "jars"
    jars = [path for path in onceflow.host.jars.spark_connector_jars() if path.name.startswith("kafka-clients")]
    for name in ("lz4-java", "zstd-jni", "snappy-java", "slf4j-api"):
        jars += sorted(spark_jars.glob(f"{name}-*.jar"))
    cases, keys = make_cases(), make_keys()
    frames = []
    for case in cases.values():
        data = b"".join(batch.head + bytes(batch.body) for batch in case.encoded)
        frames += [struct.pack(">ci", b"B", len(data)), data]
    for key in keys:
        frames += [struct.pack(">ci", b"M", len(key)), key]
    program = Path(__file__).parent / "java" / "ReadBatches.java"
    # One-core compilers and the serial collector: the program runs for a second.
    command = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx512m"]
    command += ["-cp", ":".join(str(jar) for jar in jars), str(program)]
    done = subprocess.run(command, input=b"".join(frames), capture_output=True, timeout=JVM_SECONDS_MAX)
    assert done.returncode == 0, done.stderr.decode()
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases) + len(keys)
    return JavaAnswers(
        cases=cases,
        batches=dict(zip(cases, answers, strict=False)),
        keys=keys,
        hashes=[answer["murmur2"] for answer in answers[len(cases) :]],
    )


CASE_NAMES = sorted(make_cases())


def as_hex(data: bytes | None) -> str | None:
    return None if data is None else data.hex()


@pytest.mark.parametrize("name", CASE_NAMES)
def test_kafka_reads_what_we_wrote(java: JavaAnswers, name: str) -> None:
    case, answer = java.cases[name], java.batches[name]
    assert "error" not in answer, answer
    read = answer["batches"]
    assert [batch["count"] for batch in read] == [batch.count for batch in case.encoded]
    assert [batch["bytes"] for batch in read] == [batch.nbytes for batch in case.encoded]
    records = [record for batch in read for record in batch["records"]]
    assert len(records) == len(case.rows)
    for record, (key, value, headers, timestamp_ms) in zip(records, case.rows, strict=True):
        assert record["key"] == as_hex(key)
        assert record["value"] == as_hex(value)
        assert record["headers"] == [[as_hex(name.encode()), as_hex(content)] for name, content in headers]
        assert record["timestamp"] == timestamp_ms


@pytest.mark.parametrize("name", CASE_NAMES)
def test_kafka_sees_identity_and_continuous_sequences(java: JavaAnswers, name: str) -> None:
    case = java.cases[name]
    idempotent = case.identity.producer_id >= 0
    sequence = case.base_sequence
    for batch in java.batches[name]["batches"]:
        assert (batch["magic"], batch["control"], batch["leader_epoch"]) == (2, False, -1)
        assert batch["transactional"] is (idempotent and case.identity.transactional)
        assert batch["producer_id"] == (case.identity.producer_id if idempotent else -1)
        assert batch["producer_epoch"] == (case.identity.producer_epoch if idempotent else -1)
        assert (batch["base_offset"], batch["last_offset"]) == (0, batch["count"] - 1)
        assert [record["offset"] for record in batch["records"]] == list(range(batch["count"]))
        assert batch["max_timestamp"] == max(record["timestamp"] for record in batch["records"])
        if not idempotent:
            assert batch["base_sequence"] == -1
            continue
        assert batch["base_sequence"] == sequence
        for record in batch["records"]:
            assert record["sequence"] == sequence
            sequence = 0 if sequence == SEQUENCE_MAX else sequence + 1
        assert batches.next_sequence(batch["last_sequence"], 1) == sequence


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compression_is_the_one_asked_for_unless_it_would_grow(java: JavaAnswers, compression: str) -> None:
    for name in (f"mixed-{compression}", f"long-{compression}"):
        assert {batch["compression"] for batch in java.batches[name]["batches"]} == {compression}
    assert java.batches[f"noise-{compression}"]["batches"][0]["compression"] == "none"


def test_wrap_case_splits_on_both_sides(java: JavaAnswers) -> None:
    read = java.batches["wrap"]["batches"]
    assert len(read) > 2
    assert read[0]["base_sequence"] > read[-1]["base_sequence"]


def test_murmur2_is_javas(java: JavaAnswers) -> None:
    assert partitioners.murmur2(pa.array(java.keys, pa.binary())).tolist() == java.hashes
    # Enough of every length to take the vectorised steps for all words, in a mixed order.
    order = np.random.default_rng(3).permutation(np.repeat(np.arange(len(java.keys)), 40))
    mixed = pa.array([java.keys[index] for index in order], pa.large_binary())
    assert partitioners.murmur2(mixed).tolist() == [java.hashes[index] for index in order]

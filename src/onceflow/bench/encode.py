"""How fast Arrow columns become record batches on one core, checksum included.

Run it with ``python -m onceflow.bench.encode``. Values are half noise and half text, so that compression has
something to do but not everything. Rates count the bytes before compression. Each figure is the best of
several runs: whatever else the machine does only ever slows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches

TOTAL_BYTES = 50_000_000
RUNS = 3
MAX_BATCH_BYTES = 1_048_588
_NOW_MS = 1_700_000_000_000
_TEXT = b'{"account":"ABC","amount":12.50,"currency":"EUR","accepted":true}'


@dataclass(frozen=True, slots=True)
class Rate:
    """One line of the table; sizes in bytes, rates per second."""

    value_bytes: int
    compression: str
    headers: bool
    records_per_s: float
    gigabytes_per_s: float
    wire_share: float
    """Bytes on the wire for each byte before compression."""


def columns(value_bytes: int, count: int, *, headers: bool, seed: int = 1) -> tuple[Any, Any, Any, Any]:
    """Keys of 16 bytes, values, one header a record if asked for, and rising timestamps."""
    random = np.random.default_rng(seed)
    matrix = random.integers(0, 256, (count, value_bytes), dtype=np.uint8)
    text = np.frombuffer(_TEXT * (value_bytes // len(_TEXT) + 1), dtype=np.uint8)
    matrix[:, : value_bytes // 2] = text[: value_bytes // 2]
    keys = pa.array([b"%016d" % index for index in range(count)], pa.binary())
    values = _fixed(matrix.reshape(-1), value_bytes, count)
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    listed = pa.array([[{"key": "trace", "value": b"0123456789abcdef"}]] * count, kind) if headers else None
    return keys, values, listed, pa.array(_NOW_MS + np.arange(count) // 100, pa.int64())


def _fixed(data: Any, row_bytes: int, count: int) -> Any:
    offsets = np.arange(0, (count + 1) * row_bytes, row_bytes, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def measure(value_bytes: int, compression: str, *, headers: bool) -> Rate:
    """Encode about `TOTAL_BYTES` several times; the best run."""
    count = TOTAL_BYTES // value_bytes
    given = columns(value_bytes, count, headers=headers)
    plain = _encode(given, "none")[1]
    runs = [_encode(given, compression) for _ in range(RUNS)]
    seconds, sent = min(runs)
    return Rate(value_bytes, compression, headers, count / seconds, plain / seconds / 1e9, sent / plain)


def _encode(given: tuple[Any, Any, Any, Any], compression: str) -> tuple[float, int]:
    """Seconds taken, and bytes of all batches."""
    begun = time.perf_counter()
    batches = encode_batches(
        *given,
        identity=ProducerIdAndEpoch(producer_id=1, producer_epoch=1),
        base_sequence=0,
        compression=compression,
        max_batch_bytes=MAX_BATCH_BYTES,
        default_timestamp_ms=_NOW_MS,
    )
    sent = sum(batch.nbytes for batch in batches)
    return time.perf_counter() - begun, sent


def main() -> None:
    """Print the table."""
    table = Table("value", "compression", "headers", "records/s", "GB/s", "on the wire")
    for value_bytes in (100, 1000):
        for compression in ("none", "lz4", "zstd"):
            for headers in (False, True):
                rate = measure(value_bytes, compression, headers=headers)
                table.add_row(
                    f"{value_bytes} B",
                    compression,
                    "1" if headers else "-",
                    f"{rate.records_per_s / 1e6:.2f} M",
                    f"{rate.gigabytes_per_s:.2f}",
                    f"{rate.wire_share:.0%}",
                )
    Console().print(table)


if __name__ == "__main__":
    main()

"""The five compression types of a record batch, in the framing that Kafka's Java clients and brokers read.

Kafka has special framings for snappy and lz4 (KIP-98 keeps those of older message formats). Snappy data is split into
xerial blocks. Lz4 frames must have *independent* blocks, because Kafka's reader refuses linked ones. pyarrow writes
linked blocks if the input exceeds one block, so the frame is built here. Decompression accepts everything that other
clients write: snappy without the framing (librdkafka), lz4 frames with linked blocks, sizes and checksums, and streams
that do not state their size in advance.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from onceflow.errors import OptionError, ProtocolError

CODES: dict[str, int] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
"""The compression types by name. The number is that in the low three bits of a batch's attributes."""
_NAMES = {code: name for name, code in CODES.items()}

CODECS = tuple(sorted(CODES, key=lambda name: -CODES[name])[:-1])
"""Those that compress, the one that compresses most first."""
PRODUCER, UNCOMPRESSED = "producer", "uncompressed"
"""Values of a topic's ``compression.type`` besides the codecs: batches are stored as they come, or decompressed."""

# Magic, version 1, compatible with version 1 (org.xerial.snappy.SnappyOutputStream).
_XERIAL_HEAD = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
_XERIAL_MAGIC_BYTES = 8
_XERIAL_BLOCK_BYTES = 32 * 1024
# Snappy cannot reduce data by more than a factor of 22; a larger length means that the data is damaged.
_SNAPPY_FACTOR_MAX = 32
# The frame header as the Java client writes it: magic, FLG 0x60 (version 1, independent blocks, no checksums), BD 0x40
# (blocks of 64 KiB), and the header checksum: the second byte of xxh32(FLG BD), constant because FLG and BD are.
_LZ4_HEAD = b"\x04\x22\x4d\x18\x60\x40\x82"
_LZ4_BLOCK_BYTES = 64 * 1024
_LZ4_STORED = 0x8000_0000
# Arrow's default level for gzip is 9. Level 6, the default of zlib and of the Java client, is 3 times as fast.
_LEVELS = {"gzip": 6}
_LZ4_END = b"\x00\x00\x00\x00"


def compression_code(name: str) -> int:
    """The number of a compression type.

    Raises:
        OptionError: there is no such type.
    """
    try:
        return CODES[name]
    except KeyError:
        raise OptionError(f"unknown compression {name!r}", next_step=f"use one of: {', '.join(CODES)}.") from None


def compress(name: str, data: Any) -> Any:
    """A compressed copy of ``data``, both ``pa.Buffer``. For ``none``, the data itself."""
    if name == "none":
        return data
    if name == "snappy":
        return _snappy_xerial(data)
    if name == "lz4":
        return _lz4_frame(data)
    return _codec(name).compress(data)


def decompress(code_or_name: int | str, data: Any) -> bytes:
    """The bytes of a compressed records section.

    Args:
        code_or_name: a name of `CODES`, or the number from a batch's attributes.
        data: any object that supports the buffer protocol.

    Raises:
        OptionError: unknown name.
        ProtocolError: unknown number, or the data is damaged or truncated.
    """
    code = compression_code(code_or_name) if isinstance(code_or_name, str) else code_or_name
    name = _NAMES.get(code)
    if name is None:
        raise ProtocolError(
            f"a record batch is compressed with method {code}, which onceflow does not know",
            next_step="report this to onceflow with the version of the broker and of the client that wrote it.",
        )
    if name == "none":
        return bytes(data)
    view = memoryview(data).cast("B")
    try:
        if name == "snappy":
            return _unsnappy(view)
        if not view:
            raise ValueError("it is empty")
        # As a stream, because gzip data, and most zstd and lz4 data, does not state its size in advance.
        with pa.input_stream(pa.py_buffer(data), compression=name) as stream:
            plain: bytes = stream.read()
            return plain
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise ProtocolError(
            f"a record batch compressed with {name} cannot be decompressed",
            detail=f"{len(view)} bytes: {error}",
            next_step="read the records with another client; if it can, report this to onceflow.",
        ) from error


def _codec(name: str) -> Any:
    """A new codec for each call, because Arrow's gzip codec has state and runs without the GIL."""
    return pa.Codec(name, compression_level=_LEVELS.get(name))


def _snappy_xerial(data: Any) -> Any:
    codec = _codec("snappy")
    parts = [_XERIAL_HEAD]
    for start in range(0, data.size, _XERIAL_BLOCK_BYTES):
        block = codec.compress(data.slice(start, min(_XERIAL_BLOCK_BYTES, data.size - start)), asbytes=True)
        parts += (struct.pack(">i", len(block)), block)
    return pa.py_buffer(b"".join(parts))


def _lz4_frame(data: Any) -> Any:
    codec = _codec("lz4_raw")
    parts = [_LZ4_HEAD]
    for start in range(0, data.size, _LZ4_BLOCK_BYTES):
        raw = data.slice(start, min(_LZ4_BLOCK_BYTES, data.size - start))
        block = codec.compress(raw, asbytes=True)
        if len(block) < raw.size:
            parts += (struct.pack("<I", len(block)), block)
        else:  # A block must not exceed the frame's block size: a block that would not become smaller is stored.
            parts += (struct.pack("<I", raw.size | _LZ4_STORED), raw.to_pybytes())
    parts.append(_LZ4_END)
    return pa.py_buffer(b"".join(parts))


def _unsnappy(data: memoryview) -> bytes:
    """Decompress xerial blocks, or plain snappy data as librdkafka writes it."""
    codec = _codec("snappy")
    if data[:_XERIAL_MAGIC_BYTES] != _XERIAL_HEAD[:_XERIAL_MAGIC_BYTES]:
        return _unsnappy_block(codec, data)
    blocks = []
    position = len(_XERIAL_HEAD)  # the versions after the magic are ignored, as in the Java client
    while position < len(data):
        if data[position : position + _XERIAL_MAGIC_BYTES] == _XERIAL_HEAD[:_XERIAL_MAGIC_BYTES]:
            position += len(_XERIAL_HEAD)  # several streams were concatenated
            continue
        (size,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 <= size <= len(data) - position:
            raise ValueError(f"block of {size} bytes, {len(data) - position} are left")
        blocks.append(_unsnappy_block(codec, data[position : position + size]))
        position += size
    return b"".join(blocks)


def _unsnappy_block(codec: Any, block: memoryview) -> bytes:
    """Decompress one block. It begins with the uncompressed size as a varint, which Arrow's codec needs."""
    size = shift = position = 0
    while True:
        byte = block[position]
        size |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            break
    if size > _SNAPPY_FACTOR_MAX * len(block):
        raise ValueError(f"{len(block)} bytes cannot hold {size}")
    plain: bytes = codec.decompress(block, size, asbytes=True)
    return plain

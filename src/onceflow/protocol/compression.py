"""The five compressions of a record batch, in the framing that Kafka's Java clients and brokers read.

Snappy and lz4 have framings of their own (KIP-98 keeps those of older message formats): snappy is cut in
xerial blocks, and lz4 frames must have *independent* blocks, because Kafka's reader refuses linked ones.
pyarrow's own lz4 frames are linked as soon as the input exceeds one block, so the frame is put together
here. Reading takes whatever any client writes: snappy without the framing (librdkafka), lz4 frames with
linked blocks, sizes and checksums, and streams that do not tell their size in advance.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from onceflow.errors import OptionError, ProtocolError

CODES: dict[str, int] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
"""Compression names and their number in the low three bits of a batch's attributes."""
_NAMES = {code: name for name, code in CODES.items()}

# Magic, version 1, compatible with version 1 (org.xerial.snappy.SnappyOutputStream).
_XERIAL_HEAD = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
_XERIAL_MAGIC_BYTES = 8
_XERIAL_BLOCK_BYTES = 32 * 1024
# Snappy cannot shrink by more than a factor of 22; a length beyond that is damage, not data.
_SNAPPY_FACTOR_MAX = 32
# Frame magic, FLG 0x60 (version 1, independent blocks, no checksums), BD 0x40 (blocks of 64 KiB), and the
# header checksum, second byte of xxh32(FLG BD), which is constant because the two bytes are. As the Java
# client writes.
_LZ4_HEAD = b"\x04\x22\x4d\x18\x60\x40\x82"
_LZ4_BLOCK_BYTES = 64 * 1024
_LZ4_STORED = 0x8000_0000
# Arrow's gzip takes level 9 unless told; 6, the default of zlib and of the Java client, is 3 times as fast.
_LEVELS = {"gzip": 6}
_LZ4_END = b"\x00\x00\x00\x00"


def compression_code(name: str) -> int:
    """Number of a compression, or `OptionError` naming the five that exist."""
    try:
        return CODES[name]
    except KeyError:
        raise OptionError(f"unknown compression {name!r}", next_step=f"use one of: {', '.join(CODES)}.") from None


def compress(name: str, data: Any) -> Any:
    """Compressed copy of ``data`` (a ``pa.Buffer``) as ``pa.Buffer``; the data itself for ``none``."""
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
        data: anything with a buffer.

    Raises:
        OptionError: unknown name.
        ProtocolError: unknown number, or the data is damaged or cut off.
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
            raise ValueError("nothing there")
        # As a stream: gzip and most writers of zstd and lz4 do not tell the size in advance.
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
    """A codec of its own for every call: Arrow's gzip codec keeps state, and it works outside of the GIL."""
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
        else:  # A block may not exceed the block size of the frame: what does not shrink is stored.
            parts += (struct.pack("<I", raw.size | _LZ4_STORED), raw.to_pybytes())
    parts.append(_LZ4_END)
    return pa.py_buffer(b"".join(parts))


def _unsnappy(data: memoryview) -> bytes:
    """Xerial blocks, or plain snappy, which is what librdkafka writes."""
    codec = _codec("snappy")
    if data[:_XERIAL_MAGIC_BYTES] != _XERIAL_HEAD[:_XERIAL_MAGIC_BYTES]:
        return _unsnappy_block(codec, data)
    blocks = []
    position = len(_XERIAL_HEAD)  # the versions behind the magic are not looked at, as in the Java client
    while position < len(data):
        if data[position : position + _XERIAL_MAGIC_BYTES] == _XERIAL_HEAD[:_XERIAL_MAGIC_BYTES]:
            position += len(_XERIAL_HEAD)  # streams that were put one after the other
            continue
        (size,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 <= size <= len(data) - position:
            raise ValueError(f"block of {size} bytes, {len(data) - position} are left")
        blocks.append(_unsnappy_block(codec, data[position : position + size]))
        position += size
    return b"".join(blocks)


def _unsnappy_block(codec: Any, block: memoryview) -> bytes:
    """One block; it begins with its size as a varint, which Arrow's codec wants to be told."""
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

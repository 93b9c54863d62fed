"""Headers of records, in Python and in Arrow: pairs of a name, which may come more than once, and bytes or null."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

Header = tuple[str, "bytes | None"]

#: The Arrow type of the headers of one record, as Spark's Kafka source and sink have them.
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def behind_header(raw: bytes, headers: Iterable[Header], name: str) -> bytes:
    """The bytes, behind those of the first header of this name that has any."""
    return next((content for each, content in headers if each == name and content), b"") + raw

"""Headers of records, in Python and in Arrow: pairs of a name, which may come more than once, and bytes or null."""

from __future__ import annotations

import pyarrow as pa

Header = tuple[str, "bytes | None"]

#: The Arrow type of the headers of one record, as Spark's Kafka source and sink have them.
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

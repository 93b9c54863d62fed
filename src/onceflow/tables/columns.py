"""Keys and values of a table as Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from onceflow.errors import BadRecordError
from onceflow.state.api import serdes

_TYPES: dict[Any, pa.DataType] = {
    serdes.BYTES: pa.binary(),
    serdes.STRING: pa.string(),
    serdes.LONG: pa.int64(),
    serdes.DOUBLE: pa.float64(),
}


def column(values: Sequence[Any], serde: Any, what: str, topic: str) -> pa.Array:
    """Decoded values as an Arrow array. The type of JSON documents and of own serdes is inferred by Arrow.

    Raises:
        BadRecordError: the values have no common type.
    """
    known = _TYPES.get(serde) if isinstance(serde, serdes.Serde) else None
    try:
        return pa.array(values, known)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as mixed:
        raise BadRecordError(
            f"The {what}s of table {topic} have no common type, so they cannot be an Arrow column",
            topic=topic,
            detail=str(mixed),
            next_step=f"read them with {what}=serdes.BYTES and decode them yourself, or use items()",
        ) from mixed

"""Tables to join with, for tests of processors: dicts instead of topics."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from onceflow.state.api import serdes
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.format import rows
from onceflow.state.stores.memory_store import MemoryStore


def joined_table(name: str, content: Mapping[Any, Any], now_ms: int) -> JoinedTable:
    """A dict as `JoinedTable`.

    Args:
        content: keys are bytes, text or integers. Values are bytes, or what JSON can express.
    """
    key = serdes.LONG if any(isinstance(each, int) for each in content) else None
    value = serdes.BYTES if any(isinstance(each, bytes) for each in content.values()) else serdes.JSON
    folder = Path(tempfile.gettempdir(), f"onceflow-joined-{uuid.uuid4().hex}")
    store = MemoryStore.open(folder)
    MemoryStore.remove(folder)  # it lives as long as the object does
    store.write([(rows.value_key(_key_bytes(each, key)), rows.pack(value.encode(content[each]))) for each in content])
    return JoinedTable(
        name,
        lambda: nullcontext({0: store}),
        partitions=1,
        key=key,
        value=value,
        now_ms=now_ms,
        position=f"{name}:{len(content)}",
        own_partition=None,
    )


def _key_bytes(key: Any, serde: Any) -> bytes:
    if serde is not None:
        return bytes(serde.encode(key))
    return key.encode() if isinstance(key, str) else bytes(key)

"""What tests of Delta Lake need of tables, and of rows that they do not take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deltalake import DeltaTable

from onceflow.external.sink import RefusedRow


def rows_of(root: Any) -> list[dict[str, Any]]:
    return DeltaTable(root).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]


def kept(refused: list[RefusedRow]) -> Callable[[Sequence[RefusedRow]], str]:
    """A progress row, for a batch without these rows."""

    def progress(found: Sequence[RefusedRow]) -> str:
        refused.extend(found)
        return "{}"

    return progress

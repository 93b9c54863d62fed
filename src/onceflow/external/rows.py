"""How rows change a table of a database."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from onceflow.errors import OptionError, SchemaError

INSERT, UPSERT, DELETE_BY_FLAG = "insert", "upsert", "delete-by-flag"
MODES = (INSERT, UPSERT, DELETE_BY_FLAG)


class NullKeyError(ValueError):
    """A row has null in its key. Null is different from null for a unique index, so no row has such a key."""


@dataclass(frozen=True)
class TableWrite:
    """How rows change a table. The arguments are those of the sinks.

    Raises:
        OptionError: they do not go together.
    """

    table: str
    mode: str
    key: tuple[str, ...]
    flag: str

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"mode={self.mode!r} is unknown", next_step=f"use one of {', '.join(MODES)}")
        if self.mode != INSERT and not self.key:
            raise OptionError(f"mode={self.mode!r} needs key=", next_step="name the columns of the primary key")
        if self.mode == INSERT and self.key:
            raise OptionError("key= has no meaning with mode='insert'", next_step="leave it out, or use mode='upsert'")
        if len(set(self.key)) < len(self.key):
            raise OptionError(f"key={self.key!r} names a column twice", next_step="name each column once")
        if self.mode == DELETE_BY_FLAG and self.flag in self.key:
            raise OptionError(
                f"flag={self.flag!r} is also a column of key=",
                next_step="name another column as flag=: that one is not written to the table",
            )

    def columns(self, given: Sequence[str]) -> list[str]:
        """Those of the DataFrame's columns that are columns of the table.

        Raises:
            SchemaError: a key column, or that with the flag, is missing; or two columns have one name.
        """
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise SchemaError(
                f"The rows for table {self.table} have several columns {', '.join(twice)}",
                next_step="give them different names in the query, or select one of them",
            )
        wanted = [*self.key, self.flag] if self.mode == DELETE_BY_FLAG else [*self.key]
        missing = [name for name in wanted if name not in given]
        if missing:
            raise SchemaError(
                f"The rows for table {self.table} lack the columns {', '.join(missing)}",
                detail=f"they have {', '.join(given)}",
                next_step="select them, or change key= or flag=",
            )
        return [name for name in given if self.mode != DELETE_BY_FLAG or name != self.flag]

    def check_key(self, row: Mapping[str, Any]) -> None:
        """Check the key of a row.

        Raises:
            NullKeyError: a column of it is null.
        """
        for name in self.key:
            if row[name] is None:
                raise NullKeyError(null_key(name))

    def check_flag(self, schema: pa.Schema) -> None:
        """Check that the flag is a boolean: the text ``false`` must not delete a row.

        Raises:
            SchemaError: it is not.
        """
        if self.mode != DELETE_BY_FLAG or self.flag not in schema.names:
            return
        kind = schema.field(self.flag).type
        if not pa.types.is_boolean(kind):
            raise SchemaError(
                f"The flag {self.flag} of the rows for table {self.table} is {kind}, not boolean",
                next_step=f"make it one in the query, for example {self.flag} = 'true' AS {self.flag}",
            )

    def check_table(self, written: Sequence[str], known: Sequence[str], needed: Collection[str]) -> None:
        """Check that the table has the columns that are written, and gets those that it needs.

        Args:
            known: its columns. needed: those of them that must not be null and have no default.

        Raises:
            SchemaError: it does not.
        """
        missing = [name for name in written if name not in known]
        if missing:
            raise SchemaError(
                f"Table {self.table} has no columns {', '.join(missing)}",
                detail=f"it has {', '.join(known)}",
                next_step=f"{_similar(missing, known)}add them to the table, or do not select them",
            )
        lacking = [name for name in known if name in needed and name not in written]
        if lacking:
            raise SchemaError(
                f"Columns {', '.join(lacking)} of table {self.table} must not be null, and are not written",
                next_step="select them, or give them a default",
            )


def null_key(name: str) -> str:
    """Why a row is not taken in which this column of the key is null."""
    return f"column {name} of the key is null, so no row has this key"


def _similar(missing: Sequence[str], known: Sequence[str]) -> str:
    """A question about columns of a similar name, or ""."""
    plain = {name.lower(): name for name in known}
    pairs = [(name, difflib.get_close_matches(name.lower(), plain, 1)) for name in missing]
    found = [f"{plain[close[0]]} for {name}" for name, close in pairs if close]
    return f"did you mean {', '.join(found)}? If not, " if found else ""

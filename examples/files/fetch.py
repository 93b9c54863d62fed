"""The step from a link to the rows of its file, for ``mapInArrow``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import bank_rows
import downloads
import pyarrow as pa

import onceflow

MAX_VALUE_BYTES = 10_000
ROWS_PER_ARROW_BATCH = 4_000
BYTES_PER_ARROW_BATCH = 4 * 2**20
encode = onceflow.serdes.JSON.encode


class LinkError(ValueError):
    """A record is no link."""


def link_of(value: bytes | None) -> tuple[str, bool]:
    """The link in a record, and whether it is asked for once more."""
    if value is None or len(value) > MAX_VALUE_BYTES:
        raise LinkError("no value" if value is None else f"more than {MAX_VALUE_BYTES} bytes")
    try:
        wanted = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise LinkError("not JSON") from error
    if not isinstance(wanted, dict) or not isinstance(wanted.get("link"), str):
        raise LinkError('not like {"link": "https://..."}')
    if not wanted["link"].isprintable():
        raise LinkError("a link has printable characters only")
    return wanted["link"], wanted.get("again") is True


class Out(NamedTuple):
    """One record to be written."""

    topic: str
    key: bytes
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()


class Fetch:
    """For ``mapInArrow``: links become the rows of their files. Side outputs of the step in front never come here.

    Memory holds some Arrow batches, whatever the size of the files.
    """

    def __init__(self, source: Any, suffix: str = "") -> None:
        self.source, self.suffix = source, suffix

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row, result in self.source.each(batch.to_pylist(), lambda row: link_of(row["value"])[0]):
                yield from to_arrow(self.written(row, result), batch.schema)

    def written(self, row: dict[str, Any], result: Any) -> Iterator[Out]:
        """What a link leads to: its rows and one record in ``loaded``, or one in ``failed`` and nothing else."""
        link = link_of(row["value"])[0]
        error, attempts = (result.error, result.attempts) if isinstance(result, downloads.Failure) else (None, 1)
        if error is None:
            try:
                form = bank_rows.format_of(link.partition("?")[0], result.content_type)
                yield from self.loaded(link, bank_rows.read_rows(result.file, form))
                return
            except bank_rows.BadFileError as problem:  # before the first row
                error = problem
        cause = {"class": type(error).__name__, "message": str(error)[:1000]}
        headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
        headers += [(f"onceflow.error.{name}", text.encode(errors="replace")) for name, text in cause.items()]
        headers += [("link", link.encode()), ("attempts", str(attempts).encode())]
        yield Out(f"failed{self.suffix}", row["key"], row["value"], headers)

    def loaded(self, link: str, rows: Iterable[Any]) -> Iterator[Out]:
        counts = {True: 0, False: 0}
        key = link.encode()
        for row in rows:
            good = row.transaction is not None
            counts[good] += 1
            if good:
                value = encode({**row.transaction, "link": link})
                yield Out(f"transactions{self.suffix}", row.transaction["account"].encode(), value)
            else:
                headers = [("link", key), ("line", str(row.line).encode()), ("cause", row.cause.encode())]
                yield Out(f"bad-rows{self.suffix}", key, row.raw, headers)
        summary = {"link": link, "rows": counts[True], "bad_rows": counts[False]}
        yield Out(f"loaded{self.suffix}", key, encode(summary))


def to_arrow(rows: Iterator[Out], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows in batches of a bounded size."""
    batch: list[Out] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.value)
        if len(batch) == ROWS_PER_ARROW_BATCH or size >= BYTES_PER_ARROW_BATCH:
            yield _batch_of(batch, schema)
            batch, size = [], 0
    if batch:
        yield _batch_of(batch, schema)


def _batch_of(rows: Sequence[Out], schema: pa.Schema) -> pa.RecordBatch:
    columns: dict[str, Any] = dict(zip(Out._fields, zip(*rows, strict=True), strict=True))
    columns["headers"] = [[{"key": name, "value": value} for name, value in headers] for headers in columns["headers"]]
    columns["timestamp"] = [None] * len(rows)
    return pa.RecordBatch.from_pydict(columns, schema=schema)

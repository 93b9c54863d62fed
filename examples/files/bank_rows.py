"""Reads bank transactions from CSV and JSON lines, row by row; a bad row does no harm to the others.

A row is a line. CSV may quote, but not across lines: else one lost quote would swallow the rest of the file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from itertools import count
from typing import IO, Any, NamedTuple

FIELDS = ("id", "account", "amount", "date", "text")
MAX_LINE_BYTES = 10_000
SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
CONTENT_TYPES = {"text/csv": "csv", "application/jsonl": "jsonl", "application/x-ndjson": "jsonl"}
_AMOUNT = re.compile(r"([+-]?)([0-9]{1,15})(?:\.([0-9]{2}))?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_YEARS = range(1970, 2100)


class BadFileError(Exception):
    """No row can be had of the whole file."""


class BadRowError(ValueError):
    """A line is no transaction."""


class Row(NamedTuple):
    """A line: a transaction, or the cause why it is none. ``raw`` has not more than the first 10,000 bytes."""

    line: int
    raw: bytes
    transaction: dict[str, Any] | None
    cause: str = ""


def format_of(name: str, content_type: str) -> str:
    """``csv`` or ``jsonl``, by the name's suffix, else by what the server says.

    Raises:
        BadFileError: neither tells.
    """
    plain = name.removesuffix(".gz")
    for suffix, found in SUFFIXES.items():
        if plain.endswith(suffix):
            return found
    if content_type in CONTENT_TYPES:
        return CONTENT_TYPES[content_type]
    raise BadFileError("neither its name nor its content type says what format it has")


def read_rows(file: IO[bytes], form: str) -> Iterator[Row]:
    """All rows of a file, which is never in memory as a whole.

    Raises:
        BadFileError: CSV without the columns; before the first row.
    """
    lines = _lines(file)
    split: Callable[[str], Mapping[str, Any]] = _json_object
    if form == "csv":
        _, head = next(lines, (0, None))
        if head is None:
            return  # an empty file: no rows
        split = _csv_reader(head)
    for number, line in lines:
        if not line:
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                raise BadRowError(f"more than {MAX_LINE_BYTES} bytes in a line")
            if b"\0" in line:
                raise BadRowError("a null character")
            fields = split(line.decode())
            yield Row(number, line, _checked(fields))
        except UnicodeDecodeError:
            yield Row(number, line, None, "not UTF-8")
        except BadRowError as error:
            yield Row(number, line[:MAX_LINE_BYTES], None, str(error))


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. Of one that is too long, the beginning only: it may have gigabytes."""
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 2)
        if not line:
            return
        part = line
        while part and not part.endswith(b"\n"):
            part = file.readline(64 * 1024)
        yield number, line.rstrip(b"\r\n")


def _csv_reader(head: bytes) -> Callable[[str], Mapping[str, str]]:
    """Reads the lines under a head line. Files of banks like to begin with a byte order mark."""
    names = head.decode("utf-8-sig", errors="replace").split(",")
    if sorted(names) != sorted(FIELDS):
        raise BadFileError(f"the first line does not name the columns {', '.join(FIELDS)}")

    def split(line: str) -> Mapping[str, str]:
        values = line.split(",")
        if '"' in line:
            try:
                values = next(csv.reader((line,), strict=True))
            except csv.Error as error:
                raise BadRowError("not CSV") from error
        if len(values) != len(names):
            raise BadRowError(f"{len(values)} columns in place of {len(names)}")
        return dict(zip(names, values, strict=True))

    return split


class _Number(str):
    """A number as it is written: no digit of an amount may get lost in a float."""


def _json_object(line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line, parse_int=_Number, parse_float=_Number, parse_constant=_Number)
    except (ValueError, RecursionError) as error:
        raise BadRowError("not JSON") from error
    if not isinstance(found, dict):
        raise BadRowError("not a JSON object")
    for name in FIELDS:
        wanted = _Number if name == "amount" else str
        if type(found.get(name)) is not wanted:
            raise BadRowError(f"{name} is missing" if found.get(name) is None else f"{name} has a wrong type")
    try:
        "".join(found[name] for name in FIELDS).encode()
    except UnicodeEncodeError as error:  # JSON can escape what UTF-8 cannot hold
        raise BadRowError("half a character") from error
    return found


def _checked(fields: Mapping[str, str]) -> dict[str, Any]:
    for name in ("id", "account"):
        if not 1 <= len(fields[name]) <= 64:
            raise BadRowError(f"{name} is missing" if not fields[name] else f"{name} is too long")
    amount = _AMOUNT.fullmatch(fields["amount"])
    if amount is None:
        raise BadRowError("amount is not a number with two decimals, or too large")
    sign, whole, cents = amount.groups()
    if not _DATE.fullmatch(fields["date"]):
        raise BadRowError("date is not a date")
    try:
        year = date.fromisoformat(fields["date"]).year
    except ValueError as error:
        raise BadRowError("date is not a date") from error
    if year not in _YEARS:
        raise BadRowError("date is not in 1970 to 2099")
    return {
        "id": fields["id"],
        "account": fields["account"],
        "amount": int(f"{sign}{whole}{cents or '00'}"),
        "date": fields["date"],
        "text": fields["text"],
    }

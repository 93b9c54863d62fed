"""Lines of the files of the demo ``files``: transactions, and rows that are none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

BAD_SHARE = 0.01
MAX_ROWS = 400
MAX_RAW_BYTES = 10_000
HEAD = b"id,account,amount,date,text\n"
TEXTS = ("Rent, March", 'Café "Zur Post"', "Überweisung", "Invoice 2024/17", "", "a\tb", "salary " * 10)


class Row(NamedTuple):
    """A line of a file: a transaction, or a cause why it is none."""

    raw: bytes
    transaction: Mapping[str, str | int] | None
    cause: str = ""


@lru_cache(maxsize=64)
def rows_of_file(seed: int, number: int, version: str, *, jsonl: bool) -> tuple[Row, ...]:
    """The lines of one file, without a head; some of them are bad."""
    rng = random.Random(f"rows-{seed}-{number}-{version}")
    form = _jsonl if jsonl else _csv
    bad = BAD_JSONL if form is _jsonl else BAD_CSV
    rows = []
    for n in range(rng.randint(1, MAX_ROWS)):
        cents = rng.randint(-(10**7), 10**7)
        if rng.random() < 0.1:
            cents = cents // 100 * 100
        fields = {
            "id": f"{version}{n:04d}",
            "account": f"acc-{number:05d}-{rng.randrange(10)}",
            "amount": _amount(cents),
            "date": f"{rng.randint(1970, 2099)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
            "text": rng.choice(TEXTS),
        }
        if rng.random() < BAD_SHARE:
            change, cause = rng.choice(bad)
            rows.append(Row(change(fields), None, cause))
        else:
            rows.append(Row(form(fields), {**fields, "amount": cents}))
    return tuple(rows)


def _amount(cents: int) -> str:
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole}" + (f".{rest:02d}" if rest else "")


def _csv(fields: Mapping[str, str], **changed: str) -> bytes:
    return ",".join(_quoted(value) for value in {**fields, **changed}.values()).encode()


def _quoted(value: str) -> str:
    return '"' + value.replace('"', '""') + '"' if "," in value or '"' in value else value


def _jsonl(fields: Mapping[str, str], **changed: str) -> bytes:
    """``changed``: JSON in place of a value."""
    parts = {name: value if name == "amount" else json.dumps(value) for name, value in fields.items()} | changed
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}").encode()


def _without(fields: Mapping[str, str], name: str) -> bytes:
    return _jsonl({each: value for each, value in fields.items() if each != name})


_NO_AMOUNT = "amount is not a number with two decimals, or too large"
_NO_DATE, _FAR = "date is not a date", "date is not in 1970 to 2099"
_Bad = Sequence[tuple[Callable[[Mapping[str, str]], bytes], str]]
BAD_CSV: _Bad = (
    (lambda row: _csv(row, text="").rsplit(b",", 1)[0], "4 columns in place of 5"),
    (lambda row: _csv(row, text="x") + b",more", "6 columns in place of 5"),
    (lambda row: _csv(row, amount="a lot"), _NO_AMOUNT),
    (lambda row: _csv(row, amount="1.234"), _NO_AMOUNT),
    (lambda row: _csv(row, amount="9" * 30), _NO_AMOUNT),
    (lambda row: _csv(row, amount=""), _NO_AMOUNT),
    (lambda row: _csv(row, date="2023-02-30"), _NO_DATE),
    (lambda row: _csv(row, date="tomorrow"), _NO_DATE),
    (lambda row: _csv(row, date="0000-00-00"), _NO_DATE),
    (lambda row: _csv(row, date="1066-10-14"), _FAR),
    (lambda row: _csv(row, date="9999-12-31"), _FAR),
    (lambda row: _csv(row, id=""), "id is missing"),
    (lambda row: _csv(row, account="x" * 65), "account is too long"),
    (lambda row: _csv(row, text="\0"), "a null character"),
    (lambda row: _csv(row, text="") + b"\xff\xfe", "not UTF-8"),
    (lambda row: _csv(row, text="") + b'"lost', "not CSV"),
)
BAD_JSONL: _Bad = (
    (lambda row: _jsonl(row)[:-5], "not JSON"),
    (lambda row: b"[" * 5000, "not JSON"),
    (lambda row: b"[1, 2]", "not a JSON object"),
    (lambda row: b"null", "not a JSON object"),
    (lambda row: _without(row, "account"), "account is missing"),
    (lambda row: _jsonl(row, text="null"), "text is missing"),
    (lambda row: _jsonl(row, amount='"12"'), "amount has a wrong type"),
    (lambda row: _jsonl(row, amount="true"), "amount has a wrong type"),
    (lambda row: _jsonl(row, amount="NaN"), _NO_AMOUNT),
    (lambda row: _jsonl(row, amount="1e400"), _NO_AMOUNT),
    (lambda row: _jsonl(row, amount="9" * 30), _NO_AMOUNT),
    (lambda row: _jsonl(row, id="17"), "id has a wrong type"),
    (lambda row: _jsonl(row, date='"2023-02-30"'), _NO_DATE),
    (lambda row: _jsonl(row, date='"0001-01-01"'), _FAR),
    (lambda row: _jsonl(row, text='"\\ud800"'), "half a character"),
    (lambda row: _jsonl(row, text='""') + b"\xff", "not UTF-8"),
)


def compact_json(value: Mapping[str, Any]) -> bytes:
    """As the service writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

"""Rows of the files that the service `files` loads."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
from bank_rows import BadFileError, format_of, read_rows

HEAD = "id,account,amount,date,text\n"
GOOD = {"id": "1", "account": "a", "amount": 1250, "date": "2024-02-29", "text": "rent"}


def _rows(content: str | bytes, form: str = "csv") -> list[dict[str, Any] | str]:
    raw = content.encode() if isinstance(content, str) else content
    return [row.cause if row.transaction is None else row.transaction for row in read_rows(BytesIO(raw), form)]


@pytest.mark.parametrize(
    "content",
    [
        HEAD + "1,a,12.50,2024-02-29,rent\n",
        HEAD + "1,a,12.50,2024-02-29,rent",  # no newline at the end
        HEAD.replace("\n", "\r\n") + '"1","a",12.50,2024-02-29,"rent"\r\n',
        "\ufeff" + HEAD + "\n1,a,+12.50,2024-02-29,rent\n\n",
        "text,date,amount,account,id\nrent,2024-02-29,12.50,a,1\n",
    ],
)
def test_csv(content: str) -> None:
    assert _rows(content) == [GOOD]


def test_json_lines() -> None:
    assert _rows('{"id": "1", "account": "a", "amount": 12.50, "date": "2024-02-29", "text": "rent", "more": []}\n',
                 "jsonl") == [GOOD]  # fmt: skip


@pytest.mark.parametrize("text, cents", [("0.29", 29), ("-0.05", -5), ("7", 700), ("999999999999999.99", 10**17 - 1)])
def test_amounts_are_exact(text: str, cents: int) -> None:
    for row in (
        *_rows(f"{HEAD}1,a,{text},2024-01-01,\n"),
        *_rows(f'{{"id": "1", "account": "a", "amount": {text}, "date": "2024-01-01", "text": ""}}', "jsonl"),
    ):
        assert isinstance(row, dict)
        assert row["amount"] == cents


@pytest.mark.parametrize("amount", ["", "1.5", "1e3", "0x10", "1 000", "٣", "9" * 16, "--1", "NaN"])
def test_what_is_no_amount(amount: str) -> None:
    assert _rows(f"{HEAD}1,a,{amount},2024-01-01,\n") == ["amount is not a number with two decimals, or too large"]


@pytest.mark.parametrize("day", ["", "2024-02-30", "2024-13-01", "20240101", "2024-W01-1", "0000-00-00", "01.02.2024"])
def test_what_is_no_date(day: str) -> None:
    assert _rows(f"{HEAD}1,a,1,{day},\n") == ["date is not a date"]


def test_bad_rows_do_no_harm_to_the_next() -> None:
    """Also a lost quote, and a line of megabytes."""
    lines = [b'1,a,1.00,2024-01-01,"lost', b"\xff\xfe", b"1,2", b"x" * 3_000_000, b"1,a,1,2024-01-01,\0"]
    good = b"1,a,12.50,2024-02-29,rent"
    found = _rows(HEAD.encode() + b"\n".join(line for bad in lines for line in (bad, good)))
    assert found[1::2] == [GOOD] * 5
    assert found[::2] == ["not CSV", "not UTF-8", "2 columns in place of 5", "more than 10000 bytes in a line",
                          "a null character"]  # fmt: skip


def test_rows_know_their_line_and_their_bytes() -> None:
    content = f"{HEAD}\n1,a,12.50,2024-02-29,rent\n{'x' * 20_000}\n".encode()
    [good, bad] = read_rows(BytesIO(content), "csv")
    assert (good.line, good.raw) == (3, b"1,a,12.50,2024-02-29,rent")
    assert (bad.line, bad.raw) == (4, b"x" * 10_000)


@pytest.mark.parametrize("head", ["id,account,amount,date\n", "1,a,12.50,2024-02-29,rent\n", "\n", "PNG\0\xff\n"])
def test_csv_without_its_columns_has_no_rows(head: str) -> None:
    with pytest.raises(BadFileError):
        _rows(head + "1,a,12.50,2024-02-29,rent\n")


def test_an_empty_file_has_no_rows() -> None:
    assert _rows("") == _rows(HEAD) == _rows("", "jsonl") == []


@pytest.mark.parametrize(
    "name, content_type, form",
    [("a.csv", "", "csv"), ("a.csv.gz", "", "csv"), ("a.jsonl", "text/csv", "jsonl"), ("a.ndjson.gz", "", "jsonl"),
     ("a", "text/csv", "csv"), ("a.gz", "application/x-ndjson", "jsonl")],
)  # fmt: skip
def test_formats(name: str, content_type: str, form: str) -> None:
    assert format_of(name, content_type) == form


def test_an_unknown_format() -> None:
    with pytest.raises(BadFileError):
        format_of("a.pdf", "application/octet-stream")

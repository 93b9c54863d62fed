"""What `onceflow compare` says of two versions of a record."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.admin.verify.report import Report
from onceflow.admin.verify.tally import Difference, RecordOffset
from onceflow.admin.versions.differing import described, without
from onceflow.errors import OptionError

Records = list[tuple[bytes | None, bytes | None]]


class Reader:
    """The records of two topics, of one partition each."""

    def __init__(self, old: Records, new: Records) -> None:
        self.topics = {"out": old, "out-v2": new}

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Any]:
        key, value = self.topics[topic][start]
        yield SimpleNamespace(keys=[key], values=[value])


def told(old: Records, new: Records, *ignored: str) -> list[str]:
    lost = [Difference(1, 0, (RecordOffset("out", 0, n),)) for n in range(len(old))]
    more = [Difference(0, 1, (RecordOffset("out-v2", 0, n),)) for n in range(len(new))]
    reader: Any = Reader(old, new)
    found = list(described([*more, *lost], ({"out": "out-v2"}, ("a", "b")), reader, without(ignored)))
    assert sum(len(places) for _, places in found) == len(old) + len(new)
    return [text for text, _ in found]


def test_fields_that_differ() -> None:
    old, new = (
        b'{"n": 1, "sum": 5, "at": {"x": 1, "y": 2}, "old": 1}',
        b'{"n": 1, "sum": 6, "at": {"x": 1, "y": 3}, "new": 2}',
    )
    assert told([(b"k", old)], [(b"k", new)]) == [
        "key k: sum is 5 in a, 6 in b; at.y is 2 in a, 3 in b; old is 1 in a, missing in b; new is missing in a, 2 in b"
    ]
    assert told([(b"k", old)], [(b"k", new)], "$.at", "$.old", "$.new") == ["key k: sum is 5 in a, 6 in b"]
    assert told([(b"k", old)], [(b"k", new)], "$.at.y", "$.old", "$.new", "$.sum")[0].startswith("key k: a has {")


@pytest.mark.parametrize(
    "old, new, text",
    [
        (b"x", b"y", "key k: a has x, b has y"),
        (b"1", b"1.5", "key k: a has 1, b has 1.5"),
        (b'{"a": 6.5}', b'{"a": 6.25}', "key k: a is 6.5 in a, 6.25 in b"),
        (None, b"{}", "key k: a has null, b has {}"),
        (b"\xff", b"\xfe", "key k: a has \\xff, b has \\xfe"),
        (
            b'{"a": 12345678901234567890}',
            b'{"a": 12345678901234567891}',
            "key k: a is 12345678901234567890 in a, 12345678901234567891 in b",
        ),
    ],
)
def test_values_that_differ(old: bytes | None, new: bytes | None, text: str) -> None:
    assert told([(b"k", old)], [(b"k", new)]) == [text]


def test_records_of_one_side() -> None:
    found = told([(b"k", b"1"), (b"k", b"2"), (b"l", b"3")], [(b"k", b"4"), (None, b"5")])
    assert found == [
        "key k: a has 1, b has 4",
        "key null, value 5: a has it 0 times, b once",
        "key k, value 2: a has it once, b 0 times",
        "key l, value 3: a has it once, b 0 times",
    ]


def test_fields_that_are_left_out() -> None:
    left = without(["$.at", "$.x.y"])
    assert left(b'{"b": 1, "at": 7, "x": {"y": 1, "z": 2}}') == left(b'{"x": {"z": 2}, "b": 1.0}')
    assert left(b'{"b": 1}') != left(b'{"b": 2}')
    for other in (None, b"", b"no JSON", b"[1]", b'"at"'):
        assert left(other) in (other, b"[1]")
    assert without([])(b'{"b" : 1}') == b'{"b" : 1}'
    for wrong in ("at", "$", "$.", "$.a[0]", "key"):
        with pytest.raises(OptionError, match="is no field of a JSON value"):
            without([wrong])


def test_all_are_counted_and_some_are_described() -> None:
    report = Report(2)
    report.add_all("output", 9, ((str(n), ()) for n in range(5)))
    report.add_all("output", 1, [("more", ())])
    assert report.counts == {"output": 10}
    assert [each.text for each in report.examples] == ["0", "1"]

"""What counts as a wrong answer of a query server: the check that crash tests and chaos runs use."""

from __future__ import annotations

import pytest

from onceflow_workshop.testing.served import Answer, Versions


@pytest.fixture
def versions() -> Versions:
    """Two keys in partition 0, one in partition 2; offset 3 is a control record."""
    found = Versions("t")
    for offset, key, value, ms in [
        (0, b"a", b"1", 100),
        (1, b"b", b"1", 200),
        (2, b"a", None, 300),
        (4, b"a", b"2", 400),
    ]:
        found.add(0, offset, key, value, ms)
    found.add(2, 0, b"c", b"9", 500)
    return found


@pytest.mark.parametrize(
    "key, value, position",
    [
        (b"a", b"1", "t:1.."),
        (b"a", b"1", "t:2..1"),
        (b"a", None, "t:3"),
        (b"a", None, "t:4"),
        (b"a", b"2", "t:5"),
        (b"a", b"2", "t:0"),  # newer than it says
        (b"a", None, "t:0"),
        (b"b", None, "t:1"),
        (b"c", b"9", "t:..1"),
        (b"never", None, "t:5..1"),
    ],
)
def test_right_answers(versions: Versions, key: bytes, value: bytes | None, position: str) -> None:
    assert versions.problem(Answer(key, value, position)) == ""


@pytest.mark.parametrize(
    "key, value, position, why",
    [
        (b"a", b"1", "t:3", "expected"),  # older than it says
        (b"a", None, "t:5", "expected"),
        (b"b", None, "t:2", "expected"),
        (b"a", b"3", "t:1", "expected"),  # never written
        (b"a", b"9", "t:5..1", "expected"),  # of another key
        (b"a", b"2", "t:..5", "nothing about partition 0"),  # from a copy of another partition
        (b"a", b"2", "other:5", "nothing about partition 0"),
        (b"never", b"1", "t:5", "never written"),
    ],
)
def test_wrong_answers(versions: Versions, key: bytes, value: bytes | None, position: str, why: str) -> None:
    assert why in versions.problem(Answer(key, value, position))


def test_answers_that_are_older_than_they_say(versions: Versions) -> None:
    def problem(lag_ms: int | None, asked_ms: int) -> str:
        return versions.problem(Answer(b"a", b"1", "t:2", lag_ms, asked_ms))

    assert problem(None, 10_000) == ""  # it does not know
    assert problem(9_800, 10_000) == ""
    assert problem(0, 300) == ""
    assert "offset 2 of partition 0 had been acknowledged 1 ms before that" in problem(0, 301)
    assert problem(100, 500) != problem(300, 500) == ""
    assert versions.problems([Answer(b"c", b"9", "t:..1", 0, 10_000)]) == []  # nothing came later

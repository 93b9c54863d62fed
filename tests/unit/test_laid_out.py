"""Tables of commands, at any width."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.cli.text import laid_out, width_of

WORDS = st.text("abcdefgh0123456789.,%支払ü", min_size=1, max_size=14)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    columns = draw(st.lists(WORDS, min_size=1, max_size=20, unique=True))
    row = st.lists(WORDS, min_size=len(columns), max_size=len(columns))
    return columns, draw(st.lists(row, min_size=1, max_size=8))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(table=tables(), width=st.one_of(st.none(), st.integers(40, 200)))
@pytest.mark.slow
def test_no_cell_is_broken_and_no_line_is_too_long(table: tuple[list[str], list[list[str]]], width: int | None) -> None:
    columns, rows = table
    lines = laid_out(columns, rows, width)
    assert width is None or max(map(width_of, lines)) <= width
    words = " ".join(lines).split()
    for n, column in enumerate(columns):
        assert column in words
        for value in {row[n] for row in rows}:
            assert value in words


def test_the_forms() -> None:
    columns = ["what", "trigger", "p50_ms"]
    rows = [["driver", "100 ms", "7.1"], ["tasks", "100 ms", "123.4"]]
    assert laid_out(columns, rows, 80) == [
        "what    trigger  p50_ms",
        "driver   100 ms     7.1",
        "tasks    100 ms   123.4",
    ]
    assert laid_out(columns, rows, 20) == [
        "in every row",
        "trigger  100 ms",
        "",
        "what    p50_ms",
        "driver     7.1",
        "tasks    123.4",
    ]
    many = [[f"way {n}", "1 s", str(n)] for n in range(9)]
    assert laid_out(columns, many, 12)[:6] == ["in every row", "trigger  1 s", "", "what    way 0", "p50_ms  0", ""]
    assert laid_out(columns, rows[:1], 15) == ["what     driver", "trigger  100 ms", "p50_ms      7.1"]
    assert laid_out(columns, [], 5) == ["what  trigger  p50_ms"]


def test_wide_characters() -> None:
    assert [width_of(text) for text in ("abc", "支払い", "u\u0308", "\uff21", "")] == [3, 6, 1, 2, 0]
    lines = laid_out(["FLOW", "LAG"], [["支払い", "1"], ["payments", "23"]], 80)
    assert lines == ["FLOW      LAG", "支払い      1", "payments   23"]
    assert laid_out(["FLOW", "LAG"], [["支払い", "1"]], 4) == ["FLOW  支払い", "LAG   1"]

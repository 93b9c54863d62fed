"""The text of a position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.errors import OptionError
from onceflow.protocol.position import Position

TOPICS = st.from_regex(r"[a-zA-Z0-9._-]{1,249}", fullmatch=True)
ENDS = st.dictionaries(st.integers(0, 40), st.integers(0, 2**63 - 1), min_size=1)


@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.long)])
def test_a_position_survives_as_text(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.dictionaries(TOPICS, st.tuples(ENDS, st.none() | st.uuids().map(str))))
    def check(topics: dict[str, tuple[dict[int, int], str | None]]) -> None:
        offsets = {topic: ends for topic, (ends, _) in topics.items()}
        ids = {topic: topic_id for topic, (_, topic_id) in topics.items() if topic_id is not None}
        text = str(Position(offsets, {**ids, "another": "id"}))
        assert Position.parse(text) == Position(offsets, ids)
        assert all(character.isalnum() or character in "._-:,@" for character in text)

    check()


def test_the_text() -> None:
    position = Position({"rates": {0: 9}, "balances": {2: 17, 0: 52}, "empty": {}})
    assert str(position) == "balances:52..17,rates:9"
    assert position.reached({"balances": {0: 52, 2: 18}, "rates": {0: 9}})
    assert not position.reached({"balances": {0: 52, 2: 16}, "rates": {0: 9}})
    assert not position.reached({"balances": {0: 52, 2: 17}})
    assert Position().reached({})
    position = Position({"t": {0: 1}}, {"t": "id"})
    assert str(position) == "t@id:1"
    assert position.is_of("t", "id")
    assert position.is_of("t", "")
    assert not position.is_of("t", "later")
    assert Position({"t": {0: 1}}).is_of("t", "later")


@pytest.mark.parametrize("text", ["t", "t:1,", ",", "t:-1", "t:1,t:2", "t:1 ", "t:a", ":1", "t@:1", "t@a b:1", 7, None])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a position"):
        Position.parse(text)


def test_long_texts_are_refused() -> None:
    with pytest.raises(OptionError):
        Position.parse("t:" + "." * 200_000)

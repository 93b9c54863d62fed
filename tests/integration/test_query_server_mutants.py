"""The check of answers finds broken servers: `Versions`, which crash tests and chaos runs use."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from onceflow.protocol.position import Position
from onceflow.server.local import LocalTable, Room
from onceflow.server.staleness import AnswerAge
from onceflow.tables.copies import Copy
from onceflow_workshop.testing.served import Answer, Versions, write_rows

pytestmark = pytest.mark.integration

KEYS, ROUNDS = [f"key-{n}" for n in range(20)], 20


@pytest.fixture
def problems(onceflow_broker: str, topic: str, serve: Callable[..., httpx.Client]) -> Callable[[], list[str]]:
    """Asks while rows are written. Returns what is wrong with the answers."""

    def ask() -> list[str]:
        client = serve(topic)
        answers: list[Answer] = []
        acknowledged: list[tuple[str, int]] = []
        for n in range(ROUNDS):
            acknowledged.append(
                (write_rows(onceflow_broker, topic, dict.fromkeys(KEYS, str(n))), int(time.time() * 1000))
            )
            for key in KEYS:
                asked_ms = int(time.time() * 1000)
                document = client.get(f"/tables/{topic}/keys/{key}", params={"value_encoding": "text"}).json()
                raw = None if "value" not in document else document["value"].encode()
                answers.append(Answer(key.encode(), raw, document["position"], document["lag"]["ms"], asked_ms))
        versions = Versions.read(onceflow_broker, topic)
        for position, ms in acknowledged:
            for partition, end in Position.parse(position).offsets[topic].items():
                versions.acknowledged[partition].append((end - 1, ms))
        return versions.problems(answers)

    return ask


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed is applied 30 ms later."""
    apply = Copy.apply

    def later(self: Copy, *given: Any, **named: Any) -> Any:
        time.sleep(0.03)
        return apply(self, *given, **named)

    monkeypatch.setattr(Copy, "apply", later)


def test_the_sound_server_passes(problems: Callable[[], list[str]], slow: None) -> None:
    assert problems() == []


def test_a_position_that_is_ahead_by_one(problems: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = LocalTable.seen

    def seen(self: LocalTable, partitions: Collection[int]) -> AnswerAge:
        found = sound(self, partitions)
        return replace(found, offsets={partition: offset + 1 for partition, offset in found.offsets.items()})

    monkeypatch.setattr(LocalTable, "seen", seen)
    assert "expected" in problems()[0]


def test_the_copy_of_another_partition(problems: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    get, get_many = LocalTable.get, LocalTable.get_many
    monkeypatch.setattr(LocalTable, "get", lambda self, partition, key: get(self, (partition + 1) % 4, key))

    async def others(self: LocalTable, partition: int, keys: Sequence[bytes], room: Room) -> list[bytes | None]:
        return await get_many(self, (partition + 1) % 4, keys, room)

    monkeypatch.setattr(LocalTable, "get_many", others)
    assert "expected" in problems()[0]


def test_an_answer_that_is_older_than_it_says(
    problems: Callable[[], list[str]], slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = LocalTable.seen
    monkeypatch.setattr(LocalTable, "seen", lambda self, partitions: replace(sound(self, partitions), lag_ms=0))
    assert "had been acknowledged" in problems()[0]

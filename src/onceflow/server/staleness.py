"""What a request demands of the age of its answer, and how old an answer is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onceflow.protocol.position import Position
from onceflow.server.problems import Problem
from onceflow.tables.lag import Lag

_HEADER_MAX = 8_000


@dataclass(frozen=True)
class Freshness:
    """What a request demands.

    Args:
        least: by partition, the offset up to which the answer must contain everything.
        topic_id: of the topic that ``least`` is about; empty: unknown.
        staleness_ms: the table must have contained everything at most this long ago; None: whenever.
        until: when waiting for this ends, on the monotonic clock.
        layout: what is known of moved rows: over how many partitions they are, and since when (epoch milliseconds).
    """

    least: Mapping[int, int] = field(default_factory=dict)
    staleness_ms: int | None = None
    until: float = 0.0
    topic_id: str = ""
    layout: tuple[int, int] = (0, 0)

    @property
    def demands(self) -> bool:
        """Whether an answer may be too old."""
        return bool(self.least) or self.staleness_ms is not None

    @property
    def left_s(self) -> float:
        """For how many seconds the answer may be waited for."""
        return max(0.0, self.until - time.monotonic())

    def document(self) -> dict[str, Any]:
        """For another instance. Clocks differ, so the time that is left is sent."""
        least = [[partition, offset] for partition, offset in self.least.items()]
        known = {"staleness_ms": self.staleness_ms, "wait_s": self.left_s, "topic_id": self.topic_id}
        return {"least": least, "layout": self.layout, **known}

    @classmethod
    def read(cls, document: Mapping[str, Any], longest_s: float) -> Freshness:
        """What another instance demands, from its document."""
        wait_s = min(float(document["wait_s"]), longest_s)
        least = {int(partition): int(offset) for partition, offset in document["least"]}
        partitions, since_ms = document["layout"]
        layout = (int(partitions), int(since_ms))
        return cls(least, document["staleness_ms"], time.monotonic() + wait_s, str(document["topic_id"]), layout)


@dataclass(frozen=True)
class AnswerAge:
    """How old an answer is.

    Args:
        offsets: of the partitions that the answer is from: it contains everything below these offsets.
        lag_records: at most how many committed records are missing; None: not known yet.
        lag_ms: at most how long ago it was everything that is committed; None: it has never been everything.
        topic_id: of the topic. partitions: how many it has.
        layout: what another instance knew of moved rows after it had looked, as in `Freshness`.
    """

    offsets: Mapping[int, int]
    lag_records: int | None
    lag_ms: int | None
    topic_id: str = ""
    partitions: int = 0
    layout: tuple[int, int] = (0, 0)

    @classmethod
    def all_of(cls, parts: Iterable[AnswerAge]) -> AnswerAge:
        """Of an answer that has several parts.

        Raises:
            Problem: 503, the parts are of an earlier and of a later topic of the same name.
        """
        parts = list(parts)
        ids = {part.topic_id for part in parts}
        if len(ids) > 1:
            raise Problem(
                503,
                "The topic was deleted and created again, and some instances have the earlier one",
                next_step="ask again: these instances stop to answer",
            )
        offsets = {partition: offset for part in parts for partition, offset in part.offsets.items()}
        lag = Lag.all_of(Lag(part.lag_records, part.lag_ms) for part in parts)
        partitions = max((part.partitions for part in parts), default=0)
        layout = max((part.layout for part in parts), default=(0, 0))
        return cls(offsets, lag.records, lag.ms, "".join(ids), partitions, layout)

    def headers(self, topic: str) -> dict[str, str]:
        """The headers of a response."""
        return age_headers(self.members(topic))

    def members(self, topic: str) -> dict[str, Any]:
        """The members of a JSON document."""
        lag = {"records": self.lag_records, "ms": self.lag_ms}
        return {"position": self.position(topic), "lag": lag}

    def position(self, topic: str) -> str:
        """As a text. All partitions have a place in it, so it shows which of them the answer is not from."""
        text = str(Position({topic: self.offsets}, {topic: self.topic_id}))
        return text + "." * (self.partitions - 1 - max(self.offsets)) if self.offsets else text

    def document(self) -> list[Any]:
        """For another instance."""
        offsets = [[partition, offset] for partition, offset in self.offsets.items()]
        return [offsets, self.lag_records, self.lag_ms, self.topic_id, self.partitions]

    @classmethod
    def read(cls, document: Any, layout: Sequence[int] = (0, 0)) -> AnswerAge:
        offsets, records, ms, topic_id, partitions = document
        known = {int(partition): int(offset) for partition, offset in offsets}
        spread, since_ms = map(int, layout)
        return cls(known, records, ms, str(topic_id), int(partitions), (spread, since_ms))


def age_headers(members: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a response that say how old it is, of the members of its document that say so.

    A position of very many partitions is in the document only: clients and proxies limit the size of headers.
    """
    lag = members.get("lag") or {}
    position = members.get("position")
    values = {
        "Onceflow-Position": position if len(position or "") <= _HEADER_MAX else None,
        "Onceflow-Lag-Records": lag.get("records"),
        "Onceflow-Lag-Ms": lag.get("ms"),
    }
    return {name: str(value) for name, value in values.items() if value is not None}

"""A position: how far topics are committed, as a short text such as ``balances:52.0.17,rates:9``.

After each topic stand its id (Kafka's, as a UUID; it may be left out) and the end offsets of its partitions 0, 1, 2,
and so on. A partition that is not known is left empty: ``balances:52..17``. A topic that was deleted and created again
has another id: an offset of the earlier topic says nothing about the later one. The characters are legal in HTTP
headers and in query strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from onceflow.errors import OptionError

_PART = re.compile(r"([a-zA-Z0-9._-]{1,249})(?:@([a-zA-Z0-9_-]{1,36}))?:((?:[0-9]{1,19})?(?:\.(?:[0-9]{1,19})?)*)")
_PARTITIONS_MAX = 100_000


@dataclass(frozen=True)
class Position:
    """End offsets of topics: everything below them is included.

    Args:
        offsets: topic, then partition, then the offset after the last record that is included.
        ids: the topics' ids, as far as they are known. Ids of other topics are ignored.
    """

    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Position:
        """The position in a text that ``str()`` of a position has returned.

        Raises:
            OptionError: the text is not a position.
        """
        offsets: dict[str, dict[int, int]] = {}
        ids: dict[str, str] = {}
        for part in str(text).split(",") if text != "" else ():
            matched = _PART.fullmatch(part)
            if matched is None or matched[1] in offsets or matched[3].count(".") >= _PARTITIONS_MAX:
                raise OptionError(
                    f"{text!r:.100} is not a position",
                    next_step="a position is the text of query.position or Table.position, for example "
                    "'balances:52.0.17'",
                )
            numbers = enumerate(matched[3].split("."))
            offsets[matched[1]] = {partition: int(offset) for partition, offset in numbers if offset}
            if matched[2]:
                ids[matched[1]] = matched[2]
        return cls(offsets, ids)

    def __str__(self) -> str:
        return ",".join(self._part(topic, ends) for topic, ends in sorted(self.offsets.items()) if ends)

    def is_of(self, topic: str, topic_id: str) -> bool:
        """Whether the offsets of a topic are of the one with this id, as far as both ids are known."""
        return self.ids.get(topic, "") in ("", topic_id) or not topic_id

    def reached(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Whether offsets, by topic and partition, are at this position or beyond it in every partition of it."""
        return all(
            ends.get(topic, {}).get(partition, -1) >= offset
            for topic, wanted in self.offsets.items()
            for partition, offset in wanted.items()
        )

    def _part(self, topic: str, ends: Mapping[int, int]) -> str:
        topic_id = self.ids.get(topic)
        listed = ".".join(str(ends.get(partition, "")) for partition in range(max(ends) + 1))
        return f"{topic}@{topic_id}:{listed}" if topic_id else f"{topic}:{listed}"


def other_topic(topic: str) -> OptionError:
    """The error for a position whose id is not that of the topic."""
    return OptionError(
        f"The position is of another topic with the name {topic}: it was deleted and created again",
        topic=topic,
        next_step="take a new position; if this one is new, open the table again",
    )

"""A position: how far topics are committed, as a short text such as ``balances:52.0.17,rates:9``.

After each topic stand the end offsets of its partitions 0, 1, 2, and so on. A partition that is not known is left
empty: ``balances:52..17``. The characters are legal in HTTP headers and in query strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from onceflow.errors import OptionError

_PART = re.compile(r"([a-zA-Z0-9._-]{1,249}):((?:[0-9]{1,19})?(?:\.(?:[0-9]{1,19})?)*)")
_PARTITIONS_MAX = 100_000


@dataclass(frozen=True)
class Position:
    """End offsets of topics: everything below them is included.

    Args:
        offsets: topic, then partition, then the offset after the last record that is included.
    """

    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Position:
        """The position in a text that ``str()`` of a position has returned.

        Raises:
            OptionError: the text is not a position.
        """
        offsets: dict[str, dict[int, int]] = {}
        for part in str(text).split(",") if text != "" else ():
            matched = _PART.fullmatch(part)
            if matched is None or matched[1] in offsets or matched[2].count(".") >= _PARTITIONS_MAX:
                raise OptionError(
                    f"{text!r:.100} is not a position",
                    next_step="a position is the text of query.position or Table.position, for example "
                    "'balances:52.0.17'",
                )
            numbers = enumerate(matched[2].split("."))
            offsets[matched[1]] = {partition: int(offset) for partition, offset in numbers if offset}
        return cls(offsets)

    def __str__(self) -> str:
        return ",".join(f"{topic}:{_listed(ends)}" for topic, ends in sorted(self.offsets.items()) if ends)

    def reached(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Whether offsets, by topic and partition, are at this position or beyond it in every partition of it."""
        return all(
            ends.get(topic, {}).get(partition, -1) >= offset
            for topic, wanted in self.offsets.items()
            for partition, offset in wanted.items()
        )


def _listed(ends: Mapping[int, int]) -> str:
    return ".".join(str(ends.get(partition, "")) for partition in range(max(ends) + 1))

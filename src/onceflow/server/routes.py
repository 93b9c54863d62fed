"""Which instance has which partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: In place of an address: this instance.
HERE = "here"


@dataclass(frozen=True)
class TableRoutes:
    """Where one table is.

    Args:
        holders: by partition, the addresses of those who have it; the first one is its owner.
        placed: whether all keys are where Kafka's default partitioner puts them.
        usual: how many instances have a partition, unless it is being moved.
    """

    holders: Sequence[Sequence[str]]
    placed: bool = True
    usual: int = 1


@dataclass
class Routes:
    """Where all tables are, as last heard. It is replaced as a whole, so any thread may read it.

    Args:
        address: that of this instance.
    """

    address: str
    tables: Mapping[str, TableRoutes] = field(default_factory=dict)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""
        return len(self.tables[topic].holders)

    def placed(self, topic: str) -> bool:
        """Whether a key can only be in the partition where the default partitioner puts it."""
        return self.tables[topic].placed

    def addresses(self, topic: str, partition: int) -> list[str]:
        """Whom to ask for a partition, best first."""
        holders = self.tables[topic].holders
        if partition >= len(holders):
            return []
        return [HERE if address == self.address else address for address in holders[partition]]

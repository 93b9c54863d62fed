"""When the records of a batch were written to its sources: for the latency that metrics show.

The driver does not see the records of a batch, and a query may drop their timestamps. So the first record of a
partition is looked up in Kafka, after the batch is committed, over connections of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.first_record import first_timestamp
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.protocol.timestamps import age_ms

_ANSWER_S = 5.0


class SourceTimes:
    """Looks timestamps up. To be used by one thread at a time.

    Args:
        settings: how to connect.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._cluster: Cluster | None = None

    def first(self, ranges: Sequence[tuple[str, int, int, int]], limit: int) -> list[int]:
        """Timestamps, in epoch milliseconds, of the first committed record of each range that has one, and where it can
        be right.

        Args:
            ranges: topic, partition, start and end offset.
            limit: how many ranges are looked at, which are chosen at random.

        Raises:
            OnceflowError: a broker does not answer within 5 seconds, or refuses the request.
        """
        if self._cluster is None:
            self._cluster = Cluster(self._settings)
        chosen = ranges if len(ranges) <= limit else random.sample(ranges, limit)
        deadline = Deadline(_ANSWER_S, "looking up when the records of a batch were written")
        self._cluster.connect(deadline)
        found = [first_timestamp(self._cluster, *each, deadline) for each in chosen]
        now_ms = clock_ms()
        return [stamp for stamp in found if stamp is not None and age_ms(stamp, now_ms) is not None]

    def close(self) -> None:
        """Close the connections."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

"""Whether a partition has a hole at an offset: nothing from there to the last stable offset, because of compaction.

A broker answers a Fetch without records in two cases. Compaction has removed all records between the position and the
last stable offset. Or the records are in remote storage (KIP-405) and have not come in time, or its quota is used up:
then the same Fetch has to be sent again. (Kafka: ReplicaManager.handleOffsetOutOfRangeError, DelayedRemoteFetch.)
"""

from __future__ import annotations

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import earliest_local
from onceflow.errors import BrokerUnreachableError, BrokerUnsupportedError, DeadlineExceededError


def is_hole(cluster: Cluster, topic: str, partition: int, offset: int, deadline: Deadline) -> bool:
    """Whether there is nothing at the offset. Call it after a Fetch from there has returned nothing, although it is
    below the last stable offset. False also if no broker answers in time: then it is not known.
    """
    try:
        return offset >= earliest_local(cluster, topic, partition, deadline)
    except BrokerUnsupportedError:
        return True  # brokers before Kafka 3.6 have no remote storage
    except (DeadlineExceededError, BrokerUnreachableError):
        return False

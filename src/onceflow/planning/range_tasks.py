"""Which tasks read which source partitions, when tasks read a batch by themselves (the direct engine with a backlog).

A task gets the partitions of all sources whose number, modulo the number of tasks, is its own. Kafka's default
partitioner takes the hash of the key modulo the partition count. So if the number of tasks divides the partition counts
of sources and targets, a row whose key is that of its record is already in the task that owns its target partition, and
there is no shuffle. Only the rows show whether this is so. Tasks check it (`NotCopartitionedError`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd

from onceflow.protocol.names import TopicPartition

# More tasks than cores, if only that makes a number that divides all partition counts.
_MAX_SPREAD = 4


def reading_tasks(partitions: Iterable[int], cores: int) -> int:
    """How many tasks there are.

    Args:
        partitions: partition counts, which the number has to divide. cores: how many tasks can run at once.

    Returns:
        The largest number up to ``cores``, or the smallest one up to four times as many; 1 if there is none but 1.
    """
    common = gcd(*partitions)
    divisors = [n for n in range(2, min(common, _MAX_SPREAD * cores) + 1) if common % n == 0]
    fitting = [n for n in divisors if n <= cores]
    return fitting[-1] if fitting else divisors[0] if divisors and cores > 1 else 1


def dealt(
    ranges: Iterable[tuple[str, int, int, int]], tasks: int, task_of: Callable[[int], int] | None = None
) -> tuple[dict[TopicPartition, tuple[int, int]], ...]:
    """The ranges of each task, by partition: first offset, and the offset behind the last one.

    Args:
        ranges: topic, partition, and the two offsets, of each partition that has any. Without records, the offsets are
            the same.
        task_of: returns the task of a partition, -1 if no task reads it; None: its number modulo that of the tasks.
    """
    shares: tuple[dict[TopicPartition, tuple[int, int]], ...] = tuple({} for _ in range(tasks))
    for topic, partition, start, end in ranges:
        task = partition % tasks if task_of is None else task_of(partition)
        if task >= 0:
            shares[task][topic, partition] = start, end
    return shares

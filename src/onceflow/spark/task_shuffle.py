"""A shuffle that sends every row to the task whose number is in a column.

Spark has ``repartitionById`` for this from 4.1 on. In older versions hash partitioning does the same: Spark sends a row
to the task ``pmod(murmur3(column), tasks)``, and its murmur3 of an integer can be inverted. So the number 5 is replaced
by the integer whose hash is 5.
"""

from __future__ import annotations

from functools import cache

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from onceflow.spark import versions

_SEED = 42  # of Spark's HashPartitioning (HashPartitioning.partitionIdExpression: Murmur3Hash)
_BITS = 0xFFFFFFFF


def repartition_by_task(df: DataFrame, tasks: int, task: Column) -> DataFrame:
    """The same rows, divided among ``tasks`` tasks; ``task`` is the number of each row's task.

    Args:
        task: an integer from 0 to ``tasks - 1``, never null.
    """
    if versions.has("repartitionById"):
        return df.repartitionById(tasks, task)
    keys = F.array(*[F.lit(key_of_task(number)) for number in range(tasks)])
    return df.repartition(tasks, F.element_at(keys, task.cast("int") + 1))


@cache
def key_of_task(number: int) -> int:
    """The integer that Spark's hash partitioning sends to a task, for any number of tasks."""
    return _signed(_murmur3_inverse(number))


def _murmur3_inverse(hashed: int) -> int:
    """The integer whose murmur3 this is (Spark: ``Murmur3_x86_32.hashInt``). It undoes the steps one by one."""
    h1 = hashed
    h1 ^= h1 >> 16
    h1 = h1 * pow(0xC2B2AE35, -1, 1 << 32) & _BITS
    h1 ^= h1 >> 13 ^ h1 >> 26
    h1 = h1 * pow(0x85EBCA6B, -1, 1 << 32) & _BITS
    h1 ^= h1 >> 16
    h1 ^= 4  # the length of an integer, in bytes
    h1 = (h1 - 0xE6546B64) * pow(5, -1, 1 << 32) & _BITS
    k1 = _rotated(h1, 32 - 13) ^ _SEED
    k1 = k1 * pow(0x1B873593, -1, 1 << 32) & _BITS
    return _rotated(k1, 32 - 15) * pow(0xCC9E2D51, -1, 1 << 32) & _BITS


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _BITS


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value

"""What Spark keeps of an attempt of a batch: shuffle files. The next attempt does not compute their rows again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

_SHUFFLE = "org.apache.spark.ShuffleDependency"


def drop_shuffles(df: DataFrame) -> None:
    """Let the next job compute again what is in front of the shuffles of a batch.

    All jobs of a batch use one RDD of the streaming query. No job of it may be running.
    """
    tracker = df.sparkSession.sparkContext._jsc.sc().env().mapOutputTracker()
    for shuffle in set(_shuffles(df._jdf.queryExecution().toRdd())):
        if tracker.containsShuffle(shuffle):
            tracker.unregisterAllMapAndMergeOutput(shuffle)


def _shuffles(rdd: Any) -> Iterator[int]:
    ahead, seen = [rdd], set()
    while ahead:
        rdd = ahead.pop()
        if (number := int(rdd.id())) in seen:
            continue
        seen.add(number)
        dependencies = rdd.dependencies()
        for index in range(dependencies.size()):
            dependency = dependencies.apply(index)
            if dependency.getClass().getName() == _SHUFFLE:
                yield int(dependency.shuffleId())
            ahead.append(dependency.rdd())

"""The tables that a flow joins with, as the driver knows them: at which offsets each batch sees them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.long_poll import created_again
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.settings import ClientSettings
from onceflow.errors import UnknownTopicError
from onceflow.messages import JOINED_PROPERTY, JoinOrder
from onceflow.planning.join_columns import columns_of_join
from onceflow.protocol.progress import Progress
from onceflow.spark.shuffles import drop_shuffles
from onceflow.state.joins.copies import INEXACT
from onceflow.state.joins.spec import Ends, JoinSpec
from onceflow.task.join_task import JoinTask

_LOOK_EVERY_S = 10.0
_PIN_S = 30.0
_MOVES = 30  # attempts that are not counted, because a host has read its copies in them


def join_frame(
    df: DataFrame, spec: JoinSpec, settings: ClientSettings, *, on: str, how: str, columns: Any, flow: str
) -> DataFrame:
    """What ``Flow.join_table`` returns.

    Raises:
        OptionError, SchemaError: the arguments or columns do not fit.
    """
    wanted, added = columns_of_join(df, spec, on=on, how=how, columns=columns, flow=flow)
    order = JoinOrder(spec, settings, on, how == "inner", added, isinstance(columns, str), flow)
    return df.mapInArrow(JoinTask(order), wanted)


class Joins:
    """The joined tables of one query.

    Attributes:
        ends: the offsets at which the current batch sees them, by topic and partition. They stay the same for all
            attempts of the batch.
    """

    def __init__(self, specs: Sequence[JoinSpec], cluster: Cluster, progress: Progress, *, flow: str) -> None:
        self._specs = {spec.topic: spec for spec in specs}
        self._cluster = cluster
        self._flow = flow
        self._looked_at: float | None = None
        self._moves = 0
        self._has_moved = False
        self.ends: Ends = {topic: ends for topic, ends in progress.joined.items() if topic in self._specs}

    def pin(self) -> None:
        """Fix the offsets for the next batch: everything that is committed now.

        Raises:
            UnknownTopicError: a topic was deleted, created again, or has another number of partitions.
        """
        if not self._specs:
            return
        self._moves = 0
        self._pin()

    def failed(self, problem: BaseException) -> bool:
        """Fix newer offsets, if an attempt has failed because a table cannot be seen as it was at the old ones.

        Returns whether the next attempt gets further: the copies that were read are exact from now on.
        """
        if not self._specs or INEXACT not in str(problem):
            return False
        self._pin()
        self._moves += 1
        self._has_moved = True
        return self._moves <= _MOVES

    def forget_attempt(self, df: DataFrame) -> None:
        """Let Spark compute rows again that an attempt has joined at offsets which do not hold any more."""
        if self._has_moved:
            drop_shuffles(df)
            self._has_moved = False

    def _pin(self) -> None:
        deadline = Deadline(_PIN_S, f"looking for the ends of the tables that flow {self._flow} joins with")
        self._check_topics(deadline)
        wanted = {topic: list(range(spec.partitions)) for topic, spec in self._specs.items()}
        self.ends = {topic: dict(ends) for topic, ends in list_offsets(self._cluster, wanted, LATEST, deadline).items()}

    def publish(self, df: DataFrame, now_ms: int) -> None:
        """Put the offsets where the tasks of this thread's jobs can read them."""
        if self._specs:
            described = json.dumps(
                {"now_ms": now_ms, "ends": {topic: sorted(ends.items()) for topic, ends in self.ends.items()}}
            )
            df.sparkSession.sparkContext.setLocalProperty(JOINED_PROPERTY, described)

    def withdraw(self, df: DataFrame) -> None:
        """Remove the offsets from where tasks read them, so that no job outside of a batch takes old ones."""
        if self._specs:
            with contextlib.suppress(Exception):  # Spark may have ended; then no task reads them either
                df.sparkSession.sparkContext.setLocalProperty(JOINED_PROPERTY, None)  # type: ignore[arg-type]

    def progress(self, progress: Progress) -> Progress:
        """The progress of the batch, completed with the offsets at which it has seen the tables."""
        if not self._specs:
            return replace(progress, joined={})
        # Of a topic that the flow has read as a source, the id belongs to the offsets in progress.
        ids = {topic: spec.topic_id for topic, spec in self._specs.items() if topic not in progress.offsets}
        return replace(progress, joined=self.ends, topic_ids={**progress.topic_ids, **ids})

    def _check_topics(self, deadline: Deadline) -> None:
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < _LOOK_EVERY_S:
            return
        found = self._cluster.topics(self._specs, deadline, patient=True)
        self._looked_at = now
        for topic, spec in self._specs.items():
            if found[topic].topic_id != spec.topic_id:
                raise created_again(topic).locate(flow=self._flow)
            if found[topic].partitions != spec.partitions:
                raise UnknownTopicError(
                    f"Topic {topic} has {found[topic].partitions} partitions now, it had {spec.partitions}",
                    flow=self._flow,
                    topic=topic,
                    next_step="start the flow again: it joins with all partitions then",
                )

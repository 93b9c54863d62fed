"""Spark's commit log: the entry of a batch is made before Kafka commits the batch, and can be added after a crash.

When the driver dies at the wrong moment, a batch is committed in Kafka but missing in Spark's commit log. The batch
could run again for its state (draining). That gives the state of the *second* run, which differs from the state of the
committed run when user code is not deterministic. So the progress record contains the entry that Spark is going to
write: the next watermark, and with state format 2 the ids of the state files of this run. The next start completes the
log with this entry, and continues with the state of the committed batch. The state files exist: Spark's tasks upload
them before the job ends, and the transaction is committed after that.

The entry is made by Spark's own code and objects (MicroBatchExecution.markMicroBatchEnd does the same shortly after).
If these are not as expected, there is no entry, and the batch is drained.
"""

from __future__ import annotations

import logging
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from onceflow.spark import jvm, versions
from onceflow.spark.checkpoint_files import Folder

log = logging.getLogger("onceflow.sink")


class CommitLog:
    """The commit log of a running query.

    Every entry is compared with the one that Spark writes later. If one differs, no further entries are made.

    Args:
        spark: the session that the query was started in. folder: of its checkpoint.
    """

    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self._spark = spark
        self._java: Any = spark._jvm
        self._state_format: str | None = None
        self._folder = folder
        self._made: tuple[int, str] | None = None
        self._trusted = True

    def entry(self, query_id: str, batch: int) -> str | None:
        """What Spark will write for the current batch, all of whose tasks are done; None: not known."""
        self._check(batch)
        if not self._trusted:
            return None
        try:
            text = self._entry(query_id)
        except (Py4JError, AttributeError, TypeError, LookupError) as error:
            self._trust_no_more(jvm.first_line(error))
            return None
        self._made = (batch, text)
        return text

    def _entry(self, query_id: str) -> str:
        java = self._java
        query = jvm.running_query(self._spark, query_id)
        execution = jvm.last_execution(query)
        plan = execution.executedPlan()
        tracker = query.watermarkTracker()
        tracker.updateWatermark(plan)  # the watermark only rises, so nothing changes when Spark calls this again
        ids = java.scala.Option.empty()
        if self._state_format is None:  # as it was when the query started
            self._state_format = str(execution.sparkSession().conf().get(jvm.STATE_FORMAT, "1"))
        if self._state_format != "1" and versions.has("state ids"):
            ids = java.scala.Option.apply(self._state_ids(query, plan))
        written = query.commitLog()
        stream = java.java.io.ByteArrayOutputStream()
        written.serialize(self._metadata(written, tracker.currentWatermark(), ids), stream)
        return str(stream.toString("UTF-8"))

    def _metadata(self, written: Any, watermark: int, ids: Any) -> Any:
        """Spark's object for an entry of the commit log."""
        if versions.has("commit metadata factory"):
            more, version = (getattr(written, f"createMetadata$default${n}")() for n in (3, 4))
            return written.createMetadata(watermark, ids, more, version)
        made = versions.java_class(self._spark, versions.streaming_class("CommitMetadata"))
        return made(watermark, ids) if versions.has("state ids") else made(watermark)

    def _state_ids(self, query: Any, plan: Any) -> Any:
        """Ids of the state files of the current batch. Spark collects them once, when the batch ends."""
        same_type = getattr(getattr(self._java.scala, "$less$colon$less$"), "MODULE$").refl()
        current = _call(query, "currentStateStoreCkptId")
        before = current.toMap(same_type)
        try:
            _call(query, "updateStateStoreCkptId", query.getLatestExecutionContext(), plan)
            return current.toMap(same_type)
        finally:
            current.clear()
            current.addAll(before)

    def _check(self, batch: int) -> None:
        if self._made is None or self._made[0] != batch - 1:
            return
        found = self._folder.text(f"commits/{batch - 1}")
        if found != self._made[1]:
            self._trust_no_more(f"Spark wrote {found!r} instead of {self._made[1]!r}")

    def _trust_no_more(self, why: str) -> None:
        if self._trusted:
            log.warning("Spark's commit log is not as expected; after a crash a batch may be drained: %s", why)
        self._trusted = False


def complete(spark: SparkSession, address: str, batch: int, entry: str) -> bool:
    """Write the entry of a batch that Kafka has committed into a checkpoint that no running query uses.

    Returns:
        Whether the entry was written. If not, the batch has to be drained.
    """
    java: Any = spark._jvm
    try:
        made = versions.java_class(spark, versions.streaming_class("CommitLog"))
        # The constructor of newer versions has one more parameter: whether the log is read-only.
        rest = [False] if versions.has("commit metadata factory") else []
        written = made(spark._jsparkSession, f"{address}/commits", *rest)
        stream = java.java.io.ByteArrayInputStream(bytearray(entry.encode()))
        return bool(written.add(batch, written.deserialize(stream)))
    except (Py4JError, TypeError) as error:
        log.warning("the entry of batch %d cannot be added to Spark's commit log: %s", batch, jvm.first_line(error))
        return False


def _call(target: Any, method: str, *arguments: Any) -> Any:
    """Call a method of Spark that is not public."""
    for found in target.getClass().getDeclaredMethods():
        if str(found.getName()) == method and int(found.getParameterCount()) == len(arguments):
            found.setAccessible(True)
            gateway: Any = SparkContext._gateway
            array = gateway.new_array(gateway.jvm.java.lang.Object, len(arguments))
            for i, argument in enumerate(arguments):
                array[i] = argument
            return found.invoke(target, array)
    raise LookupError(f"{target.getClass().getName()} has no {method}")

"""How a query is run: its trigger, its mode, and where Spark's checkpoint of it lives.

Without ``checkpoint=`` Spark's checkpoint is scratch space of one run; with it, it holds Spark's state and is compared
with the flow's progress before anything starts.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from onceflow.driver.numbering import Numbering
from onceflow.driver.offset_log import TopicOffsets, read_digest, read_ends
from onceflow.errors import OptionError
from onceflow.host.leftovers import of_ended_processes
from onceflow.planning.checkpoints import plan_checkpoint
from onceflow.protocol.progress import Progress
from onceflow.spark.checkpoint_files import (
    CheckpointState,
    Folder,
    LocalFolder,
    look_at,
    open_folder,
)
from onceflow.spark.commit_log import complete
from onceflow.spark.queries import PlanFacts

log = logging.getLogger("onceflow")

#: Whether a batch that Kafka has committed is put into Spark's commit log at a start, instead of being drained.
COMPLETE_COMMIT_LOG = True
OUTPUT_MODES = ("append", "update", "complete")
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(milliseconds?|ms|seconds?|s|minutes?|min)?\s*")
_UNIT_SECONDS = {"m": 60.0, "s": 1.0}


@dataclass(frozen=True)
class RunOptions:
    """Choices of ``Flow.write`` about the query as a whole.

    Args:
        trigger: in words that Spark knows. once: Spark's availableNow.
        checkpoint: folder to be kept; None: scratch.
        facts: what the query's plan says.
    """

    trigger: str | None
    once: bool
    checkpoint: str | None
    output_mode: str
    on_conflict: str
    facts: PlanFacts

    def apply(self, writer: DataStreamWriter) -> DataStreamWriter:
        """Trigger and output mode of the query."""
        writer = writer.outputMode(self.output_mode)
        if self.once:
            return writer.trigger(availableNow=True)
        if self.trigger is not None:
            return writer.trigger(processingTime=self.trigger)
        return writer


@dataclass(frozen=True)
class Location:
    """Where Spark's checkpoint of a run is.

    Args:
        address: for Spark. numbering: only of one that is kept.
    """

    folder: Folder
    address: str
    numbering: Numbering | None

    def close(self) -> None:
        """The run is over: scratch space is removed."""
        if self.numbering is None and isinstance(self.folder, LocalFolder):
            shutil.rmtree(self.folder.path, ignore_errors=True)


def scratch(flow: str) -> Location:
    """A scratch checkpoint for one run."""
    path = scratch_folder(flow)
    return Location(LocalFolder(path), path.as_uri(), None)


def kept(spark: SparkSession, run: RunOptions, progress: Progress, flow: str) -> Location:
    """The user's checkpoint, when it belongs to the flow's progress.

    Raises:
        ProgressConflictError: it does not.
        OptionError: it cannot be opened.
    """
    if run.checkpoint is None:
        raise ValueError("there is no checkpoint to be kept")
    folder, address = open_folder(spark, run.checkpoint, flow)
    state = look_at(folder)
    known = progress.checkpoint
    start = plan_checkpoint(
        state,
        progress,
        digest=None if known is None or known.batch > state.planned else read_digest(folder, known.batch),
        location=run.checkpoint,
        on_conflict=run.on_conflict,
        other_sources=run.facts.others,
        flow=flow,
    )
    if start.warning:
        log.warning("flow %s: %s", flow, start.warning)
    entry = None if known is None or not COMPLETE_COMMIT_LOG else known.commit
    if start.drains is not None and entry is not None and complete(spark, address, start.drains, entry):
        log.warning(
            "flow %s: batch %d of the checkpoint is committed in Kafka: Spark's commit log is completed with it",
            flow,
            start.drains,
        )
    return Location(folder, address, Numbering(spark, folder, flow, moved_since(folder, state, progress)))


def moved_since(folder: Folder, state: CheckpointState, progress: Progress) -> TopicOffsets:
    """Where progress has moved since its last batch: only starts do that, this one or one that then wrote nothing."""
    known = progress.checkpoint
    if known is not None and known.query_id == state.query_id:
        ends = read_ends(folder, known.batch, progress.offsets)
        return {
            topic: {p: offset for p, offset in progress.offsets.get(topic, {}).items() if ends[topic].get(p) != offset}
            for topic in ends
        }
    if progress.batch_id == 0:  # all that progress knows was committed by starts
        return {topic: dict(offsets) for topic, offsets in progress.offsets.items()}
    return {}


def scratch_folder(flow: str) -> Path:
    """A new folder for Spark's checkpoint of this run; those of killed drivers of the flow are removed.

    The name ends with the driver's process id. Spark decides nothing from the folder, so losing it is harmless.
    """
    prefix = f"onceflow-{flow}-pid"
    for old in of_ended_processes(prefix, r"-\w+"):
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


def duration_s(text: str, name: str, flow: str) -> float:
    """``"100 milliseconds"``, ``"2 seconds"``, ``"1 minute"`` or a number of seconds, as seconds."""
    match = _DURATION.fullmatch(str(text))
    if match is None:
        raise OptionError(
            f"{name}={text!r} is not a duration", flow=flow, next_step='for example "100 milliseconds" or "60 seconds"'
        )
    unit = match[2] or "s"
    factor = 0.001 if unit.startswith(("ms", "milli")) else _UNIT_SECONDS[unit[0]]
    seconds = float(match[1]) * factor
    if name != "trigger" and seconds < 1:
        raise OptionError(f"{name}={text!r} is too short", flow=flow, next_step="use at least 1 second")
    return seconds

"""Reads the folder of a query's Spark checkpoint, on a local disk or on any file system of Hadoop.

This module does not write to the folder (``commit_log.complete`` does). It reads ``metadata`` (the query's id),
``offsets/N`` (the end offsets of batch N, written before it runs) and ``commits/N`` (written after it). Spark's classes
are ``StreamMetadata``, ``OffsetSeqLog`` and ``CommitLog``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import SparkSession

from onceflow.errors import OptionError, ProgressConflictError
from onceflow.spark import jvm


class Folder(Protocol):
    """Access to a checkpoint's folder. Names are relative to it, with ``/`` between folders."""

    def text(self, name: str) -> str | None:
        """A whole file; None when it does not exist."""
        ...

    def names(self, name: str) -> list[str]:
        """Names of the files in a sub-folder; an empty list when it does not exist."""
        ...


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a disk of this host."""

    path: Path

    def text(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(f"{self.path / name}", str(error)) from error

    def names(self, name: str) -> list[str]:
        folder = self.path / name
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def __str__(self) -> str:
        return str(self.path)


class HadoopFolder:
    """A folder on a file system of Hadoop (``hdfs://``, ``s3a://``, ...)."""

    def __init__(self, spark: SparkSession, path: Any, files: Any) -> None:
        self._jvm: Any = spark._jvm
        self._path = path
        self._files = files

    def text(self, name: str) -> str | None:
        path = self._jvm.org.apache.hadoop.fs.Path(self._path, name)
        try:
            if not self._files.exists(path):
                return None
            stream = self._files.open(path)
            try:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()
        except Py4JJavaError as error:
            raise unreadable(str(path), jvm.first_line(error)) from error

    def names(self, name: str) -> list[str]:
        path = self._jvm.org.apache.hadoop.fs.Path(self._path, name)
        try:
            if not self._files.exists(path):
                return []
            return sorted(str(status.getPath().getName()) for status in self._files.listStatus(path))
        except Py4JJavaError as error:
            raise unreadable(str(path), jvm.first_line(error)) from error

    def __str__(self) -> str:
        return str(self._path)


def open_folder(spark: SparkSession, location: str, flow: str) -> tuple[Folder, str]:
    """The folder of ``checkpoint=``, and its full address for Spark.

    Raises:
        OptionError: there is no file system for it.
    """
    java: Any = spark._jvm
    try:
        path = java.org.apache.hadoop.fs.Path(location)
        files = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        path = files.makeQualified(path)
    except Py4JError as error:
        raise OptionError(
            f"checkpoint={location!r} cannot be opened",
            flow=flow,
            detail=jvm.first_line(error),
            next_step="give a folder that driver and executors can reach: a local path with a local master, else "
            "for example s3a://bucket/folder with its jar on the class path",
        ) from error
    if str(path.toUri().getScheme()) == "file":
        return LocalFolder(Path(str(path.toUri().getPath()))), str(path)
    return HadoopFolder(spark, path, files), str(path)


def unreadable(name: str, why: str) -> ProgressConflictError:
    return ProgressConflictError(
        "Spark's checkpoint of this query cannot be read",
        detail=f"{name}: {why}",
        next_step="check whether it was deleted or changed while the query ran, or whether "
        "spark.sql.streaming.offsetLog.formatVersion is set. Start the flow again: progress is in Kafka. If you gave "
        "checkpoint=, restore that folder first",
    )


@dataclass(frozen=True)
class CheckpointState:
    """The last batches in a checkpoint.

    Args:
        query_id: None when no query was ever started with it.
        planned: the last batch with an offset log; -1: none.
        committed: the last batch with a commit log; -1: none.
    """

    query_id: str | None
    planned: int = -1
    committed: int = -1


def look_at(folder: Folder) -> CheckpointState:
    """The state of the checkpoint in a folder.

    Raises:
        ProgressConflictError: the files are not as Spark writes them.
    """
    text = folder.text("metadata")
    query_id = None
    if text is not None:
        try:
            query_id = str(json.loads(text)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable(f"{folder}/metadata", f"it holds {text[:80]!r}") from error
    return CheckpointState(query_id, _last(folder.names("offsets")), _last(folder.names("commits")))


def _last(names: list[str]) -> int:
    return max((int(name) for name in names if name.isdecimal()), default=-1)

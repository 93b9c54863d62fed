"""Commits progress in a transaction of its own: at a start, and behind the transaction of an external system."""

from __future__ import annotations

import logging
from collections.abc import Collection

from onceflow.client.deadline import Deadline
from onceflow.driver.external.refused_rows import LettersToWrite
from onceflow.driver.kafka.delivery import ExactlyOnce
from onceflow.driver.record.session import DriverSession
from onceflow.errors import BatchAbortedError
from onceflow.protocol.progress import Progress

log = logging.getLogger("onceflow")


def commit_progress(
    session: DriverSession,
    progress: Progress,
    sources: Collection[str],
    deadline: Deadline,
    letters: LettersToWrite | None = None,
) -> None:
    """Commit progress in a transaction of its own.

    Args:
        sources: topics that are read. The group gets offsets of these only. Progress may know other topics, which may
            no longer exist.
        letters: dead letters of an external sink, which become visible with it.

    Raises:
        FencedError: a newer driver has started.
    """
    try:
        _try_to_commit(session, progress, sources, deadline, letters)
    except BatchAbortedError as error:
        # There may be days between two calls of a start. Kafka may have forgotten the transactional id in between.
        flow = session.names.flow
        log.info("flow %s: the first commit of its start has failed and is tried again: %s", flow, error.what)
        ExactlyOnce(session, letters.topics if letters else []).abort(deadline)
        _try_to_commit(session, progress, sources, deadline, letters)


def _try_to_commit(
    session: DriverSession,
    progress: Progress,
    sources: Collection[str],
    deadline: Deadline,
    letters: LettersToWrite | None,
) -> None:
    transaction = ExactlyOnce(session, letters.topics if letters else [])
    producer = transaction.begin(deadline)
    transaction.written(letters.write(producer, deadline) if letters else [])
    read = {topic: dict(offsets) for topic, offsets in progress.offsets.items() if topic in sources}
    transaction.write_progress(progress, read, deadline)
    if letters:
        letters.sealed()
    transaction.commit(deadline, doing="starting")

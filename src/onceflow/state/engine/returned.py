"""Records that have come back: a flow has read them, they became dead letters behind a step, and are retried."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state.engine.dead_letters import ATTEMPT, ORIGIN_TOPIC, RETRY_TOPIC
from onceflow.state.engine.input_batch import binary


class ReturnedRecordError(ValueError):
    """A record comes back in front of the de-duplication that it has passed."""

    def __init__(self) -> None:
        super().__init__(
            "the record has failed behind Flow.deduplicate and comes back in front of it, where it is a duplicate of "
            "itself: read the retry topic behind the step (docs/deduplication.md, Retries)"
        )


def returned(batch: pa.RecordBatch, sources: Iterable[str]) -> npt.NDArray[np.int64] | None:
    """Which records of a normalised batch have been dead letters, and were read from one of these topics before.

    Other records may have such headers, too, if a flow has passed them on, see `dead_letters.has_come_back`.

    Args:
        sources: topics that the flow reads.

    Returns:
        Their positions; None: there are none, or the batch has no headers.
    """
    if "headers" not in batch.schema.names:
        return None
    column = batch.column("headers")
    flat = column.flatten()
    names = pc.struct_field(flat, 0)
    origins = pc.equal(names, ORIGIN_TOPIC)
    if not pc.any(origins).as_py():
        return None
    topics = pa.array([topic.encode() for topic in sources], pa.binary())
    own = pc.and_(origins, pc.is_in(binary(pc.struct_field(flat, 1), "headers"), value_set=topics))
    rows = pc.list_parent_indices(column)
    failed = rows.filter(pc.equal(names, ATTEMPT)).to_numpy()
    found = np.intersect1d(rows.filter(own).to_numpy(), failed).astype(np.int64)
    sent = pc.equal(names, RETRY_TOPIC)
    if "topic" in batch.schema.names and pc.any(sent).as_py():
        at, to = rows.filter(sent), binary(pc.struct_field(flat, 1), "headers").filter(sent)
        read = binary(batch.column("topic"), "topic").take(at)
        found = np.setdiff1d(found, at.filter(pc.not_equal(read, to)).to_numpy())
    return found if len(found) else None

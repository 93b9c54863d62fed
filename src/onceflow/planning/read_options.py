"""The options of ``Flow.read``, and those of Spark's Kafka source that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onceflow.errors import OptionError
from onceflow.planning.options import check_whole
from onceflow.planning.read_until import ReadBound
from onceflow.planning.source_starts import StartingOffsets
from onceflow.spark import queries, query_facts


@dataclass(frozen=True)
class ReadOptions:
    """Arguments of ``Flow.read``, as given; ``until`` as the checked ``bound``."""

    topic: str
    starting_offsets: StartingOffsets
    max_records_per_batch: int | None
    fail_on_data_loss: bool
    include_headers: bool
    options: Mapping[str, str] = field(default_factory=dict)
    bound: ReadBound | None = None


def check_read(given: ReadOptions, flow: str) -> None:
    """Check what can be checked without Kafka.

    Raises:
        OptionError: see its text.
    """
    if not given.topic or not str(given.topic).strip():
        raise OptionError(f"{given.topic!r} is not the name of a topic", flow=flow, next_step="give one topic name")
    check_whole("max_records_per_batch", given.max_records_per_batch, 1, "no limit", flow)
    queries.reader_options(given.options, flow)


def source_options(given: ReadOptions, offsets: Mapping[int, int], flow: str) -> dict[str, str]:
    """Options of Spark's Kafka source for one topic, without those of the connection.

    Args:
        offsets: where each partition is read from.
    """
    options = {
        **queries.reader_options(given.options, flow),
        "subscribe": given.topic,
        "startingOffsets": queries.starting_offsets_json(given.topic, offsets),
        "kafka.isolation.level": "read_committed",
        "failOnDataLoss": str(given.fail_on_data_loss).lower(),
        "includeHeaders": str(given.include_headers).lower(),
        query_facts.MARK: flow,
    }
    if given.max_records_per_batch is not None:
        options["maxOffsetsPerTrigger"] = str(given.max_records_per_batch)
    return options

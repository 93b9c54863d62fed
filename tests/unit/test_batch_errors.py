"""What is recognised in the text of a failed Spark job."""

from __future__ import annotations

import pytest

from onceflow import DataLossError
from onceflow.driver.batch_errors import of_task

LOST = "Some data may have been lost because they are not available in Kafka any more"
PLACE = "in.put-x-0"


@pytest.mark.parametrize(
    "text, lost",
    [
        (
            f"java.lang.IllegalStateException: Cannot fetch offset 300 (GroupId: a, TopicPartition: {PLACE}). \n{LOST}",
            "offset 300",
        ),
        (
            f"Cannot fetch records in [300, 400) (GroupId: a-executor, TopicPartition: {PLACE}). \n{LOST}",
            "offsets 300 to 399",
        ),
        (
            f"""[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] {LOST};
Reason:
Could not read records in offset [300, 400) for topic partition {PLACE}
with consumer group a-executor. SQLSTATE: 22000""",
            "offsets 300 to 399",
        ),
    ],
)
def test_sparks_source_has_lost_records(text: str, lost: str) -> None:
    """The texts of Spark 3.5 and 4."""
    found = of_task(RuntimeError(f"Task 0 in stage 1.0 failed 1 times: {text}\n\tat org.apache.spark"))
    assert isinstance(found, DataLossError)
    assert found.topic == PLACE
    assert found.detail == f"{lost}: not available any more, says Spark's Kafka source"


@pytest.mark.parametrize(
    "text",
    [
        "Cannot fetch record for offset 300 in 120000 milliseconds",
        "Cannot fetch offset 300, says a processor",
    ],
)
def test_other_texts_are_worth_another_attempt(text: str) -> None:
    assert of_task(RuntimeError(text)) is None

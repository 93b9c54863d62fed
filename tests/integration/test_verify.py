"""`onceflow verify` on a real Kafka: an exact flow, and what an outsider has lost, doubled, misplaced and made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from onceflow.errors import OptionError
from onceflow.testing import independent

pytestmark = pytest.mark.integration


def test_what_others_did_to_the_outputs_of_an_exact_flow(
    make_pipe: Callable[..., Any], verify: Any, onceflow_broker: str
) -> None:
    pipe = make_pipe(partitions=2, target_partitions=3)
    pipe.fill(200)
    pipe.run()
    found, last = verify(pipe.flow, "--id", "record")
    assert (found, last["exact"], last["found"]) == ([], True, {})
    assert last["checked"]["source records"] == last["checked"]["output records"] == 200
    assert last["checked"]["group offsets"] == 2
    pipe.fill(50)  # records that no batch has read are not lost
    assert verify(pipe.flow, "--id", "record")[1]["exact"]
    assert verify(pipe.flow)[1]["exact"], "without an id, progress and group are looked at"

    producer = Producer({"bootstrap.servers": onceflow_broker})
    copied = independent.read_topic(onceflow_broker, pipe.target)[0]
    producer.produce(pipe.target, copied.value, copied.key, partition=copied.partition)
    producer.produce(pipe.target, b"made up", b"k", partition=0)
    assert producer.flush(30) == 0
    found, last = verify(pipe.flow, "--id", "record", "--partitioner", "any", code=1)
    assert last["found"] == {"doubled": 1, "foreign": 1}
    (doubled,) = [each for each in found if each["kind"] == "doubled"]
    assert [place["topic"] for place in doubled["places"]] == [pipe.source, pipe.target, pipe.target]


def test_a_flow_that_is_not_there(verify: Any) -> None:
    with pytest.raises(OptionError, match="has no progress") as raised:
        verify("no-flow-has-this-name")
    assert "onceflow status" in raised.value.next_step

"""Calls are limited by the transaction that they are made in, also if its timeout is shorter than 30 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow import OnceflowError, Record, serdes
from onceflow.testing import independent

pytestmark = pytest.mark.integration


class Slow(onceflow.Processor):
    key = value = output = serdes.STRING
    call = onceflow.concurrently(lambda value: time.sleep(0.5) or value, limit=1, timeout="1 second", retries=0)

    def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            yield Record(key, self.call(record.value))


@pytest.mark.long
def test_a_short_transaction(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    source, target = make_topic("in", 1), make_topic("out", 1)
    independent.fill(onceflow_broker, source, [(b"k%d" % n, b"v") for n in range(40)])
    with onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        rows = flow.process(flow.read(source), Slow(), table=f"table-{source}", state_dir=tmp_path)
        query = flow.write(rows, topic=target, transaction_timeout="2 seconds").start()
        with pytest.raises(OnceflowError, match=r"calls of a batch take longer than (2|1\.\d) s"):
            query.processAllAvailable()
    assert independent.read_topic(onceflow_broker, target) == []

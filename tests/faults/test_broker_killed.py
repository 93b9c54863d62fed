"""The broker is killed and comes back while a flow runs: nothing is lost or doubled, and no hand is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from onceflow import Flow
from onceflow.broker.local import LocalBroker
from onceflow.errors import BrokerUnreachableError
from onceflow.testing.broker import BACK_SOON, create_topic
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path_factory.mktemp("mortal"), properties=BACK_SOON) as broker:
        yield broker


@pytest.fixture
def own_pipe(own_broker: LocalBroker, make_pipe: Callable[..., Any]) -> Any:
    """A pipe on that broker, which runs, whatever the test before has done to it."""
    own_broker.start()
    pipe = replace(make_pipe(), bootstrap=own_broker.bootstrap_servers)
    for topic in (pipe.source, pipe.target):
        create_topic(pipe.bootstrap, topic, 4)
    return pipe


@pytest.mark.parametrize(
    "step", ["progress", *(pytest.param(step, marks=pytest.mark.long) for step in ("begin", "audit"))]
)
def test_broker_killed_in_mid_batch(
    own_broker: LocalBroker, own_pipe: Any, inject: Callable[..., None], step: str
) -> None:
    pipe = own_pipe
    pipe.fill(2000)
    paused, killed = pipe.tmp_path / "paused", pipe.tmp_path / "killed"
    inject(step, "pause", batch=2, seconds=60, once_file=str(paused), until=str(killed))
    flow = pipe.open()
    df = flow.read(pipe.source, max_records_per_batch=1000).select("key", "value")
    query = flow.write(df, topic=pipe.target, engine="tasks" if step == "begin" else "driver").start()
    try:
        wait_until(paused.exists, 60, f"the flow pauses at {step}", useless=lambda: query.failure)
        own_broker.kill()
        killed.touch()
        own_broker.start()
        query.processAllAvailable()
        pipe.fill(300)
        query.processAllAvailable()
    finally:
        query.stop()
    pipe.check()


@pytest.mark.long
def test_a_broker_that_stays_away(own_broker: LocalBroker, own_pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Spark ends the query after some minutes (here seconds), which is told also where nobody waits for it."""
    pipe = own_pipe
    pipe.fill(200)
    soon = {"default.api.timeout.ms": "2000", "request.timeout.ms": "2000"}
    flow = Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap, options=soon)
    rows = flow.read(pipe.source, options={"fetchOffset.numRetries": "1"}).select("key", "value")
    query = flow.write(rows, topic=pipe.target, checkpoint=pipe.tmp_path / "checkpoint").start()
    try:
        query.processAllAvailable()
        own_broker.kill()
        told = f"the query of flow {pipe.flow} has ended: Spark got no answer from the brokers"
        wait_until(lambda: told in caplog.text, 60, "the end of the query is told")
        with pytest.raises(BrokerUnreachableError, match="has ended the query") as caught:
            query.awaitTermination(60)
    finally:
        query.stop()
        own_broker.start()
    assert (caught.value.flow, query.failure) == (pipe.flow, caught.value)
    pipe.fill(100)
    pipe.run()
    pipe.check()

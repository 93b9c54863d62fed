"""The broker that tests use, and topics on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from onceflow.broker.local import LocalBroker
from onceflow.broker.process import admin_client
from onceflow.errors import BrokerUnreachableError

TOPIC_TIMEOUT_S = 30

#: Properties of a broker that is to be killed. It can only come back when the session of its last process has run out.
BACK_SOON = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}


@contextlib.contextmanager
def running_broker(data_dir: Path) -> Iterator[str]:
    """Bootstrap servers of a broker: ``$ONCEFLOW_TEST_BOOTSTRAP`` if set, otherwise a new broker in this folder."""
    given = os.environ.get("ONCEFLOW_TEST_BOOTSTRAP")
    if given:
        yield given
        return
    # By default the broker looks for timed-out transactions every 10 s, which is too long for tests.
    # The session of a member that was killed has to end soon, too. Records are never too old: tests like fixed
    # timestamps, and the broker deletes what is older than a week whenever it looks, every five minutes.
    properties = {
        "log.retention.ms": "-1",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "group.min.session.timeout.ms": "1000",
    }
    with LocalBroker(data_dir, properties=properties) as broker:
        try:
            yield broker.bootstrap_servers
        finally:
            broker.kill()  # a clean stop would close thousands of logs, which takes seconds and is not needed


def create_topic(
    bootstrap_servers: str, name: str, partitions: int = 4, configs: Mapping[str, str] | None = None
) -> None:
    """Create a topic and return when every partition has a leader.

    Raises:
        BrokerUnreachableError: the broker did not create it in time; the detail has its answer.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.cimpl import NewTopic

    topic = NewTopic(name, num_partitions=partitions, config=dict(configs or {}))
    try:
        admin = _admin(bootstrap_servers)
        admin.create_topics([topic], operation_timeout=TOPIC_TIMEOUT_S)[name].result(TOPIC_TIMEOUT_S)
    except (KafkaException, TimeoutError) as error:
        raise BrokerUnreachableError(
            f"Topic {name} could not be created at {bootstrap_servers}.",
            topic=name,
            detail=str(error),
            next_step="See whether the broker runs and whether the topic configuration is valid.",
        ) from error


@lru_cache(maxsize=1)
def _admin(bootstrap_servers: str) -> Any:
    """The client is kept for the next topic: connecting takes longer than creating a topic."""
    with admin_client(bootstrap_servers, {}) as admin:
        return admin

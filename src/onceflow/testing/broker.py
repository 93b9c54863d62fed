"""The broker that tests use, and topics on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from onceflow.broker.local import LocalBroker
from onceflow.client import topics
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.errors import BrokerUnreachableError, OnceflowError, OptionError

TOPIC_TIMEOUT_S = 30

#: Properties of a broker that is to be killed. It can only come back when the session of its last process has run out.
BACK_SOON = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}


def three_nodes(data_dir: Path, *, features: Mapping[str, int] | None = None) -> LocalBroker:
    """A broker of three small nodes, of which tests kill some: the others miss it, and it comes back, sooner.

    Args:
        features: finalized levels of features of Kafka, for example of ``transaction.version``.
    """
    properties = {
        **BACK_SOON,
        "controller.quorum.election.timeout.ms": "500",
        "controller.quorum.fetch.timeout.ms": "1500",
    }
    return LocalBroker(data_dir, nodes=3, heap="300m", features=features, properties=properties)


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
    deadline = Deadline(TOPIC_TIMEOUT_S, f"creating topic {name}")
    try:
        cluster = _cluster(bootstrap_servers, os.getpid())
        existed = topics.find_topic(cluster, name, "DESCRIBE", deadline) is not None
        created = topics.create_topic(cluster, name, partitions=partitions, configs=configs or {}, deadline=deadline)
        if existed and not created:  # otherwise this call has created it, and the first response was lost
            raise OptionError("it exists already")
        topics.await_topic(cluster, name, deadline)  # until every partition has a leader
    except OnceflowError as error:
        raise BrokerUnreachableError(
            f"Topic {name} could not be created at {bootstrap_servers}.",
            topic=name,
            detail="; ".join(filter(None, [error.what, error.detail])),
            next_step="See whether the broker runs and whether the topic configuration is valid.",
        ) from error


@lru_cache(maxsize=1)
def _cluster(bootstrap_servers: str, pid: int) -> Cluster:
    """The connections are kept for the next topic. A process that was forked has its own."""
    return Cluster(ClientSettings(bootstrap_servers))

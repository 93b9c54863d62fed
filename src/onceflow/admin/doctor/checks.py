"""The checks of ``onceflow doctor`` of a cluster and of a flow: functions of what was read from Kafka before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from onceflow.admin.doctor.cluster import (
    check_broker_settings,
    check_brokers,
    check_clock,
    check_cluster_topics,
    check_progress_topic,
    check_unknown_flows,
    check_versions,
)
from onceflow.admin.doctor.disk import local_flows
from onceflow.admin.doctor.facts import Facts
from onceflow.admin.doctor.finding import Check, Finding, examine, of_error, ok, warning
from onceflow.admin.doctor.local import Host
from onceflow.admin.doctor.machine import CONNECTION
from onceflow.admin.doctor.permissions import check_permissions
from onceflow.admin.doctor.reading import Reading
from onceflow.admin.doctor.topics import (
    check_cleanup,
    check_held_back,
    check_lag,
    check_message_size,
    check_progress,
    check_safety,
    check_topics,
)
from onceflow.client.addresses import contact, parse_servers
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.first_connection import LOOK_REFUSED_S
from onceflow.client.settings import ClientSettings
from onceflow.errors import OnceflowError
from onceflow.protocol.names import Names

_CONNECT_S = 20.0

CLUSTER: tuple[Check[Facts], ...] = (
    Check("brokers", check_brokers),
    Check("versions", check_versions),
    Check("clock", check_clock),
    Check("broker-settings", check_broker_settings),
    Check("kafka-topics", check_cluster_topics),
    Check("progress-topic", check_progress_topic),
    Check("unknown-flows", check_unknown_flows),
)
FLOW: tuple[Check[Facts], ...] = (
    Check("progress", check_progress),
    Check("topics", check_topics),
    Check("safety", check_safety),
    Check("cleanup-policy", check_cleanup),
    Check("lag", check_lag),
    Check("held-back", check_held_back),
    Check("message-size", check_message_size),
    Check("permissions", check_permissions),
)


def cluster_findings(
    settings: ClientSettings, names: Names | None, topics: Sequence[str], host: Host
) -> Iterator[Finding]:
    """What there is to say of the cluster, and of a flow and topics. If no broker answers, that is one finding.

    Args:
        names: the flow; None: none.
        topics: topics to look at, besides those of the flow.
    """
    with closing(Cluster(settings, refused_s=LOOK_REFUSED_S)) as cluster:
        try:
            cluster.connect(Deadline(_CONNECT_S, f"connecting to {settings.bootstrap_servers}"))
        except OnceflowError as problem:
            yield replace(of_error(settings.bootstrap_servers, problem), check=CONNECTION)
            return
        yield replace(ok(settings.bootstrap_servers, "a broker answers"), check=CONNECTION)
        for address in parse_servers(settings.bootstrap_servers):
            met = contact(address)
            if met.text:
                found = warning(str(address), met.text, "start that broker, or remove it from bootstrap_servers")
                yield replace(found, check=CONNECTION)
        local = {flow.flow: flow.folder for folder in host.state_dirs for flow in local_flows(folder)}
        reading = Reading(cluster)
        facts = reading.read(names, topics, local)
    yield from examine(CLUSTER, facts)
    yield from examine(FLOW, facts)
    yield from reading.problems

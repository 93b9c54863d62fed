"""Checks of a cluster: brokers, their versions and clocks, settings, Kafka's own topics, and the progress topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onceflow.admin.doctor.facts import CLUSTER, Facts
from onceflow.admin.doctor.finding import Finding, error, of_error, ok, skipped, warning
from onceflow.client.brokers import Safety, settings_warnings
from onceflow.driver.record import progress_log
from onceflow.errors import ProgressConflictError, UnknownTopicError, counted
from onceflow.protocol import acls
from onceflow.protocol.progress import PROGRESS_TOPIC

TRANSACTION_TIMEOUT_MS = 60_000
"""Default of transaction_timeout of Flow.write."""
EXPIRATION_GOOD_MS = 3_600_000
CLOCK_GOOD_MS = 2_000
_MOST = 10
_TIMEOUT, _EXPIRATION = "transaction.max.timeout.ms", "transactional.id.expiration.ms"
#: Settings of brokers that the checks read.
BROKER_SETTINGS = (_TIMEOUT, _EXPIRATION, "message.max.bytes", "replica.fetch.max.bytes")
_TRANSACTION_VERSION = "transaction.version"


def check_brokers(facts: Facts) -> Iterator[Finding]:
    """Each broker, at the address that it advertises."""
    for broker in facts.brokers:
        subject = f"broker {broker.node} at {broker.address}"
        if broker.problem:
            yield error(
                subject,
                f"does not answer: {broker.problem}",
                "start it, or set advertised.listeners to an address that this machine resolves and reaches",
            )
        else:
            yield ok(subject, "answers")


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Versions of the brokers, and the features of the cluster that are finalized."""
    answered = [broker for broker in facts.brokers if not broker.problem]
    if not answered:
        return
    found = sorted({broker.version for broker in answered})
    if len(found) > 1:
        each = ", ".join(f"{broker.node}: {broker.version}" for broker in answered)
        yield warning("versions", f"brokers of different versions ({each})", "finish the rolling upgrade")
    else:
        yield ok("versions", f"Apache Kafka {found[0]} or later, by the requests that the brokers know")
    features = answered[0].finalized
    level, most = features.get(_TRANSACTION_VERSION, 0), min(b.supported.get(_TRANSACTION_VERSION, 0) for b in answered)
    shown = ", ".join(f"{name}={features[name]}" for name in sorted(features)) or "none"
    if level >= 2:
        yield ok("features", f"finalized: {shown}")
    elif most >= 2:
        yield warning(
            "features",
            f"finalized: {shown}; the brokers support {_TRANSACTION_VERSION}=2 (KIP-890), but it is not finalized",
            f"kafka-features.sh upgrade --feature {_TRANSACTION_VERSION}=2",
        )
    else:
        yield ok("features", f"finalized: {shown}; {_TRANSACTION_VERSION} 2 needs Kafka 4.0")


def check_clock(facts: Facts) -> Iterator[Finding]:
    """Times that other machines have written, which cannot be later than this machine's."""
    seen = [(f"a broker's time in topic {t.name}", t.newest_ms) for t in facts.topics.values() if t.newest_ms]
    if facts.flow and facts.flow.progress:
        seen.append(("the driver's time in the flow's progress", facts.flow.progress.time_ms))
    ahead = [(what, ms - facts.now_ms) for what, ms in seen if ms - facts.now_ms > CLOCK_GOOD_MS]
    for what, by in ahead:
        yield warning(
            "clock",
            f"{what} is {by / 1000:,.1f} s later than this machine's time",
            "synchronise the clocks (NTP) of brokers, drivers and this machine",
        )
    if not ahead:
        looked = (
            f"{counted(len(seen), 'time')} of others compared, none in the future" if seen else "no times to compare"
        )
        yield skipped("clock", f"Kafka's protocol does not tell a broker's time; {looked}")


def check_cluster_topics(facts: Facts) -> Iterator[Finding]:
    """Kafka's own topics: the states of transactions, and the offsets of consumer groups."""
    topics = [topic for topic in facts.topics.values() if topic.role == CLUSTER]
    for topic in topics:
        if isinstance(topic.problem, UnknownTopicError):
            yield ok(topic.name, "does not exist yet; the brokers create it at the first transaction or group")
        elif topic.problem is not None:
            yield skipped(topic.name, "may not be seen by this principal", f"grant DESCRIBE on topic {topic.name}")
    yield from safety([t.safety for t in topics if t.problem is None], len(facts.brokers), "topics of Kafka itself")


def check_progress_topic(facts: Facts) -> Iterator[Finding]:
    """The topic with the progress of all flows."""
    topic = facts.topics.get(PROGRESS_TOPIC)
    if topic is None:
        return
    if isinstance(topic.problem, UnknownTopicError):
        allowed = facts.operations is not None and "CREATE" in facts.operations
        text = "does not exist yet; the first flow creates it"
        create = 'create it as in docs/connect.md, "The progress topic", or grant CREATE on it'
        yield ok(PROGRESS_TOPIC, text) if allowed else warning(PROGRESS_TOPIC, f"{text}, if it has CREATE", create)
        return
    if topic.problem is not None:
        yield skipped(PROGRESS_TOPIC, "may not be seen by this principal; see its permissions")
        return
    policy, replicas = topic.settings.get("cleanup.policy"), topic.safety.replicas
    try:
        progress_log.check_topic(len(topic.copies), policy)
    except ProgressConflictError as conflict:
        yield of_error(PROGRESS_TOPIC, conflict)
    else:
        in_sync = topic.settings.get("min.insync.replicas") or "unknown"
        yield ok(
            PROGRESS_TOPIC,
            f"{counted(len(topic.copies), 'partition')}, cleanup.policy={policy or 'unknown'}, "
            f"{counted(replicas, 'replica')}, min.insync.replicas={in_sync}",
        )
    yield from safety([topic.safety], len(facts.brokers), "")


def check_broker_settings(facts: Facts) -> Iterator[Finding]:
    """Settings of brokers that limit transactions."""
    if facts.broker_settings is None:
        yield skipped(
            "settings of brokers",
            "may not be read by this principal",
            acls.grant("DESCRIBE_CONFIGS", acls.CLUSTER),
        )
        return
    longest, expiration = _least(facts, _TIMEOUT), _least(facts, _EXPIRATION)
    if longest is not None and longest < TRANSACTION_TIMEOUT_MS:
        yield error(
            _TIMEOUT,
            f"{longest} ms, which is shorter than {TRANSACTION_TIMEOUT_MS} ms, the default of transaction_timeout",
            f"raise {_TIMEOUT} of the brokers, or give Flow.write a shorter transaction_timeout",
        )
    elif longest is not None:
        yield ok(_TIMEOUT, f"{longest} ms")
    if expiration is not None and expiration < EXPIRATION_GOOD_MS:
        yield warning(
            _EXPIRATION,
            f"{expiration} ms: Kafka forgets a flow that was idle for so long, and its older drivers with it",
            "raise it; Kafka's default is 7 days (604800000)",
        )
    elif expiration is not None:
        yield ok(_EXPIRATION, f"{expiration} ms")


def check_unknown_flows(facts: Facts) -> Iterator[Finding]:
    """Local state of flows that this cluster does not know."""
    if facts.flows is None:
        return
    strangers = sorted(facts.local_flows.keys() - facts.flows)
    if strangers:
        shown = ", ".join(strangers[:_MOST]) + (f" and {len(strangers) - _MOST} more" if len(strangers) > _MOST else "")
        yield warning(
            ", ".join(sorted({str(facts.local_flows[flow].parent) for flow in strangers})),
            f"local state of flows that have no progress in this cluster: {shown}",
            "delete their folders, unless these flows are on another cluster",
        )
    elif facts.local_flows:
        yield ok("local state", f"all flows with state here ({len(facts.local_flows)}) have progress in this cluster")


def safety(topics: Iterable[Safety], brokers: int, subject: str) -> Iterator[Finding]:
    """The risks of topics, as a start of a flow logs them.

    Args:
        subject: for one finding if there are none; empty: no finding then.
    """
    risky, good = False, list(topics)
    for topic in good:
        for sentence in settings_warnings([topic], brokers):
            what, _, fix = sentence.rpartition("; ")
            risky = True
            yield warning(topic.topic, what, fix)
    if good and subject and not risky:
        unknown = sorted(topic.topic for topic in good if topic.unclean is None or topic.min_in_sync is None)
        more = f"; settings of {', '.join(unknown)} may not be read" if unknown else ""
        yield ok(subject, f"nothing with which acknowledged records can be lost{more}")


def _least(facts: Facts, name: str) -> int | None:
    """The lowest value of a broker setting over all brokers."""
    values = (facts.broker_settings or {}).get(name, frozenset())
    return min(map(int, values), default=None)

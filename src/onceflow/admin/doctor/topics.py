"""Checks of the topics of a flow, or of topics that were named: replicas, settings, and how far the flow is."""

from __future__ import annotations

from collections.abc import Iterator

from onceflow.admin.doctor.cluster import safety
from onceflow.admin.doctor.facts import INTERNAL, JOINED, NAMED, OUTPUT, SOURCE, TABLE, Facts, Topic
from onceflow.admin.doctor.finding import Finding, error, of_error, ok, skipped, warning
from onceflow.admin.status.flow_status import quiet_s
from onceflow.errors import OnceflowError, PermissionDeniedError, counted
from onceflow.planning import source_starts
from onceflow.state.changelog.compacted_topic import check_policy

#: Settings of topics that the checks read.
TOPIC_SETTINGS = (
    "cleanup.policy",
    "max.message.bytes",
    "message.timestamp.type",
    "min.insync.replicas",
    "retention.bytes",
    "retention.ms",
    "unclean.leader.election.enable",
)
_OF_THE_FLOW = (SOURCE, OUTPUT, TABLE, INTERNAL, JOINED, NAMED)
_MAX = "max.message.bytes"
_OVERHEAD = 12  # by so many bytes Kafka's defaults of max.message.bytes and replica.fetch.max.bytes differ


def check_progress(facts: Facts) -> Iterator[Finding]:
    """What the flow has committed."""
    flow = facts.flow
    if flow is None:
        return
    if flow.progress is not None:
        read, written = sorted(flow.progress.offsets), sorted(flow.progress.outputs)
        tables = sorted(flow.progress.tables)
        yield ok(
            f"flow {flow.names.flow}",
            f"batch {flow.progress.batch_id} is committed; reads {', '.join(read) or 'no topic'}; "
            f"last wrote {', '.join(written) or 'no topic'}" + (f"; tables {', '.join(tables)}" if tables else ""),
        )
    elif facts.flows is None:
        yield skipped(
            f"flow {flow.names.flow}", "its progress cannot be read, so its topics are not known", "name them: --topic"
        )
    else:
        meant = f"did you mean {' or '.join(flow.similar)}? If not, " if flow.similar else ""
        yield warning(
            f"flow {flow.names.flow}",
            "has no progress here: it has not run yet, or has another name or prefix",
            f"{meant}name the topics that it will use: --topic; prefixes: --transactional-id-prefix",
        )


def check_topics(facts: Facts) -> Iterator[Finding]:
    """Whether topics exist, have leaders, and have all their replicas in sync."""
    for topic in _topics(facts):
        subject = f"{topic.role} {topic.name}"
        if isinstance(topic.problem, PermissionDeniedError):
            yield skipped(subject, "may not be seen by this principal; see its permissions")
            continue
        if topic.problem is not None:
            yield of_error(subject, topic.problem)
            continue
        leaderless = [n for n, copies in topic.copies.items() if copies.leader < 0]
        behind = [n for n, copies in topic.copies.items() if len(copies.in_sync) < len(copies.replicas)]
        needed = topic.number("min.insync.replicas") or 1
        few = [n for n, c in topic.copies.items() if n in behind and len(c.in_sync) < min(needed, len(c.replicas))]
        if leaderless:
            yield error(
                subject, f"partitions {_listed(leaderless)} have no leader", "start the brokers with their replicas"
            )
        elif few:
            yield error(
                subject,
                f"partitions {_listed(few)} have fewer replicas in sync than min.insync.replicas={needed}: nothing can "
                "be written there",
                "start the brokers with their replicas",
            )
        elif behind:
            yield warning(
                subject,
                f"partitions {_listed(behind)} are under-replicated",
                "start the brokers with the missing replicas, or wait until they are in sync",
            )
        else:
            yield ok(
                subject,
                f"{counted(len(topic.copies), 'partition')}, {counted(topic.safety.replicas, 'replica')}, all in sync",
            )


def check_safety(facts: Facts) -> Iterator[Finding]:
    """Settings with which acknowledged records can be lost, as a start of a flow logs them."""
    there = [topic for topic in _topics(facts) if topic.problem is None]
    yield from safety([topic.safety for topic in there], len(facts.brokers), "topics")


def check_cleanup(facts: Facts) -> Iterator[Finding]:
    """``cleanup.policy`` of the topics."""
    progress = None if facts.flow is None else facts.flow.progress
    side_topics = {} if progress is None else progress.side_topics
    for topic in _topics(facts):
        policy = topic.settings.get("cleanup.policy")
        subject = f"{topic.role} {topic.name}"
        if topic.problem is not None:
            continue
        if policy is None:
            yield skipped(subject, "its cleanup.policy may not be read", f"grant DESCRIBE_CONFIGS on {topic.name}")
        elif topic.role in (TABLE, INTERNAL, JOINED):
            yield _of_table(topic, policy)
        elif topic.role == SOURCE and "compact" in policy:
            yield warning(
                subject,
                f"cleanup.policy={policy}: of records with the same key, those that are not read in time are removed",
                "read a topic with cleanup.policy=delete, if the flow needs every record",
            )
        elif "compact" in policy and side_topics.get(topic.name, "parked") != "parked":
            yield error(
                subject,
                f"cleanup.policy={policy}: of {side_topics[topic.name]} records with the same key, "
                "only the last one stays",
                "set it to delete, or start the flow with another topic: a start refuses this one",
            )
        elif "compact" in policy:
            yield ok(subject, f"cleanup.policy={policy}: Kafka refuses records without a key")
        else:
            yield ok(subject, f"cleanup.policy={policy}")


def _of_table(topic: Topic, policy: str) -> Finding:
    subject = f"{topic.role} {topic.name}"
    try:
        check_policy(topic.name, policy if policy == "compact" or "compact" not in policy else "compact")
    except OnceflowError as problem:
        return of_error(subject, problem)
    if policy != "compact":
        return warning(subject, f"cleanup.policy={policy}: Kafka deletes rows by their age", "set it to compact")
    return ok(subject, "cleanup.policy=compact")


def check_lag(facts: Facts) -> Iterator[Finding]:
    """How far the flow is in its sources, against their retention; and whether it commits while records wait."""
    flow = facts.flow
    if flow is None or flow.progress is None:
        return
    quiet = None if flow.status is None else quiet_s(flow.status)
    for name, source in flow.sources.items():
        subject = f"source {name}"
        try:
            start = source_starts.plan(
                source, flow.progress, starting_offsets="earliest", fail_on_data_loss=True, flow=flow.names.flow
            )
        except OnceflowError as problem:
            yield of_error(subject, problem)
            continue
        for sentence in start.warnings:
            yield ok(subject, sentence)
        lag = sum(max(0, source.latest[n] - offset) for n, offset in start.offsets.items())
        retention, old = facts.topics[name].number("retention.ms"), flow.old_unread.get(name, ())
        found = f"lag {counted(lag, 'offset')}; retention.ms={'unknown' if retention is None else retention}"
        if old:
            yield warning(
                subject,
                f"{found}; the oldest unread records of partitions {_listed(old)} are older than half of that",
                "start the flow, let it catch up, or raise the topic's retention before unread records expire",
            )
        elif lag and quiet is not None:
            yield warning(
                subject,
                f"{found}; nothing was committed for {quiet:.0f} s although records wait",
                f"does its driver run? Ask it: `onceflow status {flow.names.progress_key} --endpoint URL`; if "
                "there is no answer, see the end of its log",
            )
        else:
            yield ok(subject, found)


def check_held_back(facts: Facts) -> Iterator[Finding]:
    """Offsets behind the last stable offset: no read_committed reader gets them until a transaction ends."""
    status = None if facts.flow is None else facts.flow.status
    for source in () if status is None else status.sources:
        subject, held = f"source {source.topic}", sum(part.held_back for part in source.partitions or ())
        for text in source.held:
            what, _, fix = text.partition(". ")
            yield warning(subject, what, fix)
        if source.partitions is not None and not source.held:
            short = f"{counted(held, 'offset')} behind a transaction, which has not been open for long"
            yield ok(subject, short if held else "no open transaction holds records back")


def check_message_size(facts: Facts) -> Iterator[Finding]:
    """Sizes of messages that do not fit each other."""
    there = [topic for topic in _topics(facts) if topic.problem is None]
    fetched = min(map(int, (facts.broker_settings or {}).get("replica.fetch.max.bytes", ())), default=None)
    largest = max((topic.number(_MAX) or 0 for topic in there if topic.role == SOURCE), default=0)
    for topic in there:
        subject, limit = f"{topic.role} {topic.name}", topic.number(_MAX)
        if limit is None:
            yield skipped(subject, f"its {_MAX} may not be read", f"grant DESCRIBE_CONFIGS on {topic.name}")
        elif fetched is not None and limit > fetched + _OVERHEAD and topic.safety.replicas > 1:
            yield warning(
                subject,
                f"{_MAX}={limit}, but replica.fetch.max.bytes={fetched} on a broker: replicas fetch large batches one "
                "by one",
                f"raise replica.fetch.max.bytes of the brokers to at least {limit}",
            )
        elif topic.role in (OUTPUT, TABLE) and limit < largest:
            yield warning(
                subject,
                f"{_MAX}={limit}, but a source takes messages of up to {largest}: a record that is passed on as it is "
                "may be too large, and stops the flow",
                f"raise {_MAX} of {topic.name} to {largest}, if the flow passes on such records",
            )
        else:
            yield ok(subject, f"{_MAX}={limit}")


def _topics(facts: Facts) -> list[Topic]:
    return [topic for topic in facts.topics.values() if topic.role in _OF_THE_FLOW]


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    """Partitions for people: at most ten of them."""
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown} and {len(numbers) - 10} more"

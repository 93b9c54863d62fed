"""Checks of permissions: what this principal may do with topics, group and transactional id of a flow.

Without an authorizer the brokers answer that everything is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator

from onceflow.admin.doctor.facts import INTERNAL, JOINED, NAMED, OUTPUT, PROGRESS, SOURCE, TABLE, Facts, Topic
from onceflow.admin.doctor.finding import Finding, error, ok, skipped, warning
from onceflow.errors import PermissionDeniedError
from onceflow.protocol import acls

#: What a flow needs on a topic of each role.
NEEDED = {
    SOURCE: ("READ",),
    OUTPUT: ("WRITE",),
    TABLE: ("READ", "WRITE"),
    INTERNAL: ("READ", "WRITE"),
    JOINED: ("READ",),
    PROGRESS: ("READ", "WRITE"),
    NAMED: (),
}
#: Without DESCRIBE_CONFIGS on these, a start assumes Kafka's defaults.
_DESCRIBED = (OUTPUT, TABLE, INTERNAL, JOINED, PROGRESS, NAMED)


def check_permissions(facts: Facts) -> Iterator[Finding]:
    """Each permission that the flow needs, one by one."""
    for topic in facts.topics.values():
        if topic.role in NEEDED:
            yield from _of_topic(topic)
    if facts.flow is not None:
        yield from _of_group(facts.flow.names.group_id, facts.flow.group)
        yield from _of_id(facts.flow.names.transactional_id, facts.flow.may_write_id)


def _of_topic(topic: Topic) -> Iterator[Finding]:
    subject = f"{topic.role} {topic.name}"
    hidden = isinstance(topic.problem, PermissionDeniedError)
    if topic.problem is not None and not hidden:
        return  # another check says that it does not exist
    allowed: frozenset[str] | None = frozenset() if hidden else topic.operations
    if allowed is None:
        yield skipped(subject, "the brokers do not tell what this principal may do with it")
        return
    for operation in NEEDED[topic.role]:
        if operation in allowed:
            yield ok(subject, f"{operation} is allowed")
        else:
            yield error(subject, f"{operation} is not allowed", acls.grant(operation, acls.TOPIC, topic.name))
    if topic.role == NAMED:
        some = [operation for operation in ("READ", "WRITE") if operation in allowed]
        if some:
            yield ok(subject, f"{' and '.join(some)} allowed" + ("" if len(some) == 2 else ", nothing else"))
        else:
            yield error(subject, "neither READ nor WRITE is allowed", acls.grant("READ", acls.TOPIC, topic.name))
    if topic.role in _DESCRIBED and not hidden and "DESCRIBE_CONFIGS" not in allowed:
        yield warning(
            subject,
            "DESCRIBE_CONFIGS is not allowed: its settings are not known, and a start assumes Kafka's defaults",
            acls.grant("DESCRIBE_CONFIGS", acls.TOPIC, topic.name),
        )


def _of_group(group: str, allowed: frozenset[str] | None) -> Iterator[Finding]:
    subject = f"group {group}"
    if allowed is None:
        yield skipped(subject, "not known: no consumer group was used in this cluster yet, or no broker told it")
    elif "READ" in allowed:
        yield ok(subject, "READ is allowed")
    else:
        yield error(subject, "READ is not allowed", acls.grant("READ", acls.GROUP, group))


def _of_id(transactional_id: str, allowed: bool | None) -> Iterator[Finding]:
    subject = f"transactional id {transactional_id}"
    if allowed is None:
        yield skipped(subject, "not known: no transaction was run in this cluster yet, or no broker told it")
    elif allowed:
        yield ok(subject, "WRITE is allowed")
    else:
        yield error(subject, "WRITE is not allowed", acls.grant("WRITE", acls.TRANSACTIONAL_ID, transactional_id))

"""What errors and findings say of permissions in Kafka: which one is missing, and the command that adds it."""

from __future__ import annotations

TOPIC, GROUP, TRANSACTIONAL_ID, CLUSTER = "--topic", "--group", "--transactional-id", "--cluster"
_NOUNS = {TOPIC: "topic", GROUP: "group id", TRANSACTIONAL_ID: "transactional id", CLUSTER: "cluster"}


# A broker does not say which operation is denied, but that follows from the request.
_DENIED = {
    (TOPIC, "Produce"): "WRITE",
    (TOPIC, "AddPartitionsToTxn"): "WRITE",
    (TOPIC, "Metadata"): "READ",  # DESCRIBE is denied, and whoever asks reads the topic, or writes to it
    (TOPIC, "ListOffsets"): "READ",
    (TOPIC, "Fetch"): "READ",
    (TOPIC, "TxnOffsetCommit"): "READ",
    (TOPIC, "DescribeProducers"): "READ",
    (TOPIC, "CreateTopics"): "CREATE",
    (TOPIC, "DeleteTopics"): "DELETE",
    (TOPIC, "CreatePartitions"): "ALTER",
    (GROUP, "OffsetFetch"): "DESCRIBE",
    (GROUP, "DeleteGroups"): "DELETE",
    (GROUP, "FindCoordinator"): "READ",
    (GROUP, "AddOffsetsToTxn"): "READ",
    (GROUP, "TxnOffsetCommit"): "READ",
    (TRANSACTIONAL_ID, "DescribeTransactions"): "DESCRIBE",
    (TRANSACTIONAL_ID, "FindCoordinator"): "WRITE",
    (TRANSACTIONAL_ID, "InitProducerId"): "WRITE",
}
_OF_CODES = {29: TOPIC, 30: GROUP, 53: TRANSACTIONAL_ID}  # ..._AUTHORIZATION_FAILED


def command(operation: str, kind: str, name: str = "") -> str:
    """The command that adds a permission.

    Args:
        operation: a name of Kafka's AclOperation, such as ``DESCRIBE_CONFIGS``.
        kind: one of the constants above.
        name: of the topic, the group or the transactional id.
    """
    words = "".join(word.capitalize() for word in operation.split("_"))
    return (
        "kafka-acls.sh --bootstrap-server HOST:PORT --add --allow-principal User:PRINCIPAL "
        f"--operation {words} {kind} {name}".rstrip()
    )


def grant(operation: str, kind: str, name: str = "") -> str:
    """A next step: what to grant, and the command that does it. See `command`."""
    return f"grant {operation} on the {_NOUNS[kind]}: {command(operation, kind, name)}"


def next_step(code: int, api: str, name: str) -> str:
    """What to grant after an error code of a request; empty: not known."""
    kind = _OF_CODES.get(code, "")
    operation = _DENIED.get((kind, api))
    if operation is None:
        return ""
    return grant(operation, kind, name) + ("; an output needs WRITE" if api == "Metadata" else "")

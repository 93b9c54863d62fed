"""The Kafka error codes that a flow can receive: what each means, and how to react.

This one table decides whether to retry, to abort the batch or to stop, so that all callers react in the same way.
Names and numbers are those of ``org.apache.kafka.common.protocol.Errors``. The verdicts apply to onceflow's use of the
protocol only. Many tasks write under one transactional id, so 19 and 51 are normal. Each attempt has a new epoch, so
45 and 46 mean that this attempt has a problem, and never that the data has been written already.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from onceflow.errors import (
    AuthenticationFailedError,
    BadRecordError,
    BatchAbortedError,
    BrokerUnreachableError,
    BrokerUnsupportedError,
    DataLossError,
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    OptionError,
    PermissionDeniedError,
    ProtocolError,
    TransactionTimeoutError,
    UnknownTopicError,
)
from onceflow.protocol import acls


class Verdict(enum.Enum):
    """How a caller reacts to an error code."""

    OK = "ok"
    """No error."""
    RETRY = "retry"
    """Send the identical bytes again, after jittered backoff."""
    RETRY_AFTER_METADATA = "retry_after_metadata"
    """Look up the partition's leader again, then send the identical bytes there."""
    RETRY_AFTER_COORDINATOR = "retry_after_coordinator"
    """Look up the coordinator again, then send the identical bytes there."""
    ABORT = "abort"
    """Abort the transaction and run the batch again under a new epoch."""
    FENCED = "fenced"
    """Another process owns the transactional id: stop, and send no more requests."""
    TIMED_OUT = "timed_out"
    """The transaction has ended, by its timeout or by EndTxn. The progress record shows which of both."""
    UNKNOWN_OUTCOME = "unknown_outcome"
    """The request may or may not have been executed. After a write: abort. After EndTxn: read the progress record."""
    FATAL = "fatal"
    """A retry cannot help: stop and report the error."""

    @property
    def retriable(self) -> bool:
        """Whether the identical bytes may be sent again under the same epoch."""
        return self in (Verdict.RETRY, Verdict.RETRY_AFTER_METADATA, Verdict.RETRY_AFTER_COORDINATOR)


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One row of the table.

    Args:
        code: Kafka's number.
        name: Kafka's name.
        verdict: how a caller reacts.
        meaning: what happened, as text of an error message.
        next_step: what the user can do if the error is raised.
        error: class of the error to raise.
    """

    code: int
    name: str
    verdict: Verdict
    meaning: str
    next_step: str
    error: type[OnceflowError]


class Code(enum.IntEnum):
    """The codes of the table that callers look for by name."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    INVALID_TOPIC_EXCEPTION = 17
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    TRANSACTIONAL_ID_NOT_FOUND = 105


_OK, _RETRY, _ABORT, _FATAL = Verdict.OK, Verdict.RETRY, Verdict.ABORT, Verdict.FATAL
_METADATA, _COORDINATOR = Verdict.RETRY_AFTER_METADATA, Verdict.RETRY_AFTER_COORDINATOR

_LEADER = "check that the brokers are up and every partition has a leader."
_RERUN = "nothing of this attempt is visible and the batch is run again; if it repeats, read the broker's log."
_BROKER_LOG = "read the broker's log of this time."
_VERSION = "use a broker of version 2.8 or later."
_OTHER_GROUP = "stop the consumer that uses this group id, or give the flow another group id prefix."
_BUG = "report this to onceflow with the broker's version and log."
_CREDENTIALS = "check the sasl.* and ssl.* options against what the broker's listener expects."

# fmt: off
_ROWS: tuple[tuple[int, str, Verdict, type[OnceflowError], str, str], ...] = (
    # code, name, verdict, error
    #   meaning
    #   next step
    (-1, "UNKNOWN_SERVER_ERROR", Verdict.UNKNOWN_OUTCOME, ProtocolError,
     "the broker failed unexpectedly; whether it executed the request is unknown",
     _BROKER_LOG),
    (0, "NONE", _OK, ProtocolError,
     "no error",
     "nothing to do."),
    (1, "OFFSET_OUT_OF_RANGE", _FATAL, DataLossError,
     "the offset is no longer, or not yet, in the partition",
     ("find out whether retention deleted unread records; `onceflow reset` moves the flow to offsets that "
      "exist.")),
    (2, "CORRUPT_MESSAGE", _RETRY, ProtocolError,
     "the broker found that the batch is damaged (checksum)",
     "check the network and the broker's disks; " + _BROKER_LOG),
    (3, "UNKNOWN_TOPIC_OR_PARTITION", _METADATA, UnknownTopicError,
     "the topic or partition does not exist, or this principal may not see it",
     "create the topic, or check its name and the DESCRIBE permission."),
    (5, "LEADER_NOT_AVAILABLE", _METADATA, BrokerUnreachableError,
     "the partition has no leader at the moment",
     _LEADER),
    (6, "NOT_LEADER_OR_FOLLOWER", _METADATA, BrokerUnreachableError,
     "the partition has moved to another broker",
     _LEADER),
    (7, "REQUEST_TIMED_OUT", _RETRY, DeadlineExceededError,
     "the broker did not finish the request in time",
     "check the load of the brokers and the replication of the partition."),
    (8, "BROKER_NOT_AVAILABLE", _METADATA, BrokerUnreachableError,
     "the broker is not available",
     _LEADER),
    (9, "REPLICA_NOT_AVAILABLE", _METADATA, BrokerUnreachableError,
     "the replica is not available",
     _LEADER),
    (10, "MESSAGE_TOO_LARGE", _FATAL, BadRecordError,
     "a batch is larger than the broker or the topic accepts",
     "raise the topic's max.message.bytes, or make records smaller."),
    (12, "OFFSET_METADATA_TOO_LARGE", _FATAL, ProtocolError,
     "the text stored with an offset is too large",
     _BUG),
    (13, "NETWORK_EXCEPTION", _METADATA, BrokerUnreachableError,
     "the connection broke before the response arrived",
     _LEADER),
    (14, "COORDINATOR_LOAD_IN_PROGRESS", _RETRY, DeadlineExceededError,
     "the coordinator is still loading its state",
     "wait for the broker to finish starting; " + _BROKER_LOG),
    (15, "COORDINATOR_NOT_AVAILABLE", _COORDINATOR, BrokerUnreachableError,
     "no coordinator is available",
     "check that __transaction_state and __consumer_offsets have leaders and enough replicas."),
    (16, "NOT_COORDINATOR", _COORDINATOR, BrokerUnreachableError,
     "the coordinator has moved to another broker",
     _LEADER),
    (17, "INVALID_TOPIC_EXCEPTION", _FATAL, OptionError,
     "the topic name is not legal, or the topic is internal",
     "correct the topic name."),
    (18, "RECORD_LIST_TOO_LARGE", _FATAL, BadRecordError,
     "a batch is larger than a log segment of the topic",
     "raise the topic's segment.bytes, or make records smaller."),
    # A broker also returns 19 if two requests that add partitions under one transactional id collide. That is normal
    # with many tasks.
    (19, "NOT_ENOUGH_REPLICAS", _RETRY, DeadlineExceededError,
     "the partition has fewer in-sync replicas than min.insync.replicas, or tasks kept colliding at the coordinator",
     "check the in-sync replicas of the partition; with many tasks, use fewer write tasks."),
    (20, "NOT_ENOUGH_REPLICAS_AFTER_APPEND", _RETRY, DeadlineExceededError,
     "the batch was appended but not replicated often enough",
     "check the in-sync replicas of the partition."),
    (21, "INVALID_REQUIRED_ACKS", _FATAL, ProtocolError,
     "the broker refuses the requested number of acknowledgements",
     _BUG),
    (22, "ILLEGAL_GENERATION", _FATAL, OptionError,
     "the group id is in use by a running consumer group",
     _OTHER_GROUP),
    (24, "INVALID_GROUP_ID", _FATAL, OptionError,
     "the broker refuses the group id",
     "rename the flow or its group id prefix."),
    (25, "UNKNOWN_MEMBER_ID", _FATAL, OptionError,
     "the group id is in use by a running consumer group",
     _OTHER_GROUP),
    (27, "REBALANCE_IN_PROGRESS", _FATAL, OptionError,
     "the group id is in use by a consumer group that is rebalancing",
     _OTHER_GROUP),
    (28, "INVALID_COMMIT_OFFSET_SIZE", _FATAL, ProtocolError,
     "the record of the committed offsets is too large",
     _BUG),
    (29, "TOPIC_AUTHORIZATION_FAILED", _FATAL, PermissionDeniedError,
     "this principal may not use the topic",
     "grant READ on sources, WRITE on outputs, both on the progress topic and on table topics."),
    (30, "GROUP_AUTHORIZATION_FAILED", _FATAL, PermissionDeniedError,
     "this principal may not use the group id",
     "grant READ on the group id (the flow's name, with its prefix)."),
    (31, "CLUSTER_AUTHORIZATION_FAILED", _FATAL, PermissionDeniedError,
     "this principal lacks a permission on the cluster",
     "grant IDEMPOTENT_WRITE or the named operation on the cluster."),
    (32, "INVALID_TIMESTAMP", _FATAL, BadRecordError,
     "a timestamp is outside of the range that the topic accepts",
     "correct the timestamp column or the clock, or raise message.timestamp.before.max.ms / after.max.ms of it."),
    (33, "UNSUPPORTED_SASL_MECHANISM", _FATAL, AuthenticationFailedError,
     "the broker does not offer the SASL mechanism",
     _CREDENTIALS),
    (34, "ILLEGAL_SASL_STATE", _FATAL, AuthenticationFailedError,
     "the broker did not expect this step of authentication",
     _CREDENTIALS),
    (35, "UNSUPPORTED_VERSION", _FATAL, BrokerUnsupportedError,
     "the broker does not support the version of the request",
     _VERSION),
    (36, "TOPIC_ALREADY_EXISTS", _FATAL, OptionError,
     "the topic exists already",
     "use it as it is, or choose another name."),
    (37, "INVALID_PARTITIONS", _FATAL, OptionError,
     "the number of partitions is not valid",
     "ask for at least one partition, and not fewer than the topic has."),
    (38, "INVALID_REPLICATION_FACTOR", _FATAL, OptionError,
     "the replication factor is below 1 or above the number of brokers",
     "ask for no more replicas than there are brokers."),
    (40, "INVALID_CONFIG", _FATAL, OptionError,
     "the broker refuses a topic setting",
     "correct the setting that the detail names."),
    (41, "NOT_CONTROLLER", _METADATA, BrokerUnreachableError,
     "the controller has moved to another broker",
     _LEADER),
    (42, "INVALID_REQUEST", _FATAL, ProtocolError,
     "the broker refuses the request as malformed",
     _BUG),
    (43, "UNSUPPORTED_FOR_MESSAGE_FORMAT", _FATAL, BrokerUnsupportedError,
     "the topic's message format is too old for transactions",
     "upgrade the topic's message format to version 2."),
    (44, "POLICY_VIOLATION", _FATAL, OptionError,
     "a policy of the cluster forbids the request",
     "ask the cluster's operator, or create the topic by other means first."),
    (45, "OUT_OF_ORDER_SEQUENCE_NUMBER", _ABORT, BatchAbortedError,
     "a batch before this one is missing in the partition",
     _RERUN),
    # The batch was acknowledged long ago, or another batch has the same sequence numbers. The broker does not say which
    # of both, so the batch counts as lost.
    (46, "DUPLICATE_SEQUENCE_NUMBER", _ABORT, BatchAbortedError,
     "the partition already has these sequence numbers",
     _RERUN),
    (47, "INVALID_PRODUCER_EPOCH", Verdict.FENCED, FencedError,
     ("a newer epoch of this transactional id exists: another driver of the flow has started, or Kafka has "
      "aborted the transaction of this one"),
     "a flow has one driver: stop one of the two. Or let one wait for the other: give standby=True to both."),
    (48, "INVALID_TXN_STATE", Verdict.TIMED_OUT, TransactionTimeoutError,
     "the transaction has ended already: it timed out, or was ended before",
     "make batches smaller or raise transaction_timeout; the batch is run again."),
    (49, "INVALID_PRODUCER_ID_MAPPING", _ABORT, BatchAbortedError,
     "the broker has forgotten the producer id of this transactional id (it expires after 7 idle days)",
     _RERUN),
    (50, "INVALID_TRANSACTION_TIMEOUT", _FATAL, OptionError,
     "transaction_timeout is longer than the broker allows",
     ("lower transaction_timeout, or raise transaction.max.timeout.ms on the brokers (15 minutes by "
      "default).")),
    (51, "CONCURRENT_TRANSACTIONS", _RETRY, DeadlineExceededError,
     "the previous transaction of this transactional id is still being ended",
     "look for a hanging transaction (`onceflow transactions list --hanging`)."),
    (52, "TRANSACTION_COORDINATOR_FENCED", _COORDINATOR, BrokerUnreachableError,
     "the transaction coordinator has been replaced",
     _LEADER),
    (53, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", _FATAL, PermissionDeniedError,
     "this principal may not use the transactional id",
     "grant WRITE and DESCRIBE on the transactional id 'onceflow.<flow>' to driver and tasks."),
    (54, "SECURITY_DISABLED", _FATAL, BrokerUnsupportedError,
     "the broker has no authorizer",
     "configure one, or do not use ACLs."),
    (55, "OPERATION_NOT_ATTEMPTED", _ABORT, BatchAbortedError,
     "the broker skipped this partition because another one of the request failed",
     _RERUN),
    (56, "KAFKA_STORAGE_ERROR", _METADATA, BrokerUnreachableError,
     "the broker's disk failed",
     "read the broker's log; a partition with other replicas gets another leader."),
    (58, "SASL_AUTHENTICATION_FAILED", _FATAL, AuthenticationFailedError,
     "the broker refused the credentials",
     _CREDENTIALS),
    (59, "UNKNOWN_PRODUCER_ID", _ABORT, BatchAbortedError,
     "the partition has forgotten the producer id",
     _RERUN),
    (60, "REASSIGNMENT_IN_PROGRESS", _RETRY, DeadlineExceededError,
     "partitions are being reassigned",
     "wait for the reassignment to end."),
    (68, "NON_EMPTY_GROUP", _FATAL, OptionError,
     "the group has members",
     _OTHER_GROUP),
    (69, "GROUP_ID_NOT_FOUND", _FATAL, OptionError,
     "the group does not exist",
     "check the name; a flow's group appears with its first commit."),
    (72, "LISTENER_NOT_FOUND", _METADATA, BrokerUnreachableError,
     "the partition's leader has no listener of this name",
     "check advertised.listeners of every broker."),
    (73, "TOPIC_DELETION_DISABLED", _FATAL, OptionError,
     "the broker does not allow topics to be deleted",
     "set delete.topic.enable on the brokers."),
    (74, "FENCED_LEADER_EPOCH", _METADATA, BrokerUnreachableError,
     "the partition's leader has changed",
     _LEADER),
    (75, "UNKNOWN_LEADER_EPOCH", _METADATA, BrokerUnreachableError,
     "the broker does not know the partition's newest leader yet",
     _LEADER),
    (76, "UNSUPPORTED_COMPRESSION_TYPE", _FATAL, OptionError,
     "the broker does not support the compression",
     "choose another compression."),
    (78, "OFFSET_NOT_AVAILABLE", _RETRY, DeadlineExceededError,
     "the new leader is still catching up",
     _LEADER),
    (79, "MEMBER_ID_REQUIRED", _FATAL, OptionError,
     "the group id is in use by a running consumer group",
     _OTHER_GROUP),
    (82, "FENCED_INSTANCE_ID", _FATAL, OptionError,
     "the group id is in use by a running consumer group",
     _OTHER_GROUP),
    (86, "GROUP_SUBSCRIBED_TO_TOPIC", _FATAL, OptionError,
     "the group is subscribed to the topic",
     _OTHER_GROUP),
    (87, "INVALID_RECORD", _FATAL, BadRecordError,
     "the broker refuses a record (a compacted topic accepts no record without key)",
     "check that every record for a compacted topic has a key."),
    (88, "UNSTABLE_OFFSET_COMMIT", _RETRY, DeadlineExceededError,
     "a transaction that commits these offsets is still open",
     "look for a hanging transaction (`onceflow transactions list --hanging`)."),
    (89, "THROTTLING_QUOTA_EXCEEDED", _RETRY, DeadlineExceededError,
     "the quota of this principal is used up",
     "slow down, or raise the quota."),
    (90, "PRODUCER_FENCED", Verdict.FENCED, FencedError,
     ("a newer driver of the flow has taken over the transactional id, or the broker ended a transaction "
      "that was open too long"),
     "a flow has one driver: stop one of the two. Or let one wait for the other: give standby=True to both."),
    (91, "RESOURCE_NOT_FOUND", _FATAL, OptionError,
     "the requested resource does not exist",
     "check the name."),
    (100, "UNKNOWN_TOPIC_ID", _METADATA, UnknownTopicError,
     "the topic was deleted, or deleted and created again",
     "check whether the topic was re-created; a re-created topic needs `onceflow reset`."),
    (103, "INCONSISTENT_TOPIC_ID", _METADATA, UnknownTopicError,
     "the topic's id is not the one the broker has: it was created again",
     "check whether the topic was re-created; a re-created topic needs `onceflow reset`."),
    (105, "TRANSACTIONAL_ID_NOT_FOUND", _FATAL, OptionError,
     "the coordinator does not know the transactional id",
     "check the name; ids expire after 7 idle days."),
    (110, "FENCED_MEMBER_EPOCH", _FATAL, OptionError,
     "the group id is in use by a running consumer group",
     _OTHER_GROUP),
    (113, "STALE_MEMBER_EPOCH", _FATAL, OptionError,
     "the group id is in use by a running consumer group",
     _OTHER_GROUP),
    (120, "TRANSACTION_ABORTABLE", _ABORT, BatchAbortedError,
     "the partition is not part of the transaction, or the transaction can only be aborted",
     _RERUN),
)
# fmt: on

ERROR_CODES: dict[int, ErrorCode] = {
    code: ErrorCode(code, name, verdict, meaning, next_step, error)
    for code, name, verdict, error, meaning, next_step in _ROWS
}
"""The table, by code."""


def describe(code: int) -> ErrorCode:
    """The row of a code. For a code that is not in the table, a FATAL row with the name ``UNKNOWN_CODE_<n>``."""
    known = ERROR_CODES.get(code)
    if known is not None:
        return known
    return ErrorCode(
        code=code,
        name=f"UNKNOWN_CODE_{code}",
        verdict=Verdict.FATAL,
        meaning="the broker returned an error code that onceflow does not know",
        next_step="look the code up for the broker's version, and report it to onceflow.",
        error=ProtocolError,
    )


def error_for(
    code: int,
    *,
    api: str,
    flow: str | None = None,
    topic: str | None = None,
    batch: int | None = None,
    resource: str = "",
    detail: str = "",
) -> OnceflowError:
    """The error to raise for a code. For a retriable code: the error to raise after the last retry.

    Args:
        code: from the response. 0 is not an error; for it the result is a `ProtocolError`.
        api: name of the request, for example ``Produce``.
        flow, topic, batch: where it happened, as far as known.
        resource: the topic, group or transactional id that a permission is on; empty: not known.
        detail: more facts. The request, the code and its name are added in front of them.
    """
    row = describe(code)
    facts = f"{api} returned {row.name} ({row.code})"
    return row.error(
        row.meaning,
        next_step=acls.next_step(code, api, resource or topic or "NAME") or row.next_step,
        flow=flow,
        topic=topic,
        batch=batch,
        detail=f"{facts}; {detail}" if detail else facts,
    )

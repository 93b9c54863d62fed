"""The error table agrees with Kafka's numbers and with the verdicts that the protocol notes fix."""

from __future__ import annotations

import inspect
import pickle

import kafka.errors
import pytest

from onceflow import errors
from onceflow.protocol.codes import (
    ERROR_CODES,
    Code,
    Verdict,
    describe,
    error_for,
)

SAME_BYTES = {19, 51, 14, 15, 16, 6, 3, 7, 13, 88, 100, 103, 5, 41, 56, 20, 2}


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_names_are_those_of_the_table(code: Code) -> None:
    assert describe(code).name == code.name


def test_verdicts_of_the_protocol_notes() -> None:
    for code in SAME_BYTES:
        assert describe(code).verdict.retriable, describe(code)
    assert {describe(code).verdict for code in (47, 90)} == {Verdict.FENCED}
    assert describe(48).verdict is Verdict.TIMED_OUT
    assert {describe(code).verdict for code in (45, 46, 49, 120)} == {Verdict.ABORT}
    fatal = (50, 10, 18, 87, 29, 30, 53, 31, 17, 25, 22, 35, 36, 42, 44, 58)
    assert {describe(code).verdict for code in fatal} == {Verdict.FATAL}
    assert describe(6).verdict is Verdict.RETRY_AFTER_METADATA
    assert describe(16).verdict is Verdict.RETRY_AFTER_COORDINATOR
    assert describe(19).verdict is describe(51).verdict is Verdict.RETRY
    assert describe(0).verdict is Verdict.OK


@pytest.mark.parametrize(
    "code, kind",
    [
        (47, errors.FencedError),
        (90, errors.FencedError),
        (48, errors.TransactionTimeoutError),
        (29, errors.PermissionDeniedError),
        (30, errors.PermissionDeniedError),
        (53, errors.PermissionDeniedError),
        (3, errors.UnknownTopicError),
        (100, errors.UnknownTopicError),
        (10, errors.BadRecordError),
        (87, errors.BadRecordError),
        (35, errors.BrokerUnsupportedError),
        (42, errors.ProtocolError),
        (58, errors.AuthenticationFailedError),
        (45, errors.BatchAbortedError),
        (120, errors.BatchAbortedError),
        (1, errors.DataLossError),
        (50, errors.OptionError),
    ],
)
def test_classes(code: int, kind: type[errors.OnceflowError]) -> None:
    error = error_for(code, api="Produce", flow="orders", topic="out-3", batch=7, detail="broker 2")
    assert type(error) is kind
    assert (error.flow, error.topic, error.batch) == ("orders", "out-3", 7)
    assert error.detail == f"Produce returned {describe(code).name} ({code}); broker 2"
    assert "next step: " in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_transaction_timeout_error_names_both_settings() -> None:
    text = str(error_for(50, api="InitProducerId"))
    assert "transaction_timeout" in text
    assert "transaction.max.timeout.ms" in text


def test_unknown_codes_are_fatal() -> None:
    row = describe(4242)
    assert (row.name, row.verdict) == ("UNKNOWN_CODE_4242", Verdict.FATAL)
    error = error_for(4242, api="EndTxn")
    assert type(error) is errors.ProtocolError
    assert "UNKNOWN_CODE_4242" in str(error)


def test_names_are_kafkas() -> None:
    theirs = {
        kind.errno: kind.message
        for kind in vars(kafka.errors).values()
        if inspect.isclass(kind) and isinstance(getattr(kind, "errno", None), int)
    }
    # kafka-python has kept names that Kafka has renamed since.
    renamed = {
        -1: "UNKNOWN_SERVER_ERROR",
        0: "NONE",
        6: "NOT_LEADER_OR_FOLLOWER",
        10: "MESSAGE_TOO_LARGE",
        17: "INVALID_TOPIC_EXCEPTION",
    }
    for code, row in ERROR_CODES.items():
        assert row.name == renamed.get(code, theirs.get(code)), code


def test_rows_read_well() -> None:
    for row in ERROR_CODES.values():
        assert row.meaning[0].islower(), row
        assert not row.meaning.endswith("."), row
        assert row.next_step.endswith("."), row

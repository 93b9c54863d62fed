"""Exactly-once Kafka pipelines for PySpark.

Public names are imported when they are first used. So ``import onceflow`` takes no time, and tools that only need the
errors or the command line do not load Spark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onceflow._version import __version__

if TYPE_CHECKING:
    from onceflow.calls.breaker import Breaker
    from onceflow.calls.concurrently import Calls, concurrently
    from onceflow.calls.target import Outcome
    from onceflow.claim_check.claim import ClaimCheck
    from onceflow.claim_check.stored_value import StoredValue
    from onceflow.errors import (
        AuthenticationFailedError,
        BadRecordError,
        BatchAbortedError,
        BrokerUnreachableError,
        BrokerUnsupportedError,
        CallTimeoutError,
        CircuitOpenError,
        ClaimCheckError,
        DataLossError,
        DeadLetterLimitError,
        DeadlineExceededError,
        EnvironmentUnusableError,
        FencedError,
        LateRowsError,
        OnceflowError,
        OptionError,
        PermissionDeniedError,
        ProcessorError,
        ProgressConflictError,
        ProtocolError,
        RegistryUnavailableError,
        SchemaError,
        StorageUnavailableError,
        TransactionTimeoutError,
        UnknownTopicError,
        UnsupportedQueryError,
    )
    from onceflow.external.delta import DeltaSink
    from onceflow.external.postgres import PostgresSink
    from onceflow.external.sink import ExternalSink
    from onceflow.flow import Flow
    from onceflow.flow_chain import FlowChain
    from onceflow.logs.json_logs import JsonLogFormatter
    from onceflow.metrics.endpoint import MetricsEndpoint, serve_metrics
    from onceflow.metrics.lineage import Lineage
    from onceflow.metrics.telemetry import Telemetry
    from onceflow.query import FlowQuery, FlowWriter
    from onceflow.schema_registry.registry import SchemaRegistry
    from onceflow.service.serving import serve
    from onceflow.session import session
    from onceflow.state.api import serdes
    from onceflow.state.api.handle import State
    from onceflow.state.api.processor import BadRows, ColumnProcessor, Processor
    from onceflow.state.api.record import Record
    from onceflow.state.api.timers import Timer
    from onceflow.state.engine.dead_letters import idempotency_key
    from onceflow.state.engine.retry import Retry
    from onceflow.state.joins.spec import JoinTable
    from onceflow.tables.table import Change, Table
    from onceflow.topic_frame import peek

    from onceflow import windows  # isort: skip

__all__ = [
    "AuthenticationFailedError",
    "BadRecordError",
    "BadRows",
    "BatchAbortedError",
    "Breaker",
    "BrokerUnreachableError",
    "BrokerUnsupportedError",
    "CallTimeoutError",
    "Calls",
    "Change",
    "CircuitOpenError",
    "ClaimCheck",
    "ClaimCheckError",
    "ColumnProcessor",
    "DataLossError",
    "DeadLetterLimitError",
    "DeadlineExceededError",
    "DeltaSink",
    "EnvironmentUnusableError",
    "ExternalSink",
    "FencedError",
    "Flow",
    "FlowChain",
    "FlowQuery",
    "FlowWriter",
    "JoinTable",
    "JsonLogFormatter",
    "LateRowsError",
    "Lineage",
    "MetricsEndpoint",
    "OnceflowError",
    "OptionError",
    "Outcome",
    "PermissionDeniedError",
    "PostgresSink",
    "Processor",
    "ProcessorError",
    "ProgressConflictError",
    "ProtocolError",
    "Record",
    "RegistryUnavailableError",
    "Retry",
    "SchemaError",
    "SchemaRegistry",
    "State",
    "StorageUnavailableError",
    "StoredValue",
    "Table",
    "Telemetry",
    "Timer",
    "TransactionTimeoutError",
    "UnknownTopicError",
    "UnsupportedQueryError",
    "__version__",
    "concurrently",
    "idempotency_key",
    "peek",
    "serdes",
    "serve",
    "serve_metrics",
    "session",
    "windows",
]

# Every other public name is an error.
_HOMES = {
    "DeltaSink": "onceflow.external.delta",
    "BadRows": "onceflow.state.api.processor",
    "Breaker": "onceflow.calls.breaker",
    "Calls": "onceflow.calls.concurrently",
    "Change": "onceflow.tables.table",
    "ClaimCheck": "onceflow.claim_check.claim",
    "ColumnProcessor": "onceflow.state.api.processor",
    "ExternalSink": "onceflow.external.sink",
    "Flow": "onceflow.flow",
    "FlowChain": "onceflow.flow_chain",
    "FlowQuery": "onceflow.query",
    "FlowWriter": "onceflow.query",
    "JoinTable": "onceflow.state.joins.spec",
    "JsonLogFormatter": "onceflow.logs.json_logs",
    "Lineage": "onceflow.metrics.lineage",
    "MetricsEndpoint": "onceflow.metrics.endpoint",
    "Outcome": "onceflow.calls.target",
    "PostgresSink": "onceflow.external.postgres",
    "Processor": "onceflow.state.api.processor",
    "Record": "onceflow.state.api.record",
    "Retry": "onceflow.state.engine.retry",
    "SchemaRegistry": "onceflow.schema_registry.registry",
    "State": "onceflow.state.api.handle",
    "StoredValue": "onceflow.claim_check.stored_value",
    "Telemetry": "onceflow.metrics.telemetry",
    "Timer": "onceflow.state.api.timers",
    "Table": "onceflow.tables.table",
    "concurrently": "onceflow.calls.concurrently",
    "idempotency_key": "onceflow.state.engine.dead_letters",
    "peek": "onceflow.topic_frame",
    "serve": "onceflow.service.serving",
    "serve_metrics": "onceflow.metrics.endpoint",
    "session": "onceflow.session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "serdes":
        return importlib.import_module("onceflow.state.api.serdes")
    if name == "windows":
        return importlib.import_module("onceflow.windows")
    try:
        value = getattr(importlib.import_module(_HOMES.get(name, "onceflow.errors")), name)
    except ImportError:
        from onceflow.spark import versions

        versions.check()  # a PySpark that is too old lacks modules: then this raises a clear error
        raise
    # Importing onceflow.session sets the package's attribute `session` to the *module*. Replace it by the function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Exactly-once Kafka pipelines for PySpark.

Public names are imported when they are first used, so that ``import onceflow`` costs nothing and tools that
only need errors or the command line never load Spark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onceflow._version import __version__

if TYPE_CHECKING:
    from onceflow.errors import (
        AuthenticationFailedError,
        BadRecordError,
        BatchAbortedError,
        BrokerUnreachableError,
        BrokerUnsupportedError,
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
        SchemaError,
        TransactionTimeoutError,
        UnknownTopicError,
        UnsupportedQueryError,
    )
    from onceflow.flow import Flow
    from onceflow.query import FlowQuery
    from onceflow.serving import serve
    from onceflow.session import session
    from onceflow.state import serdes
    from onceflow.state.handle import State
    from onceflow.state.local_table import LocalTable
    from onceflow.state.processor import BadRows, ColumnProcessor, Processor
    from onceflow.state.record import Record
    from onceflow.state.retry import Retry
    from onceflow.state.timers import Timer

__all__ = [
    "AuthenticationFailedError",
    "BadRecordError",
    "BadRows",
    "BatchAbortedError",
    "BrokerUnreachableError",
    "BrokerUnsupportedError",
    "ColumnProcessor",
    "DataLossError",
    "DeadLetterLimitError",
    "DeadlineExceededError",
    "EnvironmentUnusableError",
    "FencedError",
    "Flow",
    "FlowQuery",
    "LateRowsError",
    "LocalTable",
    "OnceflowError",
    "OptionError",
    "PermissionDeniedError",
    "Processor",
    "ProcessorError",
    "ProgressConflictError",
    "ProtocolError",
    "Record",
    "Retry",
    "SchemaError",
    "State",
    "Timer",
    "TransactionTimeoutError",
    "UnknownTopicError",
    "UnsupportedQueryError",
    "__version__",
    "serdes",
    "serve",
    "session",
]

# Every other public name is an error.
_HOMES = {
    "BadRows": "onceflow.state.processor",
    "ColumnProcessor": "onceflow.state.processor",
    "Flow": "onceflow.flow",
    "FlowQuery": "onceflow.query",
    "LocalTable": "onceflow.state.local",
    "Processor": "onceflow.state.processor",
    "Record": "onceflow.state.record",
    "Retry": "onceflow.state.retry",
    "State": "onceflow.state.handle",
    "Timer": "onceflow.state.timers",
    "serve": "onceflow.serving",
    "session": "onceflow.session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "serdes":
        return importlib.import_module("onceflow.state.serdes")
    value = getattr(importlib.import_module(_HOMES.get(name, "onceflow.errors")), name)
    # Importing onceflow.session binds the *module* to the package's name `session`; put the function there.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""A client of librdkafka, for tools: they check what onceflow does with another client than its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def admin_client(bootstrap_servers: str, client_options: Mapping[str, Any]) -> Iterator[Any]:
    """A librdkafka admin client that writes nothing to stderr."""
    import logging

    from confluent_kafka.admin import AdminClient

    yield AdminClient(
        {
            "bootstrap.servers": bootstrap_servers,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
            **client_options,
        },
        logger=logging.getLogger("onceflow_workshop.testing.librdkafka"),
    )

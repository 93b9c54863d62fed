"""``bootstrap_servers``: what is no address is refused where it is given, with the address that was meant."""

from __future__ import annotations

import re
from typing import Any

import pytest

from onceflow.client.addresses import Address, parse_servers
from onceflow.client.settings import ClientSettings
from onceflow.errors import OptionError


@pytest.mark.parametrize(
    "text, host, port",
    [
        ("localhost:9092", "localhost", 9092),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:65535", "::1", 65535),
        ("SASL_SSL://broker-1.example.com:9093", "broker-1.example.com", 9093),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_servers(text) == [Address(host, port)]
    assert str(Address(host, port)) == text.rpartition("//")[2]


@pytest.mark.parametrize(
    "servers, what, next_step",
    [
        ("localhost", "localhost has no port", "write localhost:9092"),
        ("a:9092,broker-2", "broker-2 has no port", "write broker-2:9092"),
        ("PLAINTEXT://kafka", "kafka has no port", "write kafka:9092"),
        ("localhost:", "localhost has no port", "write localhost:9092"),
        ("[::1]", "[::1] has no port", "write [::1]:9092"),
        ("::1:9092", "more than one colon", "[::1]:9092"),
        (":9092", "has no host", "write for example localhost:9092"),
        ("localhost:kafka", "'kafka' in localhost:kafka is no port", "from 1 to 65535, for example localhost:9092"),
        ("localhost:0", "'0' in localhost:0 is no port", "from 1 to 65535"),
        ("localhost:65536", "is no port", "from 1 to 65535"),
        ("localhost:-1", "is no port", "from 1 to 65535"),
        ("http://localhost:9092/topics", "'9092/topics' in http", "from 1 to 65535"),
        ("a:1 b:2", "contains spaces", "write a:1,b:2"),
        ("kafka..internal:9092", "'kafka..internal' is no host name", "1 to 63 characters"),
        ("a:9092,.kafka:9092", "'.kafka' is no host name", "1 to 63 characters"),
        (f"{'a' * 64}.b:9092", "is no host name", "1 to 63 characters"),
        ("t\udce4:9092", r"'t\udce4' is no host name", "1 to 63 characters"),
        (["a:1", "b:2"], "is of type list, not a string", "separate several servers by commas"),
        ([], "bootstrap_servers is empty", "localhost:9092"),
    ],
)
def test_what_is_no_address(servers: Any, what: str, next_step: str) -> None:
    with pytest.raises(OptionError, match=re.escape(what)) as caught:
        ClientSettings(servers)
    assert "bootstrap_servers" in caught.value.what
    assert next_step in caught.value.next_step

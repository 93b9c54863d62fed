"""Writes and parses ``sasl.jaas.config`` in the format of the Java client."""

from __future__ import annotations

import re
from collections.abc import Mapping

OAUTH_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"

# Java's tokenizer accepts double quotes, single quotes and plain words. A backslash escapes the next character.
_JAAS_FIELD = re.compile(
    r"""([\w.$-]+)\s*=\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<word>[^\s;"']+))"""
)
_JAAS_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def jaas(module: str, fields: Mapping[str, str]) -> str:
    """A ``sasl.jaas.config`` with one login module."""

    def quoted(text: str) -> str:
        for plain, escaped in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t")):
            text = text.replace(plain, escaped)
        return f'"{text}"'

    return " ".join([f"{module} required", *(f"{name}={quoted(value)}" for name, value in fields.items())]) + ";"


def jaas_fields(text: str) -> dict[str, str]:
    """The options of a login module, as Java reads them."""
    fields = {}
    for match in _JAAS_FIELD.finditer(text):
        quoted = match["double"] if match["double"] is not None else match["single"]
        fields[match[1]] = match["word"] if quoted is None else re.sub(r"\\(.)", _unescaped, quoted)
    return fields


def _unescaped(match: re.Match[str]) -> str:
    return _JAAS_ESCAPES.get(match[1], match[1])

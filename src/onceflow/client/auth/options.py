"""Turns the connection options of OAUTHBEARER and AWS_MSK_IAM into a source of tokens. It does not fetch tokens."""

from __future__ import annotations

import importlib.util
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from onceflow.client.auth import bearer_tokens
from onceflow.client.auth.jaas import jaas_fields
from onceflow.client.auth.sources import ClientCredentials, Provider, Source, TokenFile
from onceflow.errors import OptionError


def oauthbearer(options: Mapping[str, str]) -> dict[str, Any]:
    """kafka-python's arguments for OAUTHBEARER."""
    found = token_source(options)
    if found is None:
        raise OptionError(
            "mechanism OAUTHBEARER needs tokens, and no option says where they come from",
            next_step="give 'sasl.oauthbearer.token.endpoint.url' with 'sasl.oauthbearer.client.id' and "
            "'sasl.oauthbearer.client.secret', or 'onceflow.token.provider' with the import path of a function",
        )
    return {"sasl_oauth_token_provider": bearer_tokens.shared(*found)}


def msk_iam(options: Mapping[str, str]) -> dict[str, Any]:
    """kafka-python's arguments for AWS_MSK_IAM."""
    if options["security.protocol"] != "SASL_SSL":
        raise OptionError("mechanism AWS_MSK_IAM needs TLS", next_step="set 'security.protocol' to SASL_SSL")
    if jaas_fields(options.get("sasl.jaas.config", "")):
        raise OptionError(
            "'sasl.jaas.config' of AWS_MSK_IAM has fields, which only the Java client would use",
            next_step="leave it out, and choose the credentials in the environment (AWS_PROFILE, or a role of the "
            "machine), which both clients read",
        )
    found = token_source(options)
    if found is not None:
        # MSK accepts OAUTHBEARER with a signed token on the same port. The Java client uses its own mechanism.
        return {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": bearer_tokens.shared(*found)}
    if importlib.util.find_spec("botocore") is None:
        raise OptionError(
            "mechanism AWS_MSK_IAM needs a signer, and none is installed",
            next_step="install botocore on the driver and on the machines that run tasks, or give "
            "'onceflow.token.provider' with a function that signs, as module:function",
        )
    return {}


def token_source(options: Mapping[str, str]) -> tuple[Source, dict[str, str]] | None:
    """The source of tokens, and the SASL extensions to send with them. None: no option names a source."""
    path = options.get("onceflow.token.provider")
    fields = client_fields(options)
    extensions = {name.removeprefix("extension_"): v for name, v in fields.items() if name.startswith("extension_")}
    if path is not None:
        if "sasl.oauthbearer.client.id" in options:
            raise OptionError(
                "'onceflow.token.provider' and 'sasl.oauthbearer.client.id' are both given",
                next_step="give one: a function that returns tokens, or a client of a token endpoint",
            )
        if not re.fullmatch(r"[\w.]+:[\w.]+", path):
            raise OptionError(
                "option 'onceflow.token.provider' is no import path of a function",
                next_step="write module:function, for example my_tokens:token",
            )
        return Provider(path), extensions
    url = options.get("sasl.oauthbearer.token.endpoint.url")
    if url is None:
        return None
    scheme = urllib.parse.urlsplit(url).scheme.lower()
    if scheme == "file":
        return TokenFile(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)), extensions
    if scheme not in ("http", "https"):
        raise OptionError(
            "option 'sasl.oauthbearer.token.endpoint.url' is no URL of a known kind",
            next_step="use https:// for a token endpoint, or file:// for a file with a JWT",
        )
    if "@" in urllib.parse.urlsplit(url).netloc:
        raise OptionError(
            "option 'sasl.oauthbearer.token.endpoint.url' has a user or a password in it",
            next_step="leave them out: 'sasl.oauthbearer.client.id' and 'sasl.oauthbearer.client.secret' say who asks",
        )
    if not fields.get("clientId") or not fields.get("clientSecret"):
        raise OptionError(
            "a token endpoint needs the id and the secret of a client",
            next_step="give 'sasl.oauthbearer.client.id' and 'sasl.oauthbearer.client.secret', or 'sasl.jaas.config' "
            "with clientId and clientSecret as for the Java client",
        )
    return _credentials(options, url, fields), extensions


def _credentials(options: Mapping[str, str], url: str, fields: Mapping[str, str]) -> ClientCredentials:
    ca_file = fields.get("ssl.truststore.location")
    if ca_file is not None and fields.get("ssl.truststore.type", "JKS").upper() != "PEM":
        raise OptionError(
            "ssl.truststore.location in 'sasl.jaas.config' is read by Python too, which cannot read Java key stores",
            next_step="convert it to a PEM file and set ssl.truststore.type to PEM there",
        )
    return ClientCredentials(
        endpoint=url,
        client_id=fields["clientId"],
        client_secret=fields["clientSecret"],
        scope=fields.get("scope"),
        ca_file=ca_file,
        urlencode=options.get("sasl.oauthbearer.header.urlencode", "false").lower() == "true",
    )


def client_fields(options: Mapping[str, str]) -> dict[str, str]:
    """The fields of the JAAS configuration for OAUTHBEARER: from ``sasl.jaas.config``, or from the other options."""
    if "sasl.jaas.config" in options:
        return jaas_fields(options["sasl.jaas.config"])
    names = {"client.id": "clientId", "client.secret": "clientSecret", "scope": "scope"}
    fields = {
        field: options[f"sasl.oauthbearer.{name}"]
        for name, field in names.items()
        if f"sasl.oauthbearer.{name}" in options
    }
    for part in options.get("sasl.oauthbearer.extensions", "").split(","):
        name, equals, value = part.strip().partition("=")
        if part.strip() and not (equals and re.fullmatch(r"[A-Za-z]+", name)):
            raise OptionError(
                "option 'sasl.oauthbearer.extensions' is not of the form name=value,name=value",
                next_step="names are letters only, for example logicalCluster=lkc-1,identityPoolId=pool-1",
            )
        if name:
            fields[f"extension_{name}"] = value
    if "https.ca.location" in options:
        fields["ssl.truststore.type"], fields["ssl.truststore.location"] = "PEM", options["https.ca.location"]
    return fields

"""What Amazon MSK is shown: signatures, checked without AWS. No test here talks to a real MSK cluster."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import sys
import urllib.parse
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kafka.net.sasl import get_sasl_mechanism, msk

from onceflow.client.settings import ClientSettings

MSK = {"security.protocol": "SASL_SSL", "sasl.mechanism": "AWS_MSK_IAM"}
HOST, REGION = "b-1.example.kafka.eu-west-1.amazonaws.com", "eu-west-1"
# AWS's own examples of credentials.
ACCESS_KEY, SECRET_KEY = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
SESSION = "session/token+with=odd chars"
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


class FixedTime(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``signed(session_token)``: what our connections send to a broker, with fixed credentials and a fixed time."""

    def make(session_token: str | None) -> dict[str, str]:
        frozen = SimpleNamespace(access_key=ACCESS_KEY, secret_key=SECRET_KEY, token=session_token)

        class Session:
            def get_credentials(self) -> Any:
                return SimpleNamespace(get_frozen_credentials=lambda: frozen)

            def get_config_variable(self, name: str) -> str:
                assert name == "region"
                return REGION

        botocore, session = ModuleType("botocore"), ModuleType("botocore.session")
        botocore.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # what importlib looks for
        session.Session = Session  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "botocore", botocore)
        monkeypatch.setitem(sys.modules, "botocore.session", session)
        monkeypatch.setattr(msk, "datetime", SimpleNamespace(datetime=FixedTime, timezone=datetime.timezone))
        arguments = ClientSettings(f"{HOST}:9098", MSK).kafka_python()
        mechanism = get_sasl_mechanism(arguments["sasl_mechanism"])(host=HOST, **arguments)
        message: dict[str, str] = json.loads(mechanism.auth_bytes())
        return message

    return make


def sigv4(session_token: str | None) -> str:
    """The signature of the presigned request, as AWS's documentation of Signature Version 4 has it."""

    def keyed(key: bytes, text: str) -> bytes:
        return hmac.new(key, text.encode(), hashlib.sha256).digest()

    day, moment = NOW.strftime("%Y%m%d"), NOW.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{day}/{REGION}/kafka-cluster/aws4_request"
    query = {
        "Action": "kafka-cluster:Connect",
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{ACCESS_KEY}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": "900",
        "X-Amz-SignedHeaders": "host",
        **({"X-Amz-Security-Token": session_token} if session_token else {}),
    }
    canonical_query = urllib.parse.urlencode(sorted(query.items()), quote_via=urllib.parse.quote, safe="-_.~")
    nothing = hashlib.sha256(b"").hexdigest()
    canonical = f"GET\n/\n{canonical_query}\nhost:{HOST}\n\nhost\n{nothing}"
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = keyed(keyed(keyed(keyed(f"AWS4{SECRET_KEY}".encode(), day), REGION), "kafka-cluster"), "aws4_request")
    return keyed(key, to_sign).hex()


@pytest.mark.parametrize(
    "session_token, by_botocore",
    [
        # What SigV4QueryAuth of botocore 1.44.5 makes of the same request.
        (None, "e762533e3199b1ddf6ec2213246911f9b7898630eed44ef6acbe3d4236ec5322"),
        (SESSION, "3fd99800e2125fb4c9aecdc2d6ac0f28c156362c4cadf2a8f81698f9f4ac65fd"),
    ],
)
def test_the_signature(signed: Any, session_token: str | None, by_botocore: str) -> None:
    message = signed(session_token)
    assert message["x-amz-signature"] == sigv4(session_token) == by_botocore
    assert message["host"] == HOST
    assert message["action"] == "kafka-cluster:Connect"
    assert message["x-amz-credential"] == f"{ACCESS_KEY}/20260102/{REGION}/kafka-cluster/aws4_request"
    assert (message["x-amz-date"], message["x-amz-expires"]) == ("20260102T030405Z", "900")
    assert message.get("x-amz-security-token") == session_token
    assert SECRET_KEY not in json.dumps(message)


def test_a_signer_that_makes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As aws-msk-iam-sasl-signer-python does it: a presigned URL is the token, and it is no JWT."""
    url = f"https://kafka.{REGION}.amazonaws.com/?Action=kafka-cluster%3AConnect&X-Amz-Signature={sigv4(None)}"
    text = base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")
    module = ModuleType("my_signer")
    module.token = lambda: (text, 900.0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_signer", module)
    arguments = ClientSettings(f"{HOST}:9098", {**MSK, "onceflow.token.provider": "my_signer:token"}).kafka_python()
    mechanism = get_sasl_mechanism(arguments["sasl_mechanism"])(host=HOST, **arguments)
    assert mechanism.auth_bytes() == f"n,,\x01auth=Bearer {text}\x01\x01".encode()

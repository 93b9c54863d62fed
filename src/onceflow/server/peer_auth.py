"""How instances of a group recognise each other: by a secret that only they have.

Whoever may read the consumer group can join it, claim any address, or become its leader. So what members tell the
leader, what the leader decides, requests at ``/peer/`` and their answers all carry an HMAC-SHA256 (RFC 2104) with this
secret. A bearer token is never sent to another instance.

Documents of the group name the member that they are of, and the generation of the group: so nobody can use an old one.
What an HMAC covers begins with its purpose, and each part with its length, so that nothing can stand in for something
else. An answer covers the nonce of its request, so that no earlier answer can stand in for it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from onceflow.errors import OptionError
from onceflow.server.problems import Problem

#: The header of requests (``TIME NONCE HMAC``) and of answers (``HMAC``).
HEADER = "Onceflow-Peer"
#: Clocks of instances may differ by so much, in milliseconds.
CLOCKS_MS = 60_000
_SECRET_MIN = 16
_NONCE_BYTES = 16


@dataclass(frozen=True)
class Asked:
    """A request to another instance.

    Args:
        address: of the one that is asked. path: with the table and what is asked.
    """

    address: str
    path: str
    body: bytes


class PeerSecrets:
    """The secrets of a group.

    Args:
        texts: the first one is used, all are accepted: so they can be changed one instance after the other.

    Raises:
        OptionError: there is none, or one is too short.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not texts or any(len(each) < _SECRET_MIN for each in texts):
            raise OptionError(
                "Instances that share tables need a secret of their own"
                if not texts
                else f"A secret of the instances is shorter than {_SECRET_MIN} characters",
                next_step="make one, for example: python -c 'import secrets; print(secrets.token_urlsafe(32))' > "
                "peer-secret.txt, and give the file to all instances: --peer-secret-file peer-secret.txt",
            )
        self._keys = [each.encode() for each in texts]

    # ---- requests and answers ------------------------------------------------------------------------

    def proof(self, asked: Asked) -> tuple[str, str]:
        """The header of a request, and its nonce."""
        now_ms, nonce = str(int(time.time() * 1000)), secrets.token_hex(_NONCE_BYTES)
        return f"{now_ms} {nonce} {self._mac(*_request(asked, now_ms, nonce))}", nonce

    def check_request(self, header: str, asked: Asked) -> str:
        """Check the header of a request. Returns its nonce.

        Raises:
            Problem: 401, it is none of another instance.
        """
        parts = header.split(" ")
        if len(parts) != 3 or not (parts[0].isascii() and parts[0].isdigit() and len(parts[0]) < 20):
            raise _no_instance("it has no proof that it is of an instance of this group")
        now_ms, nonce, mac = parts
        if not self._is_one_of(mac, *_request(asked, now_ms, nonce)):
            raise _no_instance("its proof is not made with a secret of this instance, or for another address")
        if abs(int(now_ms) - time.time() * 1000) > CLOCKS_MS:  # after the HMAC: strangers learn nothing of clocks
            raise _no_instance(f"its clock differs by more than {CLOCKS_MS // 1000} s, or it is an old request")
        return nonce

    def answer_proof(self, nonce: str, status: int, body: bytes) -> str:
        """The header of an answer."""
        return self._mac(*_answer(nonce, status, body))

    def is_answer(self, header: str, nonce: str, status: int, body: bytes) -> bool:
        """Whether an answer is of an instance, and to the request with this nonce."""
        return self._is_one_of(header, *_answer(nonce, status, body))

    # ---- what the group carries ----------------------------------------------------------------------

    def sealed(self, purpose: str, group: str, document: bytes) -> bytes:
        """A document of the group, behind its HMAC."""
        return self._mac(purpose.encode(), group.encode(), document).encode() + document

    def opened(self, purpose: str, group: str, sealed: bytes) -> bytes | None:
        """The document; None: nobody with a secret of this group has made it for this purpose."""
        size = 2 * sha256().digest_size
        mac, document = sealed[:size].decode("latin-1"), sealed[size:]
        return document if self._is_one_of(mac, purpose.encode(), group.encode(), document) else None

    # ---- inside --------------------------------------------------------------------------------------

    def _mac(self, *parts: bytes, key: bytes | None = None) -> str:
        found = hmac.new(self._keys[0] if key is None else key, digestmod=sha256)
        for part in parts:
            found.update(b"%d:" % len(part))
            found.update(part)
        return found.hexdigest()

    def _is_one_of(self, mac: str, *parts: bytes) -> bool:
        given = mac.encode()
        # All are compared, so that the time says nothing about them.
        return bool(sum([hmac.compare_digest(given, self._mac(*parts, key=key).encode()) for key in self._keys]))


def _request(asked: Asked, now_ms: str, nonce: str) -> tuple[bytes, ...]:
    return b"request", now_ms.encode(), nonce.encode(), asked.address.encode(), asked.path.encode(), asked.body


def _answer(nonce: str, status: int, body: bytes) -> tuple[bytes, ...]:
    return b"answer", nonce.encode(), b"%d" % status, body


def _no_instance(why: str) -> Problem:
    return Problem(401, f"This is no request of another instance: {why}", next_step="see --peer-secret-file")

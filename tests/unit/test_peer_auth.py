"""How instances of the query server recognise each other."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.server import peer_auth
from onceflow.server.peer_auth import Asked, PeerSecrets
from onceflow.server.problems import Problem

OURS, OTHER = PeerSecrets(["a-secret-of-the-tests"]), PeerSecrets(["another-secret-of-tests"])
ASKED = Asked("http://a:1", "/peer/t/get", b'{"keys": []}')


def refused(header: str, asked: Asked = ASKED, secrets: PeerSecrets = OURS) -> str:
    with pytest.raises(Problem) as caught:
        secrets.check_request(header, asked)
    assert caught.value.status == 401
    return caught.value.detail


def test_a_request_and_its_answer() -> None:
    header, nonce = OURS.proof(ASKED)
    assert OURS.check_request(header, ASKED) == nonce
    proof = OURS.answer_proof(nonce, 200, b"yes")
    assert OURS.is_answer(proof, nonce, 200, b"yes")
    _, later = OURS.proof(ASKED)
    assert later != nonce
    for wrong in (("", nonce, 200, b"yes"), (proof, later, 200, b"yes"), (proof, nonce, 503, b"yes")):
        assert not OURS.is_answer(*wrong)
    assert not OURS.is_answer(proof, nonce, 200, b"no")
    assert not OTHER.is_answer(proof, nonce, 200, b"yes")
    assert not OURS.is_answer(header, nonce, 200, b"yes")  # a request is no answer


@pytest.mark.parametrize(
    "asked",
    [
        Asked("http://b:1", ASKED.path, ASKED.body),  # sent on to another instance
        Asked(ASKED.address, "/peer/u/get", ASKED.body),
        Asked(ASKED.address, "/peer/t/page", ASKED.body),
        Asked(ASKED.address, ASKED.path, b""),
        Asked("http://a:1/peer", "/t/get", ASKED.body),  # the same text, cut elsewhere
    ],
)
def test_a_proof_of_another_request(asked: Asked) -> None:
    assert "its proof is not made with a secret of this instance" in refused(OURS.proof(ASKED)[0], asked)


@given(st.one_of(st.text(), st.text("0123456789abcdef ", max_size=200), st.just("1 2 3"), st.just("9" * 30 + " a b")))
def test_headers_that_are_made_up(header: str) -> None:
    assert "This is no request of another instance" in refused(header)


def test_another_secret() -> None:
    assert "its proof is not made with a secret" in refused(OTHER.proof(ASKED)[0])
    # They are changed one instance after the other: the first one is used, all are accepted.
    both = PeerSecrets(["another-secret-of-tests", "a-secret-of-the-tests"])
    assert both.check_request(OURS.proof(ASKED)[0], ASKED)
    assert OTHER.check_request(both.proof(ASKED)[0], ASKED)
    assert "its proof is not made" in refused(both.proof(ASKED)[0])


@pytest.mark.parametrize("apart_s", [-61, 61])
def test_old_requests_and_other_clocks(apart_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = OURS.proof(ASKED)
    now = time.time()
    monkeypatch.setattr(peer_auth, "time", SimpleNamespace(time=lambda: now + apart_s))
    assert "its clock differs by more than 60 s" in refused(header)
    assert "clock" not in refused(OTHER.proof(ASKED)[0])
    monkeypatch.setattr(peer_auth, "time", SimpleNamespace(time=lambda: now + apart_s * 0.9))
    OURS.check_request(header, ASKED)


def test_what_the_group_carries() -> None:
    sealed = OURS.sealed("member", "g", b"{}")
    assert OURS.opened("member", "g", sealed) == b"{}"
    for secrets, purpose, group, document in (
        (OTHER, "member", "g", sealed),
        (OURS, "assignment", "g", sealed),
        (OURS, "member", "h", sealed),
        (OURS, "member", "g", sealed + b" "),
        (OURS, "member", "g", sealed[:64]),
        (OURS, "member", "g", b""),
        (OURS, "member", "g", b"\xff" * 70),
        (OURS, "member", "g", b"{}"),
    ):
        assert secrets.opened(purpose, group, document) is None

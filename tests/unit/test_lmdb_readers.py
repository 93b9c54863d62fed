"""Threads that read an LMDB environment, and one that needs them to be away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from onceflow.errors import DeadlineExceededError
from onceflow.state.stores import lmdb_environment
from onceflow.state.stores.lmdb_environment import Readers


def test_readers_that_follow_each_other_do_not_keep_others_out() -> None:
    """There is always one of them reading, and still the map can be moved."""
    readers, ended, alone = Readers(Path("/state")), threading.Event(), threading.Event()
    turns = [threading.Event(), threading.Event()]
    inside = [False, False]

    def read(own: int) -> None:
        while not ended.is_set():
            readers.enter()
            inside[own] = True
            turns[own].set()
            # It leaves only when the other one has come in, or waits because it is not let in.
            turns[1 - own].wait(0.05)
            turns[1 - own].clear()
            assert not alone.is_set()
            inside[own] = False
            readers.leave()

    threads = [threading.Thread(target=read, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with readers.absent(), readers.absent():
                alone.set()
                assert not any(inside)
                readers.enter()  # the thread that has sent the others away
                readers.leave()
                alone.clear()
    finally:
        ended.set()
        for thread in threads:
            thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_reader_may_read_again_while_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_environment, "WAIT_S", 0.2)
    readers = Readers(Path("/state"))
    readers.enter()
    refused: list[BaseException] = []

    def go_alone() -> None:
        try:
            with readers.absent():
                pass
        except DeadlineExceededError as error:
            refused.append(error)

    thread = threading.Thread(target=go_alone)
    thread.start()
    while thread.is_alive():
        readers.enter()
        readers.leave()
    assert "a thread is reading" in str(refused[0])
    readers.leave()
    with readers.absent():
        pass

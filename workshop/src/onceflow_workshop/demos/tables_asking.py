"""Asks the instances of a query server all the time: keys, many keys, ranges, counts, changes.

Plain HTTP with the standard library, which shares no code with the server or its clients.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode, urlsplit

from onceflow_workshop.demos.tables_check import Answer, Change, Offsets
from onceflow_workshop.demos.tables_questions import Question, offsets_of, read_answer

# Longer than a request may wait for a position, and than a stream is silent.
_ANSWER_S = 20.0
_NOBODY_S = 0.05


@dataclass
class Figures:
    """What an asker has met with.

    Attributes:
        answered: when each answer had come, on the monotonic clock, and after how many seconds, all attempts included.
        refused: how often 503 was answered; disconnected: how often there was no answer.
        problems: answers that must never be given.
    """

    kind: str = "none"
    answered: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    disconnected: int = 0
    problems: list[str] = field(default_factory=list)

    def longest_s(self, since: float, until: float) -> float:
        """The longest time that a question took which was asked before ``until``, and not answered before ``since``."""
        times = (took for ended_at, took in self.answered if ended_at > since and ended_at - took < until)
        return max(times, default=0.0)


class Client:
    """Connections to instances, which are kept. Used by one thread."""

    def __init__(self) -> None:
        self._connections: dict[str, http.client.HTTPConnection] = {}

    def ask(self, url: str, table: str, question: Question) -> tuple[int, bytes] | None:
        """Status and body of the response; None: there is none, or not all of it."""
        connection = self._connections.get(url)
        if connection is None:
            connection = self._connections[url] = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_ANSWER_S)
        path = f"/tables/{quote(table)}{question.path}"
        if question.least:
            path += ("&" if "?" in path else "?") + urlencode({"min_position": question.least, "wait": "10s"})
        try:
            connection.request("POST" if question.body else "GET", path, question.body, {"Accept": question.accept})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            return None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class Asker(threading.Thread):
    """Asks one question after the other, any of the instances, and the next one if that does not answer.

    Args:
        questions: returns the next one; None: there is none just now.
        answers: gets every answer.
        pause_s: between two questions.
    """

    def __init__(
        self,
        urls: Sequence[str],
        table: str,
        questions: Callable[[random.Random], Question | None],
        answers: deque[Answer],
        pause_s: float,
        rng: random.Random,
    ) -> None:
        super().__init__(name=f"asker {questions.__name__}", daemon=True)
        self.figures = Figures()
        self.problem: BaseException | None = None
        self._urls, self._table = list(urls), table
        self._questions, self._answers, self._pause_s, self._rng = questions, answers, pause_s, rng
        self._client = Client()
        self._leave = threading.Event()

    def stop(self) -> None:
        """End after the question that is asked now."""
        self._leave.set()

    def run(self) -> None:
        try:
            while not self._leave.wait(self._pause_s):
                question = self._questions(self._rng)
                if question is not None:
                    self.ask(question)
        except BaseException as error:
            self.problem = error
        finally:
            self._client.close()

    def ask(self, question: Question) -> None:
        """Ask until somebody answers."""
        self.figures.kind = question.kind
        began_at = time.monotonic()
        while not self._leave.is_set():
            for url in self._rng.sample(self._urls, len(self._urls)):
                found = self._client.ask(url, self._table, question)
                if found is None:
                    self.figures.disconnected += 1
                    continue
                if found[0] == 503:
                    self.figures.refused += 1
                    continue
                self._note(question, url, began_at, *found)
                return
            self._leave.wait(_NOBODY_S)

    def _note(self, question: Question, url: str, began_at: float, status: int, body: bytes) -> None:
        ended_at = time.monotonic()
        try:
            if status not in (200, 404):
                raise ValueError(f"status {status}")
            answer = read_answer(question, body, url, ended_at)
        except (ValueError, KeyError, TypeError) as wrong:
            self.figures.problems.append(f"{url}{question.path}: {wrong!r:.200}: {body[:300]!r}")
            return
        self.figures.answered.append((ended_at, ended_at - began_at))
        self._answers.append(answer)


class Stream(threading.Thread):
    """Follows the changes of a table, and continues with another instance when one ends.

    Args:
        urls: the first one is asked first.
        tell: called with the first position, and with every change and the position after it.
    """

    def __init__(self, urls: Sequence[str], table: str, tell: Callable[[Offsets | Change, str], None]) -> None:
        super().__init__(name=f"stream-{urls[0]}", daemon=True)
        self.figures = Figures("changes")
        self.problem: BaseException | None = None
        self._urls, self._table, self._tell = list(urls), table, tell
        self._last = ""
        self._connection: http.client.HTTPConnection | None = None
        self._leave = threading.Event()

    def stop(self) -> None:
        """End now."""
        self._leave.set()
        connected = None if self._connection is None else self._connection.sock
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            while not self._leave.wait(_NOBODY_S):
                for url in self._urls:
                    self._follow(url)
        except BaseException as error:
            self.problem = error

    def _follow(self, url: str) -> None:
        connection = self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_ANSWER_S)
        headers = {"Last-Event-ID": self._last} if self._last else {}
        try:
            connection.request("GET", f"/tables/{quote(self._table)}/changes", headers=headers)
            response = connection.getresponse()
            if response.status == 200:
                for event in events_of(iter(response.readline, b"")):
                    self._event(event)
            else:
                self.figures.refused += 1
        except (OSError, http.client.HTTPException):
            self.figures.disconnected += not self._leave.is_set()
        finally:
            connection.close()

    def _event(self, event: Mapping[str, str]) -> None:
        if event["event"] == "problem":
            self.figures.refused += 1
            return
        try:
            position = offsets_of(event["id"])
            if event["event"] == "position":
                if not self._last:
                    self._tell(position, event["id"])
            else:
                document = json.loads(event["data"])
                change = Change(document["partition"], document["offset"], document["key"], document["value"])
                if position[change.partition] != change.offset + 1 or "error" in document:
                    raise ValueError("the id is not the position after the change")
                self.figures.answered.append((time.monotonic(), 0.0))
                self._tell(change, event["id"])
        except (ValueError, KeyError, TypeError) as wrong:
            self.figures.problems.append(f"changes: {wrong!r:.200}: {dict(event)}")
        self._last = event["id"]


def events_of(lines: Iterator[bytes]) -> Iterator[dict[str, str]]:
    """The whole events of a stream of server-sent events."""
    event: dict[str, str] = {}
    for line in lines:
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            event[name] = value
        elif event:
            yield event
            event = {}

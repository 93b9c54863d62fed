"""Faults of the network between clients and brokers: rules, a seeded plan, a log. It has no sockets and no threads.

``proxy.py`` asks a ``Network`` about every frame, and does what the answer says. A rule in JSON::

    {"action": "drop", "apis": ["EndTxn"], "direction": "answer", "probability": 0.2, "first": 3, "count": 10}

Frames are counted from 1, separately for each API and direction, over all connections: the number ``k`` of a frame.
Whether a rule fires at a frame depends only on the seed, the rule, the API, the direction and ``k``. It does not depend
on the other rules, nor on which thread asked first. So a seed can be replayed, and removing a rule does not change the
decisions of the others. If two rules fire at one frame, the first one applies.

Actions:

- ``delay``: the frame, and what follows it in this direction of the connection, waits for ``seconds``.
- ``duplicate``: once the request has been answered, the broker gets it again on another connection. With ``seconds``,
  it gets it once more after that time. The responses to the copies are dropped.
- ``reorder``: the request is held back until a later one of the connection has been forwarded, for at most
  ``seconds`` (0.1 by default). The client gets its responses in the order of its requests.
- ``drop``: the frame vanishes, the connection stays open.
- ``cut``: the connection is closed, before the request is forwarded or in place of the response.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from onceflow.errors import OptionError

REQUEST, ANSWER = "request", "answer"
DIRECTIONS = (REQUEST, ANSWER)
DELAY, DUPLICATE, REORDER, DROP, CUT = "delay", "duplicate", "reorder", "drop", "cut"
ACTIONS = (DELAY, DUPLICATE, REORDER, DROP, CUT)
REORDER_SECONDS = 0.1

#: Names as in Kafka's protocol guide. Frames of other APIs have the name ``api-<key>``.
API_KEYS = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "DescribeGroups": 15,
    "ListGroups": 16,
    "ApiVersions": 18,
    "CreateTopics": 19,
    "DeleteTopics": 20,
    "DeleteRecords": 21,
    "InitProducerId": 22,
    "OffsetForLeaderEpoch": 23,
    "AddPartitionsToTxn": 24,
    "AddOffsetsToTxn": 25,
    "EndTxn": 26,
    "WriteTxnMarkers": 27,
    "TxnOffsetCommit": 28,
    "DescribeConfigs": 32,
    "DescribeCluster": 60,
    "DescribeProducers": 61,
    "DescribeTransactions": 65,
    "ListTransactions": 66,
    "ConsumerGroupHeartbeat": 68,
    "DescribeTopicPartitions": 75,
}
_NAMES = {key: name for name, key in API_KEYS.items()}


def api_name(api_key: int) -> str:
    return _NAMES.get(api_key, f"api-{api_key}")


@dataclass(frozen=True)
class Rule:
    """One kind of fault, and which frames it hits.

    Args:
        action: one of ``ACTIONS``.
        apis: names of ``API_KEYS``; an empty tuple means every API.
        direction: ``request`` or ``answer``; ``duplicate`` and ``reorder`` are for requests.
        probability: the probability for each frame that the rest of the rule matches.
        first: the number of the first frame that can be hit; each API counts its frames from 1.
        count: how many frames from ``first`` on can be hit; None: all.
        seconds: see the actions; ``delay`` needs it.

    Raises:
        OptionError: a field has an invalid value.
    """

    action: str
    apis: tuple[str, ...] = ()
    direction: str = REQUEST
    probability: float = 1.0
    first: int = 1
    count: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise _unusable(f"the action {self.action!r}", f"use one of {', '.join(ACTIONS)}.")
        if self.direction not in DIRECTIONS:
            raise _unusable(f"the direction {self.direction!r}", f"use one of {', '.join(DIRECTIONS)}.")
        if self.action in (DUPLICATE, REORDER) and self.direction == ANSWER:
            raise _unusable(
                f"{self.action} of answers",
                "a broker answers each request once and in order: let the rule be for requests.",
            )
        given: object = self.apis
        if not isinstance(given, tuple | list):
            raise _unusable(f"apis={given!r}", "give a list of names.")
        object.__setattr__(self, "apis", tuple(given))  # JSON has lists
        for api in self.apis:
            if api not in API_KEYS:
                raise _unusable(f"the API {api!r}", f"use names of {', '.join(API_KEYS)}.")
        if not 0 <= self.probability <= 1:
            raise _unusable(f"probability={self.probability}", "use a number from 0 to 1.")
        if self.first < 1 or (self.count is not None and self.count < 1):
            raise _unusable(f"first={self.first}, count={self.count}", "frames are counted from 1; hit at least one.")
        if self.seconds is not None and self.seconds < 0:
            raise _unusable(f"seconds={self.seconds}", "use a number of seconds from now on.")
        if self.action == DELAY and self.seconds is None:
            raise _unusable("a delay without seconds", "say how long the frame waits.")

    def fires(self, seed: int, api: str, direction: str, k: int) -> bool:
        """Whether the rule hits the ``k``-th frame of an API in a direction."""
        if direction != self.direction or (self.apis and api not in self.apis) or k < self.first:
            return False
        if self.count is not None and k >= self.first + self.count:
            return False
        return self.probability == 1 or _draw(seed, self, api, direction, k) < self.probability

    def as_json(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: list(value) if name == "apis" else value for name, value in given.items()}

    @classmethod
    def from_json(cls, rule: Mapping[str, Any]) -> Rule:
        """Raises ``OptionError`` for what ``as_json`` does not write."""
        unknown = set(rule) - {f.name for f in fields(cls)}
        if unknown or "action" not in rule:
            raise _unusable(
                f"a rule with the fields {', '.join(sorted(rule)) or '(none)'}",
                f"give an action; known are {', '.join(f.name for f in fields(cls))}.",
            )
        try:
            return cls(**rule)
        except TypeError as error:
            raise _unusable(f"the rule {json.dumps(dict(rule))}", "give numbers where they belong.") from error


@dataclass(frozen=True)
class Fault:
    """What has been decided about one frame, and when (epoch seconds)."""

    time: float
    api: str
    direction: str
    action: str
    k: int
    rule: Rule

    def as_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"rule": self.rule.as_json()}


class Network:
    """Decides what happens to frames, counts them, and records every fault. It is thread-safe.

    Args:
        seed: the seed of every decision with a probability.
        rules: the first one that fires decides.
        clock: returns epoch seconds; for tests.
    """

    def __init__(self, seed: int, rules: Iterable[Rule], *, clock: Callable[[], float] = time.time) -> None:
        self.seed = seed
        self.rules = tuple(rules)
        self._clock = clock
        self._lock = threading.Lock()
        self._frames: Counter[tuple[str, str]] = Counter()
        self._log: list[Fault] = []

    def plan(self, api: str, direction: str, k: int) -> Rule | None:
        """The rule that hits the ``k``-th frame. Nothing is counted or recorded."""
        return next((rule for rule in self.rules if rule.fires(self.seed, api, direction, k)), None)

    def decide(self, api_key: int, direction: str) -> Fault | None:
        """What happens to the next frame of an API in a direction; None: it passes unchanged."""
        api = api_name(api_key)
        with self._lock:
            self._frames[api, direction] += 1
            k = self._frames[api, direction]
            rule = self.plan(api, direction, k)
            if rule is None:
                return None
            fault = Fault(self._clock(), api, direction, rule.action, k, rule)
            self._log.append(fault)
            return fault

    @property
    def log(self) -> list[Fault]:
        """Every fault so far, in the order of the decisions."""
        with self._lock:
            return list(self._log)

    @property
    def counts(self) -> dict[str, int]:
        """Faults so far, by action; actions that have not happened are left out."""
        return dict(Counter(fault.action for fault in self.log))

    def frames(self, api: str, direction: str) -> int:
        """The number of frames so far, whether hit or not."""
        with self._lock:
            return self._frames[api, direction]

    def to_json(self) -> str:
        """Seed and rules, without what has happened."""
        return json.dumps({"seed": self.seed, "rules": [rule.as_json() for rule in self.rules]})

    @classmethod
    def from_json(cls, text: str) -> Network:
        """Raises ``OptionError`` for what ``to_json`` does not write."""
        try:
            given = json.loads(text)
            seed, rules = int(given["seed"]), [dict(rule) for rule in given["rules"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _unusable(f"{text[:100]!r}", 'write {"seed": 1, "rules": [...]}.') from error
        return cls(seed, [Rule.from_json(rule) for rule in rules])


def _draw(seed: int, rule: Rule, api: str, direction: str, k: int) -> float:
    """A number in [0, 1). A hash, not a generator: threads cannot change it by asking in another order."""
    text = json.dumps([seed, rule.as_json(), api, direction, k], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


def _unusable(what: str, next_step: str) -> OptionError:
    return OptionError(f"Faults of a network cannot have {what}", next_step=next_step)

"""Decisions about frames: a function of seed, rule, API, direction and number, whoever asks when."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from typing import Any

import pytest

from onceflow import OptionError
from onceflow_workshop.testing.network import ACTIONS, ANSWER, API_KEYS, REQUEST, Network, Rule, api_name

PRODUCE, END_TXN, FETCH = API_KEYS["Produce"], API_KEYS["EndTxn"], API_KEYS["Fetch"]


def hits(network: Network, api_key: int, count: int = 200, direction: str = REQUEST) -> list[int]:
    """Numbers of the frames that are hit, of the next ``count``."""
    found = (network.decide(api_key, direction) for _ in range(count))
    return [fault.k for fault in found if fault is not None]


# ---- the plan ----------------------------------------------------------------------------------------


def test_a_seed_decides_the_same_twice_and_another_seed_differently() -> None:
    rules = [Rule("drop", ("EndTxn",), probability=0.5)]
    first, again, other = (hits(Network(seed, rules), END_TXN) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_a_seed_that_was_written_down_replays_with_later_versions() -> None:
    rules = [Rule("drop", ("EndTxn",), probability=0.3), Rule("delay", probability=0.2, seconds=0.5)]
    network = Network(20, rules)
    found = [(k, rule.action) for k in range(1, 19) if (rule := network.plan("EndTxn", REQUEST, k))]
    drops = [(k, "drop") for k in (4, 6, 8, 9, 14, 16)]
    assert sorted(found) == sorted([(3, "delay"), (18, "delay"), *drops])


def test_the_order_in_which_apis_are_asked_about_changes_nothing() -> None:
    rules = [Rule("drop", probability=0.3), Rule("delay", probability=0.3, seconds=1, direction=ANSWER)]
    turns = list(itertools.product((PRODUCE, END_TXN, FETCH), (REQUEST, ANSWER)))
    one, other = Network(3, rules), Network(3, rules)
    for _ in range(100):
        for turn in turns:
            one.decide(*turn)
    for turn in reversed(turns):
        for _ in range(100):
            other.decide(*turn)
    keys = [sorted((f.api, f.direction, f.action, f.k) for f in network.log) for network in (one, other)]
    assert keys[0] == keys[1]
    assert len({(api, direction) for api, direction, _, _ in keys[0]}) == len(turns)


def test_apis_and_directions_are_drawn_for_separately() -> None:
    network = Network(5, [Rule("drop", probability=0.5), Rule("drop", probability=0.5, direction=ANSWER)])
    drawn = [hits(network, key, direction=direction) for key in (PRODUCE, END_TXN) for direction in (REQUEST, ANSWER)]
    assert len({tuple(found) for found in drawn}) == 4


def test_a_rule_taken_away_leaves_the_others_as_they_were() -> None:
    kept = Rule("cut", probability=0.2)
    both = Network(9, [Rule("drop", probability=0.2), kept])
    alone = Network(9, [kept])
    expected = hits(alone, PRODUCE)
    hits(both, PRODUCE)
    dropped = [f.k for f in both.log if f.action == "drop"]
    assert dropped
    assert [f.k for f in both.log if f.action == "cut"] == [k for k in expected if k not in dropped]


@pytest.mark.parametrize("probability", [0.0, 0.02, 0.3, 0.9, 1.0])
def test_probability(probability: float) -> None:
    share = len(hits(Network(1, [Rule("drop", probability=probability)]), FETCH, 5000)) / 5000
    assert share == pytest.approx(probability, abs=0.03 if 0 < probability < 1 else 0)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"first": 4}, [4, 5, 6]),
        ({"count": 1}, [1]),
        ({"first": 3, "count": 2}, [3, 4]),
        ({"first": 9}, []),
    ],
)
def test_window(fields: dict[str, Any], expected: list[int]) -> None:
    network = Network(1, [Rule("drop", ("Produce", "EndTxn"), **fields)])
    assert hits(network, PRODUCE, 6) == expected
    assert hits(network, END_TXN, 6) == expected  # each API has its own count
    assert hits(network, FETCH, 6) == []
    assert hits(network, PRODUCE, 6, ANSWER) == []


def test_the_first_rule_that_fires_decides() -> None:
    network = Network(1, [Rule("drop", first=2, count=1), Rule("cut", first=2, count=2)])
    for _ in range(4):
        network.decide(FETCH, REQUEST)
    assert [(f.k, f.action) for f in network.log] == [(2, "drop"), (3, "cut")]


def test_apis_without_a_name_have_one() -> None:
    assert api_name(PRODUCE) == "Produce"
    assert api_name(1234) == "api-1234"
    network = Network(1, [Rule("drop")])
    assert hits(network, 1234, 2) == [1, 2]
    assert network.log[0].api == "api-1234"


def test_names_and_keys_are_those_of_kafka() -> None:
    from kafka.protocol.api_key import ApiKey

    assert {name: int(ApiKey[name]) for name in API_KEYS} == API_KEYS


# ---- the log -----------------------------------------------------------------------------------------


def test_every_fault_is_remembered() -> None:
    times = iter([10.0, 11.5])
    rules = [Rule("drop", first=2, count=1), Rule("delay", direction=ANSWER, count=1, seconds=0.5)]
    network = Network(1, rules, clock=lambda: next(times))
    assert network.log == []
    assert network.counts == {}
    network.decide(PRODUCE, REQUEST)
    returned = [network.decide(PRODUCE, REQUEST), network.decide(END_TXN, ANSWER)]
    assert network.log == returned
    assert network.counts == {"drop": 1, "delay": 1}
    assert network.frames("Produce", REQUEST) == 2
    assert network.frames("EndTxn", REQUEST) == 0
    rule = {"action": "delay", "direction": "answer", "count": 1, "seconds": 0.5}
    entry = {"time": 11.5, "api": "EndTxn", "direction": "answer", "action": "delay", "k": 1, "rule": rule}
    assert json.loads(json.dumps(network.log[1].as_json())) == entry


def test_threads_share_the_count() -> None:
    network = Network(2, [Rule("drop", probability=0.5)])
    threads = [threading.Thread(target=hits, args=(network, PRODUCE, 500)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert network.frames("Produce", REQUEST) == 4000
    assert [f.k for f in network.log] == hits(Network(2, network.rules), PRODUCE, 4000)
    assert Counter(f.action for f in network.log) == network.counts


# ---- JSON --------------------------------------------------------------------------------------------


def test_json_there_and_back() -> None:
    rules = [Rule(action, seconds=0.25, probability=0.5, first=2, count=3) for action in ACTIONS]
    rules += [Rule("drop", ("Fetch", "EndTxn"), direction=ANSWER), Rule("cut")]
    network = Network(99, rules)
    again = Network.from_json(network.to_json())
    assert again.rules == network.rules
    assert again.to_json() == network.to_json()
    assert [f.k for f in again.log] == []
    assert hits(again, PRODUCE) == hits(network, PRODUCE) != []


def test_json_says_only_what_is_not_the_default() -> None:
    assert Rule("cut").as_json() == {"action": "cut"}
    assert Rule("drop", ("Fetch",), count=1).as_json() == {"action": "drop", "apis": ["Fetch"], "count": 1}


@pytest.mark.parametrize(
    "rule, what",
    [
        ({"action": "explode"}, "explode"),
        ({"action": "drop", "direction": "sideways"}, "sideways"),
        ({"action": "duplicate", "direction": "answer"}, "duplicate of answers"),
        ({"action": "reorder", "direction": "answer"}, "reorder of answers"),
        ({"action": "drop", "apis": ["Prodduce"]}, "Prodduce"),
        ({"action": "drop", "apis": "Produce"}, "apis='Produce'"),
        ({"action": "drop", "probability": 1.5}, "probability=1.5"),
        ({"action": "drop", "probability": "often"}, "often"),
        ({"action": "drop", "first": 0}, "first=0"),
        ({"action": "drop", "count": 0}, "count=0"),
        ({"action": "delay"}, "delay without seconds"),
        ({"action": "delay", "seconds": -1}, "seconds=-1"),
        ({"action": "drop", "chance": 1}, "chance"),
        ({"apis": ["Produce"]}, "apis"),
        ({}, "none"),
    ],
)
def test_wrong_rules_are_refused(rule: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what) as caught:
        Network.from_json(json.dumps({"seed": 1, "rules": [rule]}))
    assert caught.value.next_step


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"seed": 1}', '{"seed": 1, "rules": [1]}', '{"seed": 1, "rules": 5}']
)
def test_wrong_json_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="rules"):
        Network.from_json(text)

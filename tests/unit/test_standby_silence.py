"""When a standby takes over: a table of cases, and generated histories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onceflow.driver.standby.silence import BEAT_EVERY_S, DEAD_AFTER_S, UNSEEN_S, Silence, Turn
from onceflow.protocol.heartbeats import ACTIVE, ENDED, STANDBY, Heartbeat, decode, encode

STEP_S = 0.1


def beat(driver: str = "a", role: str = ACTIVE) -> Heartbeat:
    return Heartbeat("flow", driver, role, "host", 7, 1)


def after(silence: Silence, seconds: float, *, since: float = 0.0) -> Turn:
    """The decision after so many seconds in which the topic was read all the time, and nothing was in it."""
    steps = round(seconds / STEP_S)
    for step in range(1, steps + 1):
        silence.read(since + step * STEP_S, since + step * STEP_S)
    return silence.decide(since + steps * STEP_S).turn


def heard(*beats: Heartbeat, now: float = 0.0, knows_past: bool = True) -> Silence:
    silence = Silence("own", now, knows_past=knows_past)
    for each in beats:
        silence.heard(each, now)
    return silence


def test_without_another_driver_it_takes_over_at_once() -> None:
    assert heard().decide(0.0).turn is Turn.TAKES_OVER
    assert heard(beat("own")).decide(0.0).turn is Turn.TAKES_OVER, "of itself"
    assert heard(beat(role=STANDBY)).decide(0.0).turn is Turn.TAKES_OVER


def test_what_was_before_is_not_known() -> None:
    silence = heard(knows_past=False)
    assert silence.decide(0.0).turn is Turn.WAITS
    assert after(silence, DEAD_AFTER_S - 0.2) is Turn.WAITS
    assert after(silence, 2 * DEAD_AFTER_S) is Turn.TAKES_OVER


def test_a_driver_that_has_ended_is_not_waited_for() -> None:
    assert heard(beat(), beat(role=ENDED)).decide(0.0).turn is Turn.TAKES_OVER
    assert heard(beat(), beat(role=STANDBY)).decide(0.0).turn is Turn.TAKES_OVER, "a claim that was withdrawn"
    assert heard(beat(), beat("b", ENDED)).decide(0.0).turn is Turn.WAITS


def test_a_silent_driver_is_dead() -> None:
    silence = heard(beat())
    assert after(silence, DEAD_AFTER_S - 0.2) is Turn.WAITS
    decision = after(silence, DEAD_AFTER_S + 0.1)
    assert decision is Turn.TAKES_OVER
    silence.heard(beat(), 2.0)
    assert silence.decide(2.0).turn is Turn.WAITS


def test_all_have_to_be_dead() -> None:
    """A driver that was stopped may speak once more, after another one has taken over."""
    silence = heard(beat("old"))
    after(silence, 1.0)
    silence.heard(beat("new"), 1.0)
    assert after(silence, 1.0, since=1.0) is Turn.WAITS
    assert after(silence, 2.0, since=1.0) is Turn.TAKES_OVER


def test_the_driver_that_was_active_last_is_the_one_that_is_named() -> None:
    """A driver that was killed long ago, and whose place another one took, is not the cause."""
    silence = heard(beat("killed"))
    silence.gone("killed", "its lock is free")
    silence.heard(Heartbeat("flow", "next", ACTIVE, "host", 8, 1), 0.1)
    assert silence.decide(0.1).why == "process 8 on host is active"
    silence.heard(Heartbeat("flow", "next", ENDED, "host", 8, 1), 0.2)
    assert silence.decide(0.2).why == "no driver is active"
    silence.heard(beat("killed"), 0.3)
    assert silence.decide(0.3).turn is Turn.WAITS, "it lives"


def test_a_process_that_has_ended_is_dead_at_once() -> None:
    silence = heard(beat("a"), beat("b"))
    silence.gone("a", "its lock is free")
    silence.gone("unknown", "nobody")
    assert silence.decide(0.0).turn is Turn.WAITS
    silence.gone("b", "its lock is free")
    decision = silence.decide(0.0)
    assert decision.turn is Turn.TAKES_OVER
    assert decision.why == "process 7 on host its lock is free"
    silence.heard(beat("b"), 0.1)
    assert silence.decide(0.1).turn is Turn.WAITS, "it lives: another process was gone"


def test_silence_while_reads_fail_means_nothing() -> None:
    silence = heard(beat())
    assert silence.decide(10.0).turn is Turn.UNKNOWN
    silence.read(9.5, 10.0)  # the broker is back: silence counts from here
    assert silence.decide(10.0).turn is Turn.WAITS
    assert after(silence, DEAD_AFTER_S - 0.2, since=10.0) is Turn.WAITS
    assert after(silence, DEAD_AFTER_S + 0.1, since=10.0) is Turn.TAKES_OVER


def test_answers_that_know_less_count_too() -> None:
    """An answer with records of other flows only tells what was there when it was asked for."""
    silence = heard(beat())
    for step in range(1, 5):
        silence.read(0.5 * (step - step % 2), 0.5 * step)
    assert silence.decide(2.0).turn is Turn.TAKES_OVER


def test_an_answer_that_was_late_tells_nothing_about_the_time_before() -> None:
    """The broker stood still, and the active driver could not write."""
    silence = heard(beat())
    silence.read(0.5, 8.0)
    silence.read(8.5, 8.5)
    assert silence.decide(8.5).turn is Turn.WAITS


def test_a_topic_that_is_read_anew_is_observed_from_there() -> None:
    silence = heard(beat())
    after(silence, 1.4)
    silence.unseen(1.4)
    assert after(silence, 1.0, since=1.4) is Turn.WAITS


@given(
    gaps=st.lists(st.floats(0.0, BEAT_EVERY_S * 3), min_size=1, max_size=60),
    reads=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=60),
)
def test_a_driver_that_beats_is_never_taken_over(gaps: list[float], reads: list[float]) -> None:
    """However late its heartbeats are (less than the limit), and whenever this process reads: it may stand still."""
    written, at = [], 0.0
    for gap in gaps:
        at += gap
        written.append(at)
    silence, now, seen = heard(beat()), 0.0, 0
    for pause in reads:
        now += pause
        if now > written[-1]:
            return  # it may be dead from here on
        while seen < len(written) and written[seen] <= now:
            silence.heard(beat(), now)
            seen += 1
        silence.read(now, now)
        assert silence.decide(now).turn is not Turn.TAKES_OVER


# Sums of these are exact: the limits themselves are among the times.
@given(st.lists(st.sampled_from([0.0625, 0.25, 0.5, UNSEEN_S, UNSEEN_S + 0.0625, 2.0, 30.0]), max_size=40))
def test_a_dead_driver_was_silent_for_long_enough_while_it_was_watched(pauses: list[float]) -> None:
    silence, now, watched = heard(beat()), 0.0, 0.0
    for pause in pauses:
        now += pause
        watched = watched + pause if pause <= UNSEEN_S else 0.0
        silence.read(now, now)
        takes_over = silence.decide(now).turn is Turn.TAKES_OVER
        assert takes_over == (watched >= DEAD_AFTER_S)


def test_records_that_are_no_heartbeats_are_ignored() -> None:
    known = Heartbeat("flow", "id", ACTIVE, "host", 7, 8, "network", "[::1]:9", warm=True, reads="topic")
    assert decode(*encode(known)) == known
    key = b"flow"
    no_driver, no_role = b'{"role":"active"}', b'{"role":"king","driver":"id"}'
    for value in (None, b"", b"{", b"[]", b"1", b"null", b"\xff", no_driver, no_role):
        assert decode(key, value) is None
    assert decode(b"\xff", b'{"role":"active","driver":"id"}') is None
    later = b'{"role":"active","driver":"id","pid":"x","since_ms":null,"more":{"of":"it"},"door":5,"reads":[1]}'
    assert decode(key, later) == Heartbeat("flow", "id", ACTIVE, "", 0, 0)

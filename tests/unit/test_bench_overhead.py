"""The arithmetic of ``onceflow bench overhead``: what counts, what is compared with what, and what is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onceflow_workshop.bench import overhead_runs
from onceflow_workshop.bench.latency import percentile
from onceflow_workshop.bench.overhead_figures import (
    Commit,
    chosen_bound,
    commits_of,
    next_bound,
    overhead_percent,
    rate_of,
    rotations,
    turns,
    warm_span,
)


def test_percentile_is_a_value_that_was_seen() -> None:
    values = [float(value) for value in range(1, 201)]
    assert percentile(values[::-1], 50) == 100
    assert percentile(values, 99) == 198
    assert percentile(values, 100) == 200
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_contenders_take_turns_and_each_goes_first_equally_often() -> None:
    assert turns(("a", "b"), 4) == [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")]
    assert rotations(("a", "b", "c")) == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")]


def test_overhead_is_the_median_of_the_rounds_own_ratios() -> None:
    assert overhead_percent([(97.0, 100.0)]) == pytest.approx(3.0)
    assert overhead_percent([(102.0, 100.0)]) == pytest.approx(-2.0)
    # A machine that is slow in one round is slow for both; one round that went wrong is not the figure.
    assert overhead_percent([(98.0, 100.0), (49.0, 50.0), (10.0, 100.0)]) == pytest.approx(2.0)


def test_commits_come_from_sparks_reports() -> None:
    def report(rows: int, timestamp: str, ms: float) -> dict[str, Any]:
        return {"numInputRows": rows, "timestamp": timestamp, "durationMs": {"triggerExecution": ms}}

    reports = [
        report(0, "2026-01-02T03:04:05.000Z", 3),
        report(10, "2026-01-02T03:04:05.100Z", 90),
        report(20, "2026-01-02T03:04:05.250Z", 110),
    ]
    first, second = commits_of(reports)
    assert (first.rows, second.rows) == (10, 20)
    assert first.ended_ms - first.began_ms == pytest.approx(90)
    assert second.began_ms - first.began_ms == pytest.approx(150)


def batches(*spans: tuple[int, float, float]) -> list[Commit]:
    return [Commit(*span) for span in spans]


def test_warm_batches_are_full_and_not_the_first() -> None:
    every = batches((100, 0, 500), (100, 500, 700), (100, 1600, 1700), (100, 1700, 1800), (30, 1800, 1850))
    assert warm_span(every, warm_ms=1000) == (2, 4)
    assert warm_span(every, warm_ms=0) == (1, 4)
    first, end = warm_span(every[:1])
    assert end <= first, "a run of one batch has nothing to measure"
    assert warm_span([]) == (0, 0)


def test_rate_is_from_commit_to_commit_and_knows_idle_time() -> None:
    busy = batches((100, 0, 100), (100, 100, 200), (100, 201, 300))
    assert rate_of(busy, 1, 3) == (pytest.approx(1000), 0.0)
    idle = batches((100, 0, 80), (100, 100, 180), (100, 200, 280))
    rate, share = rate_of(idle, 1, 3)
    assert rate == pytest.approx(1000), "waiting counts as time"
    assert share == pytest.approx(0.2)


@pytest.mark.parametrize("fixed_ms, rows_per_ms", [(40, 20), (90, 50), (5, 200), (200, 60)])
def test_a_bound_is_found_that_fills_the_trigger(fixed_ms: float, rows_per_ms: float) -> None:
    trigger_ms, bound, tried = 1000.0, 1000, dict[int, float]()
    for _ in range(8):
        tried[bound] = fixed_ms + bound / rows_per_ms
        following = next_bound(tried, trigger_ms)
        if following is None:
            break
        bound = following
    chosen = chosen_bound(tried, trigger_ms)
    assert 1.1 <= tried[chosen] / trigger_ms <= 1.5


def test_a_jump_between_two_ways_of_writing_ends_above_it() -> None:
    """The driver writes small batches, tasks write larger ones, with nothing in between."""
    tried: dict[int, float] = {}
    bound: int | None = 1500
    while bound is not None and len(tried) < 8:
        tried[bound] = 40 + bound / 80 if bound <= 4000 else 230 + bound / 80
        bound = next_bound(tried, 100)
    assert tried[chosen_bound(tried, 100)] >= 110, "the trigger is never waited for"


def test_outputs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Somewhere:
        servers = "nowhere"

    def problem(numbers: list[int]) -> str:
        monkeypatch.setattr(overhead_runs, "_keys", lambda *_: iter(number.to_bytes(8, "big") for number in numbers))
        return overhead_runs.problem_of(Somewhere(), "out", 4)  # type: ignore[arg-type]

    assert problem([3, 1, 0, 2]) == ""
    assert problem([0, 1, 2]) == "3 records with 3 keys came out of 4"
    assert problem([0, 1, 2, 2]) == "4 records with 3 keys came out of 4"
    assert problem([0, 1, 2, 3, 3]) == "5 records with 4 keys came out of 4"
    assert "unknown key" in problem([0, 1, 2, 9])


def test_batches_of_different_sizes_count_all_but_a_rest() -> None:
    rows = [5_000, 7_000, 9_000, 6_000, 6_200, 6_100, 500]
    commits = [Commit(count, 1_000.0 * n, 1_000.0 * n + 900) for n, count in enumerate(rows)]
    assert warm_span(commits, warm_ms=500) == (2, 6)


@pytest.mark.parametrize("limit, chosen", [(10**9, (120_000, 1200.0, 120_000)), (16_000, (30_000, 160.0, 16_000))])
def test_no_bound_is_tried_that_an_engine_does_not_reach(
    monkeypatch: pytest.MonkeyPatch, limit: int, chosen: tuple[int, float, int]
) -> None:
    """Otherwise topics of millions of records were made for batches that do not grow."""
    tried: list[int] = []

    def batch_of(bench: Any, guarantee: str, trigger: Any, bound: int) -> tuple[float, int]:
        tried.append(bound)
        return min(bound, limit) / 100, min(bound, limit)

    monkeypatch.setattr(overhead_runs, "batch_of", batch_of)
    bench: Any = SimpleNamespace(say=lambda text: None)
    trigger = overhead_runs.Trigger("1s", "1 second", 1000.0, 30_000)
    assert overhead_runs.calibrated(bench, trigger) == chosen
    assert max(tried) <= 150_000

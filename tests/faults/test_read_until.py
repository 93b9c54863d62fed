"""A read that ends (``Flow.read(until=...)``), killed on its way: the restart ends at the same offsets, exactly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from onceflow.client.offsets import LATEST, list_offsets
from onceflow.direct import run as direct_run
from onceflow.testing import independent

pytestmark = [pytest.mark.integration, pytest.mark.faults]

# Partition 0 has its bound in the batch that is killed, the other one behind it.
ENDS = {0: 130, 1: 600}


def run(pipe: Any, **write: Any) -> Any:
    flow = pipe.open()
    source = flow.read(pipe.source, max_records_per_batch=500, until=ENDS)
    query = flow.write(source.select("key", "value"), topic=pipe.target, **write).start()
    query.awaitTermination(60)
    return query


def check(pipe: Any) -> None:
    """What is committed are the records before the bound, each once, and batches without gap up to it."""
    source = independent.read_topic(pipe.bootstrap, pipe.source)
    wanted = sorted((seen.key, seen.value) for seen in source if seen.offset < ENDS[seen.partition])
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted((each.key, each.value) for each in seen) == wanted
    assert independent.committed_offsets(pipe.bootstrap, pipe.flow) == {
        (pipe.source, p): end for p, end in ENDS.items()
    }
    history = pipe.committed_progress()
    assert [progress.batch_id for progress in history] == list(range(len(history)))
    for before, after in itertools.pairwise(history):
        assert all(offset <= after.offsets[pipe.source][p] for p, offset in before.offsets[pipe.source].items())
    assert dict(history[-1].offsets[pipe.source]) == ENDS


@pytest.mark.long
def test_killed(make_pipe: Any, killed_together: Any) -> None:
    pipes = {step: make_pipe(partitions=2) for step in ("plan", "write", "end", "settle")}
    for pipe in pipes.values():
        pipe.fill(2500)
    until = {str(partition): end for partition, end in ENDS.items()}
    # 100 records of each partition are in the first batch: so partition 0 ends in the second.
    options = {step: {"until": until, "records_per_batch": 200, "write": {"engine": "tasks"}} for step in pipes}
    killed_together(pipes, options)
    for step, pipe in pipes.items():
        committed = len(independent.read_topic(pipe.bootstrap, pipe.target, decided=step in ("end", "settle")))
        assert committed < sum(ENDS.values())
        run(pipe)
        check(pipe)
        assert run(pipe).batches == []


def test_a_build_that_does_not_cap_progress_is_found_out(make_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write rows behind the bound, and the next run would skip others."""
    pipe = make_pipe(partitions=2)
    pipe.fill(2500)

    def to_the_end(takeover: Any, starts: Any, deadline: Any) -> Any:
        wanted = {topic: sorted(offsets) for topic, offsets in starts.items()}
        return list_offsets(takeover.session.cluster, wanted, LATEST, deadline)

    with monkeypatch.context() as mutant:
        mutant.setattr(direct_run, "_end_of_run", to_the_end)
        run(pipe)
    with pytest.raises(AssertionError):
        check(pipe)

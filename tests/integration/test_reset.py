"""`onceflow reset`, and what a start does when progress is gone without one."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
from click.testing import CliRunner

import onceflow
from onceflow.admin.change.reset import is_known
from onceflow.cli.main import cli
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import commit_offsets
from onceflow.client.settings import ClientSettings
from onceflow.client.transactions import Transactions
from onceflow.driver.record import progress_log
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress
from onceflow.testing import independent

pytestmark = pytest.mark.integration


def reset(pipe: Any) -> dict[str, Any]:
    arguments = ["reset", pipe.flow, "--bootstrap-servers", pipe.bootstrap, "--yes", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_flow_starts_over(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(300)
    pipe.run()
    forgotten = reset(pipe)["forgotten"]
    assert sum(forgotten["offsets"][pipe.source].values()) == 300
    assert independent.committed_offsets(pipe.bootstrap, pipe.flow) == {}
    assert reset(pipe)["forgotten"] is None
    pipe.run()
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert len(seen) == 600  # the outputs of before stay


def test_an_unknown_flow_is_an_error_before_anything_is_asked(make_pipe: Any) -> None:
    pipe = make_pipe()
    with closing(Cluster(ClientSettings(pipe.bootstrap))) as cluster:
        progress_log.ensure_topic(cluster, Deadline(30, "test"))
        there = Progress(pipe.flow, 1, {pipe.source: {0: 1}}, {}, 1_700_000_000_000)
        progress_log.write_progress(cluster, None, Names(pipe.flow), there, {}, Deadline(30, "test"))
    names = Names(f"{pipe.flow}-mistyped")
    arguments = ["reset", names.flow, "--bootstrap-servers", pipe.bootstrap]
    for more in ([], ["--yes"]):
        result = CliRunner().invoke(cli, [*arguments, *more], input="y\n")
        assert isinstance(result.exception, onceflow.OptionError)
        assert "is unknown here" in result.exception.what
        assert result.exception.next_step.startswith(f"did you mean {pipe.flow}? If not, ")
        assert result.output == ""
    assert not is_known(ClientSettings(pipe.bootstrap), names)  # looking has made nothing
    # Its transactional id is forgotten after a week; its offsets and its progress are not.
    cluster, deadline = Cluster(ClientSettings(pipe.bootstrap)), Deadline(30, "test")
    commit_offsets(cluster, names.group_id, {pipe.source: {0: 7}}, deadline)
    cluster.close()
    assert is_known(ClientSettings(pipe.bootstrap), names)
    assert not is_known(ClientSettings(pipe.bootstrap), Names(names.flow, "other.", "other."))


def test_a_running_driver_is_fenced(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(300)
    flow = pipe.open()
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    query.processAllAvailable()
    reset(pipe)
    pipe.fill(100)
    with pytest.raises(onceflow.FencedError):
        query.awaitTermination(60)


def test_lost_progress_is_not_a_first_start(make_pipe: Any) -> None:
    """The group's offsets point to a record that is gone: starting over in silence would double everything."""
    pipe = make_pipe()
    pipe.fill(100)
    cluster, deadline = Cluster(ClientSettings(pipe.bootstrap)), Deadline(30, "test")
    progress_log.ensure_topic(cluster, deadline)
    transactions = Transactions(cluster, f"onceflow.{pipe.flow}")
    transactions.init(deadline)
    transactions.begin(deadline)
    hint = progress_log.hint(pipe.flow, 123_456_789)
    transactions.commit_offsets(pipe.flow, {pipe.source: {0: 7}}, deadline, metadata=hint)
    transactions.end(deadline, commit=True)
    cluster.close()
    flow = pipe.open()
    with pytest.raises(onceflow.ProgressConflictError, match=r"(?s)progress record is gone.*onceflow reset"):
        flow.read(pipe.source)
    flow.close()
    reset(pipe)
    pipe.run()
    pipe.check()


def test_progress_topic_that_expires_is_refused(make_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_log, "topic_config", lambda *_: "delete")
    pipe = make_pipe()
    flow = pipe.open()
    with pytest.raises(onceflow.ProgressConflictError, match=r"(?s)cleanup.policy=delete.*--add-config"):
        flow.read(pipe.source)
    flow.close()


def test_prefixes_make_another_flow(make_pipe: Any) -> None:
    pipe = make_pipe()
    pipe.fill(100)
    pipe.run()
    other = pipe.open(transactional_id_prefix="team-b.", group_id_prefix="team-b.")
    query = other.write(other.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    query.processAllAvailable()
    query.stop()
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True)) == 200


def test_a_source_can_be_dropped_and_taken_up_again(make_pipe: Any, make_topic: Any) -> None:
    pipe = make_pipe()
    second = make_topic("second", 2)
    pipe.fill(100)
    independent.fill(pipe.bootstrap, second, [(None, b"s%d" % n) for n in range(50)])

    def run(topics: list[str]) -> None:
        flow = pipe.open()
        frames = [flow.read(topic).select("key", "value") for topic in topics]
        df = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
        query = flow.write(df, topic=pipe.target).start()
        query.processAllAvailable()
        query.stop()

    run([pipe.source, second])
    independent.fill(pipe.bootstrap, second, [(None, b"t%d" % n) for n in range(50)])
    pipe.fill(100)
    run([pipe.source])
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True)) == 250
    # Its group offsets stay as they were; they are not committed with the others any more.
    committed = independent.committed_offsets(pipe.bootstrap, pipe.flow)
    assert sum(offset for (topic, _), offset in committed.items() if topic == second) == 50
    run([second, pipe.source])
    assert len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True)) == 300

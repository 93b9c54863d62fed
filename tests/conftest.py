"""Shared fixtures. The broker, topics and the SparkSession come from onceflow.testing.plugin (an entry point)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import hypothesis
import pytest

from onceflow import hooks
from onceflow.driver.record import progress_log
from onceflow.protocol import progress as progress_records
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.s3 import S3Server, running_s3

LONG_SECONDS = 600
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; what commands print would depend on it

# No example fails because it is slow: a machine may be busy at any moment.
hypothesis.settings.register_profile("onceflow", deadline=None, max_examples=40)
hypothesis.settings.register_profile("onceflow-long", deadline=None, max_examples=200)
hypothesis.settings.register_profile("onceflow-fast", deadline=None, max_examples=15)
hypothesis.settings.load_profile("onceflow")

# The JVMs of tests live for minutes at most, on few cores: there the second compiler takes more than it gives back.
QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
if QUICK_COMPILER not in os.environ.get("JAVA_TOOL_OPTIONS", ""):  # as it is when this process was started by pytest
    os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {QUICK_COMPILER}".strip()

# Tests start dozens of Python processes. With bytecode on disk each of them begins earlier, also where the environment
# asks for none (as containers do); pytest's own, with the rewritten assertions, takes seconds to make.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts what runs in the background with Ctrl-C ignored, and processes inherit it: tests of Ctrl-C would fail.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The long tests try more examples, `make fast` tries fewer."""
    if config.getoption("markexpr") == "long":
        hypothesis.settings.load_profile("onceflow-long")
    elif "not slow" in config.getoption("markexpr"):
        hypothesis.settings.load_profile("onceflow-fast")


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not walk over it, a million objects, again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and count as deselected, the tests of what this version of Spark does not have.

    Mark those of the suite of external sinks that kill processes: the suite, which others use, has no marks of ours.

    Of a test that is long but for some parameters, all others are long. Long tests get more time: one of two minutes
    takes twice as long beside another one.
    """
    from onceflow.spark import versions

    for item in items:
        if getattr(item, "originalname", "") == "test_processes_are_killed_at_any_moment":
            item.add_marker(pytest.mark.faults)
        if not _is_short(item):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    _check_short(
        items, whole=not any("::" in argument for argument in config.args) and not config.getoption("lf", False)
    )
    marks = {item: item.get_closest_marker("spark_since") for item in items}
    newer = [item for item, mark in marks.items() if mark and versions.current() < mark.args]
    if newer:
        config.hook.pytest_deselected(items=newer)
        items[:] = [item for item in items if item not in newer]


def _is_short(item: pytest.Item) -> bool:
    """Whether the mark ``long_but`` names the parameters of a test, or it has no such mark."""
    mark = item.get_closest_marker("long_but")
    if mark is None:
        return True
    if getattr(item, "callspec", None) is None:
        raise pytest.UsageError(f"long_but of {item.name}: it has no parameters; mark it `long`")
    return cast(pytest.Function, item).callspec.id in mark.args


def _check_short(items: list[pytest.Item], *, whole: bool) -> None:
    """Refuse names of parameters that do not exist: `make test` would leave the test out.

    Args:
        whole: whether the files were collected with all of their tests.
    """
    collected: dict[Any, list[str]] = {}
    named: dict[Any, set[str]] = {}
    for item in items:
        if whole and (mark := item.get_closest_marker("long_but")) is not None:
            function = cast(pytest.Function, item)
            collected.setdefault(function.function, []).append(function.callspec.id)
            named[function.function] = {str(name) for name in mark.args}
    for function, ids in collected.items():
        if missing := named[function] - {*ids}:
            raise pytest.UsageError(f"long_but of {function.__name__}: no {sorted(missing)} among {sorted(ids)}")


DRIVER = Path(__file__).parent / "faults" / "driver.py"
STATE_DRIVER = DRIVER.with_name("state_driver.py")
DRIVERS = DRIVER.with_name("drivers.py")


def run_driver(script: Path, rule: str | None, arguments: Any) -> subprocess.Popen[str]:
    """A driver process in a session of its own, with a fault rule or none."""
    environment = {key: value for key, value in os.environ.items() if key != hooks.VARIABLE}
    if rule is not None:
        environment[hooks.VARIABLE] = rule
    return subprocess.Popen(
        [sys.executable, str(script), json.dumps(arguments)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_driver(process: subprocess.Popen[str]) -> None:
    """End the JVM and the workers that a killed driver leaves behind; ``run_driver`` has started them."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(30)
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def _command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "onceflow.cli.main", *arguments], text=True, **pipes) as running:
        given_up = threading.Timer(60, running.kill)
        given_up.start()
        try:
            yield running
        finally:
            given_up.cancel()
            running.kill()


@pytest.fixture
def command() -> Callable[..., contextlib.AbstractContextManager[subprocess.Popen[str]]]:
    """``with command("topic", "list") as process``: a command as a process of its own, given up after a minute."""
    return _command


@dataclass
class SmallDisk:
    """A folder in which files can soon grow no more.

    It is a file system of its own where this process may mount one. Elsewhere the files of this process are not let
    grow (RLIMIT_FSIZE): writes are cut off there, too.
    """

    folder: Path
    mounted: bool

    def fill(self, left: int) -> None:
        """Leave room for this many bytes."""
        if not self.mounted:
            longest = max((each.stat().st_size for each in self.folder.rglob("*") if each.is_file()), default=0)
            self._limit(longest + left)
            return
        free = os.statvfs(self.folder)
        with (self.folder / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bfree * free.f_frsize - left)

    def mend(self) -> None:
        """Make room again."""
        if self.mounted:
            (self.folder / "ballast").unlink(missing_ok=True)
        else:
            self._limit(resource.RLIM_INFINITY)

    @staticmethod
    def _limit(size: int) -> None:
        sys.dont_write_bytecode = size != resource.RLIM_INFINITY  # it would be cut off, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture
def make_mount() -> Iterator[Callable[[int, str], tuple[Path, bool]]]:
    """Makes a folder, and in it, at a path, a small file system in memory of so many bytes; False: that is not
    permitted here. It is not below the folders of pytest: if this process is killed, the mount stays, and later runs
    could not remove them."""
    made: list[tuple[Path, Path | None]] = []

    def make(size: int, path: str = "") -> tuple[Path, bool]:
        folder = Path(tempfile.mkdtemp(prefix="onceflow-disk-"))
        at = folder / path
        at.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "onceflow-disk", str(at)]
        mounted = shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True).returncode
        made.append((folder, at if mounted else None))
        return folder, mounted

    yield make
    for folder, mounted in made:
        if mounted is not None:
            subprocess.run(["umount", "--lazy", str(mounted)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def small_disk(make_mount: Callable[..., tuple[Path, bool]]) -> Iterator[SmallDisk]:
    """A file system of 48 MB."""
    disk = SmallDisk(*make_mount(48 << 20))
    try:
        yield disk
    finally:
        disk.mend()


@dataclass
class Pipe:
    """One flow from a filled topic to an output topic, and what must come out."""

    bootstrap: str
    source: str
    target: str
    flow: str
    spark: Any
    tmp_path: Path
    sent: list[tuple[bytes | None, bytes | None]] = field(default_factory=list)

    def fill(self, count: int, *, keys: int = 50) -> None:
        """Produce ``count`` records; values are unique and tell their order within a key."""
        first = len(self.sent)
        more: list[tuple[bytes | None, bytes | None]] = [
            (f"key-{n % keys}".encode(), f"{n:09d}".encode()) for n in range(first, first + count)
        ]
        independent.fill(self.bootstrap, self.source, more)
        self.sent += more

    def open(self, **flow_options: Any) -> Any:
        from onceflow import Flow

        return Flow(self.flow, self.spark, bootstrap_servers=self.bootstrap, **flow_options)

    def run(self, *, read: dict[str, Any] | None = None, **write: Any) -> Any:
        """Start the flow in this process, let it write everything there is, stop it."""
        flow = self.open()
        source = flow.read(self.source, **{"max_records_per_batch": 1000, **(read or {})})
        query = flow.write(source.select("key", "value"), topic=self.target, **write).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return query

    def driver(self, rule: str | None = None, **options: Any) -> subprocess.Popen[str]:
        """The same flow as a process of its own (``tests/faults/driver.py``)."""
        return run_driver(DRIVER, rule, self.arguments(**options))

    def arguments(self, **options: Any) -> dict[str, Any]:
        return {
            "bootstrap": self.bootstrap,
            "flow": self.flow,
            "source": self.source,
            "target": self.target,
            **options,
        }

    def end_driver(self, process: subprocess.Popen[str]) -> None:
        end_driver(process)

    def committed_progress(self) -> list[Progress]:
        """What the progress topic shows of the flow, in order."""
        found = []
        for seen in independent.read_topic(self.bootstrap, PROGRESS_TOPIC):
            if seen.key == self.flow.encode() and seen.value is not None:
                assert seen.partition == progress_log.partition_of(self.flow)
                found.append(progress_records.decode(seen.key, seen.value))
        return found

    def check(self) -> list[independent.Seen]:
        """Exactly once: every record once, in order of its key, in the partition of its key; progress agrees."""
        seen = independent.read_topic(self.bootstrap, self.target, decided=True)
        assert_same_records(seen, self.sent)
        assert_key_order(seen, self.sent)
        ends = independent.end_offsets(self.bootstrap, self.source)
        assert independent.committed_offsets(self.bootstrap, self.flow) == ends
        return seen


@dataclass
class StatePipe:
    """One flow with a process step (``tests/faults/ledger.py``), and what must be in its output and its state."""

    bootstrap: str
    source: str
    target: str
    table: str
    flow: str
    spark: Any
    tmp_path: Path
    ledger: Any
    sent: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def state_dir(self) -> Path:
        return self.tmp_path / "state"

    @property
    def folder(self) -> Path:
        """Where the local stores of the table are, a folder for each partition."""
        return self.state_dir / self.flow / self.table

    def fill(self, count: int) -> None:
        more = self.ledger.inputs(len(self.sent), count)
        independent.fill(self.bootstrap, self.source, more)
        self.sent += more

    def start(
        self,
        *,
        read: dict[str, Any] | None = None,
        process: dict[str, Any] | None = None,
        deduplicate: dict[str, Any] | None = None,
        joined: dict[str, Any] | None = None,
        inside: bool = False,
        **write: Any,
    ) -> Any:
        """The running query. ``inside``: the step is a part of the query instead of written as it is.

        Args:
            deduplicate: the step is a ``Flow.deduplicate`` of the records of ``tests/faults/dedup_ledger.py``.
            joined: the step is a join by time of the records of ``tests/faults/join_ledger.py``.
        """
        from onceflow import Flow

        flow = Flow(self.flow, self.spark, bootstrap_servers=self.bootstrap)
        try:
            source = flow.read(self.source, **{"max_records_per_batch": 1000, **(read or {})})
            options: dict[str, Any] = {"table": self.table, "state_dir": self.state_dir}
            if deduplicate is not None:
                rows = source.selectExpr("*", *fault_module("dedup_ledger").COLUMNS)
                output = flow.deduplicate(rows, **options, **deduplicate)
            elif joined is not None:
                output = fault_module("join_ledger").joined(flow, source, **options, **joined)
            else:
                output = flow.process(source, **{"processor": self.ledger.Ledger(), **options, **(process or {})})
            if inside:
                output = output.where("value is not null")
            return flow.write(output, topic=self.target, **write).start()
        except BaseException:
            flow.close()
            raise

    def run(self, **options: Any) -> Any:
        """Start the flow in this process, let it write everything there is, stop it."""
        query = self.start(**options)
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return query

    def driver(self, rule: str | None = None, **options: Any) -> subprocess.Popen[str]:
        """The same flow as a process of its own (``tests/faults/state_driver.py``)."""
        return run_driver(STATE_DRIVER, rule, self.arguments(**options))

    def arguments(self, **options: Any) -> dict[str, Any]:
        return {
            "bootstrap": self.bootstrap,
            "flow": self.flow,
            "source": self.source,
            "target": self.target,
            "table": self.table,
            "state_dir": str(self.state_dir),
            **options,
        }

    end_driver = Pipe.end_driver
    committed_progress = Pipe.committed_progress

    def outputs(self) -> list[dict[str, Any]]:
        """What the target shows to any reader, decoded."""
        return [json.loads(s.value or b"") for s in independent.read_topic(self.bootstrap, self.target, decided=True)]

    def table_rows(self) -> dict[bytes, Any]:
        """The table topic as any reader sees it: last value per key, decoded."""
        rows: dict[bytes, Any] = {}
        for seen in independent.read_topic(self.bootstrap, self.table, decided=True):
            assert seen.key is not None
            if seen.value is None:
                rows.pop(seen.key, None)
            else:
                rows[seen.key] = json.loads(seen.value)
        return rows

    def check(self, *, local: bool = True, topic: bool = True) -> None:
        """Outputs once each and right; state in the topic = state in the local store = state by an independent fold.

        Args:
            topic: whether the table has a topic.
        """
        outputs, sums, digits = self.ledger.expected(self.sent)
        seen = self.outputs()
        numbers = Counter(value["n"] for value in seen)
        assert not set(outputs) - set(numbers), f"lost: {sorted(set(outputs) - set(numbers))[:5]}"
        assert numbers.most_common(1)[0][1] == 1, f"doubled: {numbers.most_common(3)}"
        assert {value["n"]: value for value in seen} == outputs
        if topic:
            assert self.table_rows() == sums
        ends = independent.end_offsets(self.bootstrap, self.source)
        assert independent.committed_offsets(self.bootstrap, self.flow) == ends
        if local:
            from onceflow import Table

            stored = {key: json.loads(value) for key, value in Table.of_flow(self.folder).range()}
            assert stored == sums
            maps = {
                (key, entry.decode()): json.loads(value)
                for key, entry, value in Table.of_flow(self.folder).map_entries("digits")
            }
            assert maps == digits

    def check_at_least_once(self) -> int:
        """Every record has been processed at least once: outputs are there, and no state counts less than a fold.

        Returns:
            How many outputs are there more than once.
        """
        outputs, sums, _ = self.ledger.expected(self.sent)
        numbers = Counter(value["n"] for value in self.outputs())
        assert not set(outputs) - set(numbers), f"lost: {sorted(set(outputs) - set(numbers))[:5]}"
        assert not set(numbers) - set(outputs)
        rows = self.table_rows()
        less = {
            key: (rows.get(key), row)
            for key, row in sums.items()
            if rows.get(key, {"count": 0})["count"] < row["count"]
        }
        assert not less, f"state counts less than there was: {less}"
        ends = independent.end_offsets(self.bootstrap, self.source)
        assert independent.committed_offsets(self.bootstrap, self.flow) == ends
        return sum(count - 1 for count in numbers.values())


def assert_same_records(seen: list[independent.Seen], sent: list[tuple[bytes | None, bytes | None]]) -> None:
    got, expected = Counter((s.key, s.value) for s in seen), Counter(sent)
    lost, doubled = expected - got, got - expected
    assert not lost, f"{lost.total()} records lost, for example {list(lost)[:3]}"
    assert not doubled, f"{doubled.total()} records doubled or foreign, for example {list(doubled)[:3]}"


def assert_key_order(seen: list[independent.Seen], sent: list[tuple[bytes | None, bytes | None]]) -> None:
    by_key: dict[bytes | None, list[bytes | None]] = {}
    partitions: dict[bytes | None, set[int]] = {}
    for record in sorted(seen, key=lambda s: (s.partition, s.offset)):
        by_key.setdefault(record.key, []).append(record.value)
        partitions.setdefault(record.key, set()).add(record.partition)
    assert all(len(found) == 1 for found in partitions.values()), "a key is in several partitions"
    expected: dict[bytes | None, list[bytes | None]] = {}
    for key, value in sent:
        expected.setdefault(key, []).append(value)
    assert by_key == expected, "records of a key are out of order"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server with the S3 protocol."""
    with running_s3() as server:
        yield server


@pytest.fixture
def make_pipe(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[..., Pipe]:
    """``make_pipe(partitions=4, target_partitions=None)``: an empty source, an empty target and a flow name."""

    def make(partitions: int = 4, target_partitions: int | None = None) -> Pipe:
        source = make_topic("in", partitions)
        target = make_topic("out", target_partitions or partitions)
        return Pipe(onceflow_broker, source, target, f"flow-{source}", onceflow_spark, tmp_path)

    return make


def fault_module(name: str) -> Any:
    """A module of ``tests/faults`` that drivers import, too."""
    sys.path.insert(0, str(DRIVER.parent))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DRIVER.parent))


@pytest.fixture(scope="session")
def ledger() -> Any:
    """The module ``tests/faults/ledger.py``."""
    module = fault_module("ledger")
    module.use()
    return module


@pytest.fixture(scope="session")
def external_flow() -> Any:
    """The module ``tests/faults/external_flow.py``."""
    module = fault_module("external_flow")
    module.use()
    return module


@pytest.fixture(scope="session")
def claim_check_flow() -> Any:
    """The module ``tests/faults/claim_check_flow.py``."""
    module = fault_module("claim_check_flow")
    module.use()
    return module


@pytest.fixture(scope="session")
def call_flow() -> Any:
    """The module ``tests/faults/call_flow.py``."""
    module = fault_module("call_flow")
    module.use()
    return module


@pytest.fixture
def driver_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``run_driver``; what is left of a driver is ended before the next one starts, and with the test."""
    running: list[subprocess.Popen[str]] = []

    def end() -> None:
        while running:
            end_driver(running.pop())

    def start(*arguments: Any) -> subprocess.Popen[str]:
        end()
        running.append(run_driver(*arguments))
        return running[-1]

    yield start
    end()


@pytest.fixture
def killed_together(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """``killed_together({step: pipe}, {step: options})``: one driver runs all these flows, each up to its step in
    batch 2, and is killed (SIGKILL) when all are there. What it leaves behind is ended with the test.

    The name of a step may be followed by a space and more, for several flows at the same step. ``batches={step: n}``
    for another batch than 2.

    A flow with ``trapped={step: file}`` waits by itself in place of the step; it makes the file then.
    """
    killed: list[tuple[subprocess.Popen[str], threading.Thread]] = []

    def kill(
        pipes: dict[str, Any],
        options: dict[str, dict[str, Any]],
        trapped: Mapping[str, Path] = MappingProxyType({}),
        batches: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        reached = {step: tmp_path / f"at-{step}" for step in pipes} | dict(trapped)
        rules = []
        for name, pipe in pipes.items():
            if name in trapped:
                continue
            step = name.partition(" ")[0]
            batch = {} if step == "init" else {"batch": batches.get(name, 2)}
            rule = faults.fault(step, "pause", flow=pipe.flow, once_file=str(reached[name]), **batch)
            rules += faults.parsed(rule)
        arguments = [pipe.arguments(**options[step]) for step, pipe in pipes.items()]
        process = run_driver(DRIVERS, faults.value_of(*rules), arguments)
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
        reader.start()
        killed.append((process, reader))

        def missing() -> list[str]:
            return [step for step, file in reached.items() if not file.exists()]

        wait_until(
            lambda: not missing(),
            120,
            lambda: f"the steps {missing()} are reached\n{''.join(said)}",
            useless=lambda: process.poll() is not None and "the driver has ended",
        )
        process.kill()
        assert process.wait(30) == -signal.SIGKILL

    yield kill
    for process, reader in killed:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(30)  # its last lines, before the pipe is closed
        end_driver(process)


@pytest.fixture(scope="session")
def side_outputs() -> Any:
    """The module ``tests/faults/side_outputs.py``."""
    module = fault_module("side_outputs")
    module.use()
    return module


@pytest.fixture
def make_spark_state_pipe(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[[str], Any]:
    """``make_spark_state_pipe("aggregation")``: two empty sources, an empty target, a flow, no checkpoint yet."""

    def make(query: str) -> Any:
        sources = [make_topic("left", 3), make_topic("right", 3)]
        pipe = fault_module("spark_state_pipe").SparkStatePipe
        return pipe(
            query,
            onceflow_broker,
            sources,
            make_topic("out", 2),
            f"flow-{sources[0]}",
            onceflow_spark,
            tmp_path / "checkpoint",
            run_driver,
            end_driver,
        )

    return make


@pytest.fixture
def make_state_pipe(
    request: pytest.FixtureRequest,
    onceflow_broker: str,
    make_topic: Callable[..., str],
    tmp_path: Path,
    ledger: Any,
) -> Callable[..., StatePipe]:
    """``make_state_pipe(partitions=4, target_partitions=None)``: an empty source and target, no table yet.

    ``spark=False``: for a flow that only other processes run.
    """

    def make(partitions: int = 4, target_partitions: int | None = None, *, spark: bool = True) -> StatePipe:
        session = request.getfixturevalue("onceflow_spark") if spark else None
        source = make_topic("in", partitions)
        target = make_topic("out", target_partitions or partitions)
        table = source.replace("in-", "table-", 1)
        return StatePipe(onceflow_broker, source, target, table, f"flow-{source}", session, tmp_path, ledger)

    return make


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``inject("progress", "raise", batch=2)``: a fault in this process and the tasks of its flows."""

    def inject_(step: str, action: str, **fields: Any) -> None:
        faults._fired.clear()
        monkeypatch.setenv(hooks.VARIABLE, faults.fault(step, action, **fields))

    return inject_


@pytest.fixture
def inject_at_every_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``inject_at_every_step("kill-workers")``: step after step, each in a batch of its own, from batch 2 on."""

    def inject_(action: str) -> None:
        faults._fired.clear()
        rules = [{"step": hooks.STEPS[0], "action": action}]
        rules += [{"step": step, "action": action, "batch": n} for n, step in enumerate(hooks.STEPS[1:], 2)]
        monkeypatch.setenv(hooks.VARIABLE, faults.value_of(*rules))

    return inject_


@pytest.fixture(autouse=True)
def _no_faults_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hooks.VARIABLE, raising=False)

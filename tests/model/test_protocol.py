"""The model of the protocol holds, its known mistakes are found, and both are about the code that is there."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onceflow import hooks
from onceflow.protocol.transaction import Event, IllegalEventError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "model.md"


@contextmanager
def modules_here() -> Iterator[None]:
    """Modules of this folder can be imported, under the names by which they import each other."""
    sys.path.insert(0, str(HERE))
    try:
        yield
    finally:
        sys.path.remove(str(HERE))


with modules_here():
    brokers, explore, protocol, searches, variants = map(
        importlib.import_module, ("brokers", "explore", "protocol", "searches", "variants")
    )

# What is done by brokers, by whoever starts drivers, and by faults.
OTHERS = {"append", "markers", "start"}
FAULT_ACTIONS = {"timeout", "forgets", "crash", "task dies", "second driver"}
PHASES = ["STARTED", "FENCED", "TO_SETTLE", "READY", "PLANNED", "BEGUN", "WRITING", "AUDITED", "IN_PROGRESS", "ENDING"]
VARIANTS = {variant.name: variant for variant in variants.VARIANTS}
per_variant = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "goes_on_unchecked" else []) for name in VARIANTS]
)


def named(config: Any) -> str:
    defaults = protocol.Config()._asdict()
    return "-".join(f"{name}={value}" for name, value in config._asdict().items() if value != defaults[name])


#: At version 1, where there are several times as many states, these take most of the time.
LONG = [protocol.SMALL[1], protocol.SMALL[2], protocol.SMALL[4], protocol.SMALL[5]]
#: These take seconds at version 2, too.
SLOW = [*protocol.SMALL[:3], *protocol.SMALL[4:], {"rivals": 1}]


def jobs(
    search: Callable[[Any], Any], *rows: dict[str, int], long: Sequence[dict[str, int]] = ()
) -> pytest.MarkDecorator:
    """A test for each of these sizes and both versions of transactions.

    Args:
        long: at version 1, these are left to `make test-long`.
    """
    found = []
    for row in rows:
        for version in (1, 2):
            config = protocol.Config(version=version, **row)
            marks = [pytest.mark.long] if version == 1 and row in long else []
            marks += [pytest.mark.slow] if row in SLOW else []
            found.append(pytest.param((search, config), marks=marks, id=named(config)))
    return pytest.mark.parametrize("job", found)


# ---- the protocol ------------------------------------------------------------------------------------------


def test_drivers_take_the_steps_of_the_code() -> None:
    names = [action.name for action in protocol.Model(protocol.Config()).actions()]
    assert [name for name in names if name in hooks.STEPS] == list(hooks.STEPS)
    assert sorted(names) == sorted([*hooks.STEPS, hooks.ABORTED, *OTHERS, *FAULT_ACTIONS])


@pytest.fixture(scope="module")
def searched(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """``searched(job)``: what came of it. The jobs of all tests begin at once, as many as there are cores."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = [item.callspec.params["job"] for item in tests if "job" in item.callspec.params]
    spawn = multiprocessing.get_context("spawn")  # other tests have left threads, which a fork would not survive
    with modules_here(), ProcessPoolExecutor(min(os.cpu_count() or 1, len(wanted)), mp_context=spawn) as pool:
        found = {job: pool.submit(*job) for job in wanted}
        try:
            yield lambda job: found[job].result()
        finally:
            pool.shutdown(cancel_futures=True)


@jobs(searches.everything, *protocol.SMALL, long=LONG)
def test_everything_holds(searched: Any, job: Any, capsys: pytest.CaptureFixture[str], record_property: Any) -> None:
    config, result = job[1], searched(job)
    assert result.violation is None, explore.readable(result.violation, protocol.described)
    line = f"{named(config)}: {result.states:,} states, depth {result.depth}, {result.seconds:.1f} s"
    with capsys.disabled():
        print(f"\n  {line} ", end="")
    record_property("states", result.states)
    record_property("seconds", round(result.seconds, 2))
    possible = {*hooks.STEPS, *OTHERS}
    if config.deaths or config.timeouts or config.rivals or config.expiries:
        possible.add(hooks.ABORTED)
    kinds = {
        "forgets": "expiries",
        "timeout": "timeouts",
        "crash": "crashes",
        "task dies": "deaths",
        "second driver": "rivals",
    }
    possible |= {name for name, kind in kinds.items() if getattr(config, kind)}
    assert result.actions == possible


@pytest.mark.parametrize("version", [1, 2])
def test_a_standby_may_take_over_at_any_moment(version: int) -> None:
    """A false alarm is a second driver. It comes wherever one driver runs, as long as the search has one left."""
    model = protocol.Model(protocol.Config(version=version, rivals=1, lost=1))
    seen: set[str] = set()

    def checked(state: Any) -> str:
        if len(state.drivers) != 1 or not model.spent(state, "rivals"):
            return ""
        seen.add(state.drivers[0].phase)
        ((_, after),) = model.second(state)
        assert [each.phase for each in after.drivers] == [state.drivers[0].phase, brokers.STARTED]
        return ""

    explore.explore(model.initial(), model.actions(), {"note": checked}, key=model.key, reduce=False)
    assert seen >= {getattr(brokers, name) for name in PHASES}


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_drivers_that_stand_by_for_each_other(version: int) -> None:
    """The first one is taken for dead, stands by, and takes the flow back; then one of them dies."""
    result = searches.everything(protocol.Config(version=version, batches=1, rivals=2, crashes=1))
    assert result.violation is None, explore.readable(result.violation, protocol.described)


#: Of starts that fail, batches without effect, and drivers that are fenced: the model's drivers just stop.
NOT_MODELLED = {Event.GIVEN_UP, Event.NOTHING_WRITTEN, Event.FENCED}


@pytest.mark.parametrize("version", [1, 2])
def test_the_searches_take_every_event_of_the_table(version: int) -> None:
    """So no rule of the table is there that the model does not put to the test."""
    taken: set[Event] = set()
    for faults in ("deaths timeouts", "deaths leaders", "leaders", "timeouts expiries", "expiries deaths"):
        model = protocol.Model(protocol.Config(version=version, **dict.fromkeys(faults.split(), 1)))
        assert protocol.search(model).violation is None
        taken |= {event for _, event, _ in model.events}
    # Version 1 aborts by InitProducerId, version 2 gets its epochs from EndTxn (but for the one that Flow.write takes).
    other = {Event.ABORT_DONE} if version == 1 else {Event.TIMEOUT_CONTINUED, Event.EPOCH_BUMPED}
    assert taken >= set(Event) - NOT_MODELLED - other


COMPARED = {"crashes": 1, "deaths": 1, "rivals": 1, "lost": 1, "faults": 2}


@jobs(searches.with_and_without_reduction, COMPARED, long=[COMPARED])
@pytest.mark.slow
def test_the_reduction_leaves_nothing_out(searched: Any, job: Any) -> None:
    """With and without it, brokers go through the same states, with the same faults left."""
    reduced, full, differences = searched(job)
    assert reduced.violation is None
    assert full.violation is None
    assert reduced.states < full.states
    assert not differences


@jobs(
    searches.with_and_without_keys,
    {"rivals": 1},
    {"crashes": 1, "copies": 1},
    {"deaths": 1, "timeouts": 1, "lost": 1},
    {"crashes": 1, "timeouts": 1, "local": 1},
    {"crashes": 1, "expiries": 1},
    long=[{"rivals": 1}],
)
def test_states_of_one_key_go_on_alike(searched: Any, job: Any) -> None:
    """Told apart or not, the same keys are reached: one state of a key does stand for the others."""
    merged, apart, differences = searched(job)
    assert merged < apart
    assert not differences


# ---- known mistakes ----------------------------------------------------------------------------------------


@per_variant
def test_a_mistake_is_found(name: str) -> None:
    variant = VARIANTS[name]
    found = variant.search().violation
    assert found is not None, f"{variant.what}: not found"
    assert found.invariant == variant.breaks
    numbers = [line.split()[0] for line in explore.readable(found, protocol.described).splitlines()]
    assert numbers[: len(found.trace)] == [str(n) for n in range(1, len(found.trace) + 1)]
    assert numbers[len(found.trace)] == variant.breaks


@per_variant
def test_the_mistake_is_what_breaks_it(name: str) -> None:
    """The protocol itself holds in the very search that finds the mistake."""
    assert VARIANTS[name].search(protocol.Model).violation is None


@pytest.mark.parametrize("name", ["second_attempt_writes", "lost_answer_is_an_abort", "reads_before_fencing"])
def test_a_mistake_is_found_with_the_reduction_too(name: str) -> None:
    variant = VARIANTS[name]
    config = protocol.Config(**{"batches": 1, **variant.sizes})
    found = protocol.search(variant.model(config)).violation
    assert found is not None


REFUSED = ["init_instead_of_repeating", "lost_answer_is_an_abort", "reads_before_fencing", "tasks_commit"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_that_the_table_refuses(name: str) -> None:
    """It cannot be made: the transaction machine raises."""
    variant = VARIANTS[name]
    strict = type(variant.model.__name__, (variant.model,), {"follows_the_table": True})
    with pytest.raises(IllegalEventError):
        variant.search(strict)


def test_other_mistakes_follow_the_table() -> None:
    """The table cannot see them: `test_a_mistake_is_found` finds each of them while it reports to the table."""
    assert [name for name, variant in VARIANTS.items() if not variant.model.follows_the_table] == sorted(
        REFUSED, key=list(VARIANTS).index
    )


def test_every_invariant_has_a_mistake_that_breaks_it() -> None:
    invariants = protocol.Model(protocol.Config(local=1)).invariants()
    assert {variant.breaks for variant in VARIANTS.values()} == set(invariants)


# ---- safe, but worth knowing: docs/model.md ---------------------------------------------------------------


def shortest_to(model: Any, what: str, reached: Any) -> list[str]:
    """Details of the steps of the shortest trace to a state."""
    invariants = {"never": lambda state: what if reached(state) else ""}
    found = explore.explore(model.initial(), model.actions(), invariants, key=model.key, reduce=False).violation
    assert found is not None, f"not reached: {what}"
    return [f"{step.action}: {step.detail}" for step in found.trace]


@pytest.mark.parametrize("fault", ["deaths", "timeouts", "lost", "copies", "expiries"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_driver_that_is_alone_is_never_fenced(version: int, fault: str) -> None:
    def alone(s: Any) -> bool:
        return s.started == 1 and not s.drivers

    model = protocol.Model(protocol.Config(version=version, batches=1, **{fault: 1}))
    with pytest.raises(AssertionError, match="not reached"):
        shortest_to(model, "the only driver has stopped", alone)


def test_a_driver_whose_transaction_timed_out_goes_on_at_version_1() -> None:
    def has_committed(s: Any) -> bool:
        return s.started == 1 and not any(s.left) and s.progress.at == 1

    model = protocol.Model(protocol.Config(version=1, batches=1, timeouts=1))
    trace = shortest_to(model, "the batch is committed after a timeout", has_committed)
    assert any("its transaction was aborted" in step for step in trace)


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_driver_may_give_up_before_it_is_fenced(version: int) -> None:
    def one_has_gone(s: Any) -> bool:
        return s.started == 2 and [driver.phase for driver in s.drivers] == [protocol.STARTED]

    trace = shortest_to(protocol.Model(protocol.Config(version=version, batches=1, rivals=1)), "gone", one_has_gone)
    assert trace[-1].endswith("it gives up")
    assert sum("is to be aborted" in step for step in trace) >= protocol.Config().attempts


# ---- the code and the page ---------------------------------------------------------------------------------


def test_functions_that_docstrings_name_exist() -> None:
    """``Class.method`` and ``module.function`` in a docstring of the model are somewhere in src."""
    sources = [(path.stem, path.read_text()) for path in (ROOT / "src" / "onceflow").rglob("*.py")]
    tree = ast.parse((HERE / "protocol.py").read_text())
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    pairs = {pair for text in texts for pair in re.findall(r"(?<![\w.`])(_?[A-Za-z_]+)\.(_?[a-z]\w+)(?![\w.])", text)}
    pairs = {(owner, name) for owner, name in pairs if name != "py" and owner != "explore"}
    assert len(pairs) > 10
    for owner, name in sorted(pairs):
        homes = [text for stem, text in sources if stem == owner or re.search(rf"^class {owner}\b", text, re.M)]
        assert any(re.search(rf"^ *def {name}\(", text, re.M) for text in homes), f"{owner}.{name} is not in src"


def test_the_page_has_the_variants() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (I\d) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(variant.name, variant.what, variant.breaks) for variant in variants.VARIANTS]


def test_the_page_has_the_actions() -> None:
    names = {action.name for action in protocol.Model(protocol.Config()).actions()}
    table = PAGE.read_text().partition("| Action |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {name for cell in cells for name in re.findall("`(.+?)`", cell)} == names


def test_commands_of_the_page_are_accepted() -> None:
    commands = re.findall(r"^\.venv/bin/python tests/model/protocol\.py ?(.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        given = protocol.parser().parse_args(shlex.split(command.partition("#")[0]))
        assert given.variant in (None, "all", *VARIANTS)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert protocol.main(["--transaction-version", "2", "--batches", "1", "--crashes", "1"]) == 0
    title, row = capsys.readouterr().out.splitlines()
    assert title.split()[:2] == ["version", "batches"]
    assert row.split()[:4] == ["2", "1", "2", "1"]
    assert row.endswith("holds")


def test_an_incomplete_search_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert protocol.main(["--crashes", "1", "--states-max", "50"]) == 1
    out = capsys.readouterr().out
    assert out.count("NOT FINISHED") == 2
    assert "holds" not in out


def test_the_command_line_prints_a_counterexample(capsys: pytest.CaptureFixture[str]) -> None:
    assert protocol.main(["--variant", "lost_answer_is_an_abort"]) == 0
    out = capsys.readouterr().out
    assert "the answer is lost" in out
    assert "I2 does not hold" in out
    with pytest.raises(SystemExit):
        protocol.main(["--variant", "no_such_variant"])


# ---- the search itself -------------------------------------------------------------------------------------


def steps(*moves: tuple[str, dict[Any, list[Any]]], fault: str = "", local: str = "") -> list[Any]:
    """Actions of a graph: for each name, where it leads from which state."""
    return [
        explore.Action(
            name,
            lambda state, leads=leads: [(f"{state} to {target}", target) for target in leads.get(state, [])],
            fault=name == fault,
            local=name == local,
        )
        for name, leads in moves
    ]


def test_the_shortest_trace_is_found() -> None:
    actions = steps(("long", {0: [1], 1: [2], 2: [9]}), ("short", {0: [5], 5: [9]}))
    result = explore.explore(0, actions, {"below nine": lambda n: f"{n} is not" if n == 9 else ""})
    assert result.violation == ("below nine", "9 is not", (("short", "0 to 5"), ("short", "5 to 9")), 9)
    assert result.depth == 2


def test_the_initial_state_is_checked() -> None:
    result = explore.explore(9, [], {"below nine": lambda n: f"{n} is not" if n == 9 else ""})
    assert result.violation is not None
    assert result.violation.trace == ()


def test_all_states_are_counted() -> None:
    result = explore.explore(0, steps(("step", {0: [1, 2], 1: [3], 2: [3]})), {})
    assert result[:2] == (4, 4)
    assert result.depth == 2
    assert result.violation is None
    with pytest.raises(explore.SearchTooLargeError):
        explore.explore(0, steps(("step", {0: [1, 2], 1: [3], 2: [3]})), {}, states_max=3)
    assert explore.explore(0, steps(("step", {0: [1, 2], 1: [3], 2: [3]})), {}, states_max=4).states == 4


def test_states_of_one_key_are_one() -> None:
    result = explore.explore(0, steps(("step", {0: [1, -1], 1: [2], -1: [3]})), {}, key=abs)
    assert result.states == 3


def test_a_run_that_is_stuck_is_found() -> None:
    """Only a fault leads on: no run may count on it."""
    actions = steps(("step", {0: [1]}), ("fault", {1: [2]}), fault="fault")
    result = explore.explore(0, actions, {}, final=lambda n: "" if n == 2 else f"{n} is not final")
    assert result.violation is not None
    assert result.violation[0] == explore.ENDS
    assert result.violation.trace == (("step", "0 to 1"),)


def test_a_run_without_end_is_found() -> None:
    actions = steps(("step", {0: [1, 4], 1: [2], 2: [3, 1], 3: [4]}))
    result = explore.explore(0, actions, {}, final=lambda n: "")
    assert result.violation is not None
    assert "the last 2 steps" in result.violation.what
    assert [detail for _, detail in result.violation.trace][-2:] in (["1 to 2", "2 to 1"], ["2 to 1", "1 to 2"])


def test_a_cycle_through_a_fault_ends_with_the_faults() -> None:
    actions = steps(("step", {0: [1], 1: [2]}), ("fault", {1: [0]}), fault="fault")
    assert explore.explore(0, actions, {}, final=lambda n: "").violation is None


def test_a_local_step_is_followed_alone() -> None:
    moves = ("other", {(0, 0): [(0, 1)], (1, 0): [(1, 1)]}), ("local", {(0, 0): [(1, 0)], (0, 1): [(1, 1)]})
    assert explore.explore((0, 0), steps(*moves, local="local"), {}).states == 3
    assert explore.explore((0, 0), steps(*moves, local="local"), {}, reduce=False).states == 4

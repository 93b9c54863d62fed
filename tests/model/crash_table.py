"""What a crash just after each step leaves, and what the restart does: walked through in the model, printed as a table.

    python tests/model/crash_table.py

docs/internals.md has the table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from brokers import ONGOING, PREPARE_COMMIT, Config, State
from explore import Action

from protocol import Model

STEPS = ("init", "plan", "begin", "write", "audit", "progress", "end", "settle")
BATCHES = 2
HEADER = ("Crash just after", "The transaction is", "Readers see of the batch", "The restart")


def rows(version: int) -> list[tuple[str, str, str, str]]:
    """One row for each step."""
    return [
        _row(Model(Config(version=version, batches=BATCHES, outputs=2, crashes=1, local=1)), step) for step in STEPS
    ]


def table(version: int) -> str:
    """In Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *((f"`{row[0]}`", *row[1:]) for row in rows(version))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(model: Model, step: str) -> tuple[str, str, str, str]:
    batch = 1 if step in ("init", "settle") else 2
    crashed = next(iter(_action(model, "crash").run(_until(model, step))))[1]
    state = crashed.coordinator.state
    committed = crashed.progress.at >= batch or state == PREPARE_COMMIT
    after = [(name, reached) for name, _, reached in _walk(model, crashed)]
    end = after[-1][1]
    writes = [name for name, _ in after].count("write")
    # What the table says has to be what the model does: every batch but the committed ones is written once.
    if model.final(end) or writes != BATCHES - (batch if committed else batch - 1):
        raise AssertionError(f"after a crash at {step}: {writes} batches are written; {model.final(end)}")
    readers = (
        "all of it"
        if crashed.progress.at >= batch
        else "all of it, once the markers are there"
        if committed
        else "nothing"
    )
    transaction = "open" if state == ONGOING else "committed" if committed else "not begun"
    restart = "continues after the batch" if committed else "runs the batch"
    return step, transaction, readers, f"aborts it, {restart} again" if state == ONGOING else restart


def _until(model: Model, step: str) -> State:
    """The state just after a step: of the second batch; ``init`` is done when progress is read, ``settle`` when the
    first batch is settled."""
    seen: list[str] = []
    reached: State | None = None
    for name, _, state in _walk(model, model.initial()):
        if reached is not None and name != "append":
            return reached
        seen.append(name)
        if reached is not None or seen.count(step) == 2:
            reached = state  # `write` and `progress` are done when everything is acknowledged
    raise AssertionError(f"{step} was not reached: {seen}")


def _walk(model: Model, state: State) -> Iterator[tuple[str, str, State]]:
    """One run without faults, batches of one record; the network and the brokers are quicker than the driver."""
    actions = sorted(model.actions(), key=lambda action: action.name not in ("markers", "append"))
    while True:
        found = next(
            ((action.name, what, after) for action in actions if not action.fault for what, after in action.run(state)),
            None,
        )
        if found is None:
            return
        yield found
        state = found[2]


def _action(model: Model, name: str) -> Action:
    return next(action for action in model.actions() if action.name == name)


if __name__ == "__main__":
    for number in (2, 1):
        print(f"Transaction version {number}\n\n{table(number)}\n")

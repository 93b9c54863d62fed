"""A progress bar for commands that take a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr, if that is a terminal. It is gone when the block ends.

    Yields a function that shows a text, how much is done, and of how much (None: not known yet). Nothing is shown
    before it is called.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bars:
        bar = bars.add_task("", total=None, visible=False)

        def show(text: str, done: int, total: int | None) -> None:
            bars.update(bar, description=text, completed=done, total=total, visible=True)

        yield show

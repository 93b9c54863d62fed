"""The demo ``moving-average``: averages of real series, record by record and column by column, and a picture of them.

generator -> measurements -> [averages]         -> averages          (bad-measurements)
                         \\-> [averages-columns] -> averages-columns  (bad-measurements-columns)
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from onceflow.errors import OptionError
from onceflow_workshop.demos import moving_average_data as data
from onceflow_workshop.demos.audit import Expected, Message
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.reading import read_topic
from onceflow_workshop.demos.service_files import service_file

SERVICE = service_file("moving-average/moving_average.py")
PICTURE = Path("moving-average.png")
# More would have to begin after the year 2999, which the services take for a mistake.
RECORDS_MAX = 1_000_000
PANELS = ("temperature/seattle", "weather/temp_max", "stocks/AAPL", "temperature/san-francisco")
# With more, averages over 20 values look like the values.
POINTS_MAX = 1_500
MEASURED = ("value",)
AVERAGES = {"last_n": "last 20 values", "last_t": "last 7 days", "all": "since the start"}
Point = tuple[datetime, list[float]]
Series = dict[str, list[Point]]


@dataclass(frozen=True)
class MovingAverageChoices(Choices):
    """Options of the command.

    Args:
        plot: where the picture goes; None: ``PICTURE``, in the current folder.
    """

    records: int = 50_000
    kills: int = 2
    plot: Path | None = None


class MovingAverage(Chain):
    """The same averages by two flows over the same measurements."""

    name = "moving-average"
    partitions: ClassVar[Mapping[str, int]] = {
        data.SOURCE: 4,
        "averages": 3,
        "averages-columns": 4,
        "bad-measurements": 2,
        "bad-measurements-columns": 1,
    }
    links: ClassVar[Sequence[Link]] = (
        Link("averages", (data.SOURCE,), "records", SERVICE, ("records",), keeps_state=True),
        Link("averages-columns", (data.SOURCE,), "columns", SERVICE, ("columns",), keeps_state=True),
    )
    inputs_of = (data.SOURCE,)
    outputs = ("averages", "averages-columns")
    dead_letters = ("bad-measurements", "bad-measurements-columns")
    choices: MovingAverageChoices

    @functools.cached_property
    def measurements(self) -> list[data.Measurement]:
        """The input, from the seed."""
        return list(data.generate(self.choices.seed, self.choices.records))

    def inputs(self) -> Iterator[Input]:
        return data.inputs(self.measurements)

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        averages = list(data.expected_averages(self.measurements))
        dead_letters = list(data.expected_dead_letters(self.measurements))
        return {
            data.SOURCE: data.expected_source(self.measurements),
            **dict.fromkeys(self.outputs, averages),
            **dict.fromkeys(self.dead_letters, dead_letters),
        }

    def identify(self, topic: str, message: Message) -> str | None:
        return data.identify(message)

    def more_topics(self) -> list[str]:
        tables = [f"windows{self.suffix}", f"windows-columns{self.suffix}"]
        return [*tables, *(f"{table}-internal" for table in tables)]

    def look_further(self, audit: Audit, display: Display) -> None:
        for name in self.dead_letters:
            found = read_topic(self.servers, self.topics[name], self.deadline)
            problems = data.dead_letter_problems(found, self.measurements, self.origins)
            audit.problems += [f"{self.topics[name]}: {problem}" for problem in problems]
        path = (self.choices.plot or PICTURE).absolute()
        read = {name: read_topic(self.servers, self.topics[name], self.deadline) for name in (data.SOURCE, "averages")}
        draw(path, points(read[data.SOURCE], MEASURED), points(read["averages"], list(AVERAGES)))
        display.say(f"drawn: {path}")
        audit.facts["plot"] = str(path)


# ---- the picture -------------------------------------------------------------------------------------


def points(messages: Iterable[Message], fields: Sequence[str]) -> Series:
    """What is to be drawn of a topic: of each series time and fields in units, in order; bad records are left out."""
    found: Series = {}
    for message in messages:
        if data.NUMBER in dict(message.headers):
            continue
        try:
            output = json.loads(message.value or b"")
            at = datetime.fromisoformat(output["time"].removesuffix("Z"))
            found.setdefault(output["series"], []).append((at, [output[field] / 1000 for field in fields]))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the audit says so
    return found


def draw(path: Path, measured: Series, averages: Series) -> None:
    """Draw the beginning of some series, with their averages, as a PNG.

    Args:
        measured, averages: ``points`` of the topics, with the fields ``MEASURED`` and ``AVERAGES``.

    Raises:
        EnvironmentUnusableError: no ``matplotlib``.
    """
    # Without pyplot there is no global state, and no window.
    figure = data.optional("matplotlib.figure").Figure(figsize=(14, 8), layout="constrained")
    canvas = data.optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    for panel, name in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        series, means = (beginning(each.get(name, [])) for each in (measured, averages))
        panel.set_title(f"{name}: {len(series):,} of {len(measured.get(name, [])):,} measurements")
        panel.plot([at for at, _ in series], [value for _, (value,) in series], color="0.75", label="measured")
        for n, label in enumerate(AVERAGES.values()):
            panel.plot([at for at, _ in means], [values[n] for _, values in means], label=label)
        panel.tick_params(axis="x", labelrotation=20)
    figure.axes[0].legend(loc="upper left")
    canvas.print_png(path)


def beginning(series: list[Point]) -> list[Point]:
    """The first points, as far as the series does not begin again."""
    return [point for point in series[:POINTS_MAX] if point[0] < series[0][0] + data.ROUND]


# ---- run ---------------------------------------------------------------------------------------------


def run(choices: MovingAverageChoices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``.

    Raises:
        OptionError: the picture cannot be written where it should be, or too many records.
        EnvironmentUnusableError: no ``vega_datasets`` or ``matplotlib``.
    """
    folder = (choices.plot or PICTURE).absolute().parent
    if not os.access(folder, os.W_OK):
        raise OptionError(
            f"The picture cannot be written to {folder}", next_step="use --plot PATH, in a folder of yours"
        )
    if choices.records > RECORDS_MAX:
        raise OptionError(f"{choices.records} records are too many", next_step=f"use at most --records {RECORDS_MAX}")
    # Now, and not when all is done.
    for module in ("vega_datasets", "matplotlib.figure"):
        data.optional(module)
    return run_chain(MovingAverage, choices)

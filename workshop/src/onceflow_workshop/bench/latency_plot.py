"""A picture of how long records took: how many took how long, and the share that took no longer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onceflow.errors import EnvironmentUnusableError
from onceflow_workshop.bench.latency import percentile_of_sorted

#: Pixels of the picture.
WIDTH, HEIGHT = 1200, 900
_DPI = 100
_PERCENTS = (50, 95, 99)
_BINS = 80


def module(name: str) -> Any:
    """A module of matplotlib.

    Raises:
        EnvironmentUnusableError: it is not installed.
    """
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise EnvironmentUnusableError(
            "A plot needs the package matplotlib, which cannot be imported",
            detail=str(error),
            next_step="pip install matplotlib, or leave out --plot",
        ) from error


def draw(path: Path, curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw the distributions as a PNG.

    Args:
        curves: milliseconds of each record, by what was measured. One without records is only named.

    Raises:
        EnvironmentUnusableError: no ``matplotlib``.
        OSError: the file cannot be written.
    """
    # Without pyplot there is no global state, and no window.
    figure = module("figure").Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, layout="constrained")
    canvas = module("backends.backend_agg").FigureCanvasAgg(figure)
    share, count = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    edges = bin_edges([ms for seen in curves.values() for ms in seen])
    for number, (label, seen) in enumerate(curves.items()):
        _draw_one(share, count, f"C{number % 10}", label, sorted(seen), edges)
    figure.suptitle(title)
    share.set_ylabel("records that took no longer [%]")
    share.set_ylim(0, 101)
    share.legend(loc="lower right")
    count.set_ylabel("records [%]")
    count.set_xlabel("from produce to read_committed consume [ms]")
    for panel in (share, count):
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(module("ticker").FuncFormatter(lambda ms, _: f"{ms:,g}"))
        panel.grid(visible=True, which="both", alpha=0.2)
    count.xaxis.set_minor_formatter(module("ticker").LogFormatter(minor_thresholds=(2, 0.5)))
    canvas.print_png(path)


def _draw_one(share: Any, count: Any, color: str, label: str, ordered: Sequence[float], edges: Sequence[float]) -> None:
    if not ordered:
        share.plot([], [], color=color, label=f"{label}: no records")
        return
    marks = [percentile_of_sorted(ordered, percent) for percent in _PERCENTS]
    figures = ", ".join(f"p{percent} {ms:,.0f} ms" for percent, ms in zip(_PERCENTS, marks, strict=True))
    # Steps of a thousandth are as fine as the picture.
    steps = [percent / 10 for percent in range(1, 1001)]
    share.step(
        [percentile_of_sorted(ordered, step) for step in steps],
        steps,
        where="post",
        color=color,
        label=f"{label}: {figures}",
    )
    share.plot(marks, _PERCENTS, "o", color=color)
    for percent, ms in zip(_PERCENTS, marks, strict=True):
        share.annotate(f"p{percent}", (ms, percent), textcoords="offset points", xytext=(6, -10), fontsize=8)
        count.axvline(ms, color=color, linestyle=":", linewidth=1)
    weights = [100 / len(ordered)] * len(ordered)
    count.hist(ordered, bins=edges, weights=weights, histtype="step", color=color)


def bin_edges(values: Sequence[float]) -> list[float]:
    """Edges of bins of the same width on a logarithmic axis, from the least value to the largest one."""
    least = max(0.1, min(values, default=1.0))
    most = max(least * 1.1, max(values, default=10.0))
    factor = (most / least) ** (1 / _BINS)
    inner = [least * factor**number for number in range(1, _BINS)]
    return [least, *inner, most]

"""The alert rules and the dashboard in deploy/: every expression is PromQL, of metrics and labels that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from onceflow.metrics.counts import COUNTER, HISTOGRAM, METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD, ALERTS = ROOT / "deploy" / "grafana-dashboard.json", ROOT / "deploy" / "prometheus-alerts.yaml"
MONITOR = ROOT / "docs" / "monitor.md"
#: Labels that Prometheus itself gives every series, and its own metric of a scrape.
TARGET = {"job", "instance"}
OTHERS = {"up": TARGET}
#: What Grafana puts into an expression.
VARIABLES = {"$__rate_interval": "5m", "$flow": ".*"}
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def series() -> dict[str, set[str]]:
    """The names of series, as they are scraped, and their labels."""
    found = {name: {*labels} for name, labels in OTHERS.items()}
    for name, metric in METRICS.items():
        labels = {*metric.labels, *TARGET}
        if metric.kind == HISTOGRAM:
            found |= {f"{name}_sum": labels, f"{name}_count": labels, f"{name}_bucket": labels | {"le"}}
        else:
            found[name] = labels
    return found


def problems(expression: str) -> Iterator[str]:
    """What is wrong with an expression, beside its syntax."""
    known = series()
    selected: list[Any] = []
    grouped: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            selected.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            selected.append(node.vector_selector)
        modifier = getattr(node, "modifier", None)
        if modifier is not None:
            matching = getattr(modifier, "matching", modifier)
            grouped.update(getattr(matching, "labels", None) or ())
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    if not selected:
        yield "it selects no metric"
    for each in selected:
        if each.name not in known:
            yield f"there is no metric {each.name}"
            continue
        for matcher in each.matchers.matchers:
            if matcher.name not in known[each.name]:
                yield f"{each.name} has no label {matcher.name}"
    for label in sorted(grouped - set().union(*(known.get(each.name, set()) for each in selected))):
        yield f"no metric in it has the label {label}"


def labels_after(expression: str) -> set[str]:
    """Labels that its result can have: those of an aggregation, or of what it selects."""
    found = set(re.findall(r"\w+", ",".join(re.findall(r"\bby \(([^)]*)\)", expression)))) - {"le"}
    return found or set().union(*(labels for name, labels in series().items() if name in expression))


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            text = target["expr"]
            for variable, value in VARIABLES.items():
                text = text.replace(variable, value)
            yield f"{panel['title']} {target['refId']}", text


@pytest.mark.parametrize("expression", [pytest.param(text, id=name) for name, text in expressions()])
def test_expressions_are_of_metrics_that_there_are(expression: str) -> None:
    assert "$" not in expression
    assert list(problems(expression)) == []


@pytest.mark.parametrize(
    "wrong, says",
    [
        ("onceflow_upp == 0", "there is no metric onceflow_upp"),
        ('onceflow_up{table="t"}', "onceflow_up has no label table"),
        ("rate(onceflow_batch_seconds[5m])", "there is no metric onceflow_batch_seconds"),
        ("sum by (tablet) (onceflow_up)", "no metric in it has the label tablet"),
        ("onceflow_up == on (topic) onceflow_ready", "no metric in it has the label topic"),
        ("1 + 1", "it selects no metric"),
    ],
)
def test_a_wrong_expression_is_found(wrong: str, says: str) -> None:
    assert says in list(problems(wrong))


def test_what_is_no_promql_is_found() -> None:
    with pytest.raises(ValueError, match="expected"):
        list(problems("sum by (flow) onceflow_up)"))


def test_counters_are_used_as_counters() -> None:
    """A counter by itself says nothing; a gauge has no rate."""
    for name, text in expressions():
        for metric in re.findall(r"onceflow_\w+", text):
            base = re.sub(r"_(bucket|sum|count)$", "", metric) if metric not in METRICS else metric
            counts = METRICS[base].kind in (COUNTER, HISTOGRAM)
            assert bool(re.search(rf"\b(rate|increase)\({metric}\b", text)) == counts, (name, metric)


def test_texts_name_labels_that_there_are() -> None:
    for rule in RULES:
        told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert told <= labels_after(rule["expr"]), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")
    for panel in PANELS:
        for target in panel["targets"]:
            told = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert told <= labels_after(target["expr"]), panel["title"]
            assert "flow" in told


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    left_out = {name for name in METRICS if name not in shown}
    # Numbers that mean something only beside another one.
    assert left_out == {
        "onceflow_attempts_total",
        "onceflow_last_batch",
        "onceflow_ready",
        "onceflow_restore_seconds",
        "onceflow_rows_expired_total",
        "onceflow_timers_fired_total",
    }


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(numbers) == len(set(numbers))


def test_the_page_names_all_alerts() -> None:
    told = re.findall(r"^\| `(Onceflow\w+)` \|", MONITOR.read_text(), re.MULTILINE)
    assert told == [rule["alert"] for rule in RULES]

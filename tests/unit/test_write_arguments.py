"""Arguments of Flow.write arrive: none of them is forgotten on its way to the tasks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow import flow as flow_module
from onceflow.driver.kafka.output_writer import OutputWriter
from onceflow.flow import Flow
from onceflow.messages import WriteOrder
from onceflow.planning.write_options import WriteOptions


def test_flow_write_hands_all_of_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(inspect.signature(Flow.write).parameters) - {"self", "df"}
    assert names == {field.name for field in fields(WriteOptions)}
    given: dict[str, Any] = {name: object() for name in names}
    checked: list[WriteOptions] = []
    monkeypatch.setattr(flow_module, "check_write", lambda df, options, *_: checked.append(options))
    flow: Any = object.__new__(Flow)
    flow._name, flow._runs = "f", SimpleNamespace(startup=SimpleNamespace(own_topics=None))
    Flow.write.__wrapped__(flow, None, **given)  # type: ignore[attr-defined]  # without the check of types
    assert vars(checked[0]) == given


def test_an_order_names_all_of_its_fields() -> None:
    """A field with a default would be that in every task, whatever the user has given."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(OutputWriter._order)))
    (made,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == WriteOrder.__name__
    )
    assert {word.arg for word in made.keywords} == {field.name for field in fields(WriteOrder)}

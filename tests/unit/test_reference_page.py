"""docs/reference.md has the arguments of the code, with what the docstrings say of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference.md"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "reference.py"))


def test_the_page_is_what_the_script_makes_of_the_docstrings(script: dict[str, Any]) -> None:
    assert PAGE.read_text() == script["page"](PAGE.read_text()), "run scripts/reference.py"
    assert len(script["sections"](PAGE.read_text())) > 20


def test_the_page_has_every_method_of_a_flow(script: dict[str, Any]) -> None:
    assert set(script["methods"]()) <= set(script["sections"](PAGE.read_text()))
    assert "Flow.write_chain" in script["methods"]()


def test_a_changed_table_is_written_anew_and_the_text_before_it_stays(script: dict[str, Any]) -> None:
    text = PAGE.read_text()
    other = re.sub(r"^\| `\w+` .*\n", "", text, flags=re.MULTILINE)
    assert other != text
    assert script["page"](other) == text


def test_defaults_are_values_also_where_the_code_has_a_name(script: dict[str, Any]) -> None:
    defaults = {
        name: {each.name: each.default for each in script["arguments"](name)}
        for name in ("Flow.read", "Flow.deduplicate", "PostgresSink", "Retry", "Breaker", "serve")
    }
    assert defaults["Flow.read"]["max_records_per_batch"] == "200_000"  # a constant of the module
    assert defaults["Flow.deduplicate"]["max_ahead"] == '"1 day"'  # of another module
    assert defaults["PostgresSink"]["mode"] == '"insert"'  # of several in one statement
    assert defaults["Retry"]["permanent"] == "Retry.PERMANENT"
    assert defaults["Breaker"] == {"failures": "10", "pause": '"10 seconds"'}  # a dataclass
    assert defaults["serve"]["queries"] == ""


def test_text_of_docstrings_becomes_markdown(script: dict[str, Any]) -> None:
    given = "as of `write`, or `JoinTable`: ``{1: 2}``, see ``docs/connect.md``. None: OptionError."
    assert script["markdown"](given, "Flow.read") == (
        "as of `Flow.write`, or `JoinTable`: `{1: 2}`, see [Connect](connect.md). None: `OptionError`."
    )

"""The notebook that docs/run.md shows, in a real kernel: its cells run one after the other, and the one that
serves is interrupted, as by the stop button."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import nbformat
import pytest
from nbclient import NotebookClient

from onceflow.testing import independent

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "run.md"
#: What a user may see of the signals of the kernel, in a cell.
HANDLERS = "import signal; print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])"
#: What a thread prints when its cell has ended is shown nowhere for sure. So the cell waits for it.
LISTEN = """
import sys
told, write = [], sys.stderr.write
sys.stderr.write = lambda said: (told.append(said), write(said))[1]
"""
HEAR = """
from onceflow.testing.waiting import wait_until
wait_until(lambda: any("query.stop() stops it" in said for said in told), 30, lambda: f"the thread serves: {told}")
print("heard")
"""


def cells_of_the_page() -> list[str]:
    section = PAGE.read_text().split("## In a notebook\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


class Kernel(NotebookClient):
    """Interrupts the kernel, and all processes of its group, when a cell that serves has printed its first batch."""

    interrupted = 0

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        output = super().process_message(msg, cell, cell_index)
        said = msg["content"].get("text", "") if msg["msg_type"] == "stream" else ""
        if "onceflow.serve(" in cell.source and '"batch"' in said:
            os.killpg(os.getpgid(self.km.provisioner.pid), signal.SIGINT)
            self.interrupted += 1
        return output


def text(cell: Any) -> str:
    """All that a cell has printed or shown."""
    shown = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs]
    return "".join(shown)


@pytest.mark.long
def test_the_cells_of_the_page(make_topic: Callable[..., str], onceflow_broker: str, tmp_path: Path) -> None:
    source, target = make_topic("deposits", 2), make_topic("validated", 2)
    sent = [(b"key-%d" % n, b"deposit %d" % n) for n in range(20)]
    independent.fill(onceflow_broker, source, sent)
    names = {
        '"deposits"': f'"{source}"',
        '"validated"': f'"{target}"',
        "localhost:9092": onceflow_broker,
        "tried-in-a-notebook": f"notebook-{uuid4().hex}",
    }
    look, start, stop, serve, thread, end = cells_of_the_page()
    more = (
        f"from onceflow.testing import independent\nindependent.fill({onceflow_broker!r}, {source!r}, [(b'k', b'%d')])"
    )
    code = [
        look,
        start,
        start,
        stop,
        HANDLERS,
        more % 1,
        serve,
        HANDLERS,
        more % 2,
        LISTEN + thread + HEAR,
        "query.processAllAvailable()",
    ]
    code += [end, "query"]
    for shown, name in names.items():
        code = [cell.replace(shown, name) for cell in code]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in code])
    kernel = Kernel(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    kernel.execute()

    cells = notebook.cells
    assert kernel.interrupted == 1
    (table,) = [output["data"]["text/html"] for output in cells[0].outputs if "text/html" in output.get("data", {})]
    assert table.count("<tr>") == 6
    assert "deposit" in table
    assert "batch 1 committed" in text(cells[1])
    assert "running, exactly_once" in text(cells[1])
    assert "the query that an earlier cell has started is stopped" in text(cells[2])
    assert "running, exactly_once" in text(cells[2])
    assert "interrupting stops it" in text(cells[6])
    assert "is being stopped" in text(cells[6])
    assert text(cells[7]) == text(cells[4])
    assert "default_int_handler" in text(cells[4])
    assert "heard" in text(cells[9])
    assert "stopped, exactly_once" in text(cells[12])
    seen = [(record.key, record.value) for record in independent.read_topic(onceflow_broker, target, decided=True)]
    assert sorted(seen) == sorted([*sent, (b"k", b"1"), (b"k", b"2")])

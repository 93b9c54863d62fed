"""Build hook: a wheel carries the example services, because ``onceflow demo`` runs them.

They lie in ``examples/`` in the checkout, beside this folder, and in ``onceflow_workshop/demos/examples/`` in a wheel.
An editable install gets no copies: ``onceflow_workshop.demos.service_files`` finds the files in the checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ExampleServices(BuildHookInterface):
    """Adds the files of ``examples/`` that are no tests, each in the folder of its service, with their web pages."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root).parent
        files = (file for kind in ("py", "html") for file in root.glob(f"examples/*/*.{kind}"))
        services = sorted(file for file in files if not file.name.startswith("test_"))
        if not services:
            raise FileNotFoundError(f"{root / 'examples'} holds no services; a wheel needs them for `onceflow demo`")
        for file in services:
            build_data["force_include"][str(file)] = f"onceflow_workshop/demos/{file.relative_to(root).as_posix()}"

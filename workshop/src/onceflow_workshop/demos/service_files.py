"""Where the example services are that the demos run."""

from __future__ import annotations

from pathlib import Path

# A wheel carries them beside this file (hatch_build.py); a checkout has them in its own folder `examples`.
_IN_WHEEL = Path(__file__).with_name("examples")
_IN_CHECKOUT = Path(__file__).parents[4] / "examples"


def service_file(name: str) -> Path:
    """The file of an example service, such as ``deposits/deposits.py``."""
    return (_IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT) / name

"""A flow's progress as a file: the progress record, with the version of the file and the time of the export."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import Any

from onceflow.errors import OnceflowError, OptionError
from onceflow.protocol.progress import Progress, decode, encode

VERSION = 1
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can have halves of characters, and UTF-8 cannot


def export(progress: Progress, flow: str, now_ms: int) -> dict[str, Any]:
    """The content of the file.

    Args:
        flow: name of the flow, without a prefix.
    """
    at = datetime.fromtimestamp(now_ms / 1000, tz=timezone.utc)
    return {
        "version": VERSION,
        "flow": flow,
        "exported_at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "progress": json.loads(encode(progress)[1]),
    }


def parse(text: str, name: str) -> Progress:
    """The progress in a file.

    Args:
        name: of the file, for errors.

    Raises:
        OptionError: it is not such a file, or one of a newer onceflow.
    """

    def wrong(why: str) -> OptionError:
        return OptionError(
            f"{name} is not an export of a flow's progress: {why}",
            next_step="give a file that `onceflow progress export FLOW` has written",
        )

    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"this is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise wrong(f"it holds a JSON {type(content).__name__}, not an object")
    version, record = content.get("version"), content.get("progress")
    if type(version) is not int or not isinstance(record, dict):
        raise wrong("it has no version, or no progress")
    if version != VERSION:
        raise OptionError(
            f"{name} has version {version}, and this onceflow reads version {VERSION}",
            next_step="upgrade onceflow to the version that has written it",
        )
    key = record.get("flow")
    if not isinstance(key, str) or _SURROGATE.search(key):
        raise wrong("its progress names no flow")
    try:
        return decode(key.encode(), json.dumps(record).encode())
    except OnceflowError as error:
        raise wrong(f"{error.what} ({error.detail})" if error.detail else error.what) from error

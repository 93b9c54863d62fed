"""A flow that downloads the files that links on a topic name, and writes a record for every row in them.

python files.py --bootstrap-servers localhost:9092 --host data.example.com --root /srv/statements
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import downloads
import fetch
from pyspark.sql import functions as F

import onceflow


class Once(onceflow.Processor):
    """Lets a link pass the first time; what comes again goes to ``skipped``. The state: how often it has come.

    What is raised in here makes a dead letter: the link is never asked for.
    """

    state = onceflow.serdes.LONG

    def __init__(self, places: Any, skipped: str) -> None:
        self.places, self.skipped = places, skipped

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        for record in records:
            link, again = fetch.link_of(record.value)
            if link.encode() != key:
                raise fetch.LinkError("more than one link")  # JSON may name a field twice
            self.places.check(link)
            before = state.get(0)
            state.put(before + 1)
            if before and not again:
                yield onceflow.Record(key, record.value, topic=self.skipped, headers=record.headers)
            else:
                yield record


def files_flow(
    flow: onceflow.Flow,
    places: downloads.Places,
    limits: downloads.Limits,
    suffix: str = "",
    *,
    folder: str | None = None,
    state_dir: str | None = None,
    **read: Any,
) -> onceflow.FlowWriter:
    """The flow. ``folder``: for files being downloaded."""
    records = flow.read(f"links{suffix}", include_headers=True, **read)
    link = F.get_json_object(F.col("value").cast("string"), "$.link")
    fresh = flow.process(
        records.withColumn("key", F.coalesce(link, F.lit(""))),
        Once(places, f"skipped{suffix}"),
        table=f"link-table{suffix}",
        state_dir=state_dir,
        on_error="dead-letter",
        dead_letter_topic=f"failed{suffix}",
    )
    rows = fresh.mapInArrow(fetch.Fetch(downloads.Downloads(places, limits, folder), suffix), fresh.schema)
    return flow.write(rows, trigger="200 milliseconds", transaction_timeout="10 minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=16, help="most links of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    parser.add_argument("--host", action="append", default=[], help="that links may name, as host or host:port")
    parser.add_argument("--root", help="folder that links may name files in  [default: no files]")
    parser.add_argument("--folder", help="for files being downloaded  [default: the system's for temporary files]")
    for limit in dataclasses.fields(downloads.Limits):
        option = f"--{limit.name.replace('_', '-')}"
        parser.add_argument(option, type=type(limit.default), default=limit.default, help="[default: %(default)s]")
    given = parser.parse_args()
    limits = downloads.Limits(
        **{limit.name: getattr(given, limit.name) for limit in dataclasses.fields(downloads.Limits)}
    )
    places = downloads.Places(frozenset(given.host), given.root)

    spark = onceflow.session("files", master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(f"files{given.suffix}", spark, bootstrap_servers=given.bootstrap_servers)
    write = files_flow(
        *(flow, places, limits, given.suffix),
        folder=given.folder,
        state_dir=given.state_dir,
        max_records_per_batch=given.batch,
    )
    onceflow.serve(write.start())


if __name__ == "__main__":
    main()

"""A copy of one topic to another, with the guarantee that is asked for. Nothing else differs between the three.

python copy_service.py at_most_once --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse

import onceflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("guarantee", choices=["at_most_once", "at_least_once", "exactly_once"])
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=4_000, help="most records of one batch")
    given = parser.parse_args()

    name = f"copy-{given.guarantee}"
    # A driver that lives for seconds spends most of them compiling: with the quick compiler alone it is up sooner.
    config = {"spark.driver.memory": "640m", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
    spark = onceflow.session(name, master="local[2]", config=config)
    flow = onceflow.Flow(name + given.suffix, spark, bootstrap_servers=given.bootstrap_servers)
    copy = flow.read(f"deposits{given.suffix}", max_records_per_batch=given.batch).select("key", "value")
    # An orderly end loses nothing, with at_most_once neither: serve() sees to it.
    onceflow.serve(flow.write(copy, topic=f"{given.guarantee}{given.suffix}", guarantee=given.guarantee).start())


if __name__ == "__main__":
    main()

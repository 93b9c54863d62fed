"""Two flows in a chain: deposits are validated, valid ones are settled. Each runs as a process of its own.

python service.py validate --bootstrap-servers localhost:9092
python service.py settle   --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import json
import signal
import threading

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import onceflow

# Everything as text first: a number that is none is then a cause of rejection, not a null.
DEPOSIT = "id string, account string, amount string, currency string"
CAUSE = """
    CASE WHEN deposit IS NULL OR deposit.broken IS NOT NULL THEN 'not JSON'
         WHEN deposit.id IS NULL OR deposit.account IS NULL OR deposit.amount IS NULL OR deposit.currency IS NULL
              THEN 'missing field'
         WHEN try_cast(deposit.amount AS bigint) IS NULL THEN 'amount not a whole number'
         WHEN try_cast(deposit.amount AS bigint) <= 0 THEN 'amount not positive'
         WHEN try_cast(deposit.amount AS bigint) > 1000000 THEN 'amount too large'
         WHEN deposit.currency NOT IN ('EUR', 'GBP', 'USD') THEN 'unknown currency'
    END"""
HEADERS = """
    array(struct('cause' AS key, binary(cause) AS value),
          struct('origin-topic' AS key, binary(topic) AS value),
          struct('origin-partition' AS key, binary(string(partition)) AS value),
          struct('origin-offset' AS key, binary(string(offset)) AS value))"""


def validate(deposits: DataFrame, suffix: str = "") -> DataFrame:
    """Every row to one of two topics. One transaction covers both, so none is in both or in neither."""
    kept = {"columnNameOfCorruptRecord": "broken"}
    parsed = F.from_json(F.col("value").cast("string"), f"{DEPOSIT}, broken string", kept)
    checked = deposits.withColumn("deposit", parsed).withColumn("cause", F.expr(CAUSE))
    valid = F.col("cause").isNull()
    return checked.select(
        F.when(valid, f"validated{suffix}").otherwise(f"rejected{suffix}").alias("topic"),
        "key",
        "value",
        F.when(~valid, F.expr(HEADERS)).alias("headers"),
    )


def settle(validated: DataFrame) -> DataFrame:
    """Half a percent of the amount is the fee. Amounts are whole cents."""
    deposit = F.from_json(F.col("value").cast("string"), DEPOSIT)
    settled = F.expr("""named_struct(
        'id', deposit.id, 'account', deposit.account, 'amount', bigint(deposit.amount), 'currency', deposit.currency,
        'fee', bigint(deposit.amount) div 200, 'settled', true)""")
    return validated.withColumn("deposit", deposit).select("key", F.to_json(settled).alias("value"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flow", choices=["validate", "settle"])
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    given = parser.parse_args()

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    spark = onceflow.session(given.flow, master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(given.flow + given.suffix, spark, bootstrap_servers=given.bootstrap_servers)
    if given.flow == "validate":
        rows = flow.read(f"deposits{given.suffix}", max_records_per_batch=given.batch)
        write = flow.write(validate(rows, given.suffix), trigger="200 milliseconds")
    else:
        rows = flow.read(f"validated{given.suffix}", max_records_per_batch=given.batch)
        write = flow.write(settle(rows), topic=f"settled{given.suffix}", trigger="200 milliseconds")

    query, told = write.start(), 0
    while query.isActive and not stop.wait(0.1):
        for batch in query.batches:
            if batch.batch > told:
                told = batch.batch
                print(json.dumps({"flow": flow.name, "batch": told, "records": batch.records}), flush=True)
    if query.isActive:
        query.stop()
    query.awaitTermination()  # raises why it stopped, if nobody asked it to


if __name__ == "__main__":
    main()

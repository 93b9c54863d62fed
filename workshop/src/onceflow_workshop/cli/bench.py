"""``onceflow bench``: throughput and latency on this machine, as a table and as JSON lines in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from onceflow.cli.examples import examples
from onceflow.cli.text import Number
from onceflow_workshop.cli.bench_cluster import cluster
from onceflow_workshop.cli.bench_latency import latency
from onceflow_workshop.cli.bench_report import (
    measured,
    output_option,
    report,
    run_and_report,
)


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure throughput and latency on this machine.

    Without the name of a benchmark, `sink` is run.
    """
    if context.invoked_subcommand is None:
        context.invoke(sink)


bench.add_command(cluster)
bench.add_command(latency)


@examples("onceflow bench sink --records 1000000 --rounds 5")
@bench.command()
@click.option(
    "--records",
    type=click.IntRange(min=1000),
    default=500_000,
    show_default=True,
    help="Records to copy, of 1 KiB each.",
)
@click.option(
    "--records-per-batch", type=click.IntRange(min=100), default=100_000, show_default=True, help="Records in a batch."
)
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="How often each sink is run.")
@click.option(
    "--small-batches",
    type=click.IntRange(min=6),
    default=60,
    show_default=True,
    help="Small batches to write, of 400 rows each.",
)
@output_option
def sink(records: int, records_per_batch: int, rounds: int, small_batches: int, output: Path) -> None:
    """Compare the sink with Spark's own Kafka sink.

    Measures throughput, small batches, and the time until the first commit.
    """
    from onceflow_workshop.bench.sink import Choices, run

    run_and_report(run, Choices(records, records_per_batch, rounds, small_batches), output)


@examples("onceflow bench state --large")
@bench.command()
@click.option(
    "--records", type=click.IntRange(min=10_000), default=500_000, show_default=True, help="Records to process."
)
@click.option(
    "--accounts", type=click.IntRange(min=1), default=10_000, show_default=True, help="How many keys the records have."
)
@click.option(
    "--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="How often each variant is run."
)
@click.option(
    "--often",
    type=click.IntRange(min=100),
    default=4_000,
    show_default=True,
    help="Records in a batch of the variants that commit as often as they can.",
)
@click.option(
    "--spark-records-per-batch",
    type=click.IntRange(min=1000),
    default=100_000,
    show_default=True,
    help="Records in a batch of transformWithState.",
)
@click.option(
    "--keys",
    type=click.IntRange(min=1000),
    default=1_000_000,
    show_default=True,
    help="Keys of the table that is restored.",
)
@click.option(
    "--large",
    is_flag=True,
    help="Also measure a table of --large-keys keys. It takes several minutes and some GB of disk.",
)
@click.option(
    "--large-keys", type=click.IntRange(min=1000), default=5_000_000, show_default=True, help="Keys of the large table."
)
@click.option("--pandas", is_flag=True, help="Also measure transformWithStateInPandas, which is slow.")
@click.option("--only", type=click.Choice(["throughput", "restore", "large", "weaker"]), help="Run only this part.")
@output_option
def state(
    records: int,
    accounts: int,
    rounds: int,
    often: int,
    spark_records_per_batch: int,
    keys: int,
    large: bool,
    large_keys: int,
    pandas: bool,
    only: str | None,
    output: Path,
) -> None:
    """Compare processors with Spark's transformWithState.

    The service keeps balances of accounts. Also measures how fast lost state is restored, and the memory that a large
    table takes. `--only weaker` compares exactly-once with state without a changelog, and with at-least-once. The exit
    code is 1 when the outputs or the state of a run were wrong.
    """
    from onceflow_workshop.bench.state import PARTS, Choices, run

    parts = (only,) if only else PARTS[:3] if large else PARTS[:2]
    choices = Choices(records, accounts, rounds, often, spark_records_per_batch, keys, large_keys, parts, pandas)
    run_and_report(run, choices, output)


@examples("onceflow bench overhead --rounds 3")
@bench.command()
@click.option(
    "--rounds",
    type=click.IntRange(1, 50),
    default=5,
    show_default=True,
    help="How often each guarantee is run with each trigger.",
)
@click.option("--seconds", type=Number(2, 60), default=5.0, show_default=True, help="About how long a run is measured.")
@click.option(
    "--records-per-second",
    type=click.IntRange(10, 20_000),
    default=1000,
    show_default=True,
    help="Records per second while latency is measured.",
)
@click.option("--only", type=click.Choice(["throughput", "latency"]), help="Run only this part.")
@output_option
def overhead(rounds: int, seconds: float, records_per_second: int, only: str | None, output: Path) -> None:
    """Measure what exactly-once costs.

    Compares its throughput with at-least-once, and its end-to-end latency with at-least-once and with Spark's own sink.
    The exit code is 1 when the outputs of a run were wrong.
    """
    from onceflow_workshop.bench.overhead import PARTS, Choices, run

    choices = Choices(rounds, seconds, records_per_second, parts=(only,) if only else PARTS)
    run_and_report(run, choices, output)


@examples("onceflow bench serve")
@bench.command()
@click.option("--keys", type=click.IntRange(min=100), default=100_000, show_default=True, help="Keys of the table.")
@click.option(
    "--connections",
    type=click.IntRange(1, 1_000),
    default=16,
    show_default=True,
    help="Connections that ask at the same time. Each waits for its answer before it asks again.",
)
@click.option(
    "--seconds",
    type=Number(0.2, 60),
    default=4.0,
    show_default=True,
    help="How long each of the 18 figures is measured.",
)
@click.option(
    "--records-per-second",
    type=click.IntRange(0, 100_000),
    default=10_000,
    show_default=True,
    help="Records that are written to the table meanwhile. 0: only measure while nothing is written.",
)
@click.option(
    "--writer",
    type=click.Choice(["flow", "producer"]),
    default="flow",
    show_default=True,
    help="What writes them: a flow in Spark, or a plain transactional producer, which takes less of the processor.",
)
@click.option(
    "--trigger-ms", type=click.IntRange(min=10), default=1_000, show_default=True, help="How often the writer commits."
)
@output_option
def serve(output: Path, **given: Any) -> None:
    """Measure look-ups over HTTP (onceflow table serve).

    One instance, and one of two instances that share a table, are asked while nothing is written and while a flow
    writes. Server, load and flow share the processors of this machine. The exit code is 1 when an answer was wrong.
    """
    from onceflow.cli.progress import progress_bar
    from onceflow.cli.table_serve import check_packages
    from onceflow_workshop.bench.serve import Choices, run

    check_packages()
    with progress_bar() as show:

        def run_shown(choices: Any, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
            def shown(text: str, done: int, total: int) -> None:
                show(text, done, total)
                if not sys.stderr.isatty():
                    say(f"{done} of {total}: {text}")

            yield from run(choices, shown)

        results = measured(run_shown, Choices(**given), output)
    report(results)


@examples("onceflow bench postgres")
@bench.command()
@click.option(
    "--records", type=click.IntRange(min=1000), default=1_000_000, show_default=True, help="Rows with 5 columns."
)
@click.option(
    "--wide-records", type=click.IntRange(min=0), default=100_000, show_default=True, help="Rows with 50 columns."
)
@click.option(
    "--records-per-batch",
    type=click.IntRange(min=100),
    default=200_000,
    show_default=True,
    help="Most records in a batch.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="How often each contender is run."
)
@click.option("--key", is_flag=True, help="Tables with a primary key.")
@click.option("--dsn", help="A PostgreSQL server that runs already, as libpq takes it.  [default: one is started]")
@output_option
def postgres(output: Path, **given: Any) -> None:
    """Compare a PostgresSink with Spark's JDBC writer and with COPY.

    Flow and JDBC writer (in foreachBatch, at-least-once) read the same topic. COPY gets the same rows from memory: it
    is the limit of the server. "only read" throws the rows away: it is the limit of the source. The exit code is 1
    when a table was wrong.
    """
    from onceflow_workshop.bench.postgres import Choices, run

    run_and_report(run, Choices(**given), output)

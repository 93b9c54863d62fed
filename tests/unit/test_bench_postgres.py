"""What `onceflow bench postgres` writes, and what it expects of a table."""

from __future__ import annotations

import os
import time

from onceflow_workshop.bench import postgres as bench
from onceflow_workshop.bench.postgres import Bench, Choices, Columns


def test_wide_tables_have_the_same_kinds_of_columns() -> None:
    wide = Columns.of(50)
    assert len(wide.all) == 50
    assert len({name for name, _, _ in wide.all}) == 50
    assert [kind for _, kind, _ in wide.all] == [kind for _, kind, _ in Columns.of(5).all] * 10
    statement = (
        "CREATE TABLE t (id bigint, account text, amount numeric(12,2), made timestamptz, note text, PRIMARY KEY (id))"
    )
    assert Columns.of(5).create("t", key=True) == statement


def test_what_a_table_must_have() -> None:
    made = Bench(None, "", "", "", 12, Columns.of(5), Choices(), print)
    ids = [partition * 1_000_000_000 + offset for partition in range(bench.PARTITIONS) for offset in range(3)]
    assert made._expected == (12, 12, sum(ids))


def test_keys_fill_all_partitions() -> None:
    assert all(len(keys) > 2000 for keys in bench._keys_by_partition())


def test_cpu_of_a_process() -> None:
    before = bench.tree_cpu_s(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert bench.tree_cpu_s(os.getpid()) > before

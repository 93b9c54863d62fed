"""Moving averages of every series: over its last 20 values, over its last 7 days, and since the start.

python moving_average.py records --bootstrap-servers localhost:9092    # record by record
python moving_average.py columns --bootstrap-servers localhost:9092    # column by column: other topics, same values
"""

from __future__ import annotations

import argparse
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import onceflow
from onceflow.state.api.json_columns import format_json, parse_json

LAST_N = 20
LAST_T = 10_080 * 60  # seconds: 7 days, by the times of the measurements
KEPT_MAX = 10_000  # values of a series within LAST_T: the state of a key is one record and has to fit into one
VALUE_MAX = 10**9  # so that no sum leaves 64 bits

MEASUREMENT = pa.schema([("series", pa.string()), ("time", pa.string()), ("value", pa.int64())])
TIME = "(19|2[0-9])[0-9]{2}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
MISSING, FOREIGN, BAD_TIME, BAD_VALUE, BACK, TOO_MANY = (
    "missing field",
    "series is not the key",
    "time is no time like 2010-01-31T23:59:59Z between 1900 and 2999",
    f"value is no whole number between {-VALUE_MAX} and {VALUE_MAX}",
    "time goes back",
    f"more than {KEPT_MAX} values within {LAST_T} s",
)


class Averages(onceflow.Processor):
    """Record by record. Values and averages are whole thousandths: every program adds them up to the same."""

    value = state = output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        kept = state.get({"times": [], "values": [], "sum": 0, "count": 0})
        times, values, total, count = kept["times"], kept["values"], kept["sum"], kept["count"]
        start_t = 0
        for record in records:
            at, value = checked(key, record.value)
            if times and at < times[-1]:
                raise ValueError(BACK)
            times.append(at)
            values.append(value)
            total, count = total + value, count + 1
            start_t = bisect_right(times, at - LAST_T)
            if len(times) - start_t > KEPT_MAX:
                raise ValueError(TOO_MANY)
            last_n, last_t = values[-LAST_N:], values[start_t:]
            averages = {
                "last_n": rounded(sum(last_n), len(last_n)),
                "last_t": rounded(sum(last_t), len(last_t)),
                "all": rounded(total, count),
            }
            yield onceflow.Record(key, {name: record.value[name] for name in MEASUREMENT.names} | averages)
        needed = max(LAST_N, len(times) - start_t)
        state.put({"times": times[-needed:], "values": values[-needed:], "sum": total, "count": count})


def checked(key: bytes, measurement: Any) -> tuple[int, int]:
    """Time (epoch seconds) and value of a measurement.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(measurement, dict) or any(measurement.get(name) is None for name in MEASUREMENT.names):
        raise ValueError(MISSING)
    series, time, value = (measurement[name] for name in MEASUREMENT.names)
    if not isinstance(series, str) or series.encode() != key:
        raise ValueError(FOREIGN)
    if not isinstance(time, str) or not re.fullmatch(TIME, time):
        raise ValueError(BAD_TIME)
    if type(value) is not int or abs(value) > VALUE_MAX:
        raise ValueError(BAD_VALUE)
    return int(datetime.fromisoformat(f"{time[:-1]}+00:00").timestamp()), value


def rounded(total: Any, count: Any) -> Any:
    """The average, to the next whole number; of ints or of arrays of them."""
    return (2 * total + count) // (2 * count)


class ColumnAverages(onceflow.ColumnProcessor):
    """Column by column, the same: many records and keys at once, by differences of running sums."""

    state_fields = {"times": "binary", "values": "binary", "sum": "int64", "count": "int64"}  # noqa: RUF012

    def process(self, records: pa.Table, states: pa.Table, context: Any) -> tuple[pa.Table, pa.Table]:
        try:
            given = parse_json(records["value"], MEASUREMENT)
            new_times = checked_columns(records["key"], given)
        except ValueError:
            bad = bad_rows(records)
            if not bad:
                raise
            raise onceflow.BadRows(bad) from None
        # Row after row: what is kept of the first key, what is new of it, what is kept of the second key, and so on.
        kept = pc.binary_length(states["times"]).fill_null(0).to_numpy() // 8
        keys = np.concatenate([np.repeat(np.arange(len(kept)), kept), records["state"].to_numpy()])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        times = np.concatenate([numbers(states["times"]), new_times])[order]
        values = np.concatenate([numbers(states["values"]), given["value"].to_numpy()])[order]
        # Each key has a stretch of its own on one line, further from the next than times can be apart.
        line = keys * 2**36 + times
        back = line < np.maximum.accumulate(line)
        if back.any():
            raise onceflow.BadRows({row: ValueError(BACK) for row in (order[back] - kept.sum()).tolist()})

        ends = np.arange(1, len(keys) + 1)
        first = np.searchsorted(keys, np.arange(len(kept)))  # row of each key
        start_n = np.maximum(first[keys], ends - LAST_N)
        start_t = np.searchsorted(line, line - LAST_T, side="right")
        if (ends - start_t > KEPT_MAX).any():
            raise ValueError(TOO_MANY)

        sums = np.concatenate([[0], np.cumsum(values)])
        # Since the start: what was before this batch, and what is new.
        new = first + kept
        count = pc.fill_null(states["count"], 0).to_numpy()[keys] + ends - new[keys]
        total = pc.fill_null(states["sum"], 0).to_numpy()[keys] + sums[ends] - sums[new[keys]]
        averages = {
            "last_n": rounded(sums[ends] - sums[start_n], ends - start_n),
            "last_t": rounded(sums[ends] - sums[start_t], ends - start_t),
            "all": rounded(total, count),
        }
        is_new = order >= kept.sum()
        which = order[is_new] - kept.sum()
        columns = {name: given[name].take(which) for name in MEASUREMENT.names}
        columns |= {name: pa.array(column[is_new]) for name, column in averages.items()}
        outputs = pa.table({"key": records["key"].take(which), "value": format_json(pa.table(columns))})

        last = np.append(first[1:], len(keys)) - 1
        needed = np.minimum(start_n, start_t)[last]
        rows = ends > needed[keys]
        new_states = {
            "key": states["key"],
            "times": packed(times[rows], last + 1 - needed),
            "values": packed(values[rows], last + 1 - needed),
            "sum": pa.array(total[last]),
            "count": pa.array(count[last]),
        }
        return outputs, pa.table(new_states)


def checked_columns(keys: Any, given: pa.Table) -> npt.NDArray[np.int64]:
    """Times (epoch seconds) of measurements.

    Raises:
        ValueError: at least one is none.
    """
    if any(column.null_count for column in given.columns):
        raise ValueError(MISSING)
    if not pc.all(pc.equal(given["series"].cast(pa.binary()), keys)).as_py():
        raise ValueError(FOREIGN)
    if not pc.all(pc.match_substring_regex(given["time"], f"^{TIME}$")).as_py():
        raise ValueError(BAD_TIME)
    values = given["value"].to_numpy()
    if values.min() < -VALUE_MAX or values.max() > VALUE_MAX:
        raise ValueError(BAD_VALUE)
    times: npt.NDArray[np.int64] = given["time"].cast(pa.timestamp("s", "UTC")).cast(pa.int64()).to_numpy()
    return times


def bad_rows(records: pa.Table) -> dict[int, Exception]:
    """Which records are no measurements, and why: looked for one by one."""
    found: dict[int, Exception] = {}
    for row, (key, value) in enumerate(zip(records["key"].to_pylist(), records["value"].to_pylist(), strict=True)):
        try:
            checked(key, None if value is None else onceflow.serdes.JSON.decode(value))
        except ValueError as error:
            found[row] = error
    return found


def numbers(column: Any) -> npt.NDArray[np.int64]:
    """The packed numbers of all keys, one after the other."""
    return np.frombuffer(b"".join(column.drop_null().to_pylist()), dtype="<i8")


def packed(values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Any:
    """The other way round: as many for each key as counted."""
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32) * 8
    data = np.ascontiguousarray(values, dtype="<i8")
    return pa.Array.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def averages_flow(
    flow: onceflow.Flow, version: str, suffix: str = "", state_dir: str | None = None, **read: Any
) -> onceflow.FlowWriter:
    """The flow of a version, ``records`` or ``columns``."""
    end = ends_with(version, suffix)
    averages = flow.process(
        flow.read(f"measurements{suffix}", include_headers=True, **read),
        Averages() if version == "records" else ColumnAverages(),
        table=f"windows{end}",
        state_dir=state_dir,
        on_error="dead-letter",
        dead_letter_topic=f"bad-measurements{end}",
    )
    return flow.write(averages, topic=f"averages{end}", trigger="200 milliseconds")


def ends_with(version: str, suffix: str) -> str:
    """How the names of a version end."""
    return suffix if version == "records" else f"-columns{suffix}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", choices=["records", "columns"])
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--suffix", default="", help="of all topic and flow names")
    parser.add_argument("--batch", type=int, default=20_000, help="most records of one transaction")
    parser.add_argument("--state-dir", help="for the local stores  [default: ~/.local/state/onceflow]")
    given = parser.parse_args()

    name = f"averages{ends_with(given.version, given.suffix)}"
    spark = onceflow.session("averages", master="local[2]", config={"spark.driver.memory": "640m"})
    flow = onceflow.Flow(name, spark, bootstrap_servers=given.bootstrap_servers)
    write = averages_flow(flow, given.version, given.suffix, given.state_dir, max_records_per_batch=given.batch)
    onceflow.serve(write.start())


if __name__ == "__main__":
    main()

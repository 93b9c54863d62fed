"""Queries without state that are made by chance, and rows for them. A seed always makes the same ones.

An expression is made from templates: SQL with the types of its parts in braces. What this version of Spark does not
know, or refuses for these types, is left out by whoever uses it.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator

import pandas as pd
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Values of each type, as SQL. Rows have null, too.
VALUES: dict[str, tuple[str, ...]] = {
    "boolean": ("true", "false"),
    "tinyint": ("1Y", "-128Y", "127Y", "0Y"),
    "smallint": ("2S", "-32768S", "32767S", "0S"),
    "int": ("3", "0", "-1", "2147483647", "(-2147483647 - 1)"),
    "bigint": ("4L", "0L", "-7L", "9223372036854775807L", "1700000000000L"),
    "float": ("1.5F", "float('NaN')", "-0.0F", "float('-Infinity')", "3.4e38F"),
    "double": ("2.25D", "double('NaN')", "-0.0D", "double('Infinity')", "1e300D", "0.1D"),
    "decimal(10,2)": ("12.34BD", "-0.01BD", "99999999.99BD", "0.00BD"),
    "decimal(38,18)": ("1.000000000000000001BD", "-12345678901234567890.5BD", "0BD"),
    "string": ("'7'", "''", "' 12 '", "'ä€𝄞'", "'2024-02-29'", "'1.5e3'", "'x'", "'2024-03-31T02:30:00Z'", "'true'",
        """'{"a":5,"b":[1,null],"c":{"k":"v"}}'""", """'{"a":"x"'""", "'a,b,,c'", "'Ab%c_'"),
    "binary": ("X''", "X'00FF'", "X'C3A4'", "X'31'"),
    "date": ("date'2024-02-29'", "date'0001-01-01'", "date'9999-12-31'", "date'1969-12-31'"),
    "timestamp": ("timestamp'2024-03-31 02:30:00.123456'", "timestamp'1969-12-31 23:59:59.999999'",
        "timestamp'1900-01-01 00:00:00'", "timestamp'2024-11-03 01:30:00'"),
    "timestamp_ntz": ("timestamp_ntz'2024-03-31 02:30:00'", "timestamp_ntz'1582-10-15 00:00:00.000001'"),
    "interval day to second": ("INTERVAL '1 02:03:04.5' DAY TO SECOND", "INTERVAL '-90' DAY"),
    "array<int>": ("array(3, NULL, 1)", "array()", "array(2147483647, 1)"),
    "array<string>": ("array('b', NULL, '', 'a')", "array('7', 'x')"),
    "array<struct<a:int,b:string>>": ("array(struct(1 AS a, 'x' AS b), NULL)", "array()"),
    "map<string,int>": ("map('k', 1, 'a', NULL)", "map()", "map('7', 2147483647)"),
    "map<int,array<date>>": ("map(1, array(date'2024-02-29', NULL))",),
    "struct<a:int,b:string>": ("struct(1 AS a, 'x' AS b)", "struct(NULL AS a, '7' AS b)"),
    "struct<t:timestamp,m:map<string,double>>": ("struct(timestamp'2024-01-01 00:00:00' AS t, map('d', 0.5D) AS m)",),
}  # fmt: skip
_ANY = ("boolean", "int", "bigint", "double", "decimal(10,2)", "string", "date", "timestamp", "array<int>",
    "map<string,int>", "struct<a:int,b:string>")  # fmt: skip
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal(10,2)", "decimal(38,18)")
_FROM_JSON = "a INT, b ARRAY<INT>, c MAP<STRING, STRING>, d DOUBLE, t TIMESTAMP"

#: ``{any}`` and ``{number}`` are of any such type; ``{same}`` is always of one, anew for each expression.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "boolean": (
        "{int} > {int}", "{number} <= {number}", "{string} LIKE '%a_'", "{any} IS NULL", "{boolean} AND {boolean}",
        "{boolean} OR {boolean}", "NOT {boolean}", "{string} RLIKE '^ *[0-9]+ *$'", "{same} <=> {same}",
        "exists({array<int>}, x -> x > {int})", "forall({array<int>}, x -> x IS NOT NULL)",
        "array_contains({array<string>}, {string})", "{bigint} IN (0, 4, NULL)", "{string} BETWEEN '1' AND {string}",
        "{timestamp} < {timestamp}", "{date} = {timestamp}", "{double} = {decimal(10,2)}",
        "CAST({string} AS BOOLEAN)", "isnan({double})", "startswith({string}, {string})",
        "map_contains_key({map<string,int>}, {string})", "{struct<a:int,b:string>} = {struct<a:int,b:string>}",
        "{array<int>} < {array<int>}",
    ),
    "tinyint": (
        "CAST({int} AS TINYINT)", "-({tinyint})", "{tinyint} & 7Y", "try_cast({string} AS TINYINT)",
    ),
    "smallint": (
        "CAST({bigint} AS SMALLINT)", "{smallint} * 2S", "abs({smallint})",
    ),
    "int": (
        "{int} + {int}", "{int} * {int}", "{int} % {int}", "-({int})", "abs({int})", "length({string})",
        "CAST({string} AS INT)", "CAST({double} AS INT)", "CAST({decimal(10,2)} AS INT)", "year({date})",
        "dayofyear({timestamp})", "hour({timestamp})", "size({array<int>})", "cardinality({map<string,int>})",
        "{array<int>}[{int}]", "element_at({array<int>}, {int})", "element_at({map<string,int>}, {string})",
        "try_element_at({array<int>}, {int})", "{map<string,int>}[{string}]", "{struct<a:int,b:string>}.a",
        "aggregate({array<int>}, 0, (s, x) -> s + x)", "pmod({int}, {int})", "{int} | {int}",
        "shiftleft({int}, {int})", "ascii({string})", "instr({string}, {string})", "datediff({date}, {date})",
        "extract(SECOND FROM {timestamp})", "get_json_object({string}, '$.a')::int",
        "from_json({string}, '" + _FROM_JSON + "').a", "hash({same}, {any})", "levenshtein({string}, {string})",
        "try_divide({int}, {int})::int", "array_position({array<string>}, {string})",
        "CASE WHEN {boolean} THEN {int} WHEN {boolean} THEN {int} ELSE {int} END", "array_max({array<int>})",
        "find_in_set({string}, {string})", "bit_count({int})", "octet_length({binary})", "greatest({int}, {int}, 5)",
    ),
    "bigint": (
        "{bigint} + {int}", "{bigint} * {bigint}", "{int} DIV {int}", "CAST({timestamp} AS BIGINT)",
        "unix_micros({timestamp})", "unix_timestamp({string}, 'yyyy-MM-dd')", "CAST({string} AS BIGINT)",
        "CAST({double} AS BIGINT)", "crc32({binary})", "xxhash64({any}, {same})", "floor({double})",
        "ceil({double})", "CASE {int} WHEN 0 THEN {bigint} WHEN 1 THEN 5L END", "try_add({bigint}, {bigint})",
        "to_unix_timestamp({date})", "factorial({int})", "positive({bigint})",
    ),
    "float": (
        "CAST({string} AS FLOAT)", "{float} * 2.0F", "CAST({double} AS FLOAT)",
    ),
    "double": (
        "{double} / {int}", "{number} / {number}", "sqrt({double})", "CAST({string} AS DOUBLE)",
        "{double} + {float}", "round({double}, 2)", "ln({double})", "pow({double}, {int})",
        "CAST({timestamp} AS DOUBLE)", "nanvl({double}, 1.0D)",
        "aggregate({array<int>}, 0.0D, (s, x) -> s + x, s -> s / 3)", "atan2({double}, {double})",
        "nullif({double}, 2.25D)", "{struct<t:timestamp,m:map<string,double>>}.m['d']",
        "months_between({date}, {timestamp})",
    ),
    "decimal(10,2)": (
        "CAST({string} AS DECIMAL(10,2))", "CAST({double} AS DECIMAL(10,2))", "CAST({int} AS DECIMAL(10,2))",
        "CAST({decimal(10,2)} + {decimal(10,2)} AS DECIMAL(10,2))",
        "CAST(round({decimal(10,2)}, 1) AS DECIMAL(10,2))",
    ),
    "decimal(38,18)": (
        "CAST({decimal(38,18)} * {decimal(10,2)} AS DECIMAL(38,18))", "CAST({string} AS DECIMAL(38,18))",
        "CAST({decimal(10,2)} / {int} AS DECIMAL(38,18))", "CAST({bigint} AS DECIMAL(38,18))",
    ),
    "string": (
        "concat({string}, {string})", "upper({string})", "substring({string}, {int}, 3)", "CAST({any} AS STRING)",
        "CAST({number} AS STRING)", "CAST({timestamp_ntz} AS STRING)",
        "date_format({timestamp}, 'yyyy-MM-dd HH:mm:ss.SSS z')", "to_json(struct({any} AS p, {same} AS q))",
        "to_json({map<string,int>})", "to_json({array<struct<a:int,b:string>>})",
        "regexp_replace({string}, '[0-9]+', '#')", "regexp_extract({string}, '([a-z])(.)', 1)", "hex({binary})",
        "base64({binary})", "format_string('%s-%05d', {string}, {int})", "get_json_object({string}, '$.c.k')",
        "decode({binary}, 'UTF-8')", "from_unixtime({bigint})", "array_join({array<string>}, '|', '?')",
        "{array<string>}[{int}]", "lpad({string}, 5, '*')", "translate({string}, 'ab', 'x')", "trim({string})",
        "reverse({string})", "sha2({binary}, 256)", "{struct<a:int,b:string>}.b",
        "coalesce({string}, {string}, 'none')", "IF({boolean}, {string}, {string})", "format_number({double}, 2)",
        "CAST({binary} AS STRING)", "split_part({string}, ',', {int})", "soundex({string})",
        "substring_index({string}, ',', 2)", "initcap({string})", "CAST({array<int>} AS STRING)",
        "elt({int}, {string}, 'e')", "CAST({struct<a:int,b:string>} AS STRING)", "date_format({date}, 'EEEE')",
        "to_csv(struct({int} AS a, {string} AS b))", "from_json({string}, '" + _FROM_JSON + "').c['k']",
        "typeof({any})", "url_encode({string})", "bin({bigint})",
        "variant_get(try_parse_json({string}), '$.c.k', 'string')", "to_char({decimal(10,2)}, '99999999.99')",
        "conv({string}, 10, 16)", "CAST({interval day to second} AS STRING)",
    ),
    "binary": (
        "CAST({string} AS BINARY)", "unhex({string})", "encode({string}, 'UTF-16BE')", "unbase64({string})",
        "concat({binary}, {binary})", "substring({binary}, 2, 1)", "to_binary({string}, 'utf-8')",
    ),
    "date": (
        "CAST({string} AS DATE)", "CAST({timestamp} AS DATE)", "date_add({date}, {int})",
        "to_date({string}, 'yyyy-MM-dd')", "make_date({int}, 2, 29)", "last_day({date})", "trunc({date}, 'MM')",
        "next_day({date}, 'MO')", "add_months({date}, {int})",
    ),
    "timestamp": (
        "CAST({string} AS TIMESTAMP)", "to_timestamp({string}, \"yyyy-MM-dd'T'HH:mm:ssX\")",
        "CAST({date} AS TIMESTAMP)", "{timestamp} + INTERVAL 36 HOURS", "date_trunc('HOUR', {timestamp})",
        "from_utc_timestamp({timestamp}, 'Asia/Kathmandu')", "timestamp_millis({bigint})",
        "CAST({timestamp_ntz} AS TIMESTAMP)", "make_timestamp(2024, {int}, 1, 2, 30, 0)",
        "{timestamp} + {interval day to second}", "{struct<t:timestamp,m:map<string,double>>}.t",
        "timestampadd(MONTH, {int}, {timestamp})",
    ),
    "timestamp_ntz": (
        "CAST({timestamp} AS TIMESTAMP_NTZ)", "{timestamp_ntz} + INTERVAL 1 MONTH",
        "CAST({string} AS TIMESTAMP_NTZ)",
    ),
    "interval day to second": (
        "{timestamp} - {timestamp}", "{interval day to second} * {int}", "make_dt_interval({int}, 1, 2, 3)",
    ),
    "array<int>": (
        "array({int}, {int})", "transform({array<int>}, x -> x + {int})",
        "transform({array<int>}, (x, i) -> i * {int})", "filter({array<int>}, x -> x > {int})",
        "array_sort({array<int>})", "sort_array({array<int>}, false)", "array_distinct({array<int>})",
        "slice({array<int>}, {int}, 2)", "sequence(1, 5, {int})", "map_values({map<string,int>})",
        "from_json({string}, '" + _FROM_JSON + "').b", "array_union({array<int>}, {array<int>})",
        "array_repeat({int}, 2)", "{array<struct<a:int,b:string>>}.a", "flatten(array({array<int>}, array(1)))",
        "array_remove({array<int>}, 1)", "zip_with({array<int>}, {array<int>}, (x, y) -> x + y)",
        "CAST({array<string>} AS ARRAY<INT>)", "array_insert({array<int>}, {int}, 9)",
        "array_sort({array<int>}, (x, y) -> CASE WHEN x < y THEN 1 WHEN x > y THEN -1 ELSE 0 END)",
    ),
    "array<string>": (
        "split({string}, ',')", "array({string}, {string})", "map_keys({map<string,int>})",
        "array_except({array<string>}, array(''))", "transform({array<int>}, x -> concat({string}, x))",
        "json_object_keys({string})", "regexp_extract_all({string}, '([a-z])', 1)",
    ),
    "array<struct<a:int,b:string>>": (
        "array({struct<a:int,b:string>}, {struct<a:int,b:string>})",
        "from_json({string}, 'ARRAY<STRUCT<a: INT, b: STRING>>')",
        "filter({array<struct<a:int,b:string>>}, s -> s.a > {int})",
    ),
    "map<string,int>": (
        "map({string}, {int})", "map_filter({map<string,int>}, (k, v) -> v > {int})",
        "from_json({string}, 'MAP<STRING, INT>')", "transform_values({map<string,int>}, (k, v) -> v + {int})",
        "map_concat({map<string,int>}, map('z', {int}))", "map_from_arrays({array<string>}, {array<int>})",
        "str_to_map({string})::map<string,int>", "transform_keys({map<string,int>}, (k, v) -> concat(k, {string}))",
        "map_zip_with({map<string,int>}, {map<string,int>}, (k, x, y) -> x)",
    ),
    "map<int,array<date>>": (
        "map({int}, array({date}))",
    ),
    "struct<a:int,b:string>": (
        "named_struct('a', {int}, 'b', {string})", "from_json({string}, 'a INT, b STRING')",
        "from_csv({string}, 'a INT, b STRING')", "element_at({array<struct<a:int,b:string>>}, {int})",
        "from_json({string}, 'a INT, b STRING', map('mode', 'FAILFAST'))",
    ),
    "struct<t:timestamp,m:map<string,double>>": (
        "named_struct('t', {timestamp}, 'm', map('d', {double}))",
    ),
}  # fmt: skip


class Maker:
    """Makes expressions of columns.

    Args:
        columns: their types by their names.
    """

    def __init__(self, chance: random.Random, columns: dict[str, str]) -> None:
        self.chance = chance
        self.columns = columns

    def of(self, kind: str, depth: int, same: str | None = None) -> str:
        """An expression of a type, made of templates inside of templates."""
        same = same or self.chance.choice(_ANY)
        kind = {"any": self.chance.choice(_ANY), "number": self.chance.choice(_NUMBERS), "same": same}.get(kind, kind)
        names = [name for name, each in self.columns.items() if each == kind]
        if depth <= 0 or (names and self.chance.random() < 0.2):
            return self.chance.choice(names) if names and self.chance.random() < 0.9 else self._value(kind)
        template = self.chance.choice(TEMPLATES[kind])
        return "(" + re.sub(r"\{([a-z][^{}]*)\}", lambda part: self.of(part[1], depth - 1, same), template) + ")"

    def _value(self, kind: str) -> str:
        return f"CAST(NULL AS {kind})" if self.chance.random() < 0.2 else self.chance.choice(VALUES[kind])


def column(chance: random.Random, kind: str, number: str) -> str:
    """An expression that has the values of a type in turn, by a number of the row."""
    values = [f"CAST({each} AS {kind})" for each in VALUES[kind]] + [f"CAST(NULL AS {kind})"]
    chance.shuffle(values)
    # Not from an array: Spark would make a literal of it, and take its elements for not null.
    cases = " ".join(f"WHEN {n} THEN {each}" for n, each in enumerate(values))
    return f"CASE pmod({number}, {len(values)}) {cases} END"


# ---- operators -----------------------------------------------------------------------------------------------


def _shouted(text):  # type: ignore[no-untyped-def]  # Spark would take hints for those of an Arrow function
    return None if text is None else text.upper() + "!"


def _pairs(number):  # type: ignore[no-untyped-def]
    return [number, None] if number is not None and number % 2 else None


def _doubled(numbers: pd.Series) -> pd.Series:
    return numbers.fillna(0) * 2


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _turned(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for frame in frames:
        yield frame.assign(p="p")


shouted = F.udf(_shouted, T.StringType())
pairs = F.udf(_pairs, T.ArrayType(T.LongType()))
doubled = F.pandas_udf(_doubled, T.DoubleType())


def _types(df: DataFrame) -> dict[str, str]:
    kinds = dict(df.dtypes)
    return {name: kind for name, kind in kinds.items() if kind in VALUES}


def _selected(df: DataFrame, maker: Maker) -> DataFrame:
    """Some columns as they are, some computed."""
    chance = maker.chance
    kept = chance.sample(df.columns, k=min(len(df.columns), chance.randint(2, 12)))
    made = [f"{maker.of(kind, 2)} AS n{n}" for n, kind in enumerate(chance.sample([*TEMPLATES], k=3))]
    names = {each.rsplit(" AS ", 1)[1] for each in made}
    return df.selectExpr(*[f"`{name}`" for name in kept if name not in names], *made)


def _filtered(df: DataFrame, maker: Maker) -> DataFrame:
    return df.where(f"coalesce({maker.of('boolean', 2)}, {maker.chance.choice(['true', 'true', 'false'])})")


def _generated(df: DataFrame, maker: Maker) -> DataFrame:
    """With generators. Of each row there are a few at most."""
    numbers, texts = maker.of("array<int>", 1), maker.of("array<string>", 1)
    structs, text = maker.of("array<struct<a:int,b:string>>", 1), maker.of("string", 1)
    kept = [f"`{name}`" for name in df.columns if name not in ("g0", "g1")]
    chosen = maker.chance.choice(
        [
            f"explode({numbers}) AS g0", f"explode_outer({texts}) AS g0", f"posexplode({numbers}) AS (g0, g1)",
            f"posexplode_outer({maker.of('map<string,int>', 1)}) AS (g0, g1, g2)", f"inline({structs}) AS (g0, g1)",
            f"inline_outer({structs}) AS (g0, g1)", f"stack(2, 1, {text}, {maker.of('int', 1)}, 'z') AS (g0, g1)",
            f"json_tuple({text}, 'a', 'b') AS (g0, g1)",
        ]
    )  # fmt: skip
    return df.selectExpr(*[each for each in kept if each != "`g2`"], chosen)


def _by_python(df: DataFrame, maker: Maker) -> DataFrame:
    chance = maker.chance
    way = chance.choice(["udf", "array", "pandas", "arrow", "frames", "in a filter"])
    if way == "udf":
        return df.withColumn("u0", shouted(F.expr(maker.of("string", 1))))
    if way == "array":
        return df.withColumn("u1", pairs(F.expr(maker.of("bigint", 1))))
    if way == "pandas":
        return df.withColumn("u2", doubled(F.expr(maker.of("double", 1))))
    if way == "in a filter":
        return df.where(F.coalesce(shouted(F.expr(maker.of("string", 1))), F.lit("A")) >= "7")
    if way == "arrow":
        return df.mapInArrow(_same, df.schema)
    flat = df.selectExpr(f"{maker.of('string', 1)} AS s", f"{maker.of('int', 1)} AS i")
    return flat.mapInPandas(_turned, "s string, i int, p string") if chance.random() < 0.5 else df


_OPERATORS: tuple[Callable[[DataFrame, Maker], DataFrame], ...] = (
    _selected, _selected, _filtered, _filtered, _generated, _by_python,
)  # fmt: skip


def query(df: DataFrame, chance: random.Random) -> DataFrame:
    """Some operators after each other.

    Raises:
        AnalysisException: it is not a query, or not one of this version of Spark.
    """
    for _ in range(chance.randint(1, 4)):
        df = chance.choice(_OPERATORS)(df, Maker(chance, _types(df)))
    return df

"""``Flow.process``: what is checked and decided before a step with state can run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import OptionError, located
from onceflow.options.column_names import did_you_mean
from onceflow.options.durations import duration_ms
from onceflow.planning.dead_letter_limit import check_limit
from onceflow.planning.options import check_whole, is_whole
from onceflow.protocol.names import INTERNAL_SUFFIX, OwnTopics
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.api.processor import ColumnProcessor, Processor, overrides
from onceflow.state.api.serdes import is_serde, prepare
from onceflow.state.api.time_joins import TimeJoin
from onceflow.state.changelog.topics import TableTopics
from onceflow.state.engine.base import TIMERS_PER_BATCH
from onceflow.state.engine.retry import Retry
from onceflow.state.engine.shapes import declared_fields
from onceflow.state.joins.spec import JoinSpec
from onceflow.state.local.format import default_state_dir
from onceflow.state.spec import ProcessSpec
from onceflow.state.stores.base import Store
from onceflow.state.stores.choice import check_store, store_class
from onceflow.state.windows.processor import check_windows

log = logging.getLogger("onceflow")

ON_ERROR = ("fail", "dead-letter")
# What the methods of a processor are called with. migrate() may leave out the last one.
_OF_ALL = {"open": ("partition",), "close": (), "migrate": ("payload", "from_version", "name")}
_METHODS = _OF_ALL | {
    "event_time": ("record",),
    "late_before_ms": ("watermark_ms",),
    "process": ("key", "records", "state"),
    "on_timer": ("key", "timer", "state"),
}
_COLUMN_METHODS = _OF_ALL | {"event_time": ("records",), "process": ("records", "states", "context")}
MOVES = (
    "table {table} has no changelog, and on a cluster Spark may run a partition on another host in every batch; there "
    "its state begins empty"
)


@dataclass(frozen=True)
class Step:
    """One ``Flow.process`` of a flow.

    Args:
        copies: how many hosts of a cluster keep a local copy of each partition.
        waits: whether batches wait while any partition is restored.
    """

    spec: ProcessSpec
    lateness_ms: int | None
    idle_s: float
    clock_s: float | None = None
    copies: int = 1
    waits: bool = True


@dataclass(frozen=True)
class StepOptions:
    """Arguments of ``Flow.process``, as given."""

    table: str
    partitions: int | None
    on_error: str
    dead_letter_topic: str | None
    late_topic: str | None
    retention: str | float | None
    store: str | type[Store]
    state_dir: str | Path | None
    adopt_existing: bool
    idle_timeout: str | float
    max_timers_per_batch: int | None = TIMERS_PER_BATCH
    max_dead_letters: int | float | None = None
    changelog: bool = True
    duplicates_topic: str | None = None
    clock_after: str | float | None = None
    copies: int = 1
    wait_for_restores: bool = True

    @property
    def side_topics(self) -> dict[str, str]:
        """As `ProcessSpec.side_topics`, of a step that is not made yet."""
        named = {
            "dead letter": self.dead_letter_topic,
            "late": self.late_topic,
            "duplicate": self.duplicates_topic,
        }
        return {topic: role for role, topic in named.items() if topic is not None}


def check_options(
    options: StepOptions, processor: object, *, flow: str, sources: Iterable[str], tables: Iterable[str]
) -> Processor | ColumnProcessor:
    """Check what can be checked without Kafka.

    Args:
        sources: topics that the flow reads. tables: tables of its other steps.

    Returns:
        The processor.

    Raises:
        OptionError: see its text.
    """
    if not isinstance(processor, Processor | ColumnProcessor):
        raise OptionError(
            f"Flow.process takes a Processor, not {processor!r}",
            flow=flow,
            next_step="give an instance of your subclass: Balance(), not Balance",
        )
    _check_defined(processor, flow)
    _check_signatures(processor, flow)
    _check_serdes(processor, flow)
    _note_misspelled(processor, flow)
    check_windows(processor, flow, late_topic=options.late_topic is not None)
    _check_table(options.table, flow, sources, tables)
    _check_dead_letters(options, processor, flow)
    goes_late = processor.allowed_lateness is not None
    if goes_late != (options.late_topic is not None) and not isinstance(processor, Deduplication):
        raise OptionError(
            "allowed_lateness of the processor and late_topic= go together",
            flow=flow,
            next_step="give both (late records go to the topic, they never vanish), or neither (no record is late)",
        )
    own_tables = frozenset(topic for name in (*tables, options.table) for topic in (name, name + INTERNAL_SUFFIX))
    check_side_topics(options.side_topics, OwnTopics(frozenset(sources), own_tables), flow)
    if options.clock_after is not None and not goes_late:
        raise OptionError(
            "clock_after= is for event time, which the processor does not use",
            flow=flow,
            next_step="declare allowed_lateness, or leave clock_after= out",
        )
    _check_numbers(options, flow)
    _check_durations(options, processor, flow)
    if isinstance(processor, Retry):
        _check_retry(options, processor, flow)
    check_store(options.store, flow)
    if options.changelog is not True:
        check_local(options.changelog, options.store, processor, flow, adopt_existing=options.adopt_existing)
    return processor


def _check_defined(processor: Processor | ColumnProcessor, flow: str) -> None:
    """Check that the class defines process(). Without it every record would become a dead letter."""
    given = all(overrides(processor.process, each.process) for each in (Processor, ColumnProcessor))
    if not given and not isinstance(processor, Deduplication | TimeJoin):
        own = [name for name in vars(type(processor)) if not name.startswith("_")]
        raise OptionError(
            f"{type(processor).__name__} does not define process()",
            flow=flow,
            next_step=f"{did_you_mean('process', own)}Define it: Flow.process calls it with the records of each key",
        )


def _check_signatures(processor: Processor | ColumnProcessor, flow: str) -> None:
    """Check that each method takes what it is called with. Otherwise every record would become a dead letter."""
    takes = _COLUMN_METHODS if isinstance(processor, ColumnProcessor) else _METHODS
    for name, arguments in takes.items():
        method = getattr(processor, name, None)
        if not callable(method):
            continue
        try:
            signature = inspect.signature(method, follow_wrapped=False)  # a decorator may add arguments
        except Exception:  # of a class in C, or annotations that cannot be evaluated
            continue
        wrong = _unbound(signature, arguments)
        if wrong and not (name == "migrate" and not _unbound(signature, arguments[:-1])):
            raise OptionError(
                f"{type(processor).__name__}.{name}{signature} cannot be called: {wrong}",
                flow=flow,
                next_step=f"define it as {name}({', '.join(['self', *arguments])})",
            )


def _check_serdes(processor: Processor | ColumnProcessor, flow: str) -> None:
    """Check that serdes are some. A text, or a class, fails at the first record, or makes dead letters of all."""
    for name in ("key", "value", "state", "output"):
        serde = getattr(processor, name, None)
        if serde is not None and not is_serde(serde):
            raise OptionError(
                f"{name} of {type(processor).__name__} is no serde: {serde!r:.100}",
                flow=flow,
                next_step="give one of onceflow.serdes, such as serdes.JSON, serdes.STRING or serdes.struct(...)",
            )
        with located(flow=flow):
            prepare(serde)


def _unbound(signature: inspect.Signature, arguments: Sequence[str]) -> str:
    """Why a method cannot be called with these arguments; empty: it can be."""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""


def _note_misspelled(processor: Processor | ColumnProcessor, flow: str) -> None:
    """Warn of names of the class that are almost those that onceflow uses: ``alowed_lateness`` has no effect.

    It is no error, because an attribute ``values`` of the user's own may be meant.
    """
    classes = type(processor).__mro__
    ours = [each for each in classes if each.__module__.startswith("onceflow.")]
    known = {name for each in ours for name in vars(each) if not name.startswith("_")} | {"migrate"}
    given = {name for each in classes[: classes.index(ours[0])] for name in vars(each) if not name.startswith("_")}
    for name in sorted(given - known):
        if meant := did_you_mean(name, known - given):
            log.warning(
                "flow %s: %s has %r, which onceflow does not use and which has no effect by itself; %s",
                *(flow, type(processor).__name__, name, meant.strip()),
            )


def _check_table(table: str, flow: str, sources: Iterable[str], tables: Iterable[str]) -> None:
    if not table or table in sources or table.startswith("__"):
        what = "is read by this flow" if table in sources else "cannot be a table topic"
        raise OptionError(f"table={table!r} {what}", flow=flow, next_step="give the table a topic name of its own")
    if table in tables:
        raise OptionError(
            f"table={table!r} has a step already", flow=flow, next_step="give each step a table of its own"
        )
    # A table has two topics. The name of the second one is derived, so it may be that of something else.
    own = (table, table + INTERNAL_SUFFIX)
    others = dict.fromkeys(sources, "is read by this flow")
    for other in tables:
        others |= dict.fromkeys((other, other + INTERNAL_SUFFIX), f"is a topic of table {other}")
    for name in own:
        if name in others:
            raise OptionError(
                f"table={table!r} needs the topics {' and '.join(own)}, but {name} {others[name]}",
                flow=flow,
                next_step="give the table another name",
            )


def _check_dead_letters(options: StepOptions, processor: Processor | ColumnProcessor, flow: str) -> None:
    if options.on_error not in ON_ERROR:
        raise OptionError(
            f"on_error={options.on_error!r} is unknown", flow=flow, next_step=f"use one of {', '.join(ON_ERROR)}"
        )
    if (options.on_error == "dead-letter") != (options.dead_letter_topic is not None):
        raise OptionError(
            'on_error="dead-letter" and dead_letter_topic= go together',
            flow=flow,
            next_step="give both, or neither: then a record that cannot be processed stops the flow",
        )
    try:
        declared_fields(processor)
    except ValueError as error:
        raise OptionError(
            f"{type(processor).__name__}.state_fields: {error}", flow=flow, next_step="see struct()"
        ) from None
    check_limit(options.max_dead_letters, flow)
    if options.max_dead_letters is not None and options.dead_letter_topic is None:
        raise OptionError(
            "max_dead_letters= is given, but the step has no dead letters",
            flow=flow,
            next_step='give on_error="dead-letter" and dead_letter_topic= as well, or leave it out',
        )


def _check_numbers(options: StepOptions, flow: str) -> None:
    check_whole("partitions", options.partitions, 1, "as many as the sources have", flow)
    if not is_whole(options.copies, 1):
        raise OptionError(
            f"copies={options.copies!r} is not a whole number of at least 1",
            flow=flow,
            next_step="give 1: each partition has a local copy on one host; or 2: on two of them",
        )
    if options.copies > 1 and not (options.changelog and store_class(options.store).on_disk):
        raise OptionError(
            f"copies={options.copies} needs a changelog and a store on disk",
            flow=flow,
            detail="standby copies are read from the changelog, and stay on the disks of their hosts",
            next_step="leave copies= out, or changelog=False and store= as well",
        )
    check_whole("max_timers_per_batch", options.max_timers_per_batch, 1, "all due timers in one batch", flow)


def _check_durations(options: StepOptions, processor: Processor | ColumnProcessor, flow: str) -> None:
    for name, duration in (
        ("retention", options.retention),
        ("idle_timeout", options.idle_timeout),
        ("clock_after", options.clock_after),
        ("ttl", processor.ttl),
        ("allowed_lateness", processor.allowed_lateness),
        ("max_ahead", processor.max_ahead),
    ):
        try:
            if duration is None and name == "idle_timeout":  # the type says so, but not every caller checks types
                raise ValueError("it cannot be left out")
            if duration is not None and duration_ms(duration) <= 0 and name not in ("allowed_lateness", "max_ahead"):
                raise ValueError("it must be positive")
        except ValueError as error:
            raise OptionError(f"{name}={duration!r}: {error}", flow=flow, next_step='for example "5 minutes"') from None


def _check_retry(options: StepOptions, processor: Retry, flow: str) -> None:
    """Refuse what would let waiting records vanish: they are in the table, and nowhere else."""
    refused = {
        "retention": options.retention is not None,
        "ttl": processor.ttl is not None,
        "changelog=False": not options.changelog,
    }
    for name in (name for name, given in refused.items() if given):
        raise OptionError(
            f"{name} cannot be combined with Retry: records that wait for their retry would be lost",
            flow=flow,
            detail="while a record waits, it is in the table of the step, and nowhere else",
            next_step=f"leave {name} out; a record leaves the table when it is retried",
        )


def check_side_topics(topics: Iterable[str | None], own: OwnTopics, flow: str) -> None:
    """Refuse topics that dead letters and late records must not go to.

    Raises:
        OptionError: one of them is an internal topic, a source or a table of the flow.
    """
    for topic in topics:
        why = "" if topic is None else own.refusal(topic)
        if why:
            raise OptionError(
                f"Dead letters, late records or duplicates cannot go to {topic!r}, which {why}",
                flow=flow,
                next_step="give them a topic of their own",
            )


def make_spec(
    options: StepOptions,
    processor: Processor | ColumnProcessor,
    topics: TableTopics,
    *,
    flow: str,
    flow_key: str,
    source_topic: str | None,
    local: bool,
    joins: tuple[JoinSpec, ...] = (),
) -> ProcessSpec:
    """The specification of a step for its tasks.

    Args:
        flow_key: key of the flow's progress record.
        source_topic: the topic that all records come from, when there is only one.
        local: whether tasks run on this machine. Then driver and workers share the local stores, and the driver decides
            where these are. On a cluster the environment of each host decides.
        joins: tables that the processor looks up rows in.
    """
    state_dir = default_state_dir() if local else None
    ttl = options.retention if options.retention is not None else processor.ttl
    return ProcessSpec(
        flow=flow,
        flow_key=flow_key,
        processor=processor,
        topics=topics,
        store=store_class(options.store),
        state_dir=state_dir if options.state_dir is None else Path(options.state_dir),
        on_error=options.on_error,
        dead_letter_topic=options.dead_letter_topic,
        late_topic=options.late_topic,
        default_ttl_ms=None if ttl is None else duration_ms(ttl),
        source_topic=source_topic,
        max_timers_per_batch=options.max_timers_per_batch,
        max_dead_letters=options.max_dead_letters,
        joins=joins,
    )


def side_topics(steps: Mapping[str, Step]) -> dict[str, str]:
    """Topics of dead letters, late records and duplicates, and which of them each is for."""
    return {topic: role for step in steps.values() for topic, role in step.spec.side_topics.items()}


def all_side_topics(steps: Mapping[str, Step], dead_letters: Iterable[str | None] = ()) -> dict[str, str]:
    """As `side_topics`, also with the topics of parked records.

    Args:
        dead_letters: topics of dead letters that are not those of a step.
    """
    others = {topic: "dead letter" for topic in dead_letters if topic is not None}
    processors = [step.spec.processor for step in steps.values()]
    parked = {each.parked_topic: "parked" for each in processors if isinstance(each, Retry)}
    return {**others, **side_topics(steps), **parked}


def check_local(
    changelog: bool, store: str | type[Store], processor: Any, flow: str, *, adopt_existing: bool = False
) -> None:
    """Check the options of a step without table topics.

    Raises:
        OptionError: see its text.
    """
    if changelog is not False:
        raise OptionError(f"changelog={changelog!r} is no bool", flow=flow, next_step="give True or False")
    if not store_class(store).on_disk:
        raise OptionError(
            f"changelog=False needs a store on disk, store={store!r} is in the memory of one process",
            flow=flow,
            detail="driver and Python workers process partitions in turn, and each process would have other state",
            next_step='leave store= out, or give "lmdb" or "rocksdb"',
        )
    if adopt_existing:
        raise OptionError(
            "adopt_existing=True cannot be combined with changelog=False: there is no table topic",
            flow=flow,
            next_step="leave one of them out",
        )
    if hasattr(getattr(processor, "state", None), "encode_bytes"):
        raise OptionError(
            "a ClaimCheck as state serde cannot be combined with changelog=False",
            flow=flow,
            detail="the references would be in local copies alone, so their objects would be deleted as orphans",
            next_step="leave changelog=False out, or keep the values themselves in the state",
        )

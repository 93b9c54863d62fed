"""The documents of answers, for the OpenAPI page. Answers are written without these classes, which would be slower."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from onceflow.server.problems import MEDIA_TYPE


class LagDocument(BaseModel):
    records: int | None = Field(description="At most how many committed records are missing. Null: not known yet.")
    ms: int | None = Field(description="At most how long ago this was everything. Null: it has never been.")


class AgeDocument(BaseModel):
    position: str = Field(description="The answer contains everything up to this position of the table's topic.")
    lag: LagDocument


class ValueDocument(AgeDocument):
    table: str
    key: Any
    value: Any


class RowDocument(BaseModel):
    key: Any = Field(description="Null if it does not fit the table's format; then key_base64 has its bytes.")
    value: Any = Field(description="Null if it does not fit the table's format; then error says so.")
    key_base64: str = Field(default="", description="Present if the key does not fit.")
    error: str = Field(default="", description="Present if key or value does not fit the format.")


class KeysDocument(BaseModel):
    keys: list[Any] = Field(description="Keys as text; as numbers or text if the keys are long.")


class RowsDocument(AgeDocument):
    table: str
    rows: list[RowDocument] = Field(
        description="Rows of keys that exist, in the order of the keys asked for, each once."
    )


class RangeDocument(AgeDocument):
    table: str
    rows: list[RowDocument]
    cursor: str | None = Field(description="For the same request, to continue. Null: there is nothing more.")


class CountDocument(AgeDocument):
    table: str
    count: int


class PartitionDocument(BaseModel):
    partition: int
    instances: list[str] = Field(description="Who has it; the first one is the owner.")
    position: int | None = Field(default=None, description="Of the copy here. Null: there is none here.")
    lag: LagDocument | None = None
    restoring: bool = False


class TableDocument(BaseModel):
    table: str
    key: str
    value: str
    partitions: list[PartitionDocument]
    placement: str = Field(
        description="default: keys are where Kafka's default partitioner puts them. other: they are not, so each key "
        "is looked for in all partitions. unknown: no partition is here yet."
    )
    ignored: int = Field(description="Records that could not be kept here: without a key.")
    failure: str | None = Field(description="Why the table cannot be read any more.")


class TablesDocument(BaseModel):
    tables: list[TableDocument]


class HealthDocument(BaseModel):
    status: str
    waiting_for: list[str] = Field(default_factory=list, description="What is missing until it is ready.")


class ProblemDocument(BaseModel):
    type: str
    title: str
    status: int
    detail: str
    next_step: str = ""


_AGE = {
    "Onceflow-Position": {"schema": {"type": "string"}, "description": "As `position` in the document."},
    "Onceflow-Lag-Records": {"schema": {"type": "integer"}, "description": "As `lag.records`; absent if unknown."},
    "Onceflow-Lag-Ms": {"schema": {"type": "integer"}, "description": "As `lag.ms`; absent if unknown."},
}
_PROBLEM = {
    "description": "A problem document (RFC 9457). 400: a parameter is invalid. 401: no valid token. 404: no such "
    "table or key. 422: a value does not fit the format. 503: not now, with Retry-After.",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
}


def responses(document: type[BaseModel], *, aged: bool = True, **other: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a route.

    Args:
        aged: whether the answer says how old it is in headers.
        other: further statuses that are no problems: ``s503="..."`` with the same document.
    """
    found: dict[int | str, dict[str, Any]] = {200: {"model": document}, "default": {**_PROBLEM}}
    if aged:
        found[200]["headers"] = _AGE
    for status, description in other.items():
        found[int(status[1:])] = {"model": document, "description": description}
    return found

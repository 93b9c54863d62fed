"""What of one Protobuf message cannot be read as another one: fields are found by their numbers alone.

Protobuf reads a field whose type has changed as one that is not there, or as another value. So both are looked at: the
messages, for what may be lost, and a value, for what is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor as F

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

_NAMES = {getattr(F, name): name.removeprefix("TYPE_").lower() for name in dir(F) if name.startswith("TYPE_")}
#: Which types a type is read as besides itself, without a value that becomes another one.
_WIDER = {
    F.TYPE_BOOL: (F.TYPE_INT32, F.TYPE_INT64, F.TYPE_UINT32, F.TYPE_UINT64),
    F.TYPE_INT32: (F.TYPE_INT64,),
    F.TYPE_UINT32: (F.TYPE_UINT64, F.TYPE_INT64),
    F.TYPE_SINT32: (F.TYPE_SINT64,),
    F.TYPE_ENUM: (F.TYPE_INT32, F.TYPE_INT64),
    F.TYPE_STRING: (F.TYPE_BYTES,),
}


def unreadable(writer: Descriptor, reader: Descriptor) -> list[str]:
    """What may be lost, each with its field; empty: nothing is."""
    found: list[str] = []
    _compare(writer, reader, "", set(), found)
    return found


def _compare(writer: Descriptor, reader: Descriptor, path: str, seen: set[tuple[str, str]], found: list[str]) -> None:
    pair = (writer.full_name, reader.full_name)
    if pair in seen:
        return
    seen.add(pair)
    for field in reader.fields:
        written = writer.fields_by_number.get(field.number)
        at = f"{path}{field.name} = {field.number}"
        if written is None or (_is_required(field) and not _is_required(written)):
            if _is_required(field):
                found.append(f"{at}: it is required now")
            if written is None:
                continue
        if _shown(written) == _shown(field) and field.type in (F.TYPE_MESSAGE, F.TYPE_GROUP):
            _compare(written.message_type, field.message_type, f"{path}{field.name}.", seen, found)
        elif not _fits(written, field):
            found.append(f"{at}: {_shown(written)} has become {_shown(field)}")


def _fits(written: FieldDescriptor, field: FieldDescriptor) -> bool:
    if is_repeated(written) and not is_repeated(field):
        return False
    if written.type == field.type == F.TYPE_ENUM:
        if not field.enum_type.is_closed:
            return True
        return {*written.enum_type.values_by_number} <= {*field.enum_type.values_by_number}
    if written.type in (F.TYPE_MESSAGE, F.TYPE_GROUP):
        return False
    return field.type == written.type or field.type in _WIDER.get(written.type, ())


def lost(written: Message, read: Message) -> str:
    """The first field of a value that was read as another value, in words; empty: there is none."""
    for field, value in written.ListFields():
        target = None if field.is_extension else read.DESCRIPTOR.fields_by_number.get(field.number)
        if target is None:  # it is kept as an unknown field
            continue
        found = _of_field(field, value, target, getattr(read, target.name))
        if found is not None:
            return f"{target.name}{found}"
    return ""


def _of_field(field: FieldDescriptor, value: Any, target: FieldDescriptor, got: Any) -> str | None:
    changed = f" = {field.number}: {_shown(field)} has become {_shown(target)}"
    if is_map(field) or is_map(target):
        if not (is_map(field) and is_map(target)) or {*value} != {*got}:
            return changed
        pairs = [(value[key], got[key]) for key in value]
    else:
        values, others = (list(each) if is_repeated(of) else [each] for of, each in ((field, value), (target, got)))
        if len(values) != len(others):
            return changed
        pairs = list(zip(values, others, strict=True))
    for one, other in pairs:
        if hasattr(one, "ListFields") and hasattr(other, "ListFields"):
            inner = lost(one, other)
            if inner:
                return f".{inner}"
        elif not _same(one, other):
            return changed
    return None


def _same(one: Any, other: Any) -> bool:
    one, other = (each.encode() if isinstance(each, str) else each for each in (one, other))
    if isinstance(one, bytes) or isinstance(other, bytes) or hasattr(one, "ListFields") or hasattr(other, "ListFields"):
        return type(one) is type(other) and bool(one == other)
    return bool(one == other or (one != one and other != other))


def _is_required(field: FieldDescriptor) -> bool:
    found = getattr(field, "is_required", None)  # since Protobuf 6; label ends with 7
    return bool(field.label == F.LABEL_REQUIRED if found is None else found)


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether a field is a list or a map."""
    found = getattr(field, "is_repeated", None)
    return bool(field.label == F.LABEL_REPEATED if found is None else found)


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def kind_name(field: FieldDescriptor) -> str:
    """The type of a field, as ``.proto`` files call it."""
    return _NAMES[field.type]


def _shown(field: FieldDescriptor) -> str:
    if is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return f"map of {_NAMES[key.type]} to {_NAMES[value.type]}"
    return f"repeated {_NAMES[field.type]}" if is_repeated(field) else _NAMES[field.type]

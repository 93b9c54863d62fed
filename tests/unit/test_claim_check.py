"""The claim check: what is stored, what travels, and what is said of objects that are missing or altered."""

from __future__ import annotations

import datetime
import errno
import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import onceflow
from onceflow import ClaimCheck, ClaimCheckError, Record, object_storage, serdes
from onceflow.claim_check import objects as objects_module
from onceflow.claim_check import reference as reference_module
from onceflow.claim_check.columns import ColumnTask
from onceflow.claim_check.reference import PREFIX, Reference
from onceflow.claim_check.scan import Found, scan
from onceflow.claim_check.stored_value import StoredValue
from onceflow.errors import OptionError, ProcessorError, StorageUnavailableError
from onceflow.options.sizes import size_bytes, size_text
from onceflow.planning.process import check_local
from onceflow.testing.processor_driver import ProcessorDriver

LARGE = b"large " * 100


@pytest.fixture
def claim(tmp_path: Path) -> ClaimCheck:
    return ClaimCheck(tmp_path / "store", above=100)


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``today("2026-01-31")``: sets the clock of writers."""

    def set_(day: str) -> None:
        start = datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.timezone.utc)
        monkeypatch.setattr(objects_module, "clock_ms", lambda: int(start.timestamp() * 1000) + 3_600_000)

    return set_


def stored(claim: ClaimCheck) -> list[Path]:
    return sorted(path for path in Path(claim.objects.url).glob("*/*") if path.is_file())


# ---- what travels --------------------------------------------------------------------------------------


def test_small_values_travel_as_they_are(claim: ClaimCheck) -> None:
    assert claim.encode(b"x" * 100) == b"x" * 100
    assert claim.encode(b"") == b""
    assert claim.decode(b"x" * 100) == b"x" * 100
    assert not Path(claim.objects.url).exists()


def test_the_bytes_of_a_reference(claim: ClaimCheck, today: Any) -> None:
    """As documented: other programs read them."""
    today("2026-11-23")
    raw = claim.encode(LARGE)
    checksum = hashlib.sha256(LARGE).hexdigest()
    assert type(raw) is bytes
    assert len(raw) < reference_module.MAX_BYTES
    assert raw.startswith(b"\xffonceflow-claim-check/1 {")
    document = json.loads(raw.partition(b" ")[2])
    assert document == {"name": f"2026-11-23/{checksum}", "sha256": checksum, "size": len(LARGE)}
    assert (Path(claim.objects.url) / document["name"]).read_bytes() == LARGE
    assert claim.decode(raw) == LARGE


def test_a_value_that_looks_like_a_reference_is_stored(claim: ClaimCheck) -> None:
    for value in (PREFIX, PREFIX + b"1 {}", claim.encode(LARGE)):
        raw = claim.encode(value)
        assert raw != value
        assert claim.decode(raw) == value


def test_the_same_value_is_stored_once_a_day(claim: ClaimCheck, today: Any) -> None:
    today("2026-11-23")
    first = claim.encode(LARGE)
    assert claim.encode(LARGE) == first
    assert len(stored(claim)) == 1
    today("2026-11-24")
    assert claim.encode(LARGE) != first, "an object of yesterday gets no new references"
    assert len(stored(claim)) == 2
    assert claim.decode(first) == LARGE


def test_other_serdes(claim: ClaimCheck) -> None:
    documents = claim.wrap(serdes.JSON)
    value = {"text": "a" * 200}
    assert documents.decode(documents.encode(value)) == value
    assert documents.decode(documents.encode({"a": 1})) == {"a": 1}
    assert len(stored(claim)) == 1
    with pytest.raises(OptionError, match="not a serde"):
        claim.wrap(str)


def test_a_damaged_object_of_another_size_is_stored_again(claim: ClaimCheck) -> None:
    raw = claim.encode(LARGE)
    stored(claim)[0].write_bytes(b"cut")
    assert claim.encode(LARGE) == raw
    assert claim.decode(raw) == LARGE


def test_it_is_sent_to_tasks(claim: ClaimCheck) -> None:
    raw = claim.encode(LARGE)
    again = pickle.loads(pickle.dumps(claim))
    assert again.decode(raw) == LARGE
    reference = Reference.parse(raw)
    assert pickle.loads(pickle.dumps(reference)).size == len(LARGE)


# ---- what is wrong -------------------------------------------------------------------------------------


def test_a_missing_object_is_named(claim: ClaimCheck) -> None:
    raw = claim.encode(LARGE)
    stored(claim)[0].unlink()
    with pytest.raises(ClaimCheckError, match=f"{Reference.parse(raw).name} is missing in {claim.objects.url}"):
        claim.decode(raw)


@pytest.mark.parametrize("content", [b"", LARGE[1:], LARGE + b".", LARGE[:-1] + b"."])
def test_an_altered_object_is_named(claim: ClaimCheck, content: bytes) -> None:
    raw = claim.encode(LARGE)
    stored(claim)[0].write_bytes(content)
    with pytest.raises(ClaimCheckError, match=f"{Reference.parse(raw).name} in .* was altered"):
        claim.decode(raw)


def test_an_object_that_grows_while_it_is_read(claim: ClaimCheck) -> None:
    raw = claim.encode(LARGE)
    with claim.open(raw) as source, stored(claim)[0].open("ab", 0) as file:
        file.write(b".")
        with pytest.raises(ClaimCheckError, match="601 bytes instead of 600"):
            source.read()


def test_a_store_that_is_not_there_is_not_the_fault_of_a_record(claim: ClaimCheck) -> None:
    """A folder that is not mounted has no objects, and no record may become a dead letter for that."""
    raw = claim.encode(LARGE)
    Path(claim.objects.url).rename(f"{claim.objects.url}-away")
    Path(claim.objects.url).mkdir()
    with pytest.raises(StorageUnavailableError, match="There is no store"):
        claim.decode(raw)


@pytest.mark.parametrize(
    "raw",
    [
        PREFIX,
        PREFIX + b"2 {}",
        PREFIX + b"1 {",
        PREFIX + b"1 []",
        PREFIX + b'1 {"name":"../../etc/passwd","sha256":"../passwd","size":1}',
        PREFIX + b'1 {"name":"2026-11-23/' + b"0" * 64 + b'","sha256":"' + b"1" * 64 + b'","size":1}',
        PREFIX + b'1 {"name":"2026-11-23/' + b"0" * 64 + b'","sha256":"' + b"0" * 64 + b'","size":-1}',
    ],
)
def test_references_that_nobody_has_written(claim: ClaimCheck, raw: bytes) -> None:
    with pytest.raises(ClaimCheckError, match="cannot be read"):
        claim.decode(raw)
    with pytest.raises(ClaimCheckError, match="cannot be read"):
        claim.lazy().decode(raw)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"store": "sftp://host/folder"}, "cannot be used"),
        ({"store": "s3://"}, "names no folder or bucket"),
        ({"store": "s3:/bucket/prefix"}, "is a local folder, and no URL of a s3 bucket"),
        ({"store": "S3://bucket/prefix"}, "did you mean 's3://'"),
        ({"store": ""}, "names no folder"),
        ({"store": "s3://user:secret@bucket"}, "contains a password"),
        ({"store": "/tmp/x", "above": "1 megabyte"}, "not a size"),
        ({"store": "/tmp/x", "above": -1}, "not a size"),
        ({"store": "/tmp/x", "inner": serdes.Serde}, "not a serde"),
    ],
)
def test_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        ClaimCheck(**arguments)
    assert "secret" not in str(caught.value)


def test_no_secret_is_shown() -> None:
    claim = ClaimCheck("s3://bucket/claims", storage_options={"key": "ada", "secret": "hidden"})
    assert "hidden" not in f"{claim!r} {claim.name} {claim.objects!r}"


def test_sizes() -> None:
    assert [size_bytes(text) for text in ("1 MB", "1MiB", "900 kb", "1.5 MB", "7", 8)] == [
        1_000_000, 1 << 20, 900_000, 1_500_000, 7, 8,
    ]  # fmt: skip
    assert [size_text(count) for count in (0, 1_500, 104_857_600)] == ["0 bytes", "1.5 KB", "104.9 MB"]


# ---- files and streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"small", LARGE, PREFIX])
def test_files(claim: ClaimCheck, tmp_path: Path, content: bytes) -> None:
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(content)
    raw = claim.put_file(given)
    assert bytes(raw) == claim.encode(content)
    claim.get_file(raw, got)
    assert got.read_bytes() == content
    with claim.open(raw) as source:
        assert source.read() == content
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["given", "got"]


def test_a_file_of_another_store_is_refused(claim: ClaimCheck, tmp_path: Path) -> None:
    """Its reference would name an object that is not there."""
    path = tmp_path / "given"
    path.write_bytes(LARGE)
    other = ClaimCheck(str(tmp_path / "other"), above=100)
    (tmp_path / "other").mkdir()
    for raw in (other.put_file(path), pickle.loads(pickle.dumps(other.put_file(path)))):
        with pytest.raises(ClaimCheckError, match=r"(?s)was stored by another claim check.*put_file\(\) of the claim"):
            claim.encode(raw)
    assert claim.encode(claim.put_file(path)) == claim.encode(LARGE)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ({}, {}, True),
        ({"aws_endpoint_url": "http://a:9000"}, {"aws_endpoint_url": "http://b:9000"}, False),
        ({"aws_endpoint_url": "http://a:9000"}, {}, False),
        ({"key": "ada"}, {"key": "bob", "secret": "hidden"}, True),
        ({"AWS_SECRET_ACCESS_KEY": "1"}, {"AWS_SESSION_TOKEN": "2"}, True),
    ],
)
def test_a_value_of_another_service_is_copied(
    monkeypatch: pytest.MonkeyPatch, one: dict[str, str], other: dict[str, str], same: bool
) -> None:
    """Buckets of one name may be in two services. A reference is passed on only within a store."""
    source, target = (ClaimCheck("s3://pictures/claims", 100, storage_options=options) for options in (one, other))
    copied: list[bytes] = []
    monkeypatch.setattr(StoredValue, "read_bytes", lambda self: LARGE)
    monkeypatch.setattr(target.objects, "put", lambda data: copied.append(data) or b"copied")
    reference = bytes(Reference.of(f"2026-11-23/{'a' * 64}", 100, "a" * 64))
    assert target.encode(source.lazy().decode(reference)) == (reference if same else b"copied")
    assert copied == [] if same else [LARGE]


def test_a_file_that_is_altered_does_not_appear(claim: ClaimCheck, tmp_path: Path) -> None:
    raw = claim.encode(LARGE)
    stored(claim)[0].write_bytes(LARGE[:-1] + b".")
    with pytest.raises(ClaimCheckError):
        claim.get_file(raw, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_a_failed_write_leaves_nothing(claim: ClaimCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    claim.encode(LARGE)
    monkeypatch.setattr(objects_module.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(StorageUnavailableError, match="No space left"):
        claim.encode(LARGE + b"other")
    assert len(stored(claim)) == 1


@pytest.mark.parametrize("stored_by_another", [False, True])
def test_a_file_that_changes_while_it_is_stored(
    claim: ClaimCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored_by_another: bool
) -> None:
    """An object never has other content than its name says, and what another writer has stored stays."""
    path = tmp_path / "file"
    path.write_bytes(LARGE)

    def changed(reference: Reference) -> bool:
        if stored_by_another:
            ClaimCheck(claim.objects.url, above=100).encode(LARGE)
        path.write_bytes(LARGE.upper())
        return False

    claim.encode(b"x" * 200)
    with monkeypatch.context() as patched:
        patched.setattr(claim.objects, "_has", changed)
        with pytest.raises(StorageUnavailableError, match=r"The file .*file was changed while it was stored"):
            claim.put_file(path)
    kept = {hashlib.sha256(content).hexdigest() for content in (b"x" * 200, *[LARGE] * stored_by_another)}
    assert {each.name for each in stored(claim)} == kept
    assert all(hashlib.sha256(each.read_bytes()).hexdigest() == each.name for each in stored(claim))
    assert claim.decode(claim.put_file(path)) == LARGE.upper()


NO_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@pytest.mark.parametrize("code", NO_LINKS)
@pytest.mark.parametrize("system", ["has renameat2", "has none", "refuses it"])
def test_a_file_system_without_hard_links(
    code: int, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store is made once there, too: a writer does not overwrite what a collection has written down."""

    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    if system == "has none":
        monkeypatch.setattr(object_storage, "_renamed", lambda *_: None)
    elif system == "refuses it":
        monkeypatch.setattr(object_storage, "_RENAME_NOREPLACE", 1 << 30)  # flags that no kernel knows
    folder = object_storage.Folder(str(tmp_path))
    assert folder.create("marker", b"1")
    assert not folder.create("marker", b"2")
    assert folder.read("marker") == b"1"
    assert os.listdir(tmp_path) == ["marker"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_other_errors_of_a_file_system_are_errors(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match=os.strerror(code)):
        object_storage.Folder(str(tmp_path)).create("marker", b"1")
    assert os.listdir(tmp_path) == []


# ---- in processors -----------------------------------------------------------------------------------------


def test_a_processor(claim: ClaimCheck) -> None:
    class Keep(onceflow.Processor):
        value = output = claim
        state = claim.wrap(serdes.JSON)

        def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
            for record in records:
                state.put({"text": record.value.decode()})
                yield Record(key, record.value)

    driver = ProcessorDriver(Keep())
    assert driver.send(b"ada", LARGE) == [Record(b"ada", LARGE)]
    assert driver.state(b"ada") == {"text": LARGE.decode()}
    assert len(stored(claim)) == 2, "the value, and the state as JSON"


def test_state_that_cannot_be_read_is_not_the_fault_of_a_record(claim: ClaimCheck) -> None:
    class Keep(onceflow.Processor):
        state = claim

        def process(self, key: Any, records: Any, state: Any) -> None:
            try:
                state.get()
            finally:
                state.put(LARGE)

    driver = ProcessorDriver(Keep(), on_error="dead-letter")
    driver.send(b"ada", b"")
    (path,) = stored(claim)
    path.rename(path.with_name("away"))
    with pytest.raises(ProcessorError, match=f"the state cannot be read: .*{path.name} is missing"):
        driver.send(b"ada", b"")
    Path(claim.objects.url).rename(f"{claim.objects.url}-away")
    with pytest.raises(StorageUnavailableError, match="no store"):
        driver.send(b"ada", b"")
    assert driver.dead_letters == []


def test_state_without_a_topic_is_refused(claim: ClaimCheck) -> None:
    """The collector would not see its references."""

    class Keep(onceflow.Processor):
        state = claim

    with pytest.raises(OptionError, match="changelog=False"):
        check_local(False, "lmdb", Keep(), "flow")
    check_local(False, "lmdb", onceflow.Processor(), "flow")


def test_bytes_of_an_output_are_stored_whatever_its_serde(claim: ClaimCheck, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)

    class Out(onceflow.Processor):
        value, output = serdes.BYTES, claim.wrap(serdes.JSON)

        def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
            yield Record(key, json.dumps({"text": "b" * 200}).encode())
            yield Record(key, claim.put_file(tmp_path / "file"))
            yield Record(key, None)

    driver = ProcessorDriver(Out(), partitions=1)
    driver.send(b"ada", b"")
    assert len(stored(claim)) == 2
    assert driver.outputs[0].value == {"text": "b" * 200}
    assert driver.outputs[2].value is None


def test_lazy_values_travel_on_without_being_read(claim: ClaimCheck) -> None:
    seen = []

    class Pass(onceflow.Processor):
        value = output = claim.lazy()

        def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
            for record in records:
                seen.append((record.value.size, record.value.read()[:5]))
                yield Record(key, record.value)

    driver = ProcessorDriver(Pass())
    driver.send(b"ada", claim.encode(LARGE))
    driver.send(b"ada", b"small")
    assert seen == [(600, b"large"), (5, b"small")]
    assert [record.value.read() for record in driver.outputs] == [LARGE, b"small"]
    assert len(stored(claim)) == 1


@pytest.mark.parametrize("lazy", [False, True])
def test_missing_and_altered_objects_become_dead_letters(claim: ClaimCheck, lazy: bool) -> None:
    class Pass(onceflow.Processor):
        value = claim.lazy() if lazy else claim
        output = claim

        def process(self, key: Any, records: Any, state: Any) -> Iterator[Record]:
            for record in records:
                yield Record(key, record.value.read() if lazy else record.value)

    raws = [claim.encode(LARGE + b"%d" % n) for n in range(3)]
    (Path(claim.objects.url) / Reference.parse(raws[0]).name).unlink()
    (Path(claim.objects.url) / Reference.parse(raws[2]).name).write_bytes(b"other")
    driver = ProcessorDriver(Pass(), on_error="dead-letter")
    for raw in raws:
        driver.send(b"ada", raw)
    assert [record.value for record in driver.outputs] == [LARGE + b"1"]
    texts = [dict(letter.headers)["onceflow.error.message"] or b"" for letter in driver.dead_letters]
    assert [letter.value for letter in driver.dead_letters] == [raws[0], raws[2]], "the references stay"
    assert b"is missing" in texts[0]
    assert b"was altered" in texts[1]
    with pytest.raises(ProcessorError, match="is missing"):
        ProcessorDriver(Pass()).send(b"ada", raws[0])
    Path(claim.objects.url).rename(f"{claim.objects.url}-away")
    with pytest.raises(StorageUnavailableError, match="no store"):
        ProcessorDriver(Pass(), on_error="dead-letter").send(b"ada", raws[1])


def test_large_values_are_decoded_key_by_key(claim: ClaimCheck) -> None:
    assert claim.decodes_large(pa.array([None, b"a", claim.encode(LARGE)], pa.binary()))
    assert not claim.decodes_large(pa.array([None, b"a"], pa.binary()))
    assert not claim.decodes_large(pa.array([None], pa.binary()))
    assert not claim.lazy().decodes_large(pa.array([claim.encode(LARGE)], pa.binary()))


# ---- columns -----------------------------------------------------------------------------------------------


def test_columns(claim: ClaimCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [b"small", None, LARGE, LARGE + b"2", PREFIX]
    batch = pa.RecordBatch.from_arrays([pa.array(range(5)), pa.array(values, pa.binary())], names=["n", "value"])
    (kept,) = ColumnTask(claim.encode_bytes, "value")(iter([batch]))
    assert kept.column(1).to_pylist()[:2] == [b"small", None]
    assert all(len(value) < 300 for value in kept.column(1).to_pylist() if value)
    monkeypatch.setattr("onceflow.claim_check.columns._BATCH_BYTES", 600)
    parts = list(ColumnTask(claim.decode_bytes, "value")(iter([kept])))
    assert [part.column(0).to_pylist() for part in parts] == [[0, 1, 2], [3], [4]]
    assert [value for part in parts for value in part.column(1).to_pylist()] == values
    assert list(ColumnTask(claim.encode_bytes, "value")(iter([batch.slice(0, 0)]))) == []


def test_a_column_with_a_missing_object_names_the_record(claim: ClaimCheck) -> None:
    raw = claim.encode(LARGE)
    stored(claim)[0].unlink()
    names = ["topic", "partition", "offset", "value"]
    batch = pa.RecordBatch.from_arrays([["videos"], [3], [17], pa.array([raw], pa.binary())], names=names)
    with pytest.raises(ClaimCheckError, match="videos-3") as caught:
        list(ColumnTask(claim.decode_bytes, "value")(iter([batch])))
    assert "offset 17" in str(caught.value)


# ---- what a collector sees ---------------------------------------------------------------------------------


def test_references_are_found_inside_of_values(claim: ClaimCheck) -> None:
    first, second = claim.encode(LARGE), claim.encode(LARGE + b"2")
    names = [Reference.parse(raw).name for raw in (first, second)]
    assert scan(b"") == Found()
    assert scan(first) == Found(names[:1])
    assert scan(b"\0" + first + b"and" + second) == Found(names)
    assert scan(first + PREFIX + b"2 {}") == Found(names[:1], newer=[PREFIX + b"2 {}"])


def test_only_old_objects_are_listed(claim: ClaimCheck, today: Any) -> None:
    for day in ("2026-01-30", "2026-01-31"):
        today(day)
        claim.encode(LARGE)
    end = datetime.datetime(2026, 2, 1, tzinfo=datetime.timezone.utc).timestamp() * 1000
    folder = Path(claim.objects.url)
    (folder / "2026-01-30" / f".unfinished-{'0' * 32}").write_bytes(b"cut")
    (folder / "2026-01-30" / "notes.txt").write_bytes(b"of somebody else")
    (folder / "2026-13-01").mkdir()
    assert claim.objects.days(int(end) - 1) == ["2026-01-30"]
    assert claim.objects.days(int(end)) == ["2026-01-30", "2026-01-31"]
    listed = dict(claim.objects.names("2026-01-30"))
    assert sorted(listed.values()) == [3, len(LARGE)]
    claim.objects.delete([*listed, "2026-01-30/" + "0" * 64])
    claim.objects.delete([name for name, _ in claim.objects.names("2026-01-31")])
    assert [path.name for path in stored(claim)] == ["notes.txt"]
    assert not (folder / "2026-01-31").exists()


def test_a_stream_gives_small_pieces(claim: ClaimCheck) -> None:
    raw = claim.encode(LARGE)
    with claim.open(raw) as source:
        assert b"".join(iter(lambda: source.read(7), b"")) == LARGE
    assert isinstance(claim.open(b"small"), io.BytesIO)


def test_another_store_gets_its_own_copy(claim: ClaimCheck, tmp_path: Path) -> None:
    other = ClaimCheck(tmp_path / "other", above=100)
    value = claim.lazy().decode(claim.encode(LARGE))
    assert claim.encode(value) == claim.encode(LARGE)
    assert other.decode(other.encode(value)) == LARGE
    assert len(stored(other)) == 1

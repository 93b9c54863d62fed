"""The S3 server of tests does what stores and sinks rely on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onceflow.testing.processes import descendants
from onceflow_workshop.testing.s3 import S3Server, running_s3


def test_an_object_is_created_only_if_it_is_missing(s3: S3Server) -> None:
    files = s3.filesystem()
    path = f"{s3.make_bucket()}/name"
    files.pipe_file(path, b"first", mode="create")
    with pytest.raises(FileExistsError):
        files.pipe_file(path, b"second", mode="create")
    assert files.cat_file(path) == b"first"


def test_a_large_object_is_created_only_if_it_is_missing(s3: S3Server) -> None:
    files = s3.filesystem()
    path = f"{s3.make_bucket()}/name"
    part = bytes(6 << 20)

    def create() -> None:
        upload = files.call_s3("create_multipart_upload", Bucket=path.split("/")[0], Key="name")
        sent = files.call_s3(
            "upload_part", Bucket=path.split("/")[0], Key="name", UploadId=upload["UploadId"], PartNumber=1, Body=part
        )
        files.call_s3(
            "complete_multipart_upload",
            Bucket=path.split("/")[0],
            Key="name",
            UploadId=upload["UploadId"],
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": sent["ETag"]}]},
            IfNoneMatch="*",
        )

    create()
    with pytest.raises(FileExistsError):
        create()
    assert files.size(path) == len(part)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_the_server_ends_with_the_block() -> None:
    before = set(descendants(os.getpid()))
    with running_s3() as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert set(descendants(os.getpid())) - before
    assert not set(descendants(os.getpid())) - before

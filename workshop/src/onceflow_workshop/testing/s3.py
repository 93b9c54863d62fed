"""A server with the S3 protocol on this machine, for tests. It needs `moto[s3]`, `flask` and `flask-cors`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

START_TIMEOUT_S = 60

# It ends when its stdin does, so also when the process that has started it was killed.
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class S3Server:
    """A running server. It keeps its objects in memory and takes any credentials.

    It knows ``If-None-Match: *`` and ``If-Match`` of PutObject and CompleteMultipartUpload (412 if they do not hold).
    """

    url: str

    @property
    def options(self) -> dict[str, Any]:
        """Storage options of `ClaimCheck` and `DeltaSink`."""
        return {
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test-secret",
            "aws_endpoint_url": self.url,
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }

    @property
    def of_fsspec(self) -> dict[str, Any]:
        """The same for fsspec: ``fsspec.filesystem("s3", **server.of_fsspec)``, a client that onceflow does not use."""
        return {"key": "test", "secret": "test-secret", "endpoint_url": self.url}

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables, for clients without options of their own."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def filesystem(self) -> Any:
        """A new client (s3fs) that caches no listings."""
        import fsspec

        return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, **self.of_fsspec)

    def make_bucket(self, prefix: str = "bucket") -> str:
        """Creates an empty bucket.

        Returns:
            Its new name.
        """
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        self.filesystem().mkdir(name)
        return name


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    """Starts a server in a process of its own, on a free port of 127.0.0.1, and ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"The S3 server has ended with {process.wait(START_TIMEOUT_S)}; its error is above.")
        yield S3Server(url)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

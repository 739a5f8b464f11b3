"""Two mounts of one file system in user space: what two hosts see of a shared folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.servers import seaweed
from tests.waiting import until


@contextmanager
def two_mounts(folder: str) -> Iterator[tuple[str, str]]:
    """Folders on which two clients of one SeaweedFS are mounted. Skips where this user may not mount."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs root and /dev/fuse, to mount a file system in user space")
    os.makedirs(f"{folder}/server")
    server = seaweed.start(f"{folder}/server")
    clients = []
    try:
        for name in ("one", "two"):
            os.makedirs(f"{folder}/{name}")
            clients.append(_mount(server, f"{folder}/{name}", f"{folder}/{name}.log"))
        for name in ("one", "two"):
            until(lambda name=name: os.path.ismount(f"{folder}/{name}"), 30, f"{name} is mounted")
        yield f"{folder}/one", f"{folder}/two"
    finally:
        for name in ("one", "two"):
            subprocess.run(["umount", "--lazy", f"{folder}/{name}"], check=False, capture_output=True)
        for client in clients:
            client.terminate()
            client.wait(20)
        server.kill()


def _mount(server: seaweed.S3Server, folder: str, log: str) -> subprocess.Popen[bytes]:
    filer = f"127.0.0.1:{server.ports['filer.port']}.{server.ports['filer.port.grpc']}"
    command = [seaweed.binary(), "mount", f"-filer={filer}", f"-dir={folder}", "-filer.path=/"]
    with open(log, "ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "TMPDIR": os.path.dirname(folder)})

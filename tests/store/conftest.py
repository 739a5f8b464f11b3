from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator

import pytest

from ckptsync.store import Store, open_store

# How bytes go to and from S3: see s3.py. All of it is left to s3fs where it has settings that only it knows.
UNUSUAL = {"config_kwargs": {"connector_args": {"use_dns_cache": True}}}
ROUTES: dict[str, dict[str, object]] = {
    "s3": {"obstore": False}, "s3-obstore": {"obstore": True}, "s3-s3fs": {"obstore": False, **UNUSUAL},
}  # fmt: skip
KINDS = ["disk", "shm", "memory", *(pytest.param(kind, marks=pytest.mark.s3) for kind in ROUTES)]


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path) -> Iterator[Callable[[], Store]]:
    """Opens the same empty root again and again, each time as another client would."""
    with contextlib.ExitStack() as stack:
        options = None
        if request.param == "disk":
            url = str(tmp_path / "root")
        elif request.param == "shm":
            url = tempfile.mkdtemp(dir="/dev/shm")
            stack.callback(shutil.rmtree, url)
        elif request.param == "memory":
            url = f"memory://{uuid.uuid4().hex}/root"
        else:
            url, options = request.getfixturevalue("s3_root")
            options = {**options, **ROUTES[request.param]}
        yield lambda: open_store(url, options=options)


@pytest.fixture
def store(root: Callable[[], Store]) -> Store:
    return root()

"""Fixtures around the real S3 server: list `tests.servers.fixtures` in `pytest_plugins`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from . import seaweed


class S3Root(NamedTuple):
    """A prefix of its own on the server, and the options that open it: `open_store(*s3_root)` by keyword."""

    url: str
    options: dict[str, object]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.S3Server]:
    """One server for the session. A test that stops it starts one of its own instead (`seaweed.start`)."""
    server = seaweed.start(str(tmp_path_factory.mktemp("seaweed")))
    yield server
    server.kill()


@pytest.fixture
def s3_root(s3_server: seaweed.S3Server) -> S3Root:
    """An empty root for this test alone."""
    return S3Root(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}", s3_server.options)

"""What the wire to a receiver says while it waits."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from ckptsync.transports import control
from tests.waiting import until


class Ask(msgspec.Struct):
    pass


class Slow:
    """Answers once the log says that it does not."""

    url = "http://node7:8000"

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        def answer(_: httpx.Request) -> httpx.Response:
            until(lambda: "no answer for 0.01 s to POST http://node7:8000/receive/start" in caplog.text)
            return httpx.Response(200, json={})

        self.wire = httpx.MockTransport(answer)


def test_whose_answer_is_waited_for_is_said_while_it_is(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SLOW_SECONDS", 0.01)
    wire = control.Control()
    assert wire.post(Slow(caplog), "/receive/start", Ask(), dict, seconds=60) == {}
    wire.close()

"""The wire: who may ask, what is refused before it is looked at, and clients that are slow, huge or gone."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsync import http_server
from ckptsync.errors import InvalidInput
from ckptsync.http_server import MAX_BODY, Request
from tests.host import threads
from watchers.health import Health, Receipt
from watchers.metrics import Metrics
from watchers.sidecar import Sidecar

from .sidecars import StandIn, serving, until

READY = Health(ready=True, version="e1-v1", state="serving", reason="")


def raw(client: httpx.Client, data: bytes) -> tuple[bytes, dict[str, Any]]:
    """The status line and the JSON that come back for bytes as they are."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as stream:
            head, _, body = stream.read().partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)


def test_with_a_token_all_but_the_liveness_probe_wants_it() -> None:
    watched = StandIn(READY)
    with serving(watched, token="sësame") as client:
        assert client.get("/healthz").status_code == 200
        for method, path in (("GET", "/readyz"), ("GET", "/version"), ("GET", "/metrics"), ("POST", "/wake"),
                             ("POST", "/load"), ("GET", "/nowhere")):  # fmt: skip
            for headers in ({}, {"Authorization": "Bearer sesame"}, {"Authorization": "Basic sësame"},
                            {"Authorization": "Bearer"}, {"Authorization": "sësame"}):  # fmt: skip
                answer = client.request(method, path, headers={k: v.encode() for k, v in headers.items()})
                assert (answer.status_code, answer.json()["kind"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert watched.woken == 0
        for scheme in ("Bearer", "bearer"):
            assert client.post("/wake", headers={"Authorization": f"{scheme} sësame".encode()}).status_code == 202
        assert watched.woken == 2


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_others_may_reach_it_only_with_a_token(address: str) -> None:
    with pytest.raises(InvalidInput, match="CKPTSYNC_SIDECAR_TOKEN"):
        Sidecar(StandIn(READY), Metrics(), address)
    with Sidecar(StandIn(READY), Metrics(), address, token="t") as sidecar:
        port = sidecar.url.rpartition(":")[2]
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, timeout=60).status_code == 200


@pytest.mark.parametrize("address", [":0", "127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_loopback_needs_no_token(address: str) -> None:
    with Sidecar(StandIn(READY), Metrics(), address) as sidecar:
        assert httpx.get(f"{sidecar.url}/readyz", trust_env=False, timeout=60).status_code == 200


@pytest.mark.parametrize("address", ["8080", "", "localhost", ":http", ":65536", ":-1", "no.such.host.invalid:80", ":"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput):
        Sidecar(StandIn(READY), Metrics(), address)


@pytest.mark.parametrize("token", ["secret\n", " secret", "se\ncret"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(InvalidInput, match="token"):
        Sidecar(StandIn(READY), Metrics(), ":0", token=token)


def test_a_port_in_use_is_told_at_once() -> None:
    with Sidecar(StandIn(READY), Metrics(), ":0") as first:
        port = first.url.rpartition(":")[2]
        with pytest.raises(InvalidInput, match=f":{port} cannot be served on: Address already in use"):
            Sidecar(StandIn(READY), Metrics(), f":{port}")


def test_a_port_is_free_again_after_it_was_closed() -> None:
    with Sidecar(StandIn(READY), Metrics(), ":0") as first:
        port = first.url.rpartition(":")[2]
        httpx.get(f"{first.url}/healthz", trust_env=False, timeout=60)
    with Sidecar(StandIn(READY), Metrics(), f":{port}") as second:
        assert httpx.get(f"{second.url}/healthz", trust_env=False, timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/readyz?min_version=9", "/version", "/metrics"])
def test_head_says_what_get_says_without_the_body(path: str) -> None:
    with serving(StandIn(READY)) as client:
        head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert "content-length" in head.headers


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/", 404, "no-such-endpoint"),
        ("GET", "/readyz/", 404, "no-such-endpoint"),
        ("POST", "/readyz", 405, "method-not-allowed"),
        ("GET", "/load", 405, "method-not-allowed"),
        ("DELETE", "/load", 405, "method-not-allowed"),
        ("BREW", "/load", 501, "not-implemented"),
        ("GET", "/version?verbose=1", 400, "invalid-input"),
    ],
)
def test_what_is_not_there_is_told_as_json(method: str, path: str, status: int, kind: str) -> None:
    with serving(StandIn(READY)) as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.json()["kind"], answer.json()["retryable"]) == (status, kind, False)
    assert ("allow" in answer.headers) == (status == 405)


def test_a_page_in_a_browser_may_not_change_the_engine() -> None:
    watched = StandIn(READY)
    with serving(watched) as client:
        answer = client.post("/wake", headers={"Origin": "https://elsewhere.example"})
    assert (answer.status_code, answer.json()["kind"], watched.woken) == (403, "cross-origin", 0)


def test_bodies_are_bounded() -> None:
    with serving(StandIn(READY)) as client:
        answer = client.post("/load", content=b"x" * (MAX_BODY + 1))
        assert (answer.status_code, answer.json()["kind"]) == (413, "too-large")
        assert client.post("/load", content=b" " * MAX_BODY).status_code == 400


def test_who_still_sends_a_body_that_is_too_large_can_read_why() -> None:
    with serving(StandIn(READY)) as client:
        where = (client.base_url.host, client.base_url.port)
        with socket.create_connection(where, timeout=20) as connection, connection.makefile("rb") as stream:
            connection.sendall(b"POST /load HTTP/1.1\r\nContent-Length: 600000\r\n\r\n")
            assert b" 413 " in stream.readline()
            for _ in range(10):
                connection.sendall(b"x" * 60_000)
                time.sleep(0.01)
            assert b"too-large" in stream.read()


@pytest.mark.parametrize(
    ("data", "status", "kind"),
    [
        (b"POST /load HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400", "bad-request"),
        (b"POST /load HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", b"400", "bad-request"),
        (b"POST /load HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"400", "bad-request"),
        (b"POST /load HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411", "length-required"),
        (b"GET /healthz HTTP/9.9\r\n\r\n", b"505", "http-version-not-supported"),
        (b"GET /healthz HTTP/x\r\n\r\n", b"400", "bad-request"),
        (b"GET / he al thz\r\n\r\n", b"400", "bad-request"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414", "request-uri-too-long"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", b"431", "request-header-fields-too-large"),
        (b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 200 + b"\r\n", b"431", "request-header-fields-too-large"),
    ],
)
def test_what_is_not_http_is_told_as_json(data: bytes, status: bytes, kind: str) -> None:
    with serving(StandIn(READY)) as client:
        line, said = raw(client, data)
    assert line.split()[1] == status
    assert said["kind"] == kind


def test_clients_that_drip_are_cut_off_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.5)
    with serving(StandIn(READY)) as client:
        where = (client.base_url.host, client.base_url.port)
        slow = [socket.create_connection(where, timeout=20) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"POST /load HTTP/1.1\r\nContent-Length: 100\r\n\r\n")
        started, drips = time.monotonic(), 0
        while slow and time.monotonic() - started < 20:
            assert client.get("/healthz").status_code == 200
            try:
                slow[0].sendall(b"x")
                drips += 1
                time.sleep(0.05)
            except ConnectionError:
                break
        assert 1 < drips < 100, "a byte now and then does not extend the deadline"
        assert b" 408 " in slow[1].recv(1 << 16)
        for connection in slow:
            connection.close()


def test_beyond_its_connections_it_turns_clients_away_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    with serving(StandIn(READY)) as client:
        where = (client.base_url.host, client.base_url.port)
        idle = [socket.create_connection(where, timeout=20) for _ in range(3)]
        with socket.create_connection(where, timeout=20) as one_more:
            assert one_more.recv(1) == b""
        for connection in idle:
            connection.close()

        def answers() -> bool:
            try:
                return client.get("/healthz").status_code == 200
            except httpx.TransportError:
                return False

        until(answers)


def test_a_client_that_goes_away_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    waiting, go_on, loaded = threading.Event(), threading.Event(), threading.Event()

    def load(version: str) -> Receipt:
        waiting.set()
        assert go_on.wait(60)
        loaded.set()
        return Receipt(version="e1-v1", state="serving", label="e1-v1", since=0.0, engine="a")

    with serving(StandIn(READY, loads=load)) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(b'POST /load HTTP/1.1\r\nContent-Length: 15\r\n\r\n{"version":"1"}')
            assert waiting.wait(60)
        go_on.set()
        assert loaded.wait(60), "the load goes on"
        until(lambda: client.post("/load", json={"version": "1"}).status_code == 200)
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_under_way_is_finished_when_it_closes() -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def load(version: str) -> Receipt:
        waiting.set()
        assert go_on.wait(60)
        return Receipt(version="e1-v1", state="serving", label="e1-v1", since=0.0, engine="a")

    sidecar = Sidecar(StandIn(READY, loads=load), Metrics(), ":0")
    with ThreadPoolExecutor(2) as pool, httpx.Client(trust_env=False, timeout=20) as client, sidecar:
        answer = pool.submit(client.post, f"{sidecar.url}/load", json={"version": "1"})
        assert waiting.wait(60)
        closing = pool.submit(sidecar.close)
        go_on.set()
        assert answer.result().status_code == 200
        closing.result()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.binary(max_size=200) | JSON.map(json.dumps).map(str.encode) | st.fixed_dictionaries({"version": JSON}).map(
    json.dumps
).map(str.encode)  # fmt: skip


def never(version: str) -> Receipt:
    return Receipt(version=version, state="serving", label=version, since=0.0, engine="a")


@given(body=BODIES, query=st.text(max_size=30), path=st.sampled_from(["/load", "/wake", "/readyz", "/version", "/x"]),
       method=st.sampled_from(["GET", "HEAD", "POST", "PUT"]))  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_whatever_is_sent_is_answered_as_typed_json(body: bytes, query: str, path: str, method: str) -> None:
    target = f"{path}?{query}" if query else path
    with closing(Sidecar(StandIn(READY, loads=never), Metrics(), ":0")) as sidecar:
        answer = sidecar.answer(Request(method=method, target=target, body=body))
    said = msgspec.json.decode(answer.body)
    if answer.status >= 400:
        assert answer.status < 500
        assert said["kind"]
        assert said["message"]
        assert isinstance(said["retryable"], bool)
    elif path == "/load":
        assert type(msgspec.json.decode(body)["version"]) in {str, int}


@given(data=st.binary(min_size=1, max_size=300) | BODIES.map(lambda body: b"POST /load HTTP/1.1\r\n" + body))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_arrive_the_server_goes_on(fuzzed: httpx.Client, data: bytes) -> None:
    with socket.create_connection((fuzzed.base_url.host, fuzzed.base_url.port), timeout=20) as connection:
        connection.sendall(data + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    assert fuzzed.get("/healthz").status_code == 200


@pytest.fixture
def fuzzed() -> Any:
    with serving(StandIn(READY, loads=never)) as client:
        yield client


def test_a_host_without_threads_turns_probes_away_and_answers_all_of_them_later(monkeypatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    with serving(StandIn(READY)) as client:
        with threads(0):
            for _ in range(4):
                with pytest.raises(httpx.TransportError):
                    client.get("/healthz")
        assert client.get("/healthz").status_code == 200


def test_a_host_without_descriptors_lets_a_probe_wait_and_does_not_spin(monkeypatch) -> None:
    tries: list[float] = []
    real = http_server.TCPServer.get_request

    def get_request(self: Any) -> Any:
        tries.append(time.monotonic())
        if len(tries) <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self)

    monkeypatch.setattr(http_server.TCPServer, "get_request", get_request)
    with serving(StandIn(READY)) as client:
        assert client.get("/healthz").status_code == 200
    assert tries[3] - tries[0] > 0.25

"""Where engines are found, and what becomes of the fleet when that cannot be said for a while."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ckptsync.errors import EngineUnavailable, InvalidInput, NotFound
from watchers.roster import Dns, EnginesFile, Given, Roster, Router


class Workers(ThreadingHTTPServer):
    """Answers GET /workers with `body`, and remembers the last Authorization."""

    body: bytes = b""
    authorization: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, *urls: str) -> None:
        """As sglang-router 0.3.2 did when it was asked."""
        workers = [
            {"id": f"1f4e8eae-{n}", "url": url, "model_id": "m", "priority": 50, "cost": 1.0, "worker_type": "regular",
             "is_healthy": n == 0, "load": 0, "connection_mode": "HTTP", "metadata": {"model_path": "m"},
             "disable_health_check": False}
            for n, url in enumerate(urls)
        ]  # fmt: skip
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(urls)}
        self.body = json.dumps({"workers": workers, "total": len(urls), "stats": stats}).encode()


class Handler(BaseHTTPRequestHandler):
    server: Workers

    def do_GET(self) -> None:
        self.server.authorization = self.headers["Authorization"]
        self.send_response(200 if self.path == "/workers" else 404)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def router() -> Iterator[Workers]:
    server = Workers(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_routers_workers_are_listed_whether_healthy_or_not(router: Workers) -> None:
    router.answer("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    assert Router(router.url).urls() == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]


def test_the_ranks_of_one_server_are_one_engine(router: Workers) -> None:
    router.answer("http://10.0.0.1:30000@0", "http://10.0.0.1:30000@1")
    assert Roster([Router(router.url)]).urls() == ["http://10.0.0.1:30000"]


def test_workers_that_speak_grpc_are_left_out_with_one_warning(
    router: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    router.answer("grpc://10.0.0.1:30000", "http://10.0.0.2:30000")
    source = Router(router.url)
    assert [source.urls() for _ in range(2)] == [["http://10.0.0.2:30000"]] * 2
    assert len(caplog.records) == 1


def test_the_router_is_asked_with_its_key(router: Workers) -> None:
    router.answer()
    Router(router.url, api_key="secret").urls()
    assert router.authorization == "Bearer secret"


def test_a_router_that_answers_something_else_is_an_error(router: Workers) -> None:
    router.body = b'{"urls": []}'
    with pytest.raises(EngineUnavailable, match="GET /workers"):
        Router(router.url).urls()


def test_a_source_that_does_not_answer_counts_as_unchanged(router: Workers, caplog: pytest.LogCaptureFixture) -> None:
    router.answer("http://10.0.0.1:30000")
    roster = Roster([Given(["http://10.0.0.9:8000"]), Router(router.url)])
    before = roster.urls()
    router.body = b"<html>"
    assert [roster.urls() for _ in range(3)] == [before] * 3
    assert len(caplog.records) == 1
    assert "GET /workers" in "".join(roster.problems.values())
    router.answer("http://10.0.0.2:30000")
    assert roster.urls() == ["http://10.0.0.9:8000", "http://10.0.0.2:30000"]
    assert not roster.problems


def test_a_file_is_read_anew_at_each_look(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    source = EnginesFile(str(path))
    with pytest.raises(NotFound, match="engines"):
        source.urls()
    path.write_text("# ours\nhttp://a:1\n\n  http://b:2  \n")
    assert source.urls() == ["http://a:1", "http://b:2"]
    path.write_text("http://b:2\n")
    assert source.urls() == ["http://b:2"]


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS itself is the resolver's; only what is made of its answer is ours."""

    def resolve(host: str, port: int, family: int, kind: int) -> list[object]:
        assert (host, port, family, kind) == ("engines.svc", 8000, socket.AF_INET, socket.SOCK_STREAM)
        addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
        return [(family, kind, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert Dns("engines.svc:8000").urls() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


def test_a_real_name_is_resolved() -> None:
    assert Dns("localhost:8000").urls() == ["http://127.0.0.1:8000"]


def test_a_name_that_does_not_resolve_is_an_error_and_one_without_a_port_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match=r"nowhere\.invalid"):
        Dns("nowhere.invalid:8000").urls()
    for name in ("engines.svc", "engines.svc:http", ":8000"):
        with pytest.raises(InvalidInput, match="host:port"):
            Dns(name)


def test_an_engine_that_two_sources_list_is_one(tmp_path: Path) -> None:
    assert Roster([Given(["http://a:1/", "http://b:2"]), Given(["http://a:1"])]).urls() == ["http://a:1", "http://b:2"]

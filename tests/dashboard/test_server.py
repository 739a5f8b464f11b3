"""The page over HTTP: what it answers, whom it refuses, and that it is one file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest

from ckptsync.channel import Channel
from ckptsync.dashboard.board import Board
from ckptsync.dashboard.page import served_page, static_page
from ckptsync.dashboard.server import serving
from ckptsync.errors import InvalidInput
from ckptsync.store import LocalStore
from ckptsync.testing.hooks import HookedStore, Recorder


def ask(url: str, method: str = "GET", **options: Any) -> httpx.Response:
    return httpx.request(method, url, trust_env=False, timeout=60, **options)


def test_it_answers_what_the_page_asks_and_writes_nothing_but_a_lease_while_it_compares(root):
    recorder = Recorder()
    board = Board(Channel.open(HookedStore(LocalStore(str(root)), recorder)))
    with serving(board, ":0") as server:
        page = ask(server.url + "/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert ask(server.url + "/data").json()["status"]["newest"] == "e3-v16"
        assert ask(server.url + "/version?version=e1-v5").json()["run_id"] == "grpo-7b"
        assert ask(server.url + "/manifest?version=e1-v5").json()["number"] == 5
        assert ask(server.url + "/compare?version=e2-v7").json()["base"] == "e1-v6"
        for path, status in (("/version?version=e9-v9", 404), ("/version?version=../x", 400), ("/nowhere", 404),
                             ("/compare?version=e1-v1", 400)):  # fmt: skip
            answer = ask(server.url + path)
            assert (answer.status_code, bool(answer.json()["message"])) == (status, True)
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server.url + "/data", method).status_code == 405
    assert {path.partition("/")[0] for _, path in recorder.changes()} == {"leases"}
    assert not [name for name in os.listdir(f"{root}/leases") if name.startswith("diff-")]


def test_a_page_elsewhere_cannot_read_it_through_a_name_that_points_here(channel):
    with serving(Board(channel), ":0") as server:
        port = server.server_address[1]
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "localhost"):
            assert ask(server.url + "/data", headers={"Host": host}).status_code == 200
        for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            answer = ask(server.url + "/data", headers={"Host": host})
            assert (answer.status_code, answer.json()["kind"]) == (403, "foreign-host")


def test_a_page_elsewhere_may_link_here_and_ask_nothing(channel):
    with serving(Board(channel), ":0") as server:
        for site in ("cross-site", "same-site"):
            headers = {"Sec-Fetch-Site": site}
            assert ask(server.url + "/", headers=headers).status_code == 200
            assert ask(server.url + "/compare?version=e1-v5", headers=headers).status_code == 403


def test_other_hosts_need_the_token_which_a_browser_sends_as_a_password(channel):
    with pytest.raises(InvalidInput, match="CKPTSYNC_DASHBOARD_TOKEN"), serving(Board(channel), "0.0.0.0:0"):
        pass
    with serving(Board(channel), "0.0.0.0:0", token="sësame") as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/data"
        for options in ({}, {"auth": ("me", "wrong")}, {"headers": {"Authorization": "Basic !!"}}):
            answer = ask(url, **options)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic ")
        assert ask(url, auth=("anybody", "sësame"), headers={"Host": "proxy.example"}).status_code == 200


@pytest.mark.parametrize("page", ["served", "static"])
def test_it_is_one_file_that_loads_nothing_from_elsewhere(page, channel):
    html = (served_page(2.0) if page == "served" else static_page(Board(channel))).decode()
    assert not re.search(r"%[A-Z]+%", html), "a place that was not filled"
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", html)
    assert not re.search(r"@import|url\(", html)
    assert html.count("<script") == html.count("</script>") == 2
    assert "default-src 'none'; script-src 'sha256-" in html


def test_the_command_writes_a_file_and_says_where(root, tmp_path):
    target = tmp_path / "page.html"
    command = [sys.executable, "-m", "ckptsync.cli", "dashboard", str(root), "-o", str(target), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == f'{{"page":"{target}"}}\n'
    assert b'"newest":"e3-v16"' in target.read_bytes()
    bad = subprocess.run([*command[:-3], "-o", "/nowhere/x.html"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "cannot be written" in bad.stderr

"""What is special to reading over connections of our own; what all stores promise is in test_contract.py."""

from __future__ import annotations

import http.server
import logging
import os
import shutil
import ssl
import subprocess
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.errors import BadShard, NotFound, StoreDenied, StoreError, StoreUnavailable
from ckptsync.store import put_bytes
from ckptsync.store.s3 import S3Store
from tests.servers import seaweed
from tests.servers.fixtures import S3Root

from .conftest import UNUSUAL
from .proxy import Proxy, serving

pytestmark = pytest.mark.s3
MIB = 1 << 20


@pytest.fixture
def store(s3_root: S3Root) -> S3Store:
    return S3Store(s3_root.url, **s3_root.options, obstore=False)


@pytest.fixture
def proxy(s3_server: seaweed.S3Server) -> Iterator[Proxy]:
    server = Proxy(s3_server.ports["s3.port"])
    with serving(server):
        yield server


@pytest.fixture
def proxied(s3_root: S3Root, proxy: Proxy) -> S3Store:
    options = {**s3_root.options, "endpoint_url": proxy.endpoint, "obstore": False}
    return S3Store(s3_root.url, **options, config_kwargs={"read_timeout": 1})


def read_all(store: S3Store, path: str) -> bytes:
    reader = store.open(path)
    back = bytearray(reader.size)
    reader.readinto(0, memoryview(back))
    return bytes(back)


# Which route is taken


def test_reads_leave_s3fs_after_opening(store: S3Store, monkeypatch) -> None:
    data = os.urandom(MIB)
    put_bytes(store, "a folder/ö+&?=%20 file", data)
    reader = store.open("a folder/ö+&?=%20 file")
    fs, _ = store._client()
    monkeypatch.setattr(fs, "_call_s3", None)
    back = bytearray(len(data))
    reader.readinto(0, memoryview(back))
    assert back == data


def test_urls_are_signed_with_version_4(store: S3Store) -> None:
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in store.direct()._sign("file")


@pytest.mark.parametrize(
    "options",
    [UNUSUAL, {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}}],
)
def test_settings_that_it_does_not_know_stay_with_s3fs(s3_root: S3Root, options: dict[str, object]) -> None:
    assert S3Store(s3_root.url, **s3_root.options, **options, obstore=False).direct() is None


def test_a_proxy_of_the_environment_stays_with_s3fs(s3_root: S3Root, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert S3Store(s3_root.url, **s3_root.options, obstore=False).direct() is None


@pytest.mark.parametrize(
    "options",
    [{"requester_pays": True}, {"config_kwargs": {"signature_version": "s3"}}],
)
def test_requests_that_a_url_does_not_carry_are_s3fs_s(s3_root: S3Root, options: dict[str, object]) -> None:
    store = S3Store(s3_root.url, **s3_root.options, **options, obstore=False)
    put_bytes(store, "file", bytes(MIB))
    assert read_all(store, "file") == bytes(MIB)
    assert store.direct() is None


# Broken connections


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_body_that_breaks_off_is_gone_on_with(proxied: S3Store, proxy: Proxy, caplog, fault: str) -> None:
    data = os.urandom(MIB) * 24
    put_bytes(proxied, "file", data)
    reader = proxied.open("file")
    asked, direct = [], proxied.direct()
    real = direct._get
    direct._get = lambda url, etag, offset, *rest: (asked.append(offset), real(url, etag, offset, *rest))
    setattr(proxy, fault, 9 * MIB)
    back = bytearray(len(data))
    reader.readinto(0, memoryview(back))
    assert back == data
    assert asked[0] == 0
    assert len(asked) == 2
    assert 8 * MIB <= asked[1] <= 9 * MIB
    assert "trying again" in caplog.text
    assert "X-Amz" not in caplog.text


def test_connections_are_kept_for_the_next_read(proxied: S3Store, proxy: Proxy) -> None:
    put_bytes(proxied, "file", bytes(4 * MIB))
    reader = proxied.open("file")
    before = proxy.accepted
    for _ in range(5):
        reader.readinto(MIB, memoryview(bytearray(2 * MIB)))
    assert proxy.accepted == before + 1
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: reader.readinto(MIB, memoryview(bytearray(2 * MIB))), range(40)))
    assert proxy.accepted <= before + 4


def test_a_kept_connection_that_was_hung_up_is_not_used(proxied: S3Store, proxy: Proxy, caplog) -> None:
    put_bytes(proxied, "file", bytes(4 * MIB))
    reader = proxied.open("file")
    reader.readinto(0, memoryview(bytearray(MIB)))
    (kept,) = proxied.direct()._idle
    proxy.hang_up()
    assert kept.sock.recv(1) == b""
    reader.readinto(0, memoryview(bytearray(MIB)))
    assert "trying again" not in caplog.text


def test_a_connection_in_use_while_the_store_is_closed_is_closed_after_that(store: S3Store) -> None:
    put_bytes(store, "file", bytes(MIB))
    reader, direct = store.open("file"), store.direct()
    store.close()
    direct.read(reader._source, 0, memoryview(bytearray(MIB)), [0])
    assert direct._idle == []


# Refusals


def test_a_url_that_has_expired_is_signed_afresh(store: S3Store) -> None:
    put_bytes(store, "file", bytes(MIB))
    reader = store.open("file")
    reader.readinto(0, memoryview(bytearray(MIB)))
    expired = reader._source.signed[0].replace("X-Amz-Date=2", "X-Amz-Date=1")
    reader._source.signed = expired, time.monotonic() + 1000
    reader.readinto(0, memoryview(bytearray(MIB)))
    assert reader._source.signed[0] != expired


def test_a_wrong_secret_is_denied_at_once_and_no_url_is_shown(s3_root: S3Root, store: S3Store, caplog) -> None:
    caplog.set_level(logging.DEBUG, "ckptsync")
    put_bytes(store, "file", bytes(MIB))
    reader = store.open("file")
    reader._store = S3Store(s3_root.url, **{**s3_root.options, "secret": "private", "token": "hidden"}, obstore=False)
    with pytest.raises(StoreDenied, match=r"read .*file: .*403") as caught:
        reader.readinto(0, memoryview(bytearray(MIB)))
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    for secret in ("private", "hidden", "X-Amz"):
        assert secret not in shown


def test_a_file_that_is_replaced_or_gone_is_said_to_be(store: S3Store) -> None:
    put_bytes(store, "file", b"a" * MIB)
    reader = store.open("file")
    put_bytes(store, "file", b"b" * MIB)
    with pytest.raises(BadShard, match="replaced"):
        reader.readinto(0, memoryview(bytearray(MIB)))
    store.delete("file")
    with pytest.raises(NotFound, match="NoSuchKey"):
        reader.readinto(0, memoryview(bytearray(MIB)))


class Bucket(http.server.BaseHTTPRequestHandler):
    """One public object of 200 000 bytes, for which s3fs gets what it asks for, and others what `server.does`."""

    protocol_version = "HTTP/1.1"
    body = bytes(range(200)) * 1000

    def do_GET(self) -> None:
        first, last = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        does = "" if "User-Agent" in self.headers else self.server.does
        part = self.body if does == "ignore the range" else self.body[first : last + 1]
        self.send_response({"ignore the range": 200, "redirect": 307}.get(does, 206))
        self.send_header("Content-Range", f"bytes {first + (does == 'shift')}-{last}/{len(self.body)}")
        if does == "send chunks":
            self.send_header("Transfer-Encoding", "chunked")
            part = b"%x\r\n%b\r\n0\r\n\r\n" % (len(part), part)
        else:
            self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bucket() -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that hangs up on a wrong answer
    with serving(server):
        yield server


def public(server: http.server.HTTPServer) -> S3Store:
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    return S3Store("s3://public", anon=True, endpoint_url=endpoint, obstore=False)


@pytest.mark.parametrize("does", ["ignore the range", "shift"])
def test_other_bytes_than_were_asked_for_are_an_error(bucket: http.server.HTTPServer, does: str) -> None:
    bucket.does = does
    with pytest.raises(StoreError, match="other bytes"):
        read_all(public(bucket), "file")


def test_a_redirect_is_followed_by_s3fs(bucket: http.server.HTTPServer) -> None:
    bucket.does, store = "redirect", public(bucket)
    assert read_all(store, "file") == Bucket.body
    assert store.direct() is None


def test_public_objects_and_bodies_in_chunks_are_read(bucket: http.server.HTTPServer) -> None:
    bucket.does, store = "send chunks", public(bucket)
    assert read_all(store, "file") == Bucket.body
    assert store.direct() is not None


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture
def tls(s3_server: seaweed.S3Server, certificate: tuple[str, str]) -> Iterator[Proxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = Proxy(s3_server.ports["s3.port"], context)
    with serving(server):
        yield server


@pytest.mark.parametrize("trust", ["verify", "AWS_CA_BUNDLE", "no verification"])
def test_certificates_are_trusted_as_s3fs_is_told(s3_root: S3Root, tls: Proxy, certificate, monkeypatch, trust) -> None:
    options = {**s3_root.options, "endpoint_url": tls.endpoint, "obstore": False}
    if trust == "AWS_CA_BUNDLE":
        monkeypatch.setenv(trust, certificate[0])
    else:
        options["client_kwargs"] = {"verify": certificate[0] if trust == "verify" else False}
    store = S3Store(s3_root.url, **options)
    data = os.urandom(MIB) * 20
    put_bytes(store, "file", data)
    for _ in range(2):
        assert read_all(store, "file") == data
    assert store.direct() is not None
    assert len(store.direct()._idle) == 1


def test_a_certificate_that_nobody_vouches_for_is_refused(s3_root: S3Root, store: S3Store, tls: Proxy) -> None:
    put_bytes(store, "file", bytes(MIB))
    reader = store.open("file")
    options = {**s3_root.options, "endpoint_url": tls.endpoint, "obstore": False, "deadline": 0.2}
    reader._store = S3Store(s3_root.url, **options)
    with pytest.raises(StoreUnavailable, match="SSLCertVerificationError"):
        reader.readinto(0, memoryview(bytearray(MIB)))

"""Ranged reads of S3 objects over plain HTTP connections of our own, straight into the caller's buffer.

s3fs's client (asyncio, aiohttp) and obstore copy each body at least once more. botocore signs the URL, so that
credentials, their renewal, endpoints and regions stay its own; the rest is http.client. What cannot be done so (a
proxy, another HTTP session, headers that have to be signed) is InvalidInput, and then s3fs reads.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import ssl
import time
import weakref
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import fsspec.asyn

from ..errors import InvalidInput, StoreError

_PIECE = 4 << 20
_EXPIRES = 900  # seconds; botocore renews temporary credentials that have fewer left than that, if it can
_REUSE = 60.0  # seconds for which one URL is used
_ERROR_BODY = 64 << 10
_CODE = re.compile(rb"<Code>(\w{1,99})</Code>")
_sync: Any = fsspec.asyn.sync  # it is not typed


class Refused(OSError):
    """An HTTP status that is an error. `response` is like that of botocore's errors, for translate.py."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"HTTP {status} {code}".strip())
        self.status = status
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@dataclass
class Source:
    """An object as it was when it was opened, and a signed URL of it with the time until which to use that."""

    key: str
    etag: str
    signed: tuple[str, float] = ("", 0.0)


class Direct:
    """Keep-alive connections to one bucket, of this process. Each serves one thread at a time."""

    def __init__(self, fs: Any, bucket: str) -> None:
        self._fs = fs
        self._bucket = bucket
        client = fs.connect()
        self._config = client.meta.config
        session = _session(client)
        self._tls = _tls(session) if client.meta.endpoint_url.startswith("https:") else None
        self._idle: list[http.client.HTTPConnection] = []
        # Also runs at exit, so that no socket is left to the garbage collection, which would warn.
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def read(self, source: Source, offset: int, into: memoryview, received: list[int]) -> None:
        """Fill `into` from `offset` of this very object; `received` counts the bytes also if it fails.

        The body may end early. InvalidInput means that this route cannot serve the object.
        """
        url, until = source.signed
        if fresh := time.monotonic() >= until:
            url = self._sign(source.key)
            source.signed = url, time.monotonic() + _REUSE
        try:
            self._get(urlsplit(url), source.etag, offset, into, received)
        except Refused as error:
            if fresh or error.status not in (400, 401, 403):
                raise
            source.signed = ("", 0.0)  # it may have expired
            self.read(source, offset, into, received)

    def close(self) -> None:
        """Close the connections; one that is in use now is closed after that."""
        self._finalizer()

    def _sign(self, key: str) -> str:
        url: str = _sync(self._fs.loop, _presigned, self._fs, self._bucket, key)
        query = parse_qs(urlsplit(url).query)
        if query.get("X-Amz-SignedHeaders", ["host"]) != ["host"] or "Signature" in query:
            raise InvalidInput("reading needs headers or a signature that a URL does not carry")
        return url

    def _get(self, url: SplitResult, etag: str, offset: int, into: memoryview, received: list[int]) -> None:
        span = f"{offset}-{offset + len(into) - 1}"
        headers = {"Range": f"bytes={span}", **({"If-Match": etag} if etag else {})}
        connection = self._take(url)
        reusable = False
        try:
            connection.request("GET", f"{url.path}?{url.query}", headers=headers)
            with connection.getresponse() as answer:
                _check(answer, f"bytes {span}/")
                while received[0] < len(into) and (count := answer.readinto(into[received[0] :][:_PIECE])):
                    received[0] += count
                reusable = answer.isclosed()  # it was read to its end
        finally:
            self._give_back(connection, reusable)

    def _take(self, url: SplitResult) -> http.client.HTTPConnection:
        """A connection that waits for a request, or a new one."""
        host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if (connection.host, connection.port) == (host, port) and not _hung_up(connection):
                    return connection
                connection.close()
        return self._connect(url.scheme, host, port)

    def _connect(self, scheme: str, host: str, port: int) -> http.client.HTTPConnection:
        timeout = self._config.connect_timeout
        if scheme == "https":
            connection: Any = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.connect()
        except BaseException:
            connection.close()  # the handshake may fail after the socket is there
            raise
        connection.sock.settimeout(self._config.read_timeout)
        return connection  # type: ignore[no-any-return]

    def _give_back(self, connection: http.client.HTTPConnection, reusable: bool) -> None:
        if not reusable or connection.sock is None:
            connection.close()
            return
        self._idle.append(connection)
        if not self._finalizer.alive:
            _close_all(self._idle)


def _session(client: Any) -> Any:
    """aiobotocore's HTTP session, which knows the certificates. InvalidInput where ours would not do the same."""
    session = client._endpoint.http_session
    if f"{type(session).__module__}.{type(session).__name__}" != "aiobotocore.httpsession.AIOHTTPSession":
        raise InvalidInput(f"reads stay with {type(session).__name__}")
    try:
        proxy = session._proxy_config.proxy_url_for(client.meta.endpoint_url)
        _ = session._verify, session._cert_file, session._key_file
    except AttributeError as error:
        raise InvalidInput("this aiobotocore keeps its settings elsewhere") from error
    if proxy:
        raise InvalidInput("reads through a proxy stay with s3fs")
    if set(client.meta.config.connector_args) - {"keepalive_timeout"}:
        raise InvalidInput("reads with connector_args stay with s3fs")
    return session


def _tls(session: Any) -> ssl.SSLContext:
    """As aiobotocore makes it for its own connections."""
    from botocore import httpsession

    tools: Any = httpsession  # it is not typed
    context: ssl.SSLContext = tools.create_urllib3_context()
    if session._verify:
        context.check_hostname = True
        context.load_verify_locations(tools.get_cert_path(session._verify))
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if session._cert_file:
        context.load_cert_chain(session._cert_file, session._key_file)
    return context


async def _presigned(fs: Any, bucket: str, key: str) -> str:
    await fs.set_session()
    client = await fs.get_s3(bucket)
    # botocore signs URLs with version 2, which newer buckets and encryption with KMS refuse.
    client.meta.events.register_first("choose-signer.s3.GetObject", _version_4, unique_id="ckptsync-v4")
    wanted = fs._get_s3_method_kwargs(client.get_object, Bucket=bucket, Key=key)
    url: str = await client.generate_presigned_url("get_object", Params=wanted, ExpiresIn=_EXPIRES)
    return url


def _version_4(signature_version: object, **_: object) -> str | None:
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


def _check(answer: http.client.HTTPResponse, content_range: str) -> None:
    """Raise unless these are the bytes that were asked for. The server's words are read for their code alone."""
    if 300 <= answer.status < 400:
        raise InvalidInput("reads that are redirected stay with s3fs")
    if answer.status >= 400:
        code = _CODE.search(answer.read(_ERROR_BODY))
        raise Refused(answer.status, code[1].decode() if code else "")
    if answer.status != 206 or not answer.getheader("Content-Range", "").startswith(content_range):
        raise StoreError("the server answered with other bytes than it was asked for")


def _hung_up(connection: http.client.HTTPConnection) -> bool:
    """Whether a connection on which nothing is expected has something to read, which is its end."""
    from urllib3.util import wait_for_read

    return connection.sock is None or bool(wait_for_read(connection.sock, timeout=0))


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            connections.pop().close()

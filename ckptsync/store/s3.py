"""S3 and its look-alikes, through s3fs's client but with our own transfers.

s3fs sends parts in waves (one slow part holds up all), copies each body twice, does not retry reading a body,
and asks for an object's size before each read. Here parts flow, bodies go straight into the caller's buffer
(s3_read.py), and one request opens and reads a small file. Credentials, sessions and endpoints are s3fs's. Where
obstore is installed, all writes go through it (s3_obstore.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import fsspec.asyn

from .. import logs
from ..digest import Bytes
from ..errors import AlreadyExists, BadShard, InvalidInput, NotFound, StoreError, StoreUnavailable
from . import direct, s3_obstore, s3_read
from .base import Entry, Writer
from .paths import Only, anything, parts_of
from .pipeline import Pipeline
from .remote import RemoteStore
from .retry import retrying, translated
from .translate import http_status
from .views import target

_MIN_PART = 5 << 20  # S3 refuses smaller parts, except the last
_FIRST_READ = 64 << 10
_RANGE = 64 << 20
_sync: Any = fsspec.asyn.sync  # it is not typed

log = logs.get("ckptsync.store")


class S3Store(RemoteStore):
    """An S3 bucket and prefix as a store.

    `part_size` bytes are one part of an upload, of which `in_flight` are on the way at a time: a writer holds
    at most `2 * in_flight + 1` parts in memory. `obstore` sends uploads through obstore, for less CPU: None
    where it is installed and can be told these options, True or InvalidInput, False never. Other options are
    s3fs's (key, secret, token, anon, endpoint_url, profile, client_kwargs, config_kwargs, ...); without them, the
    usual AWS variables and files count.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline: float = 30.0,
        part_size: int = 16 << 20,
        in_flight: int = 4,
        obstore: bool | None = None,
        **options: Any,
    ) -> None:
        if part_size < _MIN_PART or in_flight < 1:
            raise InvalidInput(f"part_size must be at least {_MIN_PART} and in_flight at least 1")
        if obstore and importlib.util.find_spec("obstore") is None:
            raise InvalidInput("obstore is not installed: pip install obstore")
        super().__init__(url, deadline=deadline, **_bounded(options))
        self.part_size = part_size
        self.in_flight = in_flight
        self.obstore = obstore
        self._bulks: dict[int, s3_obstore.Bulk | None] = {}
        self._directs: dict[int, s3_read.Direct | None] = {}
        self.bucket, _, self._prefix = url.partition("://")[2].strip("/").partition("/")
        if not self.bucket:
            raise InvalidInput(f"{self.url} names no bucket")

    def list(self, folder: str = "") -> Iterator[Entry]:
        """See Store.list. Page by page."""
        prefix = "".join(f"{part}/" for part in (self._prefix, *(parts_of(folder) if folder else ())) if part)
        more: dict[str, Any] = {}
        while True:
            page = self.call("list", folder, "list_objects_v2", Prefix=prefix, **more)
            for item in page.get("Contents", []):
                path = item["Key"].removeprefix(f"{self._prefix}/" if self._prefix else "")
                if not path.endswith("/"):  # an empty object that some tools make to show a folder
                    yield Entry(path, item["Size"], item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def open(self, path: str) -> S3Reader:
        """See Store.open."""
        return S3Reader(self, path)

    def write(self, path: str) -> Writer:
        """See Store.write. One put for what fits a part, else a multipart upload."""
        parts_of(path)
        bulk = self.bulk()
        return S3Writer(self, path) if bulk is None else s3_obstore.ObstoreWriter(self, path, bulk)

    def delete(self, path: str) -> None:
        """See Store.delete."""
        self.call("delete", path, "delete_object", Key=self.key(path))

    def sweep(self, folder: str, grace: float, *, now: float | None = None, only: Only = anything) -> int:
        """Abort uploads below `folder` that were begun more than `grace` seconds before `now`; the number of them.

        `now` is the server's time; this machine's by default. `only` may spare paths.
        """
        prefix = "".join(f"{part}/" for part in (self._prefix, *(parts_of(folder) if folder else ())) if part)
        page = self.call("sweep", folder, "list_multipart_uploads", Prefix=prefix)
        before = (time.time() if now is None else now) - grace
        root = f"{self._prefix}/" if self._prefix else ""
        old = [
            upload for upload in page.get("Uploads", [])
            if upload["Key"].startswith(prefix) and upload["Initiated"].timestamp() < before
            and only(upload["Key"].removeprefix(root))
        ]  # fmt: skip
        for upload in old:
            with contextlib.suppress(NotFound):
                self.call("sweep", folder, "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
        return len(old)

    def abort_uploads(self, path: str) -> None:
        """Abort every unfinished upload of this one file. Each request is tried once."""
        key = self.key(path)
        page = self._request("list_multipart_uploads", None, {"Prefix": key})
        for upload in page.get("Uploads", []):
            if upload["Key"] == key:
                self._request("abort_multipart_upload", None, {"Key": key, "UploadId": upload["UploadId"]})

    def bulk(self) -> s3_obstore.Bulk | None:
        """obstore's client of this process; None where uploads go through s3fs."""
        pid = os.getpid()
        if pid not in self._bulks:
            self._bulks.setdefault(pid, None if self.obstore is False else self._connect_bulk())
        return self._bulks[pid]

    def direct(self) -> s3_read.Direct | None:
        """This process's connections for reading; None where s3fs reads. Those of a parent process are kept."""
        pid = os.getpid()
        if pid not in self._directs:
            try:
                self._directs.setdefault(pid, self._connect_direct())
            except InvalidInput as error:
                self.read_by_s3fs(error)
        return self._directs.get(pid)

    def read_by_s3fs(self, why: InvalidInput) -> None:
        """From now on, in this process."""
        log.debug("%s: %s", self.url, why, extra={"event": "store-path"})
        if (direct := self._directs.get(os.getpid())) is not None:
            direct.close()
        self._directs[os.getpid()] = None

    def close(self) -> None:
        """See RemoteStore.close."""
        self._bulks.pop(os.getpid(), None)
        if (direct := self._directs.pop(os.getpid(), None)) is not None:
            direct.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bulks": {}, "_directs": {}}

    def key(self, path: str) -> str:
        return "/".join((self._prefix, *parts_of(path)) if self._prefix else parts_of(path))

    def call(self, verb: str, path: str, method: str, *, body: Bytes | None = None, **arguments: Any) -> Any:
        """One S3 request, retried while it is transient. A body is sent as a stream of its bytes."""
        return retrying(self._say(verb, path), lambda: self._request(method, body, arguments), deadline=self.deadline)

    def _request(self, method: str, body: Bytes | None, arguments: dict[str, Any]) -> Any:
        # BytesIO: aiohttp warns of large bytes objects, and botocore takes no memoryview.
        extra = {} if body is None else {"Body": io.BytesIO(body)}
        return self._client()[0].call_s3(method, Bucket=self.bucket, **arguments, **extra)

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._request("put_object", data, {"Key": self.key(path), "IfNoneMatch": "*"})
        except OSError as error:
            # 409 means that another conditional put is going on, and it may yet fail: only a file is an
            # answer.
            if http_status(error) == 409 and self.stored_size(path) is None:
                raise StoreUnavailable(f"{self._say('create', path)}: another create is going on") from error
            raise

    def stored_size(self, path: str) -> int | None:
        """Size in bytes of what is there, or None."""
        try:
            size: int = self.call("look at", path, "head_object", Key=self.key(path))["ContentLength"]
        except NotFound:
            return None
        return size

    def _connect_direct(self) -> s3_read.Direct:
        fs, _ = self._client()
        return s3_read.Direct(fs, self.bucket)

    def _connect_bulk(self) -> s3_obstore.Bulk | None:
        fs, _ = self._client()
        try:
            return translated(self._say("open", ""), lambda: s3_obstore.connect(fs, self))
        except (InvalidInput, StoreError, NotFound) as error:
            if self.obstore and not s3_obstore.inherited():
                raise
            log.debug("%s: uploads stay with s3fs: %s", self.url, error, extra={"event": "store-path"})
            return None

    def _connect(self) -> tuple[Any, str]:
        fs, root = super()._connect()
        fs.retries = 1  # s3fs's own loop; ours is the only one
        return fs, root


class S3Reader:
    """See Reader. Opening reads the first 64 KiB, which is all of a small file."""

    def __init__(self, store: S3Store, path: str) -> None:
        self._store = store
        self._action = store._say("read", path)
        self._key = store.key(path)
        self._start, self._size, self._etag = retrying(self._action, self._open, deadline=store.deadline)
        self._source = s3_read.Source(self._key, self._etag)

    @property
    def size(self) -> int:
        return self._size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See Reader.readinto."""
        view = target(self._action, offset, buffer, self.size)
        if offset + len(view) <= len(self._start):
            view[:] = self._start[offset : offset + len(view)]
            return
        for start in range(0, len(view), _RANGE):
            self._fill(offset + start, view[start : start + _RANGE])

    def close(self) -> None:
        """Nothing is held open."""

    def _open(self) -> tuple[bytes, int, str]:
        fs, _ = self._store._client()
        first = memoryview(bytearray(_FIRST_READ))
        request = {"Bucket": self._store.bucket, "Key": self._key, "Range": f"bytes=0-{_FIRST_READ - 1}"}
        try:
            answer, count = _sync(fs.loop, _get, fs, request, first)
        except OSError as error:
            if http_status(error) == 416:  # no byte 0: an empty object
                return b"", 0, ""
            raise
        total = answer.get("ContentRange", "").rpartition("/")[2] or answer["ContentLength"]
        return bytes(first[:count]), int(total), answer.get("ETag", "")

    def _fill(self, offset: int, view: memoryview) -> None:
        """A body that broke off is gone on with where it ended."""
        done = 0

        def read() -> None:
            nonlocal done
            received = [0]
            try:
                self._get(offset + done, view[done:], received)
            finally:
                done += received[0]
            if done < len(view):
                raise StoreUnavailable(f"{self._action}: the answer ended at byte {offset + done}")

        try:
            retrying(self._action, read, deadline=self._store.deadline)
        except AlreadyExists as error:  # 412: the ETag is another one now
            raise BadShard(f"{self._action}: it was replaced while it was read") from error

    def _get(self, offset: int, into: memoryview, received: list[int]) -> None:
        """One request. `received` counts the bytes also if it fails."""
        if (direct := self._store.direct()) is not None:
            try:
                direct.read(self._source, offset, into, received)
                return
            except InvalidInput as error:
                self._store.read_by_s3fs(error)
        fs, _ = self._store._client()
        span = f"bytes={offset}-{offset + len(into) - 1}"
        request = {"Bucket": self._store.bucket, "Key": self._key, "Range": span, "IfMatch": self._etag}
        _sync(fs.loop, _get, fs, request, into, received)


class S3Writer:
    """See Writer."""

    def __init__(self, store: S3Store, path: str) -> None:
        self._store = store
        self._path = path
        self._key = store.key(path)
        self._action = store._say("write", path)
        self._lock = threading.Lock()
        self._upload = ""
        self._parts: dict[int, str] = {}
        self._size = 0
        self._pipeline = Pipeline(
            self._send, part_size=store.part_size, workers=store.in_flight, allocate=direct.aligned
        )

    def write(self, data: Bytes) -> None:
        """See Writer.write."""
        self._size += memoryview(data).nbytes
        translated(self._action, lambda: self._pipeline.write(data))

    def commit(self) -> None:
        """See Writer.commit."""
        index, tail = self._pipeline.finish()
        if not self._upload:
            self._call("put_object", body=tail)
            return
        self._send(index, tail)
        try:
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": self._listed()})
        except NotFound:
            # No such upload: an earlier try completed it and its answer was lost, if the object is there.
            if self._store.stored_size(self._path) != self._size:
                raise
        self._upload = ""

    def abort(self) -> None:
        """See Writer.abort. One try: if the server is away, `sweep` finds the upload later."""
        self._pipeline.cancel()
        upload, self._upload = self._upload, ""
        if upload:
            arguments = {"Key": self._key, "UploadId": upload}
            with contextlib.suppress(StoreError, NotFound):
                translated(self._action, lambda: self._store._request("abort_multipart_upload", None, arguments))

    def _send(self, index: int, part: memoryview) -> None:
        with self._lock:
            if not self._upload:
                self._upload = self._call("create_multipart_upload")["UploadId"]
        answer = self._call("upload_part", body=part, UploadId=self._upload, PartNumber=index + 1)
        self._parts[index + 1] = answer["ETag"]

    def _listed(self) -> list[dict[str, Any]]:
        return [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._parts.items())]

    def _call(self, method: str, *, body: Bytes | None = None, **arguments: Any) -> Any:
        return self._store.call("write", self._path, method, body=body, Key=self._key, **arguments)


async def _get(fs: Any, request: dict[str, Any], into: memoryview, received: list[int] | None = None) -> Any:
    """One ranged GET: the answer and the number of bytes, which `received` has also if it fails."""
    count = [0] if received is None else received
    answer = await fs._call_s3("get_object", **request)
    body = answer["Body"]
    try:
        while count[0] < len(into) and (chunk := await body.read(1 << 20)):
            into[count[0] : count[0] + len(chunk)] = chunk
            count[0] += len(chunk)
    finally:
        body.close()
    return answer, count[0]


def _bounded(options: dict[str, Any]) -> dict[str, Any]:
    """Timeouts in seconds and one try per request, for retry.py does the rest. What the user set stays.

    Bodies are not hashed for the signature: over TLS they need not be, over plain HTTP it is most of an
    upload's CPU (SHA-256 at 1.2 GB/s), and the CRC32 that the server verifies stays.
    """
    given = dict(options.get("config_kwargs") or {})
    s3 = {"payload_signing_enabled": False, **(given.pop("s3", None) or {})}
    retries = {"mode": "standard", "total_max_attempts": 1}
    defaults = {"connect_timeout": 5, "read_timeout": 20, "max_pool_connections": 32, "retries": retries}
    return {**options, "config_kwargs": {**defaults, **given, "s3": s3}}

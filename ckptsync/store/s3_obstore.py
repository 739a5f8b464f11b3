"""Uploads of an S3Store through obstore (Rust), where it is installed and can be told the same as s3fs.

It takes half to two thirds of s3fs's CPU. Everything else (list, create, delete, aborting) stays with s3fs, and so do
uploads where credentials or settings come from what obstore does not know. Reads (s3_read.py) do without it: it
cannot read into a buffer of ours.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..digest import Bytes
from ..errors import InvalidInput, NotFound, StoreError
from .retry import translated
from .views import flat

if TYPE_CHECKING:
    from .s3 import S3Store

_PIECE = 4 << 20
_SLOWEST = 256 << 10  # bytes per second at which a part of an upload may still go

_OPTIONS = {
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "secret", "skip_instance_cache", "token",
    "use_listings_cache",
}  # fmt: skip
_CLIENT_KWARGS = {"endpoint_url", "region_name"}
_CONFIG_KWARGS = {"connect_timeout", "max_pool_connections", "read_timeout", "region_name", "retries", "s3"}
_S3_CONFIG = {"addressing_style", "payload_signing_enabled"}
_AWS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")

_inherited = False  # obstore's threads do not survive a fork, and a call would wait for them for ever


def _after_fork() -> None:
    global _inherited
    _inherited = _inherited or "obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


def inherited() -> bool:
    """Whether this process was forked from one that had obstore loaded, and so must not use it."""
    return _inherited


class Bulk:
    """obstore's client for one bucket, of this process."""

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any], *, deadline: float, part: int) -> None:
        from obstore.store import S3Store as Client

        client: Any = Client
        self._client = client(
            **settings,
            client_options={
                "allow_http": settings["endpoint"].startswith("http://"),
                "connect_timeout": _seconds(config["connect_timeout"]),
                # Its limit on reads would count the time of sending as well.
                "timeout": _seconds(config["read_timeout"] + part / _SLOWEST),
            },
            retry_config={
                "max_retries": 10_000,
                "retry_timeout": _seconds(deadline),
                "backoff": {"init_backoff": _seconds(0.05), "max_backoff": _seconds(2), "base": 2},
            },
        )

    def open(self, key: str, *, part_size: int, in_flight: int) -> Any:
        """obstore's file for writing. Nothing is sent before one part is full or it is closed."""
        import obstore

        return obstore.open_writer(self._client, key, buffer_size=part_size, max_concurrency=in_flight)


class ObstoreWriter:
    """See Writer. One put for what fits a part, else a multipart upload; holds `in_flight + 2` parts at most.

    Two writers of one name at a time are not told apart by `abort`: it ends the uploads of both. Names in
    `data/` are unique to an attempt, and other files fit a part.
    """

    def __init__(self, store: S3Store, path: str, bulk: Bulk) -> None:
        self._store = store
        self._path = path
        self._action = store._say("write", path)
        self._size = 0
        self._file = bulk.open(store.key(path), part_size=store.part_size, in_flight=store.in_flight)

    def write(self, data: Bytes) -> None:
        """See Writer.write. In pieces, since obstore takes the whole of what it is given and waits only before.

        Copied, since it goes on reading from the buffer after it has returned (obstore 0.12), also past a part.
        """
        view = flat(data)
        for start in range(0, len(view), _PIECE):
            piece = bytes(view[start : start + _PIECE])
            self._size += len(piece)
            translated(self._action, partial(self._file.write, piece))

    def commit(self) -> None:
        """See Writer.commit. Without a server it may take twice the deadline: obstore then tries to abort as long."""
        try:
            translated(self._action, self._file.close)
        except NotFound:
            # No such upload: an earlier try completed it and its answer was lost, if the object is there.
            if self._store.stored_size(self._path) != self._size:
                raise
        self._file = None

    def abort(self) -> None:
        """See Writer.abort. obstore forgets uploads that it does not finish, so they are looked up."""
        began, self._file = self._file is not None and self._size >= self._store.part_size, None
        if began:
            with contextlib.suppress(StoreError, NotFound):
                translated(self._action, lambda: self._store.abort_uploads(self._path))


def _seconds(count: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=count)


def connect(fs: Any, store: S3Store) -> Bulk:
    """A client that does what `fs`, the s3fs of `store`, does. InvalidInput says why there can be none."""
    if inherited():
        raise InvalidInput("obstore does not work in a process forked from one that has it loaded")
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise InvalidInput("obstore is not installed: pip install obstore") from error
    options = store._options
    _check_names(options)
    settings = _settings(fs, store.bucket, options)
    return Bulk(settings, options["config_kwargs"], deadline=store.deadline, part=store.part_size)


def _check_names(options: Mapping[str, Any]) -> None:
    def check(where: str, given: Iterable[str], known: set[str]) -> None:
        if unknown := sorted(set(given) - known):
            raise InvalidInput(f"obstore cannot be told {where}{', '.join(unknown)}")

    check("", (name for name, value in options.items() if value is not None), _OPTIONS)
    check("client_kwargs: ", options.get("client_kwargs") or {}, _CLIENT_KWARGS)
    check("config_kwargs: ", options["config_kwargs"], _CONFIG_KWARGS)
    check("config_kwargs: s3: ", options["config_kwargs"]["s3"], _S3_CONFIG)


def _settings(fs: Any, bucket: str, options: Mapping[str, Any]) -> dict[str, Any]:
    s3 = options["config_kwargs"]["s3"]
    endpoint, region, virtual = _endpoint(fs, bucket, s3.get("addressing_style") or "auto")
    over_tls = endpoint.startswith("https://")
    if over_tls and any(os.environ.get(name) for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")):
        raise InvalidInput("obstore knows no AWS_CA_BUNDLE")
    credentials = None if options.get("anon") else _credentials(options)
    return {
        "bucket": bucket,
        "endpoint": endpoint,
        "region": region,
        "virtual_hosted_style_request": virtual,
        "skip_signature": credentials is None,
        # Not among the settings, which obstore shows: only a function knows the secret.
        "credential_provider": credentials,
        # TLS guards the bytes already. Without it the signature's SHA-256 is the only check that obstore makes
        # and every server verifies (SeaweedFS 4.48 refuses its CRC64NVME).
        "unsigned_payload": over_tls and not s3["payload_signing_enabled"],
    }


def _credentials(options: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """From the options, else from the AWS variables, as botocore does; the rest of its chain stays its own."""
    key, secret, token = (options.get(name) for name in ("key", "secret", "token"))
    if not (key or secret or token):
        key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        token = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN")
        if os.environ.get("AWS_CREDENTIAL_EXPIRATION"):
            raise InvalidInput("obstore cannot renew credentials that expire")
    if not (key and secret):
        raise InvalidInput("obstore needs a key and a secret, as options or as AWS variables")
    found = {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
    return lambda: found


def _endpoint(fs: Any, bucket: str, style: str) -> tuple[str, str, bool]:
    """Endpoint as obstore wants it, region, and whether the bucket is in the host name: as botocore resolved them."""
    meta = fs.connect().meta
    url = urlsplit(meta.endpoint_url)
    aws = (url.hostname or "").endswith(_AWS)
    region = meta.region_name or ""
    if aws:
        if url.hostname not in ("s3.amazonaws.com", f"s3.{region}.amazonaws.com") or "." in bucket:
            raise InvalidInput(f"obstore cannot be told {url.hostname} with bucket {bucket}")
        # botocore follows a bucket to its region, obstore does not.
        answer = fs.call_s3("head_bucket", Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
        region = answer.get("x-amz-bucket-region", region)
        url = url._replace(netloc=f"s3.{region}.amazonaws.com")
    virtual = style == "virtual" or (aws and style == "auto")
    if virtual:
        url = url._replace(netloc=f"{bucket}.{url.netloc}")
    return url.geturl(), region if region not in ("", "aws-global") else "us-east-1", virtual

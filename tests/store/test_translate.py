from __future__ import annotations

import errno

import pytest

from ckptsync.errors import (
    AlreadyExists,
    BadShard,
    InvalidInput,
    NotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ckptsync.store.retry import retrying
from ckptsync.store.translate import http_status, translate


class AzureLike(Exception):
    status_code = 409


class GoogleLike(Exception):
    code = 412


class AiohttpLike(Exception):
    status = 503


class HangUp(Exception):
    code = 1006


def client_error(status: int, code: str) -> Exception:
    botocore = pytest.importorskip("botocore.exceptions")
    error = {"Code": code, "Message": "key AKIAEXAMPLE"}
    return botocore.ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NotFound), (errno.EISDIR, NotFound), (errno.ENOTDIR, NotFound),
        (errno.EEXIST, AlreadyExists), (errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull),
        (errno.EFBIG, StoreFull), (errno.EACCES, StoreDenied),
        (errno.EPERM, StoreDenied), (errno.EROFS, StoreDenied), (errno.ELOOP, StoreDenied),
        (errno.ESTALE, StoreUnavailable), (errno.ETIMEDOUT, StoreUnavailable),
        (errno.ENOTCONN, StoreUnavailable),
        (errno.EIO, StoreError), (errno.EINVAL, StoreError),
    ],
)  # fmt: skip
def test_errors_of_the_operating_system(number: int, kind: type[Exception]) -> None:
    ours = translate(OSError(number, "text"), "read x")
    assert type(ours) is kind
    assert "read x" in str(ours)
    assert errno.errorcode[number] in str(ours)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", StoreDenied), (403, "SignatureDoesNotMatch", StoreDenied),
        (400, "ExpiredToken", StoreDenied), (404, "NoSuchKey", NotFound),
        (412, "PreconditionFailed", AlreadyExists), (500, "InternalError", StoreUnavailable),
        (409, "ConditionalRequestConflict", AlreadyExists), (503, "SlowDown", StoreUnavailable),
        (429, "TooManyRequests", StoreUnavailable), (400, "RequestTimeout", StoreUnavailable),
        (400, "BadDigest", StoreUnavailable), (507, "InsufficientStorage", StoreFull),
        (403, "QuotaExceeded", StoreFull), (400, "InvalidArgument", StoreError),
        (501, "NotImplemented", StoreError),
    ],
)  # fmt: skip
def test_answers_of_s3_however_s3fs_wraps_them(status: int, code: str, kind: type[Exception]) -> None:
    cause = client_error(status, code)
    for error in (
        cause,
        caused(OSError(errno.EINVAL, "wrapped"), cause),
        caused(FileExistsError("x"), cause),
    ):
        ours = translate(error, "write x")
        assert type(ours) is kind
        assert code in str(ours)
        assert http_status(error) == status


def test_what_the_server_wrote_is_not_in_our_message() -> None:
    assert "AKIA" not in str(translate(client_error(403, "InvalidAccessKeyId"), "read x"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AzureLike(), AlreadyExists), (GoogleLike(), AlreadyExists), (AiohttpLike(), StoreUnavailable),
        (TimeoutError(), StoreUnavailable), (ConnectionResetError(), StoreUnavailable),
        (FileNotFoundError("path"), NotFound), (FileExistsError("path"), AlreadyExists),
        (PermissionError("path"), StoreDenied), (OSError("text"), StoreError),
    ],
)  # fmt: skip
def test_errors_of_other_libraries(error: Exception, kind: type[Exception]) -> None:
    assert type(translate(error, "x")) is kind


@pytest.mark.parametrize("error", [TypeError("a bug"), KeyError("a bug"), KeyboardInterrupt(), HangUp()])
def test_what_is_not_of_the_storage_is_left_alone(error: BaseException) -> None:
    assert translate(error, "x") is None


def test_our_own_errors_pass_unchanged() -> None:
    ours = BadShard("x")
    assert translate(ours, "again") is ours


def test_a_chain_of_causes_that_bites_its_tail_ends() -> None:
    error = OSError(errno.EIO, "x")
    error.__cause__ = error
    assert type(translate(error, "x")) is StoreError


def test_only_transient_errors_are_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = [OSError(errno.ESTALE, "x"), TimeoutError(), OSError(errno.ENOSPC, "x"), None]

    def call() -> None:
        if error := outcomes.pop(0):
            raise error

    with pytest.raises(StoreFull):
        retrying("write x", call, deadline=20)
    assert outcomes == [None]
    assert caplog.text.count("trying again") == 1


def test_retries_end_at_the_deadline_with_the_last_cause() -> None:
    def call() -> None:
        raise OSError(errno.ESTALE, "x")

    with pytest.raises(StoreUnavailable, match=r"read x.*gave up after \d+ tries") as caught:
        retrying("read x", call, deadline=0.1)
    assert caught.value.__cause__.errno == errno.ESTALE


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Server returned non-2xx status code: 403 Forbidden: <Error><Code>ExpiredToken</Code></Error>", StoreDenied),
        ("Server returned non-2xx status code: 412 Precondition Failed: <Error></Error>", AlreadyExists),
        ("Server returned non-2xx status code: 400 Bad Request: <Error><Code>QuotaExceeded</Code></Error>", StoreFull),
        ("Server returned non-2xx status code: 503 Service Unavailable: busy", StoreUnavailable),
        ("HTTP error: error sending request", StoreUnavailable),
    ],
)
def test_errors_of_obstore_are_known_by_their_words(words: str, kind: type[Exception]) -> None:
    """Its classes differ between reading and writing, where all are OSError."""
    exceptions = pytest.importorskip("obstore.exceptions")
    message = f"Generic S3 error: Error performing PUT http://host/bucket/key in 2s - {words}"
    for error in (exceptions.GenericError(message), OSError(message)):
        ours = translate(error, "write x")
        assert type(ours) is kind
        assert "host" not in str(ours)


def test_an_endpoint_without_a_scheme_is_told_in_one_line() -> None:
    error = translate(ValueError("Invalid endpoint: 127.0.0.1:22"), "list s3://bucket/run")
    assert isinstance(error, InvalidInput)
    assert "http://host:port" in str(error)

"""ONE table from what storages raise to our errors.

Remote libraries are recognised by HTTP status and by class name along the chain of causes, so none of them
needs to be installed or imported. The server's own words stay in `__cause__`: a message of ours carries the
action, the kind and a code, never a header, a signed URL or a credential.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from .. import errors
from ..errors import CkptSyncError, InvalidInput, NotFound, StoreDenied, StoreError, StoreFull, StoreUnavailable

_Kind = tuple[type[CkptSyncError], str]

_DENIED: _Kind = (StoreDenied, "permission denied")
_UNAVAILABLE: _Kind = (StoreUnavailable, "no answer")
_NO_MEMORY: _Kind = (StoreUnavailable, "this process gets no more memory")

ERRNO: dict[int, _Kind] = {
    errno.ENOENT: (NotFound, "not found"),
    errno.ENOTDIR: (NotFound, "not found: a part of the path is a file, not a folder"),
    errno.EISDIR: (NotFound, "this is a folder, not a file"),
    errno.EEXIST: (errors.AlreadyExists, "the name is taken"),
    errno.ENOSPC: (StoreFull, "no space left"),
    errno.EDQUOT: (StoreFull, "quota used up (df may still show space)"),
    errno.EFBIG: (StoreFull, "the file would be larger than the file system or a limit allows"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: (StoreDenied, "the file system is read-only"),
    errno.ELOOP: (StoreDenied, "a symbolic link below the root is not followed"),
    errno.ESTALE: (StoreUnavailable, "stale file handle"),
    errno.ENOTCONN: (StoreUnavailable, "the mount lost its server"),
    errno.EMFILE: (StoreUnavailable, "too many open files: raise `ulimit -n`"),
    errno.ENFILE: (StoreUnavailable, "too many open files on this host: raise fs.file-max"),
    errno.ENOMEM: _NO_MEMORY,
    **dict.fromkeys(
        (
            errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EHOSTDOWN, errno.EHOSTUNREACH,
            errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED,
            errno.EPIPE,
        ),
        _UNAVAILABLE,
    ),
}  # fmt: skip

STATUS: dict[int, _Kind] = {
    401: _DENIED,
    403: _DENIED,
    404: (NotFound, "not found"),
    408: _UNAVAILABLE,
    409: (errors.AlreadyExists, "the name is taken, or somebody is writing it"),
    412: (errors.AlreadyExists, "the name is taken"),
    429: (StoreUnavailable, "throttled"),
    501: (StoreError, "the server cannot do this"),
    507: (StoreFull, "no space left"),
}

# S3 error codes whose HTTP status alone would mislead.
CODE: dict[str, _Kind] = {
    "ExpiredToken": (StoreDenied, "credentials expired"),
    "InvalidToken": (StoreDenied, "wrong credentials"),
    "TokenRefreshRequired": (StoreDenied, "credentials expired"),
    "InvalidAccessKeyId": (StoreDenied, "wrong credentials"),
    "SignatureDoesNotMatch": (StoreDenied, "wrong credentials"),
    "RequestTimeTooSkewed": (StoreDenied, "this machine's clock is wrong"),
    "QuotaExceeded": (StoreFull, "quota used up"),
    "RequestTimeout": _UNAVAILABLE,
    "BadDigest": (StoreUnavailable, "bytes were damaged on the way"),
    "IncompleteBody": (StoreUnavailable, "bytes were lost on the way"),
    "NoSuchBucket": (NotFound, "the bucket does not exist"),
}

CLASS: dict[str, _Kind] = {
    "botocore.exceptions.NoCredentialsError": (StoreDenied, "no credentials"),
    "botocore.exceptions.PartialCredentialsError": (StoreDenied, "incomplete credentials"),
    "botocore.exceptions.CredentialRetrievalError": (StoreUnavailable, "credentials could not be fetched"),
    "botocore.exceptions.MetadataRetrievalError": (StoreUnavailable, "credentials could not be fetched"),
    "botocore.exceptions.ConnectionError": _UNAVAILABLE,
    "botocore.exceptions.HTTPClientError": _UNAVAILABLE,
    "botocore.exceptions.IncompleteReadError": _UNAVAILABLE,
    "botocore.parsers.ResponseParserError": _UNAVAILABLE,
    "aiohttp.client_exceptions.ClientError": _UNAVAILABLE,
    "azure.core.exceptions.ServiceRequestError": _UNAVAILABLE,
    "azure.core.exceptions.ServiceResponseError": _UNAVAILABLE,
    "obstore.exceptions.GenericError": _UNAVAILABLE,
    "builtins.TimeoutError": _UNAVAILABLE,
    "builtins.MemoryError": _NO_MEMORY,
    # Their numbers are not the operating system's.
    "http.client.HTTPException": _UNAVAILABLE,
    "socket.gaierror": _UNAVAILABLE,
    "ssl.SSLError": _UNAVAILABLE,
}


_OBSTORE_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_OBSTORE_CODE = re.compile(r"<Code>(\w{1,99})</Code>")


def translate(error: BaseException, action: str) -> CkptSyncError | None:
    """Our error for `error`, or None if it is not the storage's doing (a bug, a KeyboardInterrupt)."""
    if isinstance(error, CkptSyncError):
        return error
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint"):
        return InvalidInput(f"{action}: the endpoint is not a URL: write http://host:port (AWS_ENDPOINT_URL?)")
    kind, detail = _classify(error)
    return kind[0](f"{action}: {kind[1]} ({detail})") if kind else None


def http_status(error: BaseException) -> int | None:
    """The HTTP status that `error` or one of its causes stands for."""
    return next((status for link in _chain(error) if (status := _status(link))), None)


def _classify(error: BaseException) -> tuple[_Kind | None, str]:
    for link in _chain(error):
        if (status := _status(link)) is not None:
            return _by_status(status, _code(link))
    for link in _chain(error):
        for name in _class_names(link):
            if name in CLASS:
                return CLASS[name], _detail(link)
    if isinstance(error, OSError):
        number = error.errno or _bare_errno(error)
        return ERRNO.get(number, (StoreError, "failed")), _detail(error)
    return None, ""


def _detail(error: BaseException) -> str:
    number = None if type(error).__module__ == "ssl" else getattr(error, "errno", None)
    return errno.errorcode.get(number, type(error).__name__) if number else type(error).__name__


def _by_status(status: int, code: str) -> tuple[_Kind, str]:
    detail = f"HTTP {status} {code}".strip()
    if code in CODE:
        return CODE[code], detail
    if status in STATUS:
        return STATUS[status], detail
    return (_UNAVAILABLE if status >= 500 else (StoreError, "refused")), detail


def _bare_errno(error: OSError) -> int:
    """fsspec raises FileNotFoundError(path) and the like, without a number."""
    for known, number in (
        (FileNotFoundError, errno.ENOENT), (FileExistsError, errno.EEXIST), (PermissionError, errno.EACCES),
        (IsADirectoryError, errno.EISDIR), (NotADirectoryError, errno.ENOTDIR),
        (ConnectionError, errno.ECONNRESET),
    ):  # fmt: skip
        if isinstance(error, known):
            return number
    # What obstore's file for writing makes of its GenericError.
    return errno.ECONNRESET if str(error).startswith("Generic S3 error") else 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _status(error: BaseException) -> int | None:
    """botocore keeps it in `response`, azure in `status_code`, aiohttp in `status`, gcsfs in `code`, obstore in
    its words."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    for name in ("status_code", "status", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int) and 300 <= found < 600:
            return found
    said = _OBSTORE_STATUS.search(str(error))
    return int(said[1]) if said else None


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        said = _OBSTORE_CODE.search(str(error))
        return said[1] if said else ""
    code = str(response.get("Error", {}).get("Code", ""))
    return "" if code.isdigit() else code


def _class_names(error: BaseException) -> Iterator[str]:
    for cls in type(error).__mro__:
        yield f"{cls.__module__}.{cls.__name__}"

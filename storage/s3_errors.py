"""From what botocore, aiohttp and an S3 server say to the store's typed errors.

Two things decide, as in `translate`: what was said, and whether the request could have had an
effect. A reader's failure is always Transient. A writer's is Transient only if the request never
left, or if the server itself says that it did not do it; a connection that broke, a time-out, or
a gateway's word that something behind it failed are OutcomeUnknown.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from keepstep.storage.errors import (
    AlreadyExists,
    BadKey,
    Denied,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    Permanent,
    StoreError,
    Throttled,
    Transient,
    Truncated,
)

FAILURES: tuple[type[Exception], ...] = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    aiohttp.ClientError,
    OSError,
    asyncio.TimeoutError,
)
"""What a request may raise."""

_EXPIRED = "the credentials have expired: renew them, and start the command again"
_REFUSED = (
    "the credentials are refused: check which ones are in use (environment, ~/.aws), and what they"
    " may do in this bucket"
)
_NONE = (
    "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,"
    " or run where a role is attached"
)
_NO_BUCKET = "the bucket is not there: check its name and the endpoint, or make it"
_DAMAGED = "the data was damaged or cut on its way, and the server refused it; try again"
_SLOW_DOWN = "the store asks for fewer requests; wait, then try again"
_LATER = "try again"
_UNKNOWN = "read the key to learn whether it happened"

_BY_CODE: dict[str, tuple[type[StoreError], str]] = {
    **dict.fromkeys(
        (
            "ExpiredToken",
            "ExpiredTokenException",
            "TokenRefreshRequired",
            "RequestExpired",
        ),
        (Denied, _EXPIRED),
    ),
    **dict.fromkeys(
        (
            "AccessDenied",
            "AllAccessDisabled",
            "AccountProblem",
            "AuthorizationHeaderMalformed",
            "Forbidden",
            "InvalidAccessKeyId",
            "InvalidSecurity",
            "InvalidToken",
            "SignatureDoesNotMatch",
            "UnauthorizedAccess",
            "401",
            "403",
        ),
        (Denied, _REFUSED),
    ),
    "RequestTimeTooSkewed": (
        Denied,
        "this host's clock and the server's differ by more than the server allows: set the clock",
    ),
    **dict.fromkeys(
        (
            "SlowDown",
            "ServiceUnavailable",
            "Throttling",
            "ThrottlingException",
            "ThrottledException",
            "RequestThrottled",
            "RequestLimitExceeded",
            "BandwidthLimitExceeded",
            "TooManyRequests",
            "429",
        ),
        (Throttled, _SLOW_DOWN),
    ),
    **dict.fromkeys(
        (
            "BadDigest",
            "IncompleteBody",
            "InvalidDigest",
            "InvalidPart",
            "InvalidPartOrder",
            "MalformedXML",
            "XAmzContentSHA256Mismatch",
            "XAmzContentChecksumMismatch",
        ),
        (Transient, _DAMAGED),
    ),
    **dict.fromkeys(
        ("ConditionalRequestConflict", "OperationAborted", "RequestTimeout"), (Transient, _LATER)
    ),
    **dict.fromkeys(
        ("InsufficientCapacity", "QuotaExceeded", "XMinioStorageFull", "507"),
        (NoSpace, "free space or raise the quota"),
    ),
    "NoSuchBucket": (Permanent, _NO_BUCKET),
    "NoSuchKey": (NotFound, "no such object"),
    "InvalidRange": (Truncated, "the object ends before the bytes that were asked for"),
    "416": (Truncated, "the object ends before the bytes that were asked for"),
    "NoSuchUpload": (
        NotFound,
        "the multipart upload is gone: gc or a lifecycle rule of the bucket removed it",
    ),
    "PreconditionFailed": (AlreadyExists, "the key is taken; read it to see by whom"),
    "412": (AlreadyExists, "the key is taken; read it to see by whom"),
    "KeyTooLongError": (BadKey, "with the store's own prefix the key is too long"),
    "ExistingObjectIsDirectory": (
        BadKey,
        "one name would have to be an object and the directory of others; choose another key",
    ),
    "ExistingObjectIsFile": (
        BadKey,
        "one name would have to be an object and the directory of others; choose another key",
    ),
}
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.NoAuthTokenError,
    boto.ProfileNotFound,
)
_STALE_CREDENTIALS = (
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.UnauthorizedSSOTokenError,
)
_NOT_SENT = (boto.ConnectTimeoutError, boto.ProxyConnectionError, boto.SSLError)
_USER_INFORMATION = re.compile(r"(?<=://)[^/@\s]*@")


@dataclass(frozen=True, slots=True)
class Call:
    """Which operation of the store a request belongs to."""

    operation: str
    key: str
    where: str
    is_write: bool
    """Whether the request may change what is in the store."""
    is_head: bool = False
    """Whether the answer has no body that could say what is missing."""

    def error(self, kind: type[StoreError], what: str) -> StoreError:
        """An error of `kind` that says `what`."""
        return kind(
            f"{self.operation} {self.key!r} in {self.where}: {what}",
            operation=self.operation,
            key=self.key,
            where=self.where,
        )


def translate(error: Exception, call: Call) -> StoreError:
    """The typed error for `error`. Says nothing of a secret."""
    if isinstance(error, boto.ClientError):
        return _answered(error, call)
    reason = _USER_INFORMATION.sub("***@", str(error)) or type(error).__name__
    kind, advice = _unanswered(error, call)
    return call.error(kind, f"{reason}; {advice}")


def _answered(error: boto.ClientError, call: Call) -> StoreError:
    """The server answered, and its answer is an error."""
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = str(details.get("Message") or "").strip()
    kind, advice = _kind(code, status, call)
    reason = f"{code or status}" + (f", {said}" if said and said != code else "")
    return call.error(kind, f"{advice} (the server said: {reason})")


def _kind(code: str, status: int, call: Call) -> tuple[type[StoreError], str]:
    known = _BY_CODE.get(code)
    if known is not None:
        return known
    if status == 404 and call.is_head:
        return NotFound, "no such object"
    if status == 404:
        # Not NotFound: whoever reads the log would take it for the log's end.
        return Permanent, "404 without a word on what is missing: is this an S3 endpoint?"
    if status in (401, 403):
        return Denied, _REFUSED
    if status == 412:
        return _BY_CODE["412"]
    if status >= 500 and status != 501:
        # Also a bare 503: a gateway may say it of a request that the server behind it has done.
        return (OutcomeUnknown, _UNKNOWN) if call.is_write else (Transient, _LATER)
    return Permanent, "the same call will fail again"


def _unanswered(error: Exception, call: Call) -> tuple[type[StoreError], str]:
    """There is no answer, or none that can be understood."""
    if isinstance(error, _NO_CREDENTIALS):
        return Denied, _NONE
    if isinstance(error, _STALE_CREDENTIALS):
        return Denied, _EXPIRED
    if isinstance(error, boto.SSLError) and isinstance(
        error.kwargs.get("error"), aiohttp.ClientConnectorCertificateError
    ):
        return Permanent, "check the endpoint's certificate"
    if _never_left(error):
        return Transient, "check the endpoint and the network, or try again"
    if isinstance(error, _BROKEN):
        return (OutcomeUnknown, _UNKNOWN) if call.is_write else (Transient, _LATER)
    return Permanent, "the same call will fail again"


_BROKEN = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    ResponseParserError,
    aiohttp.ClientError,
    OSError,
    asyncio.TimeoutError,
)


def _never_left(error: Exception) -> bool:
    """Whether no byte of the request was sent.

    aiobotocore says EndpointConnectionError also of a connection that was reset after the request.
    """
    if isinstance(error, _NOT_SENT):
        return True
    if not isinstance(error, boto.EndpointConnectionError):
        return False
    cause = error.kwargs.get("error")
    return isinstance(cause, aiohttp.ClientConnectorError) or not isinstance(
        cause, aiohttp.ClientError
    )

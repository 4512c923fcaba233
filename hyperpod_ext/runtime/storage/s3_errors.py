"""Translate the exceptions of an S3 client: whether to retry, and the error for the user. This module imports no S3
client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, NotFoundError, UnreachableError


class NameInUseError(Exception):
    """A put that must create a new object found an object of that name."""


class UploadGoneError(Exception):
    """The multipart upload no longer exists: it was completed, aborted, or deleted by a lifecycle rule."""


class WrongChecksumError(Exception):
    """The bytes that S3 received do not match the checksum sent with them."""


class TruncatedError(Exception):
    """The body of an answer ended before its declared length."""

    def __str__(self) -> str:
        return "the answer was cut off"


class SpoiltError(Exception):
    """The body of an answer does not match its checksum."""

    def __str__(self) -> str:
        return "the bytes were damaged in transit"


class ShortError(Exception):
    """The object ends before the requested range."""


@dataclass(frozen=True, slots=True)
class ErrorMeaning:
    """The error to raise for a failed request, and whether another try may succeed."""

    error: Exception
    passes: bool = False
    """Whether the fault may be transient, so that another try may succeed."""


MEANINGS: dict[str, type[Exception]] = {
    "PreconditionFailed": NameInUseError,
    "412": NameInUseError,
    "NoSuchUpload": UploadGoneError,
    "BadDigest": WrongChecksumError,
    "InvalidDigest": WrongChecksumError,
    "XAmzContentChecksumMismatch": WrongChecksumError,
    "InvalidRange": ShortError,
    "416": ShortError,
}
PASSING_CODES = {
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",  # another put tried to create the same object; a retry shows which put succeeded
    "RequestTimeout",
    "RequestTimeTooSlow",
    "RequestLimitExceeded",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
PASSING_STATUS = {408, 409, 429, 500, 502, 503, 504}
PASSING_TYPES = {  # names of classes, so that no S3 client is imported
    "ConnectionError",
    "HTTPClientError",
    "ResponseStreamingError",
    "IncompleteReadError",
    "FlexibleChecksumError",
    "CredentialRetrievalError",
    "MetadataRetrievalError",
    "HTTPError",  # the base class of urllib3's errors
    "TruncatedError",
    "SpoiltError",
    "OSError",
}
CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "TokenRetrievalError"}
CREDENTIAL_CODES = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "RequestTimeTooSkewed",
}


def judge(error: Exception, doing: str, what: str, bucket: str) -> ErrorMeaning:
    """Classify the error of one failed request.

    Args:
        error: the exception of the S3 client.
        doing: verb for the message, such as "write".
        what: object of the request for the message, such as "s3://bucket/key".
        bucket: name of the bucket.
    """
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:
        return _judge_answer(response, doing, what, bucket)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if not kinds & (PASSING_TYPES | {"BotoCoreError"}):
        return ErrorMeaning(error)  # a bug here, not an S3 client's error: keep its traceback
    text = " ".join(str(error).split())
    if kinds & CREDENTIALS:
        return ErrorMeaning(
            UnreachableError(
                f"Cannot {doing} {what}: {text}",
                hint="Give the node a role, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
            )
        )
    if "SSLError" in kinds:
        hint = "Check AWS_CA_BUNDLE and the endpoint's certificate."
        return ErrorMeaning(UnreachableError(f"Cannot {doing} {what}: {text}", hint=hint))
    hint = "Check AWS_ENDPOINT_URL_S3, AWS_REGION, the S3 VPC endpoint and the security group."
    return ErrorMeaning(UnreachableError(f"Cannot {doing} {what}: {text}", hint=hint), bool(kinds & PASSING_TYPES))


def item_error(item: dict[str, Any]) -> Exception:
    """Return one error in the answer to DeleteObjects as an exception, in the form of a failed single request."""
    error = _ItemError(item.get("Message", ""))
    error.response = {"Error": item, "ResponseMetadata": {}}
    return error


class _ItemError(Exception):
    response: dict[str, Any]


def _judge_answer(response: dict[str, Any], doing: str, what: str, bucket: str) -> ErrorMeaning:
    code, message = str(response["Error"].get("Code", "")), str(response["Error"].get("Message", ""))
    metadata = response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    if meaning := MEANINGS.get(code):
        return ErrorMeaning(meaning(message))
    if status == 400 and "checksum" in message and "invalid" in message.lower():
        # S3's message is "InvalidRequest, Value for x-amz-checksum-... header is invalid"
        return ErrorMeaning(WrongChecksumError(message))
    if code in ("NoSuchKey", "404", "NotFound"):
        return ErrorMeaning(NotFoundError(f"There is no {what}"))
    request = f", request {metadata['RequestId']}" if metadata.get("RequestId") else ""
    text = f"Cannot {doing} {what}: {message.rstrip('.') or 'refused'} ({code}{request})"
    passes = code in PASSING_CODES or status in PASSING_STATUS
    return ErrorMeaning(_error(code, status, text, bucket), passes)


def _error(code: str, status: int, text: str, bucket: str) -> HyperpodExtError:
    if code == "NoSuchBucket":
        return UnreachableError(text, hint=f"Create bucket {bucket!r}, or correct the checkpoint URL.")
    if code in CREDENTIAL_CODES:
        return UnreachableError(text, hint="Renew the credentials, and check this machine's clock.")
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):
        return UnreachableError(text, hint=f"Set AWS_REGION to the region of bucket {bucket!r}.")
    if status == 403 or code in ("AccessDenied", "403"):
        return UnreachableError(
            text,
            hint=f"Allow this role s3:ListBucket on arn:aws:s3:::{bucket}, and s3:GetObject, s3:PutObject, "
            f"s3:DeleteObject and s3:AbortMultipartUpload on arn:aws:s3:::{bucket}/*; "
            "with SSE-KMS also kms:GenerateDataKey and kms:Decrypt on its key.",
        )
    if code == "NotImplemented" or status == 501:
        return UnreachableError(
            text,
            hint="The store does not implement a request that checkpoints need. Upgrade it, or choose another store.",
        )
    if code in PASSING_CODES or status in PASSING_STATUS:
        return UnreachableError(
            text, hint="S3 has refused all retries. Distribute saves over several prefixes, or save less often."
        )
    return UnreachableError(text, hint="S3's list of error codes explains the code.")

"""Calls AWS through boto3, with retries, and with this project's errors. boto3 is imported only when it is used."""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hyperpod_ext.errors import (
    ConfigError,
    ConflictError,
    HyperpodExtError,
    NotFoundError,
    Problem,
    UnknownOutcomeError,
    UnreachableError,
)

T = TypeVar("T")

TRIES = 5
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 8.0
_AGAIN = frozenset(
    {
        "ThrottlingException",
        "Throttling",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "InternalServerError",
        "InternalFailure",
        "InternalServiceException",
    }
)
_DENIED = frozenset(
    {"AccessDeniedException", "AccessDenied", "UnrecognizedClientException", "InvalidSignatureException"}
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
_LISTED_BY = {"DescribeTrainingJob": "hp-ext list --target sagemaker", "DescribeCluster": "hp-ext cluster list"}
"""Command of hp-ext that lists the objects which an API operation describes, by the operation's name."""


@functools.cache
def client(service: str, region: str | None) -> Any:
    """Return boto3's client of an AWS service. boto3's own retries are disabled, because `call` retries.

    Args:
        service: name of the service, such as `sagemaker`.
        region: region of the service; None means the region in the environment.

    Raises:
        HyperpodExtError: boto3 is not installed.
        UnreachableError: there are no credentials, or no region.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        hint = "pip install 'hyperpod-ext[sagemaker]'"
        raise HyperpodExtError("boto3, which sends requests to SageMaker, is not installed", hint=hint) from None
    config = Config(retries={"total_max_attempts": 1}, connect_timeout=10, read_timeout=60)
    try:
        region = region or os.environ.get("AWS_REGION")  # boto3 itself reads only AWS_DEFAULT_REGION
        return boto3.session.Session().client(service, region_name=region, config=config)
    except BotoCoreError as error:
        hint = "set AWS_REGION, or write sagemaker.region in the spec; commands on clusters and nodes take --region"
        raise UnreachableError(f"{service}: {error}", hint=hint) from None


def call(
    doing: str,
    attempt: Callable[[], T],
    sleep: Callable[[float], None] = time.sleep,
    existing: Callable[[], T] | None = None,
) -> T:
    """Call `attempt`, and retry it after temporary failures, with growing pauses.

    Args:
        doing: name of the operation for messages, such as "CreateTrainingJob tiny-gpt".
        attempt: sends the request to AWS, and returns the response.
        existing: reads the object that the request creates. `existing` is called after a failure if the object may
            exist nevertheless, because an earlier response was lost. `existing` raises NotFoundError if the object does
            not exist, or ConflictError if the object differs from the request. `existing` is None for requests that
            create no object.

    Raises:
        UnknownOutcomeError: a response was lost, and the request may have created its object.
        HyperpodExtError: the request failed. The class of the error names the cause, such as NotFoundError.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    delay = _FIRST_DELAY_S
    for tried in range(1, TRIES + 1):
        try:
            return attempt()
        except ClientError as error:
            failure, again = explain(doing, error.response), _is_passing(error.response)
        except BotoCoreError as error:
            failure, again = _offline(doing, error)
        if not again or tried == TRIES:
            if existing is not None and (again or tried > 1):
                return _despite(failure, existing)
            raise failure from None
        sleep(delay * (1 + secrets.randbelow(1000) / 4000))  # jitter: clients should not retry at the same time
        delay = min(delay * 2, _LONGEST_DELAY_S)
    raise AssertionError("unreachable")


def _despite(failure: HyperpodExtError, existing: Callable[[], T]) -> T:
    try:
        return existing()
    except (NotFoundError, ConflictError) as error:
        raise (failure if isinstance(error, NotFoundError) else error) from None
    except HyperpodExtError as error:
        message = f"{failure.message}; an earlier attempt may have succeeded ({error.message})"
        raise UnknownOutcomeError(
            message, hint="check with `hp-ext list` or `hp-ext cluster list` before you retry"
        ) from None


def explain(doing: str, response: Any) -> HyperpodExtError:
    """Return the error for an error response of AWS.

    Args:
        doing: name of the operation for messages.
    """
    code = str(response.get("Error", {}).get("Code", ""))
    text = str(response.get("Error", {}).get("Message", "")) or code
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    message = f"{doing}: {text}"
    if code in _EXPIRED:
        return UnreachableError(message, hint="the AWS credentials have expired, so sign in again")
    if code in _DENIED or status in (401, 403):
        return UnreachableError(
            message, hint="this identity lacks the permission; `aws sts get-caller-identity` shows it"
        )
    if code in ("ResourceInUse", "ConflictException", "ResourceExistsException"):
        hint = "use another name" if doing.startswith("Create") else "wait until the current change is done"
        return ConflictError(message, hint=hint)
    missing = code in ("ResourceNotFound", "ResourceNotFoundException") or status == 404 or "not found" in text.lower()
    if missing or (code == "ValidationException" and "could not find" in text.lower()):
        command = _LISTED_BY.get(doing.partition(" ")[0])
        return NotFoundError(message, hint=f"`{command}` lists all" if command else "check region and name")
    if code == "ResourceLimitExceeded":
        return UnreachableError(message, hint="request a higher quota in Service Quotas, or use fewer instances")
    if _is_passing(response):
        return UnreachableError(message, hint=f"it failed {TRIES} times; try again later")
    if status == 400 or code == "ValidationException":
        return ConfigError(
            [Problem(f"SageMaker refuses the request: {message}", hint="`hp-ext render` shows the request")]
        )
    return HyperpodExtError(message)


def _is_passing(response: Any) -> bool:
    code = response.get("Error", {}).get("Code", "")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return code in _AGAIN or status == 429 or status >= 500


def _offline(doing: str, error: Exception) -> tuple[HyperpodExtError, bool]:
    """Return the error for a request that got no response, and whether to retry the request."""
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError, NoCredentialsError, ParamValidationError

    if isinstance(error, NoCredentialsError):
        return UnreachableError(
            f"{doing}: there are no AWS credentials", hint="run `aws configure` or `aws sso login`"
        ), False
    if isinstance(error, ParamValidationError):
        return ConfigError([Problem(f"{doing}: {error}", hint="`hp-ext render` shows the request")]), False
    if isinstance(error, NoConnection | HTTPClientError):
        return UnreachableError(f"{doing}: {error}", hint="check the network and the region"), True
    return HyperpodExtError(f"{doing}: {error}"), False

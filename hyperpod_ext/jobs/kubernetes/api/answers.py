"""Responses of the Kubernetes API, and errors with hints for refused or failed requests."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.errors import (
    ConfigError,
    ConflictError,
    HyperpodExtError,
    NotFoundError,
    Problem,
    UnknownOutcomeError,
    UnreachableError,
)
from hyperpod_ext.jobs.kubernetes.api.kubeconfig import Access


@dataclass
class Answer:
    """One response of the Kubernetes API. The body of the response is read only when `read` is called."""

    status: int
    stream: http.client.HTTPResponse
    retry_after_s: float | None = None
    body: bytes = b""

    @classmethod
    def of(cls, response: http.client.HTTPResponse) -> Answer:
        """Make an Answer from an HTTP response, without reading the body."""
        after = response.headers.get("Retry-After", "")
        return cls(response.status, response, float(after) if after.isdecimal() else None)

    def read(self) -> Answer:
        """Read the whole body of the response; return this object."""
        self.body = self.stream.read()
        return self

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object.

        Raises:
            UnreachableError: the body is not a JSON object, so the response is not from a Kubernetes API server.
        """
        try:
            found = json.loads(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UnreachableError(
                "the server's response is not JSON",
                hint="check that this address is a Kubernetes API, not a proxy in front of it",
            )
        return found

    def message(self) -> str:
        """Return the server's error message in one line."""
        try:
            message = self.json().get("message")
        except UnreachableError:
            message = None
        return str(message or self.body.decode(errors="replace").strip()[:200] or self.stream.reason)


def describe(problem: Answer | Exception, method: str, path: str, access: Access) -> HyperpodExtError:
    """Return the error for a request that the server refused, or for a server that cannot be reached.

    Args:
        problem: response of the server, or exception of the connection.
        method: HTTP method of the request.
        path: API path of the request.
        access: server and credentials of the request.
    """
    if isinstance(problem, Exception):
        return _unreachable(problem, method, access)
    text, where = problem.message(), f"context {access.context}"
    match problem.status:
        case 401:
            hint = "sign in again, for example with `aws sso login`, then `aws eks update-kubeconfig --name CLUSTER`"
            return UnreachableError(f"{access.server} does not accept these credentials ({where}): {text}", hint=hint)
        case 403:
            hint = (
                "request the permission, or use another namespace or context; `kubectl auth can-i --list` shows yours"
            )
            return UnreachableError(f"not allowed in {where}: {text}", hint=hint)
        case 404:
            return _not_found(problem, path, access, text)
        case 409:
            return ConflictError(text, hint="choose another name, or delete the object that has it")
        case 400 | 422:
            return ConfigError(list(_causes(problem)) or [Problem(text)])
        case 429:
            return UnreachableError(f"{access.server} is overloaded: {text}", hint="try again later")
    message = f"{access.server} failed with HTTP {problem.status}: {text}"
    if method == "POST" and problem.status != 503:
        return _unknown(message)
    return UnreachableError(message, hint="try again later")


def _unknown(message: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(f"{message}; the change may have been made anyway", hint="check with `hp-ext list`")


def _unreachable(error: Exception, method: str, access: Access) -> UnreachableError:
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "if the cluster was created again, run `aws eks update-kubeconfig --name CLUSTER`"
        return UnreachableError(f"the certificate of {access.server} is not trusted: {error.verify_message}", hint=hint)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = "it does not respond"
    if isinstance(error, socket.gaierror):
        reason = "its name cannot be resolved; check the network"
    message = f"cannot reach {access.server}: {reason}"
    if method == "POST" and not isinstance(error, ConnectionRefusedError | socket.gaierror | ssl.SSLError):
        return _unknown(message)
    return UnreachableError(
        message, hint=f"check the network, and the server of context {access.context} in the kubeconfig"
    )


def _not_found(answer: Answer, path: str, access: Access, text: str) -> NotFoundError:
    if _details(answer).get("name"):
        return NotFoundError(f"{text} in {access.context}, namespace {access.namespace}")
    kind = path.rstrip("/").rpartition("/")[2]
    hint = "check the namespace, and with `hp-ext doctor` that the operator is installed"
    return NotFoundError(f"{access.server} has no kind {kind}", hint=hint)


def _causes(answer: Answer) -> list[Problem]:
    """Return a problem for every field that the server refused."""
    return [
        Problem(str(cause.get("message", "is refused")), path=str(cause.get("field", "")), source="the Kubernetes API")
        for cause in _details(answer).get("causes") or []
    ]


def _details(answer: Answer) -> dict[str, Any]:
    try:
        found = answer.json().get("details")
    except UnreachableError:
        return {}
    return found if isinstance(found, dict) else {}

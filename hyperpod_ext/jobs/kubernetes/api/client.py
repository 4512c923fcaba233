"""A small client of the Kubernetes API, which sends JSON over HTTP with the standard library.

Requests are retried after HTTP status 429 or 5xx, and after a broken connection. If the response to a request that
creates an object was lost, the client first checks whether the object exists, and whether it is equal to the object in
the request.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import ssl
import tempfile
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

from hyperpod_ext.errors import ConflictError, HyperpodExtError, NotFoundError, UnknownOutcomeError
from hyperpod_ext.jobs.contract.differences import FieldDifference, differences
from hyperpod_ext.jobs.kubernetes.api.answers import Answer, describe
from hyperpod_ext.jobs.kubernetes.api.kubeconfig import Access

_TRIES = 5
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
_TIMEOUT_S = 30.0
_DID_NOTHING = frozenset({429, 503})
_TRANSIENT = frozenset({429, 500, 502, 503, 504})


class Client:
    """Client of one Kubernetes API server, with the credentials of one user.

    Args:
        access: address of the server, and credentials.
        pause: waits for a number of seconds before a request is sent again.
        say: called with the reason each time before a request is sent again.
    """

    def __init__(
        self,
        access: Access,
        pause: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.access = access
        self._pause = pause
        self._say = say
        self._token: str | None = None
        self._tls: ssl.SSLContext | None = None
        self._prefix = urllib.parse.urlsplit(access.server).path

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return the object at `path`."""
        return self._ask("GET", path, query)

    def get_once(self, path: str) -> dict[str, Any]:
        """Return the object at `path` without retries.

        Used for paths that may not respond for a long time, such as a pod behind the API server's proxy.
        """
        return self._ask("GET", path, {}, tries=1)

    def create(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        """Create the object `body` in the collection at `path`; return the created object.

        If the response to an attempt is lost, but the attempt has created the object, the object is returned.

        Raises:
            ConflictError: another object has the same name.
            UnknownOutcomeError: a response was lost, and it is unknown whether the object was created.
        """
        lost: UnknownOutcomeError | None = None
        for attempt in range(_TRIES):
            try:
                return self._ask("POST", path, query, body)
            except UnknownOutcomeError as error:
                if "dryRun" in query:
                    raise
                lost = error
            except ConflictError:
                if lost is None:
                    raise
            try:
                found = self.get(f"{path}/{body['metadata']['name']}")
            except NotFoundError:
                self._wait(attempt, None, lost.message)
                continue
            except HyperpodExtError:
                raise lost from None
            if other := unlike(body, found):
                name = f"{body.get('kind', path)} {body['metadata']['name']}"
                raise ConflictError(f"a {name} exists and differs: {'; '.join(other)}", hint="choose another name")
            return found
        assert lost is not None
        raise lost

    def evict(self, path: str, body: Mapping[str, Any]) -> None:
        """Request the eviction of a pod. The request can be repeated without harm, because it creates no object.

        Args:
            path: path of the pod's subresource `eviction`.
        """
        self._ask("POST", path, {}, body, repeatable=True)

    def replace(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        """Replace the object at `path` with `body`; return the replaced object."""
        return self._ask("PUT", path, query, body)

    def delete(self, path: str, **query: str) -> dict[str, Any]:
        """Delete the object at `path`, and the objects that depend on it.

        Returns {} if an earlier attempt, whose response was lost, has already deleted the object.
        """
        return self._ask("DELETE", path, query, {"kind": "DeleteOptions", "propagationPolicy": "Background"})

    def items(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """Yield all objects of the collection at `path`, which is read page by page."""
        query = {"limit": "500"} | query
        while True:
            page = self._ask("GET", path, query)
            yield from page.get("items") or []
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return
            query = query | {"continue": following}

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Yield the lines of a text at `path`, such as a log, until the text ends or the connection breaks."""
        answer, connection = self._send("GET", path, query, None, endless="follow" in query)
        with closing(connection):
            if answer.status >= 400:
                raise describe(answer.read(), "GET", path, self.access)
            while line := answer.stream.readline():
                yield line.decode(errors="replace").rstrip("\n")

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Any = None,
        tries: int = _TRIES,
        repeatable: bool | None = None,
    ) -> dict[str, Any]:
        repeatable = method != "POST" if repeatable is None else repeatable
        for attempt in range(tries):
            last = attempt == tries - 1
            try:
                answer, connection = self._send(method, path, query, body)
                with closing(connection):
                    answer.read()
            except (OSError, http.client.HTTPException) as error:
                if last or not _is_safe(repeatable, error):
                    raise describe(error, method, path, self.access) from None
                self._wait(attempt, None, _words(error))
                continue
            if answer.status == 401 and attempt == 0 and self._token is not None:
                self._token = None  # get a new token once, because the token may have expired
                continue
            if not last and answer.status in (_TRANSIENT if repeatable else _DID_NOTHING):
                self._wait(attempt, answer.retry_after_s, f"HTTP {answer.status}")
                continue
            if method == "DELETE" and answer.status == 404 and attempt:
                return {}
            if answer.status >= 400:
                raise describe(answer, method, path, self.access)
            return answer.json()
        raise HyperpodExtError(f"{method} {path} failed in all {tries} tries", hint="try again later")

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Any, endless: bool = False
    ) -> tuple[Answer, http.client.HTTPConnection]:
        connection = self._connect(None if endless else _TIMEOUT_S)
        if query:
            path = f"{path}?{urllib.parse.urlencode(query)}"
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, content, self._headers(content is not None))
            return Answer.of(connection.getresponse()), connection
        except BaseException:
            connection.close()
            raise

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        parts = urllib.parse.urlsplit(self.access.server)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        if self._tls is None:
            self._tls = _tls_of(self.access)
        return _Connection(host, parts.port, timeout_s, self._tls, self.access.server_name or host)

    def _headers(self, has_body: bool) -> dict[str, str]:
        headers = {"Accept": "application/json, */*", "User-Agent": "hp-ext"}
        if has_body:
            headers["Content-Type"] = "application/json"
        if self._token is None:
            self._token = self.access.token()
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        elif self.access.basic is not None:
            headers["Authorization"] = f"Basic {b64encode(':'.join(self.access.basic).encode()).decode()}"
        return headers

    def _wait(self, attempt: int, asked_s: float | None, why: str) -> None:
        grown = _FIRST_PAUSE_S * 2**attempt * random.uniform(0.75, 1.25)
        pause = min(max(grown, asked_s or 0.0), _LONGEST_PAUSE_S)
        self._say(f"{why} from {self.access.server}; retrying in {pause:.1f} s")
        self._pause(pause)


def unlike(asked: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a text for each field in which the existing object `found` differs from the object `asked`.

    If `asked` has annotations, only its metadata is compared. Objects of jobs have an annotation with their spec, and
    admission webhooks may change their other fields. Objects without annotations are compared completely, except
    `stringData`, which the server does not return.
    """
    parts = ("metadata",) if asked["metadata"].get("annotations") else asked.keys() - {"stringData"}
    other = (one for part in sorted(parts) for one in differences(asked[part], found.get(part), part))
    return [str(field) for one in other for field in _fields(one)]


def _fields(found: FieldDifference) -> Iterator[FieldDifference]:
    """Yield the differing fields within one difference, if both values are JSON texts, such as specs in annotations."""
    try:
        there, wanted = json.loads(found.there), json.loads(found.wanted)
    except (TypeError, ValueError):
        yield found
        return
    yield from differences(wanted, there, found.path)
    for one in differences(there, wanted, found.path):
        if one.there is None:
            yield FieldDifference(one.path, one.wanted, None)


def _is_safe(repeatable: bool, error: Exception) -> bool:
    """Return whether a request may be sent again after `error`: the request had no effect or is idempotent."""
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return False  # a retry of a failed TLS handshake or DNS query would fail, too
    return repeatable or isinstance(error, ConnectionRefusedError)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _tls_of(access: Access) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=access.ca)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if access.certificate is not None:
        # ssl reads client certificates only from files; NamedTemporaryFile creates a file of mode 600
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write("\n".join(access.certificate))
            file.flush()
            context.load_cert_chain(file.name)
    return context


class _Connection(http.client.HTTPConnection):
    """HTTPS connection to a host whose certificate may have another name than the host.

    In a kubeconfig, `tls-server-name` sets the name in the certificate.
    """

    def __init__(self, host: str, port: int | None, timeout_s: float | None, tls: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port or 443, timeout=timeout_s)
        self._own_tls, self._certified = tls, name

    def connect(self) -> None:
        super().connect()
        self.sock = self._own_tls.wrap_socket(self.sock, server_hostname=self._certified)

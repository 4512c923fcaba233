"""A small client of the Kubernetes API: JSON over HTTP, on the standard library.

Requests are retried after 429, 5xx, and a broken connection. If the response to a request that creates an object was
lost, the client first checks whether the server has the object, and whether it equals the one that was sent.
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
    """Requests to one endpoint, as one identity.

    `pause` waits between attempts; `say` gets the reason as text.
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
        """Return the object at `path` without retries: for a source that may be absent for long, such as a pod behind
        the server."""
        return self._ask("GET", path, {}, tries=1)

    def create(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        """Create `body` in the collection `path`. If an attempt without a response created the object, return it.

        Raises:
            ConflictError: another object has the name.
            UnknownOutcomeError: a response was lost, and it is unknown whether the object exists.
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
        """Create an eviction at `path`. An eviction is not an object, so sending it again is harmless."""
        self._ask("POST", path, {}, body, repeatable=True)

    def replace(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        """Replace the object at `path` by `body`."""
        return self._ask("PUT", path, query, body)

    def delete(self, path: str, **query: str) -> dict[str, Any]:
        """Delete the object at `path` and its dependents. Return {} if an attempt without a response deleted it."""
        return self._ask("DELETE", path, query, {"kind": "DeleteOptions", "propagationPolicy": "Background"})

    def items(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """Yield all objects of a collection, page by page."""
        query = {"limit": "500"} | query
        while True:
            page = self._ask("GET", path, query)
            yield from page.get("items") or []
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return
            query = query | {"continue": following}

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Yield the lines of a growing text, until the server ends it or the connection breaks."""
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
                self._token = None  # the token may have expired: request a new one, once
                continue
            if not last and answer.status in (_TRANSIENT if repeatable else _DID_NOTHING):
                self._wait(attempt, answer.retry_after_s, f"HTTP {answer.status}")
                continue
            if method == "DELETE" and answer.status == 404 and attempt:
                return {}
            if answer.status >= 400:
                raise describe(answer, method, path, self.access)
            return answer.json()
        raise HyperpodExtError(f"{method} {path} failed {tries} times")

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
    """Return the fields in which `found` differs from the object `asked`.

    If `asked` has annotations, only annotations and labels are compared: jobs of this project have their spec there,
    and admission may change other fields. Other objects are compared completely, except `stringData`, which servers do
    not return.
    """
    parts = ("metadata",) if asked["metadata"].get("annotations") else asked.keys() - {"stringData"}
    other = (one for part in sorted(parts) for one in differences(asked[part], found.get(part), part))
    return [str(field) for one in other for field in _fields(one)]


def _fields(found: FieldDifference) -> Iterator[FieldDifference]:
    """Return the fields of one difference if both values are JSON, such as the spec in an annotation."""
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
    """Return whether the request may be sent again, because it had no effect or is idempotent."""
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return False  # a retry would fail in the same way
    return repeatable or isinstance(error, ConnectionRefusedError)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _tls_of(access: Access) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=access.ca)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if access.certificate is not None:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # mode 600; ssl reads only from files
            file.write("\n".join(access.certificate))
            file.flush()
            context.load_cert_chain(file.name)
    return context


class _Connection(http.client.HTTPConnection):
    """HTTPS to a host whose certificate may be for another name, which `tls-server-name` sets."""

    def __init__(self, host: str, port: int | None, timeout_s: float | None, tls: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port or 443, timeout=timeout_s)
        self._own_tls, self._certified = tls, name

    def connect(self) -> None:
        super().connect()
        self.sock = self._own_tls.wrap_socket(self.sock, server_hostname=self._certified)

"""A stand-in for the Kubernetes API, over plain HTTP: what it keeps, it keeps as the real one does.

It gives out uids and resource versions, refuses names that are taken, checks tokens, pages lists, knows dry runs and
label selectors, streams logs, and answers with `Status` objects. Orders say which requests fail, and how.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from pod_streams import serve_exec
from serving import serving

_REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 422: "Invalid"}
KNOWN = {
    "secrets", "pods", "networkpolicies", "hyperpodpytorchjobs", "pytorchjobs", "trainjobs", "nodes",
}  # fmt: skip
"""Collections that exist; the rest answers as a cluster without that operator."""


@dataclass
class Order:
    """The next `times` requests that match are answered with `status`."""

    status: int
    method: str = ""
    path: str = ""
    times: int = 1
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """Close the connection without an answer."""
    done: bool = False
    """Whether the request is carried out all the same: only its answer is lost."""
    before: Callable[[str], None] = lambda path: None
    """Called with the path before the answer."""


@dataclass
class KubernetesApi:
    """One cluster."""

    url: str = ""
    token: str = "good-token"
    """Empty: everybody is let in; kubectl sends no token over plain HTTP."""
    known: set[str] = field(default_factory=lambda: set(KNOWN))
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By path."""
    orders: list[Order] = field(default_factory=list)
    evicted: list[tuple[str, str]] = field(default_factory=list)
    """Pods that were, and the version of the API that was asked."""
    requests: list[tuple[str, str, dict[str, str], dict[str, Any] | None]] = field(default_factory=list)
    """method, path, query and body, in the order they came."""
    pod_logs: dict[str, list[str]] = field(default_factory=dict)
    """Lines by name of the pod."""
    pod_ports: dict[str, int] = field(default_factory=dict)
    """`POD:PORT` that the server reaches, and the port of this machine that it stands for."""
    cut_logs_after: list[int] = field(default_factory=list)
    """The next log streams break after so many lines."""
    page: int = 2
    """Most items of one page."""
    on_delete: Callable[[str], None] = lambda path: None
    changed: threading.Condition = field(default_factory=threading.Condition)
    _versions: int = 0

    def kubeconfig(self, file: Path, *, token: str | None = None, user: dict[str, Any] | None = None) -> Path:
        """Write a kubeconfig for it."""
        context = {"cluster": "c", "user": "u", "namespace": "team-a"}
        found = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": context}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user or {"token": token or self.token}}],
        }
        file.write_text(yaml.safe_dump(found))
        return file

    def put(self, path: str, found: dict[str, Any]) -> None:
        """Have this object, as an operator or a kubelet would make it."""
        with self.changed:
            self._versions += 1
            before = self.objects.get(path, {}).get("metadata", {}).get("uid")
            metadata = {"uid": before or f"uid-{self._versions}", "creationTimestamp": "2026-11-21T00:00:00Z"}
            found["metadata"] = metadata | found["metadata"] | {"resourceVersion": str(self._versions)}
            self.objects[path] = found
            self.changed.notify_all()

    def pod(
        self,
        name: str,
        labels: dict[str, str],
        phase: str = "Running",
        lines: list[str] | None = None,
        containers: tuple[str, ...] = ("worker",),
    ) -> None:
        """A pod of namespace team-a; its logs are those of the first container."""
        self.pod_logs.setdefault(name, []).extend(lines or [])
        spec = {"containers": [{"name": one} for one in containers]}
        body = {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {"phase": phase}}
        self.put(f"/api/v1/namespaces/team-a/pods/{name}", body)

    def condition(self, path: str, kind: str, **more: str) -> None:
        """Add a condition to the status of a job."""
        with self.changed:
            found = self.objects[path]
        one = {"type": kind, "status": "True", "lastTransitionTime": "2026-11-21T00:01:00Z"} | more
        conditions = [*found.get("status", {}).get("conditions", []), one]
        self.put(path, found | {"status": {"conditions": conditions}})

    def asked(self, method: str) -> list[str]:
        """Paths that were asked for by this method."""
        return [path for verb, path, _query, _body in self.requests if verb == method]

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any] | None) -> tuple[int, Any]:
        """What a server without orders says."""
        parts = path.strip("/").split("/")
        if path == "/api/v1":
            pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["get", "list"]}
            eviction = {"name": "pods/eviction", "group": "policy", "version": "v1"}
            return 200, {"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods, eviction]}
        if path in ("/api", "/apis"):
            core = {"kind": "APIVersions", "versions": ["v1"]}
            return 200, core if path == "/api" else {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
        if path == "/api/v1/pods":
            return 200, {"items": self._pods_on(query["fieldSelector"].partition("=")[2])}
        if path.endswith("/eviction"):
            self.evicted.append((parts[5], (body or {}).get("apiVersion", "")))
            found = self.objects.pop(path.removesuffix("/eviction"), None)
            return (201, {"status": "Success"}) if found else (404, {"message": "not found"})
        at = parts.index("namespaces") + 2 if "namespaces" in parts else 2
        collection, name = parts[at], "/".join(parts[at + 1 :])
        if collection not in self.known:
            return 404, "the server could not find the requested resource"
        with self.changed:
            if method == "POST" and body is not None:
                return self._create(path, query, body)
            if not name:
                return self._list(path, query)
            if path not in self.objects:
                return 404, {
                    "message": f'{collection} "{name}" not found',
                    "details": {"name": name, "kind": collection},
                }
            if method == "DELETE":
                self.objects.pop(path)
                self.on_delete(path)
                return 200, {"kind": "Status", "status": "Success"}
            if method == "PUT" and body is not None:
                self.objects[path] = body
            return 200, self.objects[path]

    def _pods_on(self, node: str) -> list[dict[str, Any]]:
        with self.changed:
            pods = [one for path, one in self.objects.items() if path.split("/")[-2] == "pods"]
        return [pod for pod in pods if pod.get("spec", {}).get("nodeName") == node]

    def _create(self, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        name = body["metadata"]["name"]
        own = f"{path}/{name}"
        details = {"name": name, "kind": path.rpartition("/")[2]}
        if own in self.objects:
            return 409, {"message": f'{details["kind"]} "{name}" already exists', "details": details}
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name):
            causes = [{"field": "metadata.name", "message": f'Invalid value: "{name}"'}]
            return 422, {"message": "is invalid", "details": details | {"causes": causes}}
        if "dryRun" not in query:
            self.put(own, body)
        return 201, body

    def _list(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        found = [one for own, one in sorted(self.objects.items()) if own.rpartition("/")[0] == path]
        if selector := query.get("labelSelector"):
            key, _, value = selector.partition("=")
            found = [one for one in found if one["metadata"].get("labels", {}).get(key) == value]
        start = int(query.get("continue", "0"))
        end = start + min(self.page, int(query.get("limit", "500")))
        metadata = {"continue": str(end)} if end < len(found) else {}
        return 200, {"kind": "List", "metadata": metadata, "items": found[start:end]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubernetesApi

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        length = int(self.headers.get("Content-Length", "0"))
        body = json.loads(self.rfile.read(length)) if length else None
        self.api.requests.append((self.command, url.path, query, body))
        for order in self.api.orders:
            if order.times and order.method in ("", self.command) and order.path in url.path:
                order.times -= 1
                order.before(url.path)
                if order.done:
                    self.api.answer(self.command, url.path, query, body)
                if order.cut:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._reply(order.status, order.body or {"message": f"ordered {order.status}"}, order.headers)
                return
        if self.api.token and self.headers.get("Authorization") != f"Bearer {self.api.token}":
            self._reply(401, {"message": "Unauthorized"}, {})
        elif "/proxy/" in url.path:
            self._pass_on(url.path)
        elif url.path.endswith("/exec") and self.headers.get("Upgrade") == "websocket":
            words = [value for name, value in urllib.parse.parse_qsl(url.query) if name == "command"]
            serve_exec(self, words, query.get("stdin") == "true")
        elif url.path.endswith("/log"):
            self._log(url.path.split("/")[-2], query)
        else:
            status, found = self.api.answer(self.command, url.path, query, body)
            self._reply(status, found, {})

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def _reply(self, status: int, found: Any, headers: dict[str, str]) -> None:
        if status >= 400 and isinstance(found, dict):
            found = {"kind": "Status", "code": status, "reason": _REASONS.get(status, "InternalError")} | found
        content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _pass_on(self, path: str) -> None:
        """What a pod answers at a port of its own; 503 where nobody does, as of the real one."""
        before, _, rest = path.partition("/proxy/")
        port = self.api.pod_ports.get(before.rpartition("/")[2])
        try:
            if port is None:
                raise ConnectionRefusedError
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            line.request("GET", f"/{rest}")
            answer = line.getresponse()
            self._reply(answer.status, answer.read().decode(), {})
        except OSError as error:
            self._reply(503, {"message": f"error trying to reach service: {error!r}"}, {})

    def _log(self, pod: str, query: dict[str, str]) -> None:
        """Each line with its time; with follow until the pod has ended."""
        path = f"/api/v1/namespaces/team-a/pods/{pod}"
        several = [one["name"] for one in self.api.objects.get(path, {}).get("spec", {}).get("containers", [])][1:]
        if several and "container" not in query:
            self.send_error(400, "a container name must be specified")
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = 0
        most = self.api.cut_logs_after.pop(0) if self.api.cut_logs_after else None
        while True:
            with self.api.changed:
                lines = list(self.api.pod_logs.get(pod, []))
                running = path in self.api.objects and self.api.objects[path]["status"]["phase"] == "Running"
            for number, line in enumerate(lines[sent:], sent):
                at = f"2026-11-21T00:00:{number:02d}.000000000Z"
                if most is not None and number >= most:
                    return
                if at >= query.get("sinceTime", ""):
                    self.wfile.write(f"{at} {line}\n".encode())
            self.wfile.flush()
            sent = len(lines)
            if not running or query.get("follow") != "true":
                return
            with self.api.changed:
                if len(self.api.pod_logs.get(pod, [])) == sent:
                    self.api.changed.wait(0.05)


@contextmanager
def serve() -> Iterator[KubernetesApi]:
    """A cluster for one test."""
    api = KubernetesApi()
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield api

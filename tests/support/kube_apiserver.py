"""A real Kubernetes API server for tests: kube-apiserver 1.20 and etcd on loopback, with the custom resources we send.

Nobody packages the server for development machines, but Debian 12's source package of it is whole: it is built once,
into `.venv/kube-apiserver` (four minutes of CPU, 500 MB on the way). Needs root and Debian's golang-go and etcd-server;
a machine without them skips these tests and says so, and under CI what lacks is installed, or is a failure.

Objects only: nothing here schedules or runs pods. Pods that a test puts on `NODE` have logs, from a kubelet that knows
nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from debian import cannot_run, install_under_ci

from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import die_with_parent

FOLDER = Path(sys.prefix) / "kube-apiserver"
BINARY = FOLDER / "kube-apiserver"
PACKAGES = ("golang-go", "etcd-server", "openssl", "dpkg-dev")
NODE = "node-1"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_START_S = 60.0
# 1.20 on newer Go: its OpenAPI file is made, not shipped; its reflect2 crashes on the first custom resource
_BUILD = r"""
set -eu
cd "$1"
mkdir -p apt/lists/partial apt/cache/archives/partial go/src/k8s.io
site=$(apt-get indextargets --format '$(SITE)' | grep -m1 '/debian$')
cat >apt/apt.conf <<END
Dir::Etc::SourceList "$1/apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$1/apt/lists";
Dir::Cache "$1/apt/cache";
APT::Sandbox::User "root";
END
for kind in deb deb-src; do echo "$kind [signed-by=$2] $site bookworm main"; done >apt/sources.list
source=$1/go/src/k8s.io/kubernetes
export APT_CONFIG=$1/apt/apt.conf
if [ ! -e fetched ]; then
    apt-get -qq update
    apt-get -qq source --download-only kubernetes
    apt-get -qq download golang-github-modern-go-reflect2-dev
    tar -xzf kubernetes_*.orig.tar.gz
    mv kubernetes-1.20.* "$source"
    dpkg-deb -x golang-github-modern-go-reflect2-dev_*.deb reflect2
    rm -r "$source/vendor/github.com/modern-go/reflect2"
    cp -r reflect2/usr/share/gocode/src/github.com/modern-go/reflect2 "$source/vendor/github.com/modern-go/"
    touch fetched
fi
cd "$source"
export GOPATH=$1/go GO111MODULE=off GOFLAGS= CGO_ENABLED=0 GOCACHE=$1/cache
made=pkg/generated/openapi/zz_generated.openapi.go
if [ ! -s "$made" ]; then
    go build -o "$1/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    inputs=$(grep -rl --include=*.go '+k8s:openapi-gen=' pkg cmd vendor/k8s.io/*/ |
        grep -v -E 'vendor/k8s.io/(code-generator|sample-apiserver|kube-openapi)|_test.go|testdata' |
        xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
    "$1/openapi-gen" -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$1/violations" 2>"$1/openapi-gen.log"
fi
go build -tags providerless -ldflags "-s -w" -o "$1/built" ./cmd/kube-apiserver
"""


class UnavailableError(Exception):
    """This machine has no API server, and cannot get one."""


def install() -> None:
    """Build the server, unless it is there. What was built before an interruption is not built again; of several
    processes that ask for it one builds, and the others wait."""
    if BINARY.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not BINARY.exists():
            _build(FOLDER / "work")


def _build(work: Path) -> None:
    work.mkdir(exist_ok=True)
    command = ["nice", "sh", "-c", _BUILD, "sh", str(work), _KEYRING]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise UnavailableError(f"kube-apiserver cannot be built: {str(said).strip()[-300:]}") from error
    (work / "built").rename(BINARY)
    shutil.rmtree(work)


def require() -> None:
    """Skip where there can be no API server; fail under CI."""
    if lacking := _make():
        cannot_run(lacking)


def _make() -> str:
    """Why there can be no API server here; empty: there is one."""
    lacking = _lacking()
    if lacking:
        install_under_ci(*PACKAGES, timeout_s=600.0)
        lacking = _lacking()
    try:
        if not lacking:
            install()
    except UnavailableError as error:
        lacking = str(error)
    return f"a Kubernetes API server cannot run here: {lacking}" if lacking else ""


def _lacking() -> str:
    programs = {"etcd": "etcd-server", "openssl": "openssl"}
    if not BINARY.exists():
        programs |= {"go": "golang-go", "dpkg-deb": "dpkg", "apt-get": "apt"}
    missing = [package for program, package in programs.items() if shutil.which(program) is None]
    if missing:
        return f"apt-get install {' '.join(missing)}"
    return "" if BINARY.exists() or Path(_KEYRING).exists() else "it is built from Debian's sources"


@dataclass
class ApiServer:
    """A running server, with an administrator and somebody who may do nothing."""

    place: Path
    url: str
    admin: str = field(default_factory=lambda: secrets.token_hex(16))
    nobody: str = field(default_factory=lambda: secrets.token_hex(16))
    pod_logs: dict[str, list[str]] = field(default_factory=dict)
    """Lines by name of the pod."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def kubeconfig(self, file: Path, token: str | None = None, namespace: str = "default") -> Path:
        """Write a kubeconfig for it; its certificate is checked."""
        cluster = {"server": self.url, "certificate-authority": str(self.place / "certs" / "apiserver.crt")}
        found = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token or self.admin}}],
        }
        file.write_text(yaml.safe_dump(found))
        return file

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the server answers to the administrator.

        Raises:
            urllib.error.HTTPError: it refuses.
        """
        headers = {"Authorization": f"Bearer {self.admin}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        context = ssl.create_default_context(cafile=str(self.place / "certs" / "apiserver.crt"))
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def define(self, crd: dict[str, Any]) -> None:
        """Have a custom resource, and wait until it is served."""
        self.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        spec = crd["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        _wait(lambda: self._serves(path))

    def _serves(self, path: str) -> bool:
        try:
            self.ask("GET", path)
        except urllib.error.HTTPError:
            return False
        return True

    def pod(self, name: str, labels: dict[str, str], phase: str, lines: list[str], namespace: str = "default") -> None:
        """A pod of NODE, as an operator makes it and a kubelet runs it."""
        self.pod_logs[name] = lines
        path = f"/api/v1/namespaces/{namespace}/pods"
        spec = {"nodeName": NODE, "containers": [{"name": "worker", "image": "a:1"}]}
        made = self.ask("POST", path, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        made["status"] = {"phase": phase}
        self.ask("PUT", f"{path}/{name}/status", made)

    def condition(self, path: str, kind: str, reason: str = "") -> None:
        """Add a condition to the status of a job, as its operator does."""
        found = self.ask("GET", path)
        one = {"type": kind, "status": "True", "reason": reason, "lastTransitionTime": "2026-11-21T00:01:00Z"}
        found["status"] = {"conditions": [*found.get("status", {}).get("conditions", []), one]}
        self.ask("PUT", f"{path}/status", found)

    def start(self, name: str, *command: str) -> None:
        """A process that ends when the tests do."""
        parent = os.getpid()
        with (self.place / f"{name}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=lambda: die_with_parent(parent),
                )
            )


@contextmanager
def api_server(place: Path) -> Iterator[ApiServer]:
    """A server of its own in `place`, empty but for its node."""
    require()
    ports = [free_port() for _ in range(3)]
    server = ApiServer(place, f"https://127.0.0.1:{ports[0]}")
    etcd, peers = (f"http://127.0.0.1:{port}" for port in ports[1:])
    (place / "certs").mkdir()
    tokens = place / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f'{server.admin},admin,1,"system:masters"\n{server.nobody},nobody,2\n')
    _openssl("genrsa", "-out", str(place / "sa.key"), "2048")
    own = ["--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", peers]
    own += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    try:
        server.start("etcd", "etcd", "--data-dir", str(place / "etcd"), "--unsafe-no-fsync", "--logger", "zap", *own)
        server.start(
            "kube-apiserver",
            *(str(BINARY), f"--etcd-servers={etcd}", f"--cert-dir={place}/certs", f"--secure-port={ports[0]}"),
            *("--bind-address=127.0.0.1", "--service-cluster-ip-range=10.99.0.0/24"),
            *(f"--token-auth-file={place}/tokens", "--authorization-mode=RBAC", "--anonymous-auth=false"),
            *("--service-account-issuer=https://tests", f"--service-account-key-file={place}/sa.key"),
            *(f"--service-account-signing-key-file={place}/sa.key", "--disable-admission-plugins=ServiceAccount"),
            *("--endpoint-reconciler-type=none", "--kubelet-preferred-address-types=InternalIP", "--profiling=false"),
            "--allow-privileged=true",
        )
        _wait(lambda: _ready(server))
        with _kubelet(server):
            yield server
    finally:
        for process in reversed(server.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


@contextmanager
def _kubelet(server: ApiServer) -> Iterator[None]:
    """The node, and the one thing that is asked of it: logs."""
    key, certificate = server.place / "kubelet.key", server.place / "kubelet.crt"
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate),
             "-subj", "/CN=kubelet", "-days", "2")  # fmt: skip
    handler = type("Handler", (_Kubelet,), {"server_of_pods": server})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        made = server.ask("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
        made["status"] = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": listening.server_port}},
        }
        server.ask("PUT", f"/api/v1/nodes/{NODE}/status", made)
        try:
            yield
        finally:
            listening.shutdown()
            thread.join()


class _Kubelet(BaseHTTPRequestHandler):
    server_of_pods: ApiServer

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")  # containerLogs/NAMESPACE/POD/CONTAINER
        lines = self.server_of_pods.pod_logs.get(parts[2] if len(parts) > 2 else "")
        self.send_response(404 if lines is None else 200)
        self.end_headers()
        for number, line in enumerate(lines or []):
            self.wfile.write(f"2026-11-21T00:00:{number:02d}.000000000Z {line}\n".encode())


def _ready(server: ApiServer) -> bool:
    if any(process.poll() is not None for process in server.processes):
        logs = "".join(f"\n{log.name}: {log.read_text()[-500:]}" for log in sorted(server.place.glob("*.log")))
        pytest.fail(f"the API server did not start{logs}")
    try:
        server.ask("GET", "/api/v1/namespaces/default")
    except (OSError, ssl.SSLError):  # not yet; HTTPError is an OSError too
        return False
    return True


def _wait(ready: Any) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


if __name__ == "__main__":  # where there can be none, tests say so again
    sys.exit(_make() or 0)

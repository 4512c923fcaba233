"""Reads address, certificates and credentials of the Kubernetes API from the kubeconfig, as kubectl does.

Tokens and keys are kept in memory. A client certificate and its key are written to a temporary file, because Python's
ssl reads only files. Only this user can read the temporary file, which is deleted as soon as ssl has read it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import UnreachableError
from hyperpod_ext.user_folders import home_folder

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_TIMEOUT_S = 60.0
_WRITE = "write one with `aws eks update-kubeconfig --name CLUSTER`, or set KUBECONFIG"


@dataclass(frozen=True)
class Access:
    """Address of a Kubernetes API server, and the credentials of one user."""

    server: str
    """URL of the server, such as `https://host:port`, or with `http` for a proxy on this machine."""
    context: str
    namespace: str
    ca: str | None = field(default=None, repr=False)
    """PEM text of the certificate authorities that sign the server's certificate; None means the system's
    authorities."""
    insecure: bool = False
    """Whether the kubeconfig disables the check of the server's certificate."""
    server_name: str | None = None
    """Name in the server's certificate; None means the name of the host."""
    certificate: tuple[str, str] | None = field(default=None, repr=False)
    """PEM texts of the client certificate and its key; None without a client certificate."""
    token: Callable[[], str | None] = field(default=lambda: None, repr=False)
    """Function that returns a new bearer token; it returns None if the user has no token."""
    basic: tuple[str, str] | None = field(default=None, repr=False)


def load_access(context: str | None = None, namespace: str | None = None) -> Access:
    """Read address and credentials from $KUBECONFIG or ~/.kube/config.

    Inside a pod without a kubeconfig, the pod's service account is used.

    Args:
        context: name of a context; None means the kubeconfig's current context.
        namespace: namespace of requests; None means the context's namespace.

    Raises:
        UnreachableError: there is no kubeconfig, or it does not have the context.
    """
    files = [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    files = files or [home_folder("KUBECONFIG") / ".kube" / "config"]
    there = [file for file in files if file.is_file()]
    if not there:
        if context is None and (_IN_POD / "token").is_file() and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _in_pod(namespace)
        hint = _WRITE
        raise UnreachableError(f"there is no kubeconfig at {', '.join(map(str, files))}", hint=hint)
    config = _merged([_read(file) for file in there])
    return _access(config, context, namespace)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not YAML"
        raise UnreachableError(
            f"the kubeconfig {file} cannot be read: {reason}", hint="correct it, or set KUBECONFIG to another file"
        ) from None
    if not isinstance(found, dict):
        raise UnreachableError(f"the kubeconfig {file} is empty", hint=_WRITE)
    for kind in ("clusters", "users"):
        for entry in found.get(kind) or []:
            entry["_folder"] = str(file.parent)  # paths in the entry are relative to the kubeconfig's folder
    return found


def _merged(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge several kubeconfigs as kubectl does. Of several entries with the same name, the first entry is used."""
    merged: dict[str, Any] = {
        "current-context": next((c["current-context"] for c in configs if c.get("current-context")), None)
    }
    for kind in ("clusters", "users", "contexts"):
        merged[kind] = {}
        for config in configs:
            for entry in config.get(kind) or []:
                merged[kind].setdefault(str(entry.get("name")), entry)
    return merged


def _access(config: Mapping[str, Any], context: str | None, namespace: str | None) -> Access:
    name = context or config["current-context"]
    if not name:
        known = ", ".join(config["contexts"]) or "none"
        raise UnreachableError(
            "the kubeconfig has no current context", hint=f"name a context; the kubeconfig has: {known}"
        )
    found = _named(config, "contexts", name)["context"]
    cluster_entry = _named(config, "clusters", str(found.get("cluster")))
    cluster = cluster_entry["cluster"]
    user_entry = config["users"].get(str(found.get("user")), {})
    user = user_entry.get("user") or {}
    folder = Path(user_entry.get("_folder", "."))
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("https://", "http://")):
        raise UnreachableError(
            f"cluster {found.get('cluster')} of the kubeconfig has no URL in the field `server`", hint=_WRITE
        )
    certificate = _data(user, "client-certificate", folder)
    key = _data(user, "client-key", folder)
    basic = (user["username"], user.get("password", "")) if user.get("username") else None
    return Access(
        server=server.rstrip("/"),
        context=name,
        namespace=namespace or found.get("namespace") or "default",
        ca=_data(cluster, "certificate-authority", Path(cluster_entry["_folder"])),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=cluster.get("tls-server-name"),
        certificate=(certificate, key) if certificate and key else None,
        token=_token_source(user, folder, name),
        basic=basic,
    )


def _named(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    entry = config[kind].get(name)
    if not isinstance(entry, dict) or not isinstance(entry.get(kind.removesuffix("s")), dict):
        hint = suggest(name, config[kind])
        raise UnreachableError(f"the kubeconfig has no {kind.removesuffix('s')} `{name}`", hint=hint)
    return entry


def _data(holder: Mapping[str, Any], name: str, folder: Path) -> str | None:
    """Return the PEM text of a certificate or key, which the kubeconfig contains in base64 or names as a file.

    Args:
        holder: entry of the kubeconfig.
        name: name of the field, such as `client-key`.
        folder: folder of the kubeconfig, for relative paths.
    """
    try:
        if encoded := holder.get(f"{name}-data"):
            return base64.b64decode(str(encoded)).decode()
        if path := holder.get(name):
            return (folder / str(path)).read_text()
    except (OSError, ValueError, binascii.Error) as error:
        raise UnreachableError(f"the kubeconfig's {name} cannot be read: {error}") from None
    return None


def _token_source(user: Mapping[str, Any], folder: Path, context: str) -> Callable[[], str | None]:
    if isinstance(command := user.get("exec"), dict):
        return lambda: _exec_token(command, folder, context)
    if path := user.get("tokenFile"):
        return lambda: (folder / path).read_text().strip()
    token = str(user["token"]) if user.get("token") else None
    return lambda: token


def _exec_token(command: Mapping[str, Any], folder: Path, context: str) -> str:
    """Return the token that a program prints. The kubeconfig names the program, for example `aws eks get-token`."""
    program = str(command.get("command"))
    if "/" in program and not program.startswith("/"):
        program = str(folder / program)
    variables = {entry["name"]: entry["value"] for entry in command.get("env") or []}
    info = {"apiVersion": command.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = os.environ | variables | {"KUBERNETES_EXEC_INFO": json.dumps(info)}
    arguments = [program, *map(str, command.get("args") or [])]
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(arguments, env=environment, timeout=_EXEC_TIMEOUT_S, check=False, **given)
    except OSError as error:
        # if a folder of PATH cannot be read, Python raises PermissionError for a missing program
        hint = str(command.get("installHint") or "install it, or choose another context").strip()
        is_here = Path(program).exists() if "/" in program else shutil.which(program)
        why = f"which cannot be started: {error.strerror}" if is_here else "which is not installed"
        raise UnreachableError(f"context {context} gets its credentials from `{program}`, {why}", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"`{program}` returned no token within {_EXEC_TIMEOUT_S:g} s",
            hint=f"run `{shlex.join(arguments)}` to see why",
        ) from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UnreachableError(
            f"`{program}` returned no token: {last[0]}", hint="sign in again, for example with `aws sso login`"
        )
    try:
        token = json.loads(done.stdout)["status"]["token"]
    except (ValueError, KeyError, TypeError):
        raise UnreachableError(
            f"`{program}` did not print a token", hint=f"run `{shlex.join(arguments)}` to see its output"
        ) from None
    return str(token)


def _in_pod(namespace: str | None) -> Access:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    own = (_IN_POD / "namespace").read_text().strip()
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        context="in-cluster",
        namespace=namespace or own,
        ca=(_IN_POD / "ca.crt").read_text(),
        token=lambda: (_IN_POD / "token").read_text().strip(),
    )

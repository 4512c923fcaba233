"""Command lines of kubectl that run commands in a job's pods or forward their ports."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from hyperpod_ext.jobs.contract.handle import ANYWHERE, JobHandle
from hyperpod_ext.jobs.contract.targets import running_node
from hyperpod_ext.jobs.kubernetes.details import details
from hyperpod_ext.jobs.kubernetes.jobs import client_of


def exec_command(handle: JobHandle, node: int, words: Sequence[str], terminal: bool) -> list[str]:
    """See `targets.Shell`."""
    return in_pod(handle, _pod(handle, node), words, terminal=terminal)


def forward_command(handle: JobHandle, node: int, ports: Sequence[str]) -> list[str]:
    """See `targets.Ports`."""
    return [*_kubectl(handle), "port-forward", f"pod/{_pod(handle, node)}", *ports]


def in_pod(handle: JobHandle, pod: str, words: Sequence[str], *, terminal: bool = False) -> list[str]:
    """Return the command line that runs `words` in a pod of the job."""
    return [*_kubectl(handle), "exec", "-it" if terminal else "-i", pod, "--", *words]


def _kubectl(handle: JobHandle) -> list[str]:
    context = [] if handle.place == ANYWHERE else ["--context", unquote(handle.place.rpartition("@")[2])]
    return ["kubectl", *context, "--namespace", client_of(handle).access.namespace]


def _pod(handle: JobHandle, node: int) -> str:
    running = [str(pod["name"]) for pod in details(handle)["pods"] if pod["phase"] == "Running"]
    return running_node(handle, running, node)

"""Commands that run inside of a job: in a pod by kubectl, on a node of Slurm's by srun."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from urllib.parse import unquote

from hyperpod_ext.errors import NotFoundError, Problem, UnreachableError, UnsupportedError
from hyperpod_ext.submit.contract.handle import ANYWHERE, JobHandle
from hyperpod_ext.submit.contract.targets import get_target

_KUBERNETES = ("hyperpod-eks", "kubeflow")
_SLURM = "hyperpod-slurm"
_INSTEAD = {
    "local": "its processes are on this machine: `hp-ext status` shows the folder of their files",
    "sagemaker": "with sagemaker.remote_debug: `aws ssm start-session --target sagemaker-training-job:NAME_algo-1`",
}


def exec_command(handle: JobHandle, node: int, words: Sequence[str], terminal: bool) -> list[str]:
    """What runs `words` on a node of the job.

    Args:
        node: the node's place among those that run, from 0 on, by the names of pods or hosts.
        terminal: whether the user types into it.

    Raises:
        NotFoundError: there is no such job, or it does not run on so many nodes.
        UnsupportedError: nothing can be run in jobs of this target.
    """
    if handle.target in _KUBERNETES:
        return in_pod(handle, _pod(handle, node), words, terminal=terminal)
    if handle.target == _SLURM:
        job, host = _slurm_host(handle, node)
        step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        return [*step, *(["--pty"] if terminal else []), *words]
    get_target(handle.target)
    message = f"nothing can be run in jobs of target {handle.target}"
    raise UnsupportedError([Problem(message, hint=_INSTEAD[handle.target])])


def in_pod(handle: JobHandle, pod: str, words: Sequence[str], *, terminal: bool = False) -> list[str]:
    """What runs `words` in a pod of the job."""
    return [*_kubectl(handle), "exec", "-it" if terminal else "-i", pod, "--", *words]


def forward_command(handle: JobHandle, node: int, ports: Sequence[str]) -> list[str]:
    """What brings ports of a pod to this machine, as `exec_command`.

    Args:
        ports: each `PORT`, or `HERE:THERE`.
    """
    if handle.target in _KUBERNETES:
        return [*_kubectl(handle), "port-forward", f"pod/{_pod(handle, node)}", *ports]
    get_target(handle.target)
    hint = "on Slurm: ssh -L HERE:HOST:THERE, to the host that `squeue` shows"
    raise UnsupportedError([Problem(f"jobs of target {handle.target} have no pods", hint=hint)])


def run(command: Sequence[str]) -> int:
    """Run it here, with this terminal; returns its exit code.

    Raises:
        UnreachableError: the program is not on this machine.
    """
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        hint = "install it, or use --dry-run and run the command elsewhere"
        raise UnreachableError(f"there is no {command[0]} on this machine", hint=hint) from None


def _kubectl(handle: JobHandle) -> list[str]:
    from hyperpod_ext.submit.kubernetes.jobs import client_of

    context = [] if handle.place == ANYWHERE else ["--context", unquote(handle.place.rpartition("@")[2])]
    return ["kubectl", *context, "--namespace", client_of(handle).access.namespace]


def _pod(handle: JobHandle, node: int) -> str:
    from hyperpod_ext.submit.kubernetes.details import details

    running = [str(pod["name"]) for pod in details(handle)["pods"] if pod["phase"] == "Running"]
    return _chosen(handle, running, node)


def _slurm_host(handle: JobHandle, node: int) -> tuple[str, str]:
    from hyperpod_ext.submit.slurm import client, target

    job = target.submission(handle).id
    running = client.nodes_of(job)[0] if target.status(handle).state == "running" else []
    return job, _chosen(handle, running, node)


def _chosen(handle: JobHandle, running: Sequence[str], node: int) -> str:
    if node < len(running):
        return running[node]
    hint = f"the last is --node {len(running) - 1}" if running else f"`hp-ext describe {handle}` shows why"
    raise NotFoundError(f"{handle.name} runs on {len(running)} nodes", hint=hint)

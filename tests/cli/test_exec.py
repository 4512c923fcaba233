"""hp-ext exec and port-forward: what they run, and where they cannot."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext, hp_ext
from kubernetes_api import KubernetesApi, serve

JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs"
EKS = ("--target", "hyperpod-eks")
SLURM = ("--target", "hyperpod-slurm")


def program(folder: Path, name: str, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job with two pods that run, and one that does not."""
    with serve() as served:
        served.known.add("events")
        monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig(tmp_path / "config")))
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        served.put(f"{JOBS}/gpt", {"metadata": {"name": "gpt"}, "spec": {}})
        for name, phase in (("gpt-0", "Failed"), ("gpt-1", "Running"), ("gpt-2", "Running")):
            served.pod(name, {"HPJob": "gpt"}, phase=phase)
        yield served


def test_the_command_runs_in_a_pod_that_runs_and_its_exit_code_is_ours(api: KubernetesApi, tmp_path: Path) -> None:
    program(tmp_path, "kubectl", 'for word in "$@"; do echo "$word"; done; exit 9')
    done = hp_ext("exec", *EKS, "gpt", "--", "python", "-c", "print(1)  # a b")
    wanted = ["--namespace", "team-a", "exec", "-i", "gpt-1", "--", "python", "-c", "print(1)  # a b"]
    assert (done.code, done.stdout.splitlines()) == (9, wanted)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed on this machine")
def test_the_real_kubectl_takes_the_command_and_brings_back_outputs_and_exit_code(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end is a stand-in for the API server, which serves exec as the protocol says and runs the command."""
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl keeps what it learns of an API server there
    api.token = ""
    path = "/api/v1/namespaces/team-a/pods/gpt-1"
    api.put(path, api.objects[path] | {"apiVersion": "v1", "kind": "Pod"})
    script = 'read line; echo "$0: $line"; echo "to stderr" >&2; exit 7'
    command = [Path(sys.executable).with_name("hp-ext"), "exec", *EKS, "gpt", "--", "sh", "-c", script, "a b"]
    done = subprocess.run(command, input="typed\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "a b: typed\n"), done.stderr
    assert "to stderr" in done.stderr
    assert any(one.endswith("/pods/gpt-1/exec") for one in api.asked("GET"))


def test_a_dry_run_shows_the_command_with_the_context_of_the_url(api: KubernetesApi) -> None:
    shown = call_hp_ext("exec", "--node", "1", "-t", "--dry-run", "hyperpod-eks://team-a@here/gpt", "--", "bash", "-l")
    wanted = ["kubectl", "--context", "here", "--namespace", "team-a", "exec", "-it", "gpt-2", "--", "bash", "-l"]
    assert shlex.split(shown.stdout) == wanted
    forward = call_hp_ext("port-forward", "gpt", "9400", "6006:80", *EKS, "--dry-run", "-o", "json")
    wanted = ["kubectl", "--namespace", "team-a", "port-forward", "pod/gpt-1", "9400", "6006:80"]
    assert (forward.code, forward.json["command"]) == (0, wanted)


def test_a_node_that_does_not_run_and_a_job_that_is_not_there_are_not_found(api: KubernetesApi) -> None:
    told = call_hp_ext("exec", *EKS, "--node", "2", "gpt", "--", "true")
    assert (told.code, "the last is --node 1" in told.stderr) == (6, True)
    assert call_hp_ext("port-forward", "nobody", "80", *EKS).code == 6


def test_no_command_is_wrong_usage(api: KubernetesApi) -> None:
    told = call_hp_ext("exec", *EKS, "gpt", "--")
    assert (told.code, "Write the command after --" in told.stderr, api.requests) == (2, True, [])


def test_a_machine_without_kubectl_says_so(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    told = call_hp_ext("exec", *EKS, "gpt", "--", "true")
    assert (told.code, "kubectl is not installed on this machine" in told.stderr) == (4, True)


def test_on_slurm_it_is_a_step_of_the_job_on_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperpod_ext.jobs.contract import records

    monkeypatch.setenv("HPX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    job = {"id": "17", "cluster": "research", "folder": str(tmp_path), "runs": str(tmp_path), "world_size": 2}
    records.remember("hyperpod-slurm", "gpt", job | {"submitted_at": "2026-11-21T00:00:00"})
    shown = 'echo "JobId=17 JobState=RUNNING Reason=None SubmitTime=2026-11-21T00:00:00 EndTime=Unknown"'
    program(tmp_path, "scontrol", f'case "$*" in *hostnames*) printf "n0\\nn1\\n";; *) {shown};; esac')
    program(
        tmp_path,
        "squeue",
        'case "$*" in *%N*) echo "n[0-1]|n0";; *) echo "17|RUNNING|2026-11-21T00:00:00|N/A|None";; esac',
    )
    made = call_hp_ext("exec", *SLURM, "--node", "1", "--dry-run", "-o", "json", "gpt", "--", "nvidia-smi")
    wanted = ["srun", "--jobid=17", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n1", "nvidia-smi"]
    assert (made.code, made.json["command"]) == (0, wanted)


@pytest.mark.parametrize(("command", "target"), [("exec", "sagemaker"), ("port-forward", "sagemaker")])
def test_where_it_cannot_it_says_what_to_do_instead(command: str, target: str) -> None:
    told = call_hp_ext(command, "--target", target, "gpt", "80")
    assert (told.code, "jobs of target" in told.stderr) == (3, True)

"""hp-ext node drain, on Kubernetes and on Slurm."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from command import Done, call_hp_ext
from kubernetes_api import KubernetesApi, Order, serve

CORE = "/api/v1/namespaces/team-a"


def hp_ext(*arguments: str) -> Done:
    return call_hp_ext("node", "drain", *arguments)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two nodes; on the first a pod of a job, one that has ended, a daemon set's and a static one."""
    with serve() as served:
        monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig(tmp_path / "config")))
        for name in ("hyperpod-i-0a", "hyperpod-i-0b"):
            served.put(f"/api/v1/nodes/{name}", {"metadata": {"name": name}, "spec": {}})
        daemon = {"ownerReferences": [{"kind": "DaemonSet"}]}
        static = {"annotations": {"kubernetes.io/config.mirror": "x"}}
        for name, phase, node, more in (
            ("gpt-0", "Running", "hyperpod-i-0a", {}),
            ("done-0", "Succeeded", "hyperpod-i-0a", {}),
            ("efa-plugin", "Running", "hyperpod-i-0a", daemon),
            ("proxy", "Running", "hyperpod-i-0a", static),
            ("gpt-1", "Running", "hyperpod-i-0b", {}),
        ):
            pod = {"metadata": {"name": name, "namespace": "team-a"} | more, "spec": {"nodeName": node}}
            served.put(f"{CORE}/pods/{name}", pod | {"status": {"phase": phase}})
        yield served


def unschedulable(api: KubernetesApi) -> list[bool]:
    return [bool(api.objects[f"/api/v1/nodes/hyperpod-i-0{n}"]["spec"].get("unschedulable")) for n in "ab"]


def test_a_node_is_cordoned_its_pods_evicted_and_taken_again(api: KubernetesApi) -> None:
    done = hp_ext("i-0a", "hyperpod-i-0a", "--yes", "-o", "json")
    assert (done.code, done.json["nodes"], done.json["state"]) == (0, ["hyperpod-i-0a"], "unschedulable")
    assert (unschedulable(api), api.evicted) == ([True, False], [("gpt-0", "policy/v1")])
    undone = hp_ext("i-0a", "--undo", "-o", "json")
    assert (undone.code, undone.json["state"], unschedulable(api)) == (0, "schedulable", [False, False])


def test_a_dry_run_and_no_answer_change_nothing(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    dry = hp_ext("i-0a", "i-0b", "--dry-run", "-o", "json")
    assert [pod["name"] for pod in dry.json["pods"]] == ["gpt-0", "gpt-1"]
    monkeypatch.setattr("sys.stdin", io.StringIO())
    asked = hp_ext("i-0a")
    assert (asked.code, "Evict 1 pod from hyperpod-i-0a?" in asked.stderr) == (130, True)
    assert (unschedulable(api), api.evicted) == ([False, False], [])


def test_a_name_that_is_no_nodes_stops_all(api: KubernetesApi) -> None:
    told = hp_ext("i-0a", "i-0c", "--yes")
    assert (told.code, "has no node i-0c" in told.stderr, unschedulable(api)) == (6, True, [False, False])


def test_a_node_that_is_changed_all_the_time_is_a_conflict(api: KubernetesApi) -> None:
    api.orders.append(Order(409, method="PUT", path="/nodes/", times=5))
    assert (hp_ext("i-0a", "--yes").code, api.evicted) == (5, [])


def test_a_node_that_was_changed_meanwhile_is_cordoned(api: KubernetesApi) -> None:
    api.orders.append(Order(409, method="PUT", path="/nodes/"))
    assert (hp_ext("i-0a", "--yes").code, len(api.evicted)) == (0, 1)


def test_a_disruption_budget_refuses_and_the_node_stays_cordoned(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperpod_ext.jobs.kubernetes.api.client._FIRST_PAUSE_S", 0.001)
    refusal = {"message": "Cannot evict pod as it would violate the pod's disruption budget."}
    api.orders.append(Order(429, path="/eviction", times=99, body=refusal))
    told = hp_ext("i-0a", "--yes")
    assert (told.code, "disruption budget" in told.stderr) == (4, True)
    assert (unschedulable(api), api.evicted) == ([True, False], [])


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands: three nodes, of which gpu-2 has a job."""
    said = tmp_path / "said"
    for name, text in {
        "scontrol": f'case "$*" in *hostnames*) echo "$3" | tr , "\\n";; *) echo "$*" >>{said};; esac',
        "sinfo": 'printf "gpu-1\\ngpu-2\\ngpu-3\\n"',
        "squeue": 'case "$*" in *gpu-2*) echo 17;; esac',
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return said


SLURM = ("--target", "hyperpod-slurm")


def test_on_slurm_nodes_take_no_more_jobs_for_a_reason_and_take_them_again(slurm: Path) -> None:
    done = hp_ext("gpu-1", "gpu-2", *SLURM, "--reason", "NVLink errors", "--yes", "-o", "json")
    assert (done.code, done.json["jobs"], done.json["state"]) == (0, ["17"], "unschedulable")
    assert hp_ext("gpu-1", *SLURM, "--undo").code == 0
    assert slurm.read_text().splitlines() == [
        "update NodeName=gpu-1,gpu-2 State=DRAIN Reason=NVLink errors",
        "update NodeName=gpu-1 State=RESUME",
    ]


def test_on_slurm_a_dry_run_and_an_unknown_node_change_nothing(slurm: Path) -> None:
    assert hp_ext("gpu-2", *SLURM, "--dry-run", "-o", "json").json["jobs"] == ["17"]
    told = hp_ext("gpu-1", "gpu-9", *SLURM, "--yes")
    assert (told.code, "no node gpu-9" in told.stderr, slurm.exists()) == (6, True, False)

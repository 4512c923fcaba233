"""hp-ext delete: what a job left on Kubernetes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from command import Done, call_hp_ext
from kubernetes_api import KubernetesApi, Order, serve

from hyperpod_ext.catalog.labels import JOB

JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs"
CORE = "/api/v1/namespaces/team-a"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies"


def hp_ext(*arguments: str) -> Done:
    return call_hp_ext("delete", *arguments, "--target", "hyperpod-eks")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With what two jobs left."""
    with serve() as served:
        monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig(tmp_path / "config")))
        for name in ("gpt", "other"):
            served.put(f"{JOBS}/{name}", {"metadata": {"name": name}, "spec": {}})
            served.condition(f"{JOBS}/{name}", "Failed", reason="WorkerCrash")
            served.pod(f"{name}-0", {"HPJob": name, JOB: name}, phase="Failed")
            for path in (POLICIES, f"{CORE}/secrets"):
                served.put(f"{path}/{name}-hpx", {"metadata": {"name": f"{name}-hpx", "labels": {JOB: name}}})
        yield served


def kept(api: KubernetesApi) -> list[str]:
    return sorted(path.rpartition("team-a/")[2] for path in api.objects if "other" not in path)


ALL = ["hyperpodpytorchjobs/gpt", "networkpolicies/gpt-hpx", "pods/gpt-0", "secrets/gpt-hpx"]


def test_what_a_job_left_is_deleted_and_its_secret_stays(api: KubernetesApi) -> None:
    done = hp_ext("gpt", "--yes", "-o", "json")
    assert (done.code, done.json["deleted"]) == (0, True)
    assert [one["kind"] for one in done.json["objects"]] == ["HyperPodPyTorchJob", "Pod", "NetworkPolicy"]
    assert kept(api) == ["secrets/gpt-hpx"]
    assert len(api.objects) == 5
    assert hp_ext("gpt", "--with-secret", "--yes").code == 0
    assert (kept(api), len(api.objects)) == ([], 4)
    assert hp_ext("gpt", "--with-secret", "--yes").code == 6


def test_a_dry_run_and_no_answer_delete_nothing(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    dry = hp_ext("gpt", "--dry-run", "--with-secret", "-o", "json")
    assert (dry.code, dry.json["deleted"], len(dry.json["objects"])) == (0, False, 4)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    asked = hp_ext("gpt")
    assert (asked.code, "Delete 3 objects?" in asked.stderr) == (130, True)
    assert kept(api) == ALL


def test_a_job_that_runs_is_not_deleted(api: KubernetesApi) -> None:
    api.objects[f"{JOBS}/gpt"]["status"]["conditions"] = [{"type": "Running", "status": "True"}]
    told = hp_ext("gpt", "--yes")
    assert (told.code, "hp-ext cancel" in told.stderr, kept(api)) == (5, True, ALL)


def test_pods_that_went_by_themselves_are_no_mistake(api: KubernetesApi) -> None:
    def collect(path: str) -> None:
        if path.startswith(JOBS):
            api.objects.pop(f"{CORE}/pods/gpt-0")

    api.on_delete = collect
    assert (hp_ext("gpt", "--yes").code, kept(api)) == (0, ["secrets/gpt-hpx"])


def test_who_may_not_is_told_so(api: KubernetesApi) -> None:
    api.orders.append(Order(403, method="DELETE", times=9))
    assert (hp_ext("gpt", "--yes").code, kept(api)) == (4, ALL)


@pytest.mark.parametrize("target", ["hyperpod-slurm", "sagemaker"])
def test_where_nothing_is_left_it_says_what_is(target: str) -> None:
    told = call_hp_ext("delete", "gpt", "--target", target)
    assert (told.code, "leave no objects" in told.stderr) == (3, True)

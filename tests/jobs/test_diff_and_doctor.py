"""What would change, and what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext as hp_ext
from kubernetes_api import KubernetesApi

from hyperpod_ext.jobs.contract.differences import differences
from hyperpod_ext.jobs.kubernetes import schemas

JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/hyperpodpytorchjobs.sagemaker.amazonaws.com"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nscript: train.py\nimage: repo/train:1\nenv: {A: x, B: y}\n")
    return file


@pytest.mark.parametrize(
    ("wanted", "there", "changes"),
    [
        ({"a": 1}, {"a": 1, "default": 2}, []),
        ({"a": 1}, {"a": 2}, ["a: 2 -> 1"]),
        ({"a": {"b": 1}}, {}, ['a: (nothing) -> {"b": 1}']),
        ({"a": {}}, {}, []),
        (
            {"e": [{"name": "A", "value": "1"}]},
            {"e": [{"name": "B"}, {"name": "A", "value": "2"}]},
            ['e[A].value: "2" -> "1"', 'e[B]: {"name": "B"} -> (nothing)'],
        ),
        ({"l": [1, 2]}, {"l": [1]}, ["l.1: (nothing) -> 2"]),
        ({"l": [1]}, {"l": [1, 2]}, ["l.1: 2 -> (nothing)"]),
    ],
)
def test_only_what_is_wanted_is_compared(wanted: Any, there: Any, changes: list[str]) -> None:
    assert [str(one) for one in differences(wanted, there)] == changes


def test_a_live_job_differs_by_what_was_changed_and_by_nothing_that_the_server_added(
    api: KubernetesApi, spec: Path
) -> None:
    assert hp_ext("create-job", "-f", spec, "--target", "hyperpod-eks").code == 0
    live = api.objects[f"{JOBS}/a"]
    live["spec"]["replicaSpecs"][0]["template"]["spec"]["schedulerName"] = "default-scheduler"
    live["status"] = {"conditions": []}
    arguments = ("diff", "-f", spec, "--target", "hyperpod-eks", "--exit-code")
    done = hp_ext(*arguments)
    assert (done.code, done.stdout) == (0, "no differences\n")
    done = hp_ext(*arguments, "--set", "nodes=2", "--set", "env.B=z", "-o", "json")
    assert done.code == 10
    paths = {one["path"] for one in done.json}
    assert "spec.replicaSpecs[nodes].replicas" in paths
    assert "spec.replicaSpecs[nodes].template.spec.containers[worker].env[B].value" in paths
    assert hp_ext("diff", "-f", spec, "--set", "name=b").code == 6


def test_a_file_may_be_compared_too(spec: Path, tmp_path: Path) -> None:
    hp_ext("render", "-f", spec, "--target", "hyperpod-eks", "--out", tmp_path / "out")
    arguments = ("diff", "-f", spec, "--target", "hyperpod-eks", "--exit-code", "--with")
    assert hp_ext(*arguments, tmp_path / "out" / "job.yaml").code == 0
    assert hp_ext(*arguments, tmp_path / "none").code == 6
    assert hp_ext(*arguments, tmp_path / "out" / "network-policy.yaml").code == 3


def crd_of(model: Any) -> dict[str, Any]:
    """A definition as the operator would install it."""
    spec = {"type": "object", "properties": _properties(model)}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"properties": {"spec": spec}}}}
    return {"metadata": {"name": "x"}, "spec": {"versions": [version]}}


def _properties(model: Any) -> dict[str, Any]:
    from hyperpod_ext.config.files.schema_path import models_in

    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        inner = [m for part in (info.annotation, *getattr(info.annotation, "__args__", ())) for m in models_in(part)]
        one = {"properties": _properties(inner[0])} if inner else {}
        found[info.alias or name] = {"items": one} if "list" in str(info.annotation) else one
    return found


def states(output: Any) -> dict[str, tuple[str, str]]:
    return {one["what"]: (one["state"], one["finding"]) for one in output}


def test_doctor_compares_the_live_definition_with_what_is_rendered(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    crd = crd_of(schemas.HyperPodSpec)
    answer = api.answer

    def with_definitions(method: str, path: str, *rest: Any) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"gitVersion": "v1.33.0"}
        if "customresourcedefinitions" in path:
            return (200, crd) if path == CRD else (404, {"message": "no", "details": {"name": "x"}})
        return answer(method, path, *rest)

    monkeypatch.setattr(api, "answer", with_definitions)
    found = states(hp_ext("doctor", "-o", "json").json)
    assert found["kubernetes"][0] == "ok"
    assert found["HyperPodPyTorchJob"] == ("ok", "v1; accepts every rendered field")
    assert found["PyTorchJob"][0] == "absent"
    assert found["Kueue"][0] == "absent"
    run_policy = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
        "runPolicy"
    ]
    del run_policy["properties"]["logMonitoringConfiguration"]["items"]["properties"]["faultOnMatch"]
    state, finding = states(hp_ext("doctor", "-o", "json").json)["HyperPodPyTorchJob"]
    assert state == "WRONG"
    assert finding.endswith("has no spec.runPolicy.logMonitoringConfiguration.faultOnMatch")


def test_doctor_without_a_cluster_still_tells_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    done = hp_ext("doctor", "-o", "json")
    assert done.code == 0
    assert states(done.json)["kubernetes"][0] == "absent"
    assert states(done.json)["python"][0] == "ok"
    assert "kubernetes" not in states(hp_ext("doctor", "--offline", "-o", "json").json)

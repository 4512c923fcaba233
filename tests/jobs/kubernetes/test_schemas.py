"""Rendered files against what their operators take: our own tables, and Kubernetes' and Kubeflow's published models."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from crds import SPECS, unknown
from pydantic import ValidationError

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.kubernetes.schemas import check_yaml, find_problems

HYPERPOD = """\
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata: {name: sample}
spec:
  nprocPerNode: "8"
  replicaSpecs:
    - name: pods
      replicas: 16
      spares: 1
      template:
        spec:
          nodeSelector: {beta.kubernetes.io/instance-type: ml.p5.48xlarge}
          containers:
            - name: train
              image: repo/train:1
              ports: [{containerPort: 8080}]
  runPolicy:
    jobMaxRetryCount: 50
    restartPolicy: {numRestartBeforeFullJobRestart: 3, evalPeriodSeconds: 21600, maxFullJobRestarts: 1}
    cleanPodPolicy: All
    logMonitoringConfiguration:
      - {name: JobStart, logPattern: ".*Experiment.*", expectedStartCutOffInSeconds: 120}
      - {name: HighLoss, logPattern: ".*loss: (.*)", metricThreshold: 2.5, operator: gt, faultOnMatch: true}
"""


def files(root: Path) -> list[Path]:
    """Every file for Kubernetes that the repository shows."""
    found = [*(root / "examples").glob("*/rendered/**/*.yaml")]
    assert len(found) >= 14
    return found


def published(model: Any, data: dict[str, Any]) -> None:
    """`data` is valid, and nothing of it is lost: a field that the model drops is one that the server would drop."""
    data = without_quantities(data)
    assert lost(data, model.from_dict(copy.deepcopy(data)).to_dict()) == []


def lost(data: Any, read: Any, path: str = "") -> list[str]:
    """Where `read` lacks or changes what `data` says; a reader may add defaults."""
    if isinstance(data, dict) and isinstance(read, dict):
        return [one for key, value in data.items() for one in lost(value, read.get(key), f"{path}/{key}")]
    if isinstance(data, list) and isinstance(read, list) and len(data) == len(read):
        return [one for at, value in enumerate(data) for one in lost(value, read[at], f"{path}/{at}")]
    return [] if data == read else [path]


def without_quantities(data: Any, holder: str = "") -> Any:
    """`data` without amounts, which the published models take for objects; their form is checked here."""
    if isinstance(data, list):
        return [without_quantities(item) for item in data]
    if not isinstance(data, dict):
        return data
    kept = {}
    for key, value in data.items():
        if holder in ("limits", "requests") or key == "sizeLimit":
            assert re.fullmatch(r"[0-9]+(m|Ki|Mi|Gi)?", value), value
        else:
            kept[key] = without_quantities(value, key)
    return kept


def pods(found: dict[str, Any]) -> list[dict[str, Any]]:
    spec = found["spec"]
    if found["kind"] == "HyperPodPyTorchJob":
        return [one["template"] for one in spec["replicaSpecs"]]
    return [one["template"] for one in spec.get("pytorchReplicaSpecs", {}).values()]


def test_every_example_passes_the_tables_of_its_operator(root: Path) -> None:
    for file in files(root):
        check_yaml(file.name, file.read_text())


def test_every_pod_and_trainjob_passes_the_published_models(root: Path) -> None:
    from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec, TrainerV1alpha1TrainJobSpec

    seen = {"pods": 0, "TrainJob": 0}
    for file in files(root):
        found = yaml.safe_load(file.read_text())
        for pod in pods(found) if found["kind"] != "NetworkPolicy" else ():
            published(IoK8sApiCoreV1PodTemplateSpec, pod)
            seen["pods"] += 1
        if found["kind"] == "TrainJob":
            published(TrainerV1alpha1TrainJobSpec, found["spec"])
            seen["TrainJob"] += 1
    assert min(seen.values()) > 0


def test_aws_own_sample_passes() -> None:
    assert check_yaml("sample.yaml", HYPERPOD)[0]["metadata"]["name"] == "sample"


def put(found: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    changed: Any = copy.deepcopy(found)
    at = changed
    *before, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    for part in before:
        at = at[part]
    at[last] = value
    whole: dict[str, Any] = changed
    return whole


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/nprocPerNode", 8),
        ("spec/nprocPerNode", "0"),
        ("spec/replicaSpecs", []),
        ("spec/replicaSpecs/0/replicas", "16"),
        ("spec/replicaSpecs/0/spare", 1),
        ("spec/replicaSpecs/0/template/spec/containers", []),
        ("spec/runPolicy/restartPolicy", {"maxFullJobRestarts": 1}),
        ("spec/runPolicy/restartPolicy/evalPeriodSecond", 1),
        ("spec/runPolicy/cleanPodPolicy", "Running"),
        ("spec/runPolicy/logMonitoringConfiguration/1/operator", "greater"),
        ("spec/elasticPolicy", {"maxReplicas": 2}),
        ("kind", "HyperPodPytorchJob"),
        ("metadata/name", "Upper"),
    ],
)
def test_a_planted_mistake_is_found(path: str, value: object) -> None:
    assert find_problems("job.yaml", put(yaml.safe_load(HYPERPOD), path, value))


def test_a_planted_mistake_in_a_pod_is_found_by_the_published_model() -> None:
    from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec

    pod = yaml.safe_load(HYPERPOD)["spec"]["replicaSpecs"][0]["template"]
    published(IoK8sApiCoreV1PodTemplateSpec, pod)
    with pytest.raises(AssertionError):
        published(IoK8sApiCoreV1PodTemplateSpec, put(pod, "spec/nodeSelectors", {}))
    with pytest.raises(ValidationError):
        published(IoK8sApiCoreV1PodTemplateSpec, put(pod, "spec/containers/0/ports", [{"containerPort": "8080"}]))


def test_a_file_that_is_not_yaml_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"job\.yaml: is not YAML"):
        check_yaml("job.yaml", "a: [")
    with pytest.raises(ConfigError, match=r"did you mean `PyTorchJob`"):
        check_yaml("job.yaml", "kind: PyTorchJop")


def test_every_example_has_only_fields_that_its_operator_defines(root: Path) -> None:
    """The definitions are written apart from our own tables, which could share a mistake with what is rendered."""
    seen = set()
    for file in files(root):
        found = yaml.safe_load(file.read_text())
        if found["kind"] in SPECS:
            assert unknown(found["spec"], SPECS[found["kind"]]()) == [], file
            seen.add(found["kind"])
    assert seen == set(SPECS)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/replicaSpecs/0/spare", 1),
        ("spec/replicaSpecs/0/template/spec/nodeSelectors", {}),
        ("spec/replicaSpecs/0/template/spec/containers/0/ports", [{"containerPort": "8080"}]),
        ("spec/runPolicy/restartPolicy", {"maxFullJobRestarts": 1}),
        ("spec/runPolicy/jobMaxRetryCount", "50"),
    ],
)
def test_a_planted_mistake_is_found_by_the_definition(path: str, value: object) -> None:
    found = yaml.safe_load(HYPERPOD)
    assert unknown(found["spec"], SPECS["HyperPodPyTorchJob"]()) == []
    assert unknown(put(found, path, value)["spec"], SPECS["HyperPodPyTorchJob"]())

"""A HyperPodPyTorchJob that is resized: which bounds the operator gets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_api import KubernetesApi, Order

from hyperpod_ext.catalog.labels import HPJOB
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, ConflictError, NotFoundError, UnsupportedError, WaitTimeoutError
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.kubernetes import hyperpod_eks_resize as eks
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.submit import submit

JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs"
HANDLE = JobHandle("hyperpod-eks", "team-a@here", "a")
ELASTIC = {"nodes": 2, "elastic": {"min_nodes": 1, "max_nodes": 4, "graceful_shutdown_s": 60}}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eks, "POLL_S", 0.01)


def job(**fields: object) -> JobConfig:
    document = {"name": "a", "script": "train.py", "image": "repo/train:1"} | fields
    return JobConfig.model_validate_json(json.dumps(document))


def submitted(api: KubernetesApi, running: int = 2, **fields: object) -> None:
    submit(make_plan(job(**fields), target="hyperpod-eks"))
    for number in range(running):
        api.pod(f"a-{number}", {HPJOB: "a"})


def bounds(api: KubernetesApi) -> tuple[Any, ...]:
    spec = api.objects[f"{JOBS}/a"]["spec"]
    return (spec["elasticPolicy"]["maxReplicas"], *((r["replicas"], r["maxReplicas"]) for r in spec["replicaSpecs"]))


def test_the_operator_gets_other_bounds_and_it_is_waited_for_its_pods(api: KubernetesApi) -> None:
    submitted(api, **ELASTIC)
    assert bounds(api) == (4, (2, 4))
    ordered = eks.order(HANDLE, 3)
    assert bounds(api) == (3, (2, 3))
    assert "as soon as they are free" in ordered.note
    with pytest.raises(WaitTimeoutError, match=r"not been resized within 0\.05 s"):
        eks.outcome(ordered, 0.05)
    api.pod("a-2", {HPJOB: "a"}, "Pending")
    with pytest.raises(WaitTimeoutError):
        eks.outcome(ordered, 0.05)
    api.pod("a-2", {HPJOB: "a"})
    assert eks.outcome(ordered, 10) == {"nodes": 3, "of": 2}
    assert eks.outcome(eks.order(HANDLE, 3), 10)["nodes"] == 3
    eks.order(HANDLE, 1)
    assert bounds(api) == (1, (1, 1))
    eks.order(HANDLE, 4)
    assert bounds(api) == (4, (1, 4))


def test_of_groups_of_nodes_those_that_come_first_keep_most(root: Path) -> None:
    example = root / "examples" / "04-hyperpod-eks" / "rendered" / "elastic" / "job.yaml"
    found = yaml.safe_load(example.read_text())
    spec = eks._spec_of(HANDLE, found)
    for nodes, sizes, groups in (
        (4, [2, 4], [(2, 2), (2, 2)]),
        (2, [2], [(2, 2), (0, 0)]),
        (8, [2, 4, 8], [(2, 2), (6, 6)]),
    ):
        changed = eks.bounded(found, spec, nodes)["spec"]
        assert changed["elasticPolicy"]["maxReplicas"] == nodes
        assert changed["elasticPolicy"]["replicaDiscreteValues"] == sizes
        assert [(one["replicas"], one["maxReplicas"]) for one in changed["replicaSpecs"]] == groups
    again = eks.bounded(eks.bounded(found, spec, 2), spec, 8)["spec"]["replicaSpecs"]
    assert [(one["replicas"], one["maxReplicas"]) for one in again] == [(2, 2), (0, 6)]


def test_a_change_of_somebody_else_is_kept(api: KubernetesApi) -> None:
    submitted(api, **ELASTIC)
    api.orders.append(Order(409, "PUT", JOBS, times=2, body={"message": "the object has been modified"}))
    eks.order(HANDLE, 3)
    assert api.asked("PUT") == [f"{JOBS}/a"] * 3
    api.orders.append(Order(409, "PUT", JOBS, times=9, body={"message": "the object has been modified"}))
    with pytest.raises(ConflictError, match="has been modified"):
        eks.order(HANDLE, 4)


def test_what_cannot_be_is_refused(api: KubernetesApi) -> None:
    with pytest.raises(NotFoundError):
        eks.order(HANDLE, 3)
    submitted(api, **ELASTIC)
    with pytest.raises(ConfigError, match=r"above elastic\.max_nodes"):
        eks.order(HANDLE, 5)
    ordered = eks.order(HANDLE, 3)
    api.condition(f"{JOBS}/a", "Failed")
    with pytest.raises(ConflictError, match="has ended"):
        eks.order(HANDLE, 2)
    with pytest.raises(ConflictError, match="before it was resized"):
        eks.outcome(ordered, 10)
    api.objects[f"{JOBS}/a"]["metadata"].pop("annotations")
    with pytest.raises(UnsupportedError, match="kubectl edit"):
        eks.order(HANDLE, 2)


def test_a_job_that_is_not_elastic_is_refused(api: KubernetesApi) -> None:
    submitted(api)
    with pytest.raises(ConfigError, match="exactly 1 node"):
        eks.order(HANDLE, 2)

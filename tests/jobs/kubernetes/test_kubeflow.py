"""What a spec becomes with Kubeflow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.plan import make_plan

TRAIN = {"kubeflow_api": "trainjob"}


def job(**fields: object) -> JobConfig:
    return JobConfig.model_validate_json(
        json.dumps({"name": "a", "script": "train.py", "image": "repo/train:1"} | fields)
    )


def rendered(spec: JobConfig) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(make_plan(spec, target="kubeflow").files["job.yaml"])
    return found


def words_started(script: str, folder: Path, program: str, environment: dict[str, str]) -> list[str]:
    """What `program` is started with by the script."""
    show = folder / program
    show.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    show.chmod(0o755)
    variables = environment | {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh", "-c", script], env=variables, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize(("name", "api"), [("job", "pytorchjob"), ("job", "trainjob"), ("elastic", "pytorchjob")])
def test_what_is_rendered_for_the_examples_is_what_the_repository_shows(
    name: str, api: str, golden: Callable[[Path, str], None], root: Path
) -> None:
    folder = root / "examples" / "06-kubeflow"
    spec = load(JobConfig, folder / f"{name}.yaml", [f"kubernetes.kubeflow_api={api}"])
    for file, text in make_plan(spec, target="kubeflow", source_dir=folder).files.items():
        golden(folder / "rendered" / f"{name}-{api}" / file, text)


def test_our_agents_leave_their_last_word_where_the_pod_says() -> None:
    spec = job(kubernetes={"container": {"terminationMessagePath": "/dev/last-word"}}, env={"HPX_PORT_BASE": "30000"})
    (container,) = rendered(spec)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["HPX_TERMINATION_LOG"] == container["terminationMessagePath"] == "/dev/last-word"
    assert variables["HPX_PORT_BASE"] == "30000"


def test_a_job_has_one_master_and_workers() -> None:
    roles = rendered(job(nodes=3))["spec"]["pytorchReplicaSpecs"]
    assert {role: found["replicas"] for role, found in roles.items()} == {"Master": 1, "Worker": 2}
    assert list(rendered(job())["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    elastic = job(nodes=3, mode="plain", elastic={"min_nodes": 2, "max_nodes": 4})
    assert list(rendered(elastic)["spec"]["pytorchReplicaSpecs"]) == ["Worker"]
    assert rendered(elastic)["spec"]["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 4, "rdzvBackend": "c10d"}


def script_of(spec: JobConfig) -> str:
    found = rendered(spec)["spec"]
    if "trainer" in found:
        return str(found["trainer"]["args"][0])
    (container,) = found["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    return str(container["args"][0])


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1", "MASTER_ADDR": "head"}, {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "RANK": "7"}],
)
def test_our_agent_meets_at_the_first_node(environment: dict[str, str], tmp_path: Path) -> None:
    for only in ({}, TRAIN):
        spec = job(nodes=2, workers_per_node=4, args=["a b"], kubernetes=only, rendezvous={"port": 1234})
        assert words_started(script_of(spec), tmp_path, "python3", environment) == [
            *("-m", "hyperpod_ext.runtime.container_kubernetes"),
            *("--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "1"),
            *("--rdzv-endpoint", "head:1234", "--", "train.py", "a b"),
        ]


def test_a_plain_script_is_started_by_torchrun_never_by_hyperpodrun(tmp_path: Path) -> None:
    spec = job(nodes=2, mode="plain")
    assert "hyperpodrun" not in make_plan(spec, target="kubeflow").files["job.yaml"].partition("spec:\n")[2]
    assert words_started(script_of(spec), tmp_path, "torchrun", {"RANK": "0", "MASTER_ADDR": "head"}) == [
        *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", "0", "--master-addr", "head"),
        *("--master-port", "29400", "--redirects", "3", "--tee", "3", "train.py"),
    ]


def test_a_trainjob_carries_what_it_can_and_refuses_the_rest() -> None:
    volumes = [{"kind": "claim", "path": "/fsx", "claim": "fsx"}]
    spec = job(
        nodes=2, kubernetes=TRAIN, volumes=volumes, working_dir="/w", resources={"instance_type": "ml.g5.xlarge"}
    )
    found = rendered(spec)["spec"]
    assert (found["trainer"]["numNodes"], found["trainer"]["numProcPerNode"]) == (2, 1)
    assert found["trainer"]["args"][0].splitlines()[1] == "cd /w"
    assert found["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "1"}
    (node,) = found["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]} >= {"/fsx", "/dev/shm"}
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.g5.xlarge"}
    for refused in (
        {"kubernetes": TRAIN | {"host_network": True}},
        {"kubernetes": TRAIN, "timeouts": {"keep_s": 1}},
        {"kubernetes": TRAIN, "mode": "plain", "elastic": {"min_nodes": 1, "max_nodes": 1}},
        {"node_groups": [{"name": "g", "nodes": 1}]},
        {"spares": 1},
        {"mode": "aws-checkpointless"},
    ):
        with pytest.raises(UnsupportedError):
            make_plan(job(**refused), target="kubeflow")


def test_hyperpods_auto_resume_is_asked_for_by_annotations() -> None:
    found = rendered(job(relaunch={"max_times": 3}, kubernetes={"namespace": "kubeflow"}))
    assert found["metadata"]["annotations"]["sagemaker.amazonaws.com/enable-job-auto-resume"] == "true"
    assert found["metadata"]["annotations"]["sagemaker.amazonaws.com/job-max-retry-count"] == "3"
    assert found["spec"]["runPolicy"]["backoffLimit"] == 3
    assert found["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "OnFailure"


def test_whoever_collects_numbers_reaches_their_port_and_no_other() -> None:
    def policy(**fields: object) -> list[dict[str, Any]]:
        plan = make_plan(job(**fields), target="kubeflow")
        assert not [warning for warning in plan.warnings if "metrics" in warning]
        ingress: list[dict[str, Any]] = yaml.safe_load(plan.files["network-policy.yaml"])["spec"]["ingress"]
        return ingress

    members, collectors = policy(metrics={"port": 9500})
    assert "podSelector" in members["from"][0]
    assert collectors == {"ports": [{"protocol": "TCP", "port": 9500}]}
    for closed in ({}, {"metrics": {"port": 0}}, {"metrics": {}, "mode": "plain"}):
        assert policy(**closed) == [members]

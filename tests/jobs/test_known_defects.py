"""Mistakes that other tools for HyperPod make, one test each: this project does not make them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aws_stand_in import AwsStandIn, aws_stand_in
from clusters import GROUP, LEAST, ROLE
from command import call_hp_ext as hp_ext
from kubernetes_api import KubernetesApi

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.kubernetes import jobs
from hyperpod_ext.jobs.kubernetes.api import client as client_module
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.sagemaker import client as sagemaker

JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs"
OFFLINE = """\
import socket, sys
def refuse(*arguments): raise AssertionError(f"the network was used: {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
from importlib.metadata import entry_points
(entry,) = entry_points(group="console_scripts", name="hp-ext")
sys.argv = ["hp-ext", *sys.argv[1:]]
entry.load()()
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nscript: train.py\nimage: repo/train:1\n")
    return file


def job(**fields: object) -> JobConfig:
    document = {"name": "a", "script": "train.py", "image": "repo/train:1"} | fields
    return JobConfig.model_validate_json(json.dumps(document))


def spec_of(found: JobConfig) -> dict[str, Any]:
    """What the operator acts on: the spec in the annotations is not part of it."""
    rendered = yaml.safe_load(make_plan(found, target="hyperpod-eks").files["job.yaml"])
    rendered["metadata"].pop("annotations", None)
    whole: dict[str, Any] = rendered
    return whole


@pytest.mark.parametrize(
    "arguments",
    [
        ("init", "new"),
        ("validate", "job.yaml", "--target", "hyperpod-eks"),
        ("render", "job.yaml", "--target", "hyperpod-eks"),
        ("render", "job.yaml", "--target", "kubeflow"),
        ("create-job", "-f", "job.yaml", "--target", "hyperpod-eks", "--dry-run"),
        ("explain", "HPX104"),
        ("instances",),
        ("doctor", "--offline"),
    ],
)
def test_a_laptop_without_kubeconfig_or_network_can_do_all_but_submit(
    arguments: tuple[str, ...], spec: Path, tmp_path: Path
) -> None:
    """There, scaffolding failed without a kubeconfig, and each command reported home."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-c", OFFLINE, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ELASTIC = {"min_nodes": 1, "max_nodes": 4}
BASE: dict[str, Any] = {
    "mode": "plain",
    "nodes": 2,
    "elastic": ELASTIC,
    "scheduling": {"queue": "q"},
    "log_rules": [{"name": "r", "pattern": "x (.*)", "every_s": 9}],
    "volumes": [{"kind": "claim", "path": "/a", "claim": "c"}],
}
CHANGES: list[dict[str, Any]] = [
    {"name": "b"},
    {"script": "other.py"},
    {"args": ["x,y"]},
    {"env": {"A": 'say "hi"'}},
    {"image": "repo/train:2"},
    {"working_dir": "/w"},
    {"nodes": 3},
    {"workers_per_node": 2},
    {"spares": 1},
    {"shared_memory_mib": 5},
    *({"elastic": ELASTIC | one} for one in ({"min_nodes": 2}, {"max_nodes": 5}, {"step": 2}, {"sizes": [1, 2, 4]})),
    *({"elastic": ELASTIC | {name: 7}} for name in ("scaling_timeout_s", "graceful_shutdown_s", "faulty_scale_down_s")),
    {"resources": {"instance_type": "ml.g5.xlarge"}},
    *({"resources": one} for one in ({"accelerators": 1}, {"efa": 1}, {"cpus": 1}, {"memory_mib": 9})),
    {"resources": {"accelerators": 1, "accelerator_resource": "nvidia.com/mig-1g.10gb"}},
    {"resources": {"ephemeral_storage_mib": 9}},
    {"resources": {"memory_mib": 9, "hugepages_mib": 2}},
    {"scheduling": {"queue": "r"}},
    *({"scheduling": {"queue": "q", name: "p"}} for name in ("priority", "pod_priority_class")),
    {"scheduling": {"queue": "q", "topology": {"level": "topology.k8s.aws/network-node-layer-3"}}},
    {"scheduling": {"queue": "q", "tolerations": [{"key": "a"}]}},
    {"scheduling": {"queue": "q", "node_selector": {"a": "b"}}},
    *({"scheduling": {"queue": "q", name: False}} for name in ("healthy_only", "spread")),
    {"node_groups": [{"name": "g", "nodes": 2, "max_nodes": 4}]},
    {"node_groups": [{"name": "g", "nodes": 1, "max_nodes": 2}, {"name": "h", "nodes": 1, "max_nodes": 2}]},
    {"volumes": [{"kind": "claim", "path": "/a", "claim": "c", "read_only": True}]},
    {"volumes": [{"kind": "claim", "path": "/a", "claim": "c", "sub_path": "s"}]},
    {"volumes": [{"kind": "host", "path": "/a", "host_path": "/b"}]},
    {"volumes": [{"kind": "scratch", "path": "/a", "size_mib": 1, "in_memory": True}]},
    {"volumes": [{"kind": "config", "path": "/a", "config_map": "c"}]},
    {"volumes": [{"kind": "secret", "path": "/a", "secret": "c"}]},
    *({"relaunch": {name: 3}} for name in ("max_times", "after_restarts", "window_s", "max_process_restarts")),
    *({"relaunch": {name: 3}} for name in ("avoid_nodes", "scale_up_pause_s")),
    *({"timeouts": {name: 3}} for name in ("run_s", "start_s", "fault_s", "keep_s")),
    *({"log_rules": [BASE["log_rules"][0] | {name: 3}]} for name in ("first_within_s", "every_s")),
    {"log_rules": [BASE["log_rules"][0] | {"stop_pattern": "s"}]},
    {"log_rules": [BASE["log_rules"][0] | {"threshold": 2.5, "operator": "gt"}]},
    {"log_rules": [BASE["log_rules"][0] | {"threshold": 2.5, "operator": "gt", "data_points": 2}]},
    {"log_rules": [BASE["log_rules"][0] | {"fault_on_match": True}]},
    {"labels": {"team": "a"}},
    *({"kubernetes": {name: "other"}} for name in ("namespace", "service_account", "workload_mode")),
    {"kubernetes": {"secret_env": [{"name": "T", "secret": "s", "key": "k"}]}},
    {"kubernetes": {"pull_policy": "Always"}},
    {"kubernetes": {"pull_secrets": ["s"]}},
    *({"kubernetes": {name: True}} for name in ("privileged", "host_network", "suspend")),
    {"kubernetes": {"clean_pods": "none"}},
    {"kubernetes": {"termination_grace_s": 99}},
    {"mode": "ours", "checkpoint": {"tiers": []}},
    {"mode": "ours", "kubernetes": {"job_secret": "s"}},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: json.dumps(change)[:70])
def test_no_field_of_a_spec_is_dropped_in_silence(change: dict[str, Any]) -> None:
    """There, elastic fields, read_only, shared memory and more were accepted and then lost."""
    base = BASE | ({"mode": "ours"} if change.get("mode") == "ours" else {})
    assert spec_of(job(**base | change)) != spec_of(job(**base))


def test_a_gpu_that_is_requested_is_the_limit_too() -> None:
    """There, 8 GPUs were requested with a limit of 0, and the API refused what had been called valid."""
    found = spec_of(job(workers_per_node=8, resources={"instance_type": "ml.p5.48xlarge"}))
    resources = found["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "8"


def test_nothing_is_called_submitted_that_was_refused(api: KubernetesApi, spec: Path) -> None:
    from kubernetes_api import Order

    api.orders.append(Order(422, "POST", JOBS, body={"message": "limit"}))
    done = hp_ext("create-job", "-f", spec, "--target", "hyperpod-eks")
    assert (done.code, done.stdout) == (3, "")
    assert "limit" in done.stderr


def test_a_server_that_never_answers_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There, a timeout was passed as a query parameter, so that there was none."""
    monkeypatch.setattr(client_module, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(client_module, "_TRIES", 2)
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stop = threading.Event()
        accepted: list[socket.socket] = []

        def accept() -> None:
            silent.settimeout(0.05)
            while not stop.is_set():
                try:
                    accepted.append(silent.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        api = KubernetesApi(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        done = hp_ext("list", "--target", "hyperpod-eks", "-o", "json")
        stop.set()
        thread.join()
        for one in accepted:
            one.close()
    assert done.code == 4
    assert "it does not respond" in done.json["error"]["message"]


def test_one_odd_job_does_not_hide_the_others(api: KubernetesApi) -> None:
    """There, one job with a documented field crashed the whole listing."""
    odd = {"runPolicy": {"logMonitoringConfiguration": [{"faultOnMatch": True, "metricThreshold": 2.5}]}, "new": {}}
    api.put(f"{JOBS}/odd", {"metadata": {"name": "odd"}, "spec": odd, "status": {"future": [1], "conditions": [{}]}})
    api.put(f"{JOBS}/plain", {"metadata": {"name": "plain"}})
    listed = hp_ext("list", "--target", "hyperpod-eks", "-o", "json")
    assert [one["name"] for one in listed.json] == ["odd", "plain"]


def test_what_is_created_is_listed_in_the_same_namespace(api: KubernetesApi, spec: Path) -> None:
    """There, create used the context's namespace and list the one called default."""
    handle = hp_ext("create-job", "-f", spec, "--target", "hyperpod-eks", "-o", "json").json["handle"]
    assert [one["handle"] for one in hp_ext("list", "--target", "hyperpod-eks", "-o", "json").json] == [handle]
    assert hp_ext("status", "a", "--target", "hyperpod-eks", "-o", "json").json["handle"] == handle
    assert hp_ext("status", handle, "-o", "json").json["name"] == "a"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("create-job",), 2),
        (("validate", "none.yaml"), 6),
        (("create-job", "-f", "job.yaml", "--target", "kubeflo"), 3),
    ],
)
def test_a_command_that_did_nothing_does_not_exit_with_0(arguments: tuple[str, ...], code: int, spec: Path) -> None:
    assert hp_ext(*arguments, cwd=spec.parent).code == code


def test_a_failure_says_what_the_server_said(api: KubernetesApi, spec: Path) -> None:
    """There, exceptions were hidden, and helm failed in silence."""
    from kubernetes_api import Order

    api.orders.append(Order(403, "POST", JOBS, body={"message": "exceeded quota: team-a, requested: 8 GPUs"}))
    done = hp_ext("create-job", "-f", spec, "--target", "hyperpod-eks", "-o", "json")
    assert done.code == 4
    assert "exceeded quota: team-a" in done.json["error"]["message"]


def test_a_job_is_waited_for_and_its_failure_is_an_exit_code(
    api: KubernetesApi, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "POLL_S", 0.01)
    arguments = ("create-job", "-f", spec, "--target", "hyperpod-eks", "--wait", "-o", "json")
    create = api._create

    def ends_as(kind: str) -> None:
        def created(path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
            answer = create(path, query, body)
            if path == JOBS:
                api.condition(f"{JOBS}/a", kind, reason="WorkerCrash")
            return answer

        monkeypatch.setattr(api, "_create", created)

    ends_as("Failed")
    done = hp_ext(*arguments)
    assert (done.code, done.json["state"]) == (7, "failed")
    assert "WorkerCrash" in done.stderr
    api.objects.pop(f"{JOBS}/a")
    ends_as("Completed")
    done = hp_ext(*arguments)
    assert (done.code, done.json["state"]) == (0, "succeeded")


def test_a_wait_that_is_over_leaves_the_job_alone(api: KubernetesApi, spec: Path) -> None:
    done = hp_ext("create-job", "-f", spec, "--target", "hyperpod-eks", "--wait", "--timeout", "0")
    assert done.code == 8
    assert jobs.list_jobs(HYPERPOD)[0].name == "a"


def test_waiting_for_a_job_that_was_submitted_before(api: KubernetesApi, spec: Path) -> None:
    hp_ext("create-job", "-f", spec, "--target", "hyperpod-eks")
    assert hp_ext("wait", "a", "--target", "hyperpod-eks", "--timeout", "0").code == 8
    api.condition(f"{JOBS}/a", "Failed", reason="WorkerCrash")
    assert hp_ext("wait", "a", "--target", "hyperpod-eks", "-o", "json").code == 7
    assert hp_ext("wait", "b", "--target", "hyperpod-eks").code == 6


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsStandIn]:
    with aws_stand_in() as state:
        found = {"AWS_ENDPOINT_URL": state.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        for name, value in (found | {"AWS_CONFIG_FILE": "/nowhere"}).items():
            monkeypatch.setenv(name, value)
        sagemaker.client.cache_clear()
        yield state
        sagemaker.client.cache_clear()


@pytest.mark.parametrize("orchestrator", [{}, {"Orchestrator": {"Slurm": {}}}], ids=["of-old", "of-today"])
def test_a_cluster_with_slurm_in_the_account_is_no_reason_to_crash(
    orchestrator: dict[str, Any], aws: AwsStandIn, tmp_path: Path
) -> None:
    """There, commands took every cluster for one with EKS, and a Slurm cluster ended them."""
    plain = {"name": "research", "region": "us-west-2", "orchestrator": "slurm", "execution_role": ROLE}
    plain["instance_groups"] = [GROUP | {"lifecycle": {"source": "s3://bucket/scripts"}}]
    (tmp_path / "slurm.yaml").write_text(json.dumps(plain))
    (tmp_path / "eks.yaml").write_text(json.dumps(LEAST))
    assert hp_ext("cluster", "create", "-f", "slurm.yaml", cwd=tmp_path).code == 0
    live = aws.clusters["research"]
    for member in ("Orchestrator", "VpcConfig"):
        live.pop(member, None)
    live.update(orchestrator)

    same = hp_ext("cluster", "update", "-f", "slurm.yaml", "--dry-run", cwd=tmp_path)
    assert same.code == 0, same.stderr
    other = hp_ext("cluster", "update", "-f", "eks.yaml", "--dry-run", cwd=tmp_path)
    assert "Orchestrator" in other.stdout + other.stderr
    assert "Traceback" not in other.stderr


def test_a_job_for_eks_is_not_sent_to_a_cluster_with_slurm(tmp_path: Path, spec: Path) -> None:
    cluster = {"name": "c", "region": "us-west-2", "orchestrator": "slurm", "instance_groups": [GROUP]}
    (tmp_path / "cluster.yaml").write_text(json.dumps(cluster))
    arguments = (*("create-job", "-f", "job.yaml", "--cluster", "cluster.yaml"), "--dry-run", "--target")
    refused = hp_ext(*arguments, "hyperpod-eks", cwd=tmp_path)
    assert (refused.code, "HPX123" in refused.stderr) == (3, True), refused.stderr
    assert hp_ext(*arguments, "hyperpod-slurm", cwd=tmp_path).code == 0

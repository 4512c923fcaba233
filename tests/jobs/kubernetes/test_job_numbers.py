"""hp-ext top, report, list and plan of a job on Kubernetes: from its pods while they live, from its tier afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext
from counting import counting
from kubernetes_api import KubernetesApi
from made_events import entry

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.metrics import Metrics
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.pod_numbers import PodNumbers
from hyperpod_ext.jobs.submit import submit
from hyperpod_ext.runtime.events.kept import KeptLog
from hyperpod_ext.runtime.storage.file import FileStore

JOB = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs/a"
RAN = [
    entry(0.0, "job_started", world_size=2, nodes=2),
    *(entry(1.0, "joined", rank=rank) for rank in (0, 1)),
    entry(1.0, "generation", generation=1, step=0, world_size=2),
    *(entry(4.0, "step", rank=rank, step=1, of=5, began=2.0, generation=1, loss=0.5) for rank in (0, 1)),
    entry(5.0, "fault", rank=1, node=1, step=2, cause="killed", kind="signal", escalation_level="process"),
]
ENDED = [entry(8.0, "job_ended", state="succeeded")]
TOP = ("top", "a", "--target", "hyperpod-eks", "--once", "-o", "json")
REPORT = ("report", "hyperpod-eks://team-a@here/a", "-o", "json")


@pytest.fixture
def tier(tmp_path: Path) -> KeptLog:
    """Where node 0 keeps events."""
    return KeptLog(FileStore(str(tmp_path / "tier" / "a")), 0)


@pytest.fixture(params=["hyperpodrun", "ours"])
def running(request: pytest.FixtureRequest, api: KubernetesApi, tmp_path: Path) -> None:
    """Job `a` runs on two pods."""
    spec = {"name": "a", "script": "train.py", "image": "repo/train:1", "nodes": 2, "metrics": {"port": 9464}}
    spec["checkpoint"] = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": str(tmp_path / "tier")}]}
    spec["volumes"] = [{"kind": "host", "path": str(tmp_path), "host_path": str(tmp_path)}]
    spec["kubernetes"] = {"launcher": request.param}
    submit(make_plan(JobConfig.model_validate_json(json.dumps(spec)), target="hyperpod-eks"))
    api.condition(JOB, "Running")
    for number in (0, 1):
        api.pod(f"a-{number}", {labels.HPJOB: "a"})


def keep(tier: KeptLog, events: list[dict[str, Any]]) -> None:
    tier.add(json.dumps(one).encode() + b"\n" for one in events)
    tier.flush()


@pytest.mark.usefixtures("running")
def test_the_pod_that_counts_is_asked_through_the_api_server(api: KubernetesApi) -> None:
    with counting(RAN) as port:
        api.pod_ports["a-1:9464"] = port  # not the first one
        ask_pods(api)


def ask_pods(api: KubernetesApi) -> None:
    said = call_hp_ext(*TOP).json
    assert (said["name"], said["handle"], said["state"]) == ("a", "hyperpod-eks://team-a@here/a", "recovering")
    assert (said["step"], said["of"], said["loss"], said["faults"], said["world_size"]) == (1, 5, 0.5, 1, 2)
    assert [rank["rank"] for rank in said["ranks"]] == [0, 1]
    assert call_hp_ext(*TOP[:4]).stdout.startswith("a\nstate  ")
    job = JobHandle("hyperpod-eks", "team-a@here", "a")
    spec = JobConfig(name="a", script="train.py", metrics=Metrics())
    pods, before = PodNumbers(job, spec), len(api.requests)
    assert pods.now()["step"] == 1
    assert pods.now()["step"] == 1
    asked = [
        path.rpartition("/pods/")[2].partition(":")[0] for _, path, _, _ in api.requests[before:] if "/proxy/" in path
    ]
    assert asked == ["a-0", "a-1", "a-1"], "the pod that answered is asked first"


@pytest.mark.usefixtures("running")
def test_what_is_kept_is_read_where_no_pod_answers_and_after_they_are_gone(api: KubernetesApi, tier: KeptLog) -> None:
    keep(tier, RAN)
    said = call_hp_ext(*TOP).json
    assert (said["state"], said["step"], said["faults"]) == ("recovering", 1, 1)
    assert (call_hp_ext(*REPORT).json["state"], call_hp_ext(*REPORT).json["steps"]) == ("running", 1)
    keep(tier, ENDED)
    for number in (0, 1):
        api.objects.pop(f"/api/v1/namespaces/team-a/pods/a-{number}")
    api.condition(JOB, "Succeeded")
    said = call_hp_ext(*TOP).json
    assert (said["state"], said["step"], said["left_s"]) == ("succeeded", 1, None)
    report = call_hp_ext(*REPORT).json
    assert (report["state"], report["steps"], report["world_size"]) == ("succeeded", 1, 2)
    assert [(one["rank"], one["step"]) for one in report["faults"]] == [(1, 2)]


@pytest.mark.usefixtures("running")
def test_a_job_that_keeps_nothing_tells_its_state_and_why_no_more(api: KubernetesApi) -> None:
    done = call_hp_ext(*TOP)
    assert (done.json["state"], done.json["step"], done.json["ranks"]) == ("running", None, [])
    assert "no pod serves metrics (" in done.stderr
    assert "no events are stored next to checkpoints" in done.stderr
    assert len([path for path in api.asked("GET") if "/proxy/" in path]) == 2, "each pod is asked once"


def test_places_do_without_any_cluster(tier: KeptLog, tmp_path: Path) -> None:
    keep(tier, RAN + ENDED)
    place = str(tmp_path / "tier" / "a")
    said = call_hp_ext("top", place, "-o", "json").json
    assert (said["name"], said["handle"], said["state"], said["step"]) == ("a", place, "succeeded", 1)
    assert "step_s" in said
    (listed,) = call_hp_ext("list", "--kept", str(tmp_path / "tier"), "-o", "json").json
    assert (listed["name"], listed["state"], listed["step"], listed["of"]) == ("a", "succeeded", 1, 5)
    assert listed["ended_at"] is not None
    plan = call_hp_ext("plan", "--params", "1B", "--nodes", "2", "--history", place, "-o", "json")
    assert plan.code == 0, plan.stderr
    assert any("process failures: 1 in" in note for note in plan.json["notes"])
    nothing = call_hp_ext("list", "--kept", str(tmp_path / "tier" / "a"))
    assert nothing.code == 6
    assert call_hp_ext("top", f"file://{tmp_path}/nowhere").code == 6


def test_what_another_node_tells_late_is_counted_in_the_order_of_time(tier: KeptLog, tmp_path: Path) -> None:
    from hyperpod_ext.cli.checkpoints.location import open_place
    from hyperpod_ext.cli.report.numbers import FromPlaces

    source = FromPlaces([open_place(str(tmp_path / "tier" / "a"))])
    other = KeptLog(FileStore(str(tmp_path / "tier" / "a")), 1)
    keep(tier, [one for one in RAN if one["event"] != "step" or one["rank"] == 0])
    assert source.take()["faults"] == 1
    keep(other, [one for one in RAN if one["event"] == "step" and one["rank"] == 1])
    late = source.take()
    assert late["ranks"][1]["step"] == 1
    assert late["ranks"][1]["phase"] == "rebuild", "the fault came after the step that was told later"
    assert source.take() == late

"""hp-ext describe: a job on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext
from kubernetes_api import KubernetesApi, Order, serve

JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs"
CORE = "/api/v1/namespaces/team-a"
HYPERPOD = ("--target", "hyperpod-eks")
NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with serve() as served:
        served.known.add("events")
        monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig(tmp_path / "config")))
        job = {"metadata": {"name": "gpt"}, "spec": {}}
        served.put(f"{JOBS}/gpt", job)
        served.condition(f"{JOBS}/gpt", "Running", reason="PodsRunning")
        yield served


def pod(api: KubernetesApi, name: str, job: str = "gpt", node: str | None = None, **status: Any) -> None:
    body: dict[str, Any] = {"metadata": {"name": name, "labels": {"HPJob": job}}, "spec": {}, "status": status}
    if node:
        body["spec"]["nodeName"] = node
    api.put(f"{CORE}/pods/{name}", body)


def event(api: KubernetesApi, name: str, kind: str, about: str, reason: str, message: str, **more: Any) -> None:
    body = {"metadata": {"name": name}, "involvedObject": {"kind": kind, "name": about}, "type": "Warning"}
    api.put(f"{CORE}/events/{name}", body | {"reason": reason, "message": message} | more)


def made(api: KubernetesApi) -> None:
    crashed = {"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}}
    pod(api, "gpt-0", node="node-1", phase="Running", containerStatuses=[crashed])
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_GPU}
    pod(api, "gpt-1", phase="Pending", conditions=[unscheduled])
    pod(api, "other-0", job="other", phase="Running")
    event(api, "c", "Pod", "gpt-1", "FailedScheduling", NO_GPU, count=4, lastTimestamp="2026-11-21T00:05:00Z")
    event(api, "a", "HyperPodPyTorchJob", "gpt", "Created", "2 pods", eventTime="2026-11-21T00:01:00.000000Z")
    event(api, "b", "Pod", "gpt-0", "BackOff", "again", series={"count": 9, "lastObservedTime": "2026-11-21T00:03:00Z"})
    event(api, "d", "Pod", "other-0", "Killing", "not ours", lastTimestamp="2026-11-21T00:06:00Z")


def test_pods_say_why_they_wait_and_events_come_in_order(api: KubernetesApi) -> None:
    made(api)
    found = call_hp_ext("describe", "gpt", *HYPERPOD, "-o", "json").json
    assert (found["state"], [one["type"] for one in found["conditions"]]) == ("running", ["Running"])
    assert [(one["name"], one["node"], one["restarts"], one["why"]) for one in found["pods"]] == [
        ("gpt-0", "node-1", 3, "CrashLoopBackOff: back-off 40s"),
        ("gpt-1", None, 0, f"Unschedulable: {NO_GPU}"),
    ]
    assert [(one["object"], one["reason"], one["count"]) for one in found["events"]] == [
        ("HyperPodPyTorchJob/gpt", "Created", 1),
        ("Pod/gpt-0", "BackOff", 9),
        ("Pod/gpt-1", "FailedScheduling", 4),
    ]


def test_a_screen_shows_the_newest_events_and_how_many_are_left(api: KubernetesApi) -> None:
    made(api)
    screen = call_hp_ext("describe", "gpt", *HYPERPOD, "--events", "1").stdout
    assert "gpt-1  Pending  -       0         Unschedulable: 0/2 nodes are available" in screen
    assert ("FailedScheduling" in screen, "BackOff  " in screen) == (True, False)
    assert screen.endswith("2 older events: --events 3 shows all\n")
    assert "older" not in call_hp_ext("describe", "gpt", *HYPERPOD).stdout


@pytest.mark.parametrize(("status", "code"), [(404, 6), (403, 4)])
def test_a_job_that_is_not_there_or_not_ours_to_see_is_said(api: KubernetesApi, status: int, code: int) -> None:
    api.orders.append(Order(status, path="/pods", times=99))
    told = call_hp_ext("describe", "nobody" if status == 404 else "gpt", *HYPERPOD, "-o", "json")
    assert (told.code, "error" in told.json) == (code, True)


def test_a_job_that_this_machine_does_not_know_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    assert call_hp_ext("describe", "nobody").code == 6

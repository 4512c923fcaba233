"""describe, delete and node drain before a real Kubernetes API server."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext
from counting import counting
from crds import SPECS, definition
from kube_apiserver import NODE, ApiServer, api_server
from made_events import entry

from hyperpod_ext.catalog.labels import HPJOB, JOB
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.submit import submit

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1800)]  # the first builds the server

JOBS = HYPERPOD.path("team-a")
CORE = "/api/v1/namespaces/team-a"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies"
TARGET = ("--target", "hyperpod-eks")


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with tempfile.TemporaryDirectory(prefix="hpx-k8s-") as place, api_server(Path(place)) as running:
        running.define(definition(HYPERPOD, SPECS[HYPERPOD.name]()))
        running.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "team-a"}})
        yield running


@pytest.fixture
def job(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A job that has failed, with a pod, a network policy, a secret and an event."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config", namespace="team-a")))
    template = {"spec": {"containers": [{"name": "a", "image": "a:1"}]}}
    spec = {"nprocPerNode": "1", "replicaSpecs": [{"name": "pods", "replicas": 1, "template": template}]}
    of_kind = {"apiVersion": HYPERPOD.api_version, "kind": HYPERPOD.name}
    server.ask("POST", JOBS, of_kind | {"metadata": {"name": "gpt"}, "spec": spec})
    server.condition(f"{JOBS}/gpt", "Failed", "WorkerCrash")
    server.pod("gpt-0", {HPJOB: "gpt", JOB: "gpt"}, "Running", [], "team-a")
    labelled = {"metadata": {"name": "gpt-hpx", "labels": {JOB: "gpt"}}}
    server.ask("POST", POLICIES, labelled | {"spec": {"podSelector": {}}})
    server.ask("POST", f"{CORE}/secrets", labelled)
    about = {"kind": "Pod", "name": "gpt-0", "namespace": "team-a"}
    event = {"metadata": {"name": "gpt-0.1"}, "involvedObject": about, "reason": "BackOff", "message": "again"}
    server.ask("POST", f"{CORE}/events", event | {"type": "Warning", "count": 9})
    yield "gpt"
    for collection in (JOBS, f"{CORE}/pods", POLICIES, f"{CORE}/secrets", f"{CORE}/events"):
        server.ask("DELETE", f"{collection}?gracePeriodSeconds=0")
    node = server.ask("GET", f"/api/v1/nodes/{NODE}")
    node["spec"].pop("unschedulable", None)
    server.ask("PUT", f"/api/v1/nodes/{NODE}", node)


def names(server: ApiServer, path: str) -> list[str]:
    """Of the objects that nobody has asked to end."""
    items: list[dict[str, Any]] = server.ask("GET", path)["items"]
    return [one["metadata"]["name"] for one in items if "deletionTimestamp" not in one["metadata"]]


def test_a_job_is_described_with_its_pods_and_events(server: ApiServer, job: str) -> None:
    found = call_hp_ext("describe", job, *TARGET, "-o", "json").json
    assert (found["state"], found["conditions"][0]["reason"]) == ("failed", "WorkerCrash")
    assert [(pod["name"], pod["node"]) for pod in found["pods"]] == [("gpt-0", NODE)]
    assert [(one["object"], one["count"]) for one in found["events"]] == [("Pod/gpt-0", 9)]
    assert call_hp_ext("describe", "nobody", *TARGET).code == 6


def test_what_the_job_left_is_deleted(server: ApiServer, job: str) -> None:
    assert len(call_hp_ext("delete", job, *TARGET, "--dry-run", "-o", "json").json["objects"]) == 3
    assert names(server, JOBS) == ["gpt"]
    done = call_hp_ext("delete", job, *TARGET, "--yes")
    assert done.code == 0, done.stderr
    assert [names(server, path) for path in (JOBS, f"{CORE}/pods", POLICIES)] == [[], [], []]
    assert names(server, f"{CORE}/secrets") == ["gpt-hpx"]
    assert call_hp_ext("delete", job, *TARGET, "--with-secret", "--yes").code == 0
    assert names(server, f"{CORE}/secrets") == []


def test_a_pod_that_counts_is_asked_through_the_server(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # sends nothing
        here = str(probe.getsockname()[0])
    if ipaddress.ip_address(here).is_loopback or here == "0.0.0.0":
        pytest.skip("this machine has no address but 127.0.0.1, which the server forwards nothing to")
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config", namespace="team-a")))
    with counting([entry(0.0, "job_started", world_size=2, nodes=2)], here) as port:
        spec = {"name": "a", "script": "a.py", "image": "a:1", "metrics": {"port": port}}
        submit(make_plan(JobConfig.model_validate_json(json.dumps(spec)), target="hyperpod-eks"))
        try:
            server.condition(f"{JOBS}/a", "Running")
            server.pod("a-0", {HPJOB: "a"}, "Running", [], "team-a")
            pod = server.ask("GET", f"{CORE}/pods/a-0")
            pod["status"] |= {"podIP": here, "podIPs": [{"ip": here}]}
            server.ask("PUT", f"{CORE}/pods/a-0/status", pod)
            done = call_hp_ext("top", "a", *TARGET, "--once", "-o", "json")
            assert (done.json["world_size"], done.json["nodes"], done.stderr) == (2, 2, "")
        finally:
            server.ask("DELETE", f"{CORE}/pods/a-0?gracePeriodSeconds=0")
            server.ask("DELETE", f"{JOBS}/a")


def test_a_node_is_drained_and_given_back(server: ApiServer, job: str) -> None:
    done = call_hp_ext("node", "drain", NODE, "--yes", "-o", "json")
    assert (done.code, [pod["name"] for pod in done.json["pods"]]) == (0, ["gpt-0"]), done.stderr
    assert server.ask("GET", f"/api/v1/nodes/{NODE}")["spec"]["unschedulable"] is True
    assert names(server, f"{CORE}/pods") == []
    assert call_hp_ext("node", "drain", NODE, "--undo").code == 0
    assert not server.ask("GET", f"/api/v1/nodes/{NODE}")["spec"].get("unschedulable")


def test_who_may_do_nothing_is_told_so(
    server: ApiServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "nobody", server.nobody, "team-a")))
    for command in (("describe", job, *TARGET), ("delete", job, *TARGET, "--yes"), ("node", "drain", NODE, "--yes")):
        told = call_hp_ext(*command)
        assert (told.code, "not allowed" in told.stderr) == (4, True), command

"""The last word of a job on Kubernetes names its first cause, whatever pod died on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import call_hp_ext
from kubernetes_api import KubernetesApi
from made_events import entry

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.kubernetes.api.last_word import last_word
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.submit import submit
from hyperpod_ext.runtime.agent import last_word as of_agent
from hyperpod_ext.runtime.events.kept import KeptLog
from hyperpod_ext.runtime.storage.file import FileStore

OPERATOR = {
    "code": "JobFailedError",
    "message": "BackoffLimitExceeded: 3 restarts",
    "hint": "see its logs with `hp-ext logs`",
}
CAUSE = "rank 1 failed twice in a row at step 7: ValueError: odd"
KINDS = {
    "hyperpod-eks": ("/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs", "HPJob"),
    "kubeflow": ("/apis/kubeflow.org/v1/namespaces/team-a/pytorchjobs", "training.kubeflow.org/job-name"),
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container's /dev/termination-log."""
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setenv(of_agent.ENV_FILE, str(file))
    return file


def ended(name: str, at: int, code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    """A pod whose container has ended at that second."""
    found = {"exitCode": code, "reason": reason, "finishedAt": f"2026-11-25T10:00:{at:02}Z", "message": message}
    status = {"phase": "Failed", "containerStatuses": [{"name": "a", "state": {"terminated": found}}]}
    return {"metadata": {"name": name}, "status": status}


def words_of_job(kept: Path) -> str:
    of_agent.keep(CAUSE, "its log has the stack")
    return kept.read_text()


def words_of_node(kept: Path, node: int) -> str:
    of_agent.keep(f"node {node} stops: it reached no majority", node=node)
    return kept.read_text()


def test_what_the_leading_agent_says_stands_and_killed_pods_follow(kept: Path) -> None:
    pods = [
        ended("a-0", 30, 7, words_of_job(kept)),
        ended("a-1", 10, 137, reason="OOMKilled"),
        ended("a-2", 20, 143),  # told to end
        ended("a-3", 25, 7, words_of_node(kept, 3)),
    ]
    for order in (pods, pods[::-1]):
        assert last_word(order, OPERATOR) == {
            "code": "JobFailedError",
            "message": f"{CAUSE}. Kubernetes saw: pod a-1 ended: OOMKilled, exit code 137",
            "hint": "its log has the stack",
        }


def test_a_pod_that_was_killed_first_is_the_cause_where_no_agent_led_the_job_to_its_end(kept: Path) -> None:
    pods = [ended("a-1", 20, 7, words_of_node(kept, 1)), ended("a-0", 10, 137, reason="OOMKilled")]
    found = last_word(pods, OPERATOR)
    assert found is not None
    assert found["message"] == (
        "pod a-0 ended: OOMKilled, exit code 137. Then: node 1 stops: it reached no majority; "
        "the operator: BackoffLimitExceeded: 3 restarts"
    )


def test_a_container_that_was_started_again_has_its_first_end_told(kept: Path) -> None:
    pod = ended("a-0", 30, 1)
    pod["status"]["containerStatuses"][0]["lastState"] = ended("a-0", 5, 139)["status"]["containerStatuses"][0]["state"]
    found = last_word([pod], None)
    assert found is not None
    assert found["message"] == "pod a-0 ended: exit code 139. Then: pod a-0 ended: exit code 1"


def test_an_evicted_pod_is_told(kept: Path) -> None:
    disrupted = [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-11-25T10:00:01Z"}]
    status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": disrupted}
    pods = [ended("a-0", 9, 1), {"metadata": {"name": "a-1"}, "status": status}]
    found = last_word(pods, OPERATOR)
    assert found is not None
    assert found["message"].startswith("pod a-1 ended: Evicted: low on memory. Then: pod a-0 ended: exit code 1")


def test_where_pods_tell_nothing_the_operator_has_the_word() -> None:
    running = {"metadata": {"name": "a-0"}, "status": {"phase": "Running", "containerStatuses": [{"state": {}}]}}
    assert last_word([running], OPERATOR) == OPERATOR
    assert last_word([], None) is None


def test_a_job_that_begins_again_forgets_the_last_word_of_the_one_before(kept: Path) -> None:
    assert words_of_job(kept)
    of_agent.keep("")
    assert kept.read_text() == ""


def test_no_file_is_made_where_there_is_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(of_agent.ENV_FILE, str(tmp_path / "none"))
    of_agent.keep(CAUSE)
    assert not (tmp_path / "none").exists()


@pytest.fixture(params=KINDS)
def failed(request: pytest.FixtureRequest, api: KubernetesApi, kept: Path, tmp_path: Path) -> tuple[str, Path]:
    """A job that has failed, without its pods; its target, and where its events may be kept."""
    target, (path, _) = request.param, KINDS[request.param]
    place = tmp_path / "tier"
    place.mkdir()
    spec = {"name": "a", "script": "train.py", "image": "repo/train:1", "nodes": 2, "workers_per_node": 1}
    spec["checkpoint"] = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": str(place)}]}
    spec["volumes"] = [{"kind": "host", "path": str(place), "host_path": str(place)}]
    if target == "kubeflow":
        spec |= {"kubernetes": {"kubeflow_api": "pytorchjob"}}
    submit(make_plan(JobConfig.model_validate_json(json.dumps(spec)), target=target))
    api.condition(f"{path}/a", "Failed", reason="BackoffLimitExceeded", message="3 restarts")
    return target, place


def said_by_all(target: str) -> set[str]:
    """The last word as each command has it; all exit as they should."""
    named = ("a", "--target", target, "-o", "json")
    waited = call_hp_ext("wait", *named)
    assert waited.code == 7
    found = {call_hp_ext(command, *named).json["error"]["message"] for command in ("status", "describe")}
    error = waited.json["error"]["message"]
    assert f"error: {error}\n" in waited.stderr
    return found | {error, call_hp_ext("report", f"{target}://-/a", "-o", "json").json["error"]["message"]}


def test_all_commands_have_the_first_cause_from_the_pods(
    failed: tuple[str, Path], api: KubernetesApi, kept: Path
) -> None:
    target, _ = failed
    api.known.add("events")
    for name, pod in (("a-0", ended("a-0", 30, 7, words_of_job(kept))), ("a-1", ended("a-1", 9, 137))):
        pod["metadata"]["labels"] = {KINDS[target][1]: "a"}
        api.put(f"/api/v1/namespaces/team-a/pods/{name}", pod)
    assert said_by_all(target) == {f"{CAUSE}. Kubernetes saw: pod a-1 ended: exit code 137"}


def test_all_commands_have_the_first_cause_from_kept_events_where_pods_are_gone(
    failed: tuple[str, Path], api: KubernetesApi
) -> None:
    target, place = failed
    api.known.add("events")
    log = KeptLog(FileStore(str(place / "a")), 0)
    happened = [entry(1.0, "job_started", world_size=2), entry(2.0, "fault", rank=1, node=1, step=7, cause="odd")]
    log.add(json.dumps(one).encode() + b"\n" for one in [*happened, entry(3.0, "job_ended", state="failed")])
    log.flush()
    (word,) = said_by_all(target)
    assert word == "rank 1 on node 1, step 7: odd. Then: BackoffLimitExceeded: 3 restarts"

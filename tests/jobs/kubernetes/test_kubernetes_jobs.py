"""Submitting, watching and ending jobs over HTTP, and everything that an API server can answer."""

from __future__ import annotations

import itertools
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_api import KubernetesApi, Order, serve
from programs import python_program
from waiting import until

from hyperpod_ext.catalog.labels import HPJOB
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import (
    ConfigError,
    ConflictError,
    HyperpodExtError,
    NotFoundError,
    UnknownOutcomeError,
    UnreachableError,
)
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.kubernetes import jobs
from hyperpod_ext.jobs.kubernetes.api import client as client_module
from hyperpod_ext.jobs.kubernetes.api.client import Client
from hyperpod_ext.jobs.kubernetes.api.kubeconfig import load_access
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD, state_of
from hyperpod_ext.jobs.plan import Plan, make_plan
from hyperpod_ext.jobs.submit import submit

JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies"
SECRETS = "/api/v1/namespaces/team-a/secrets"
HANDLE = JobHandle("hyperpod-eks", "team-a@here", "a")
FAST_S = 0.05


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.001)


def plan(**fields: object) -> Plan:
    document = {"name": "a", "script": "train.py", "image": "repo/train:1"} | fields
    return make_plan(JobConfig.model_validate_json(json.dumps(document)), target="hyperpod-eks")


def client() -> Client:
    return Client(load_access())


# --- submit -----------------------------------------------------------------------------------------


def test_submit_creates_what_the_plan_says_and_the_jobs_secret(api: KubernetesApi) -> None:
    assert str(submit(plan())) == "hyperpod-eks://team-a@here/a"
    assert api.asked("POST") == [SECRETS, POLICIES, JOBS]
    assert api.objects[f"{JOBS}/a"]["spec"]["replicaSpecs"][0]["replicas"] == 1
    secret = api.objects[f"{SECRETS}/a-hpx"]["stringData"]["secret"]
    assert len(secret) == 64
    assert all(secret not in text for text in plan().files.values())
    assert [
        query["fieldValidation"] for _, path, query, _ in api.requests if path == JOBS and "fieldValidation" in query
    ] == ["Strict"]


def test_a_second_submission_keeps_the_secret_because_checkpoints_are_signed_with_it(api: KubernetesApi) -> None:
    submit(plan())
    before = api.objects[f"{SECRETS}/a-hpx"]
    api.objects.pop(f"{JOBS}/a")
    submit(plan())
    assert api.objects[f"{SECRETS}/a-hpx"] == before


def test_a_job_of_this_name_is_not_touched(api: KubernetesApi) -> None:
    submit(plan())
    before = dict(api.objects)
    with pytest.raises(ConflictError, match="HyperPodPyTorchJob named a exists already") as caught:
        submit(plan())
    assert caught.value.exit_code == 5
    assert "hp-ext cancel hyperpod-eks://team-a@here/a" in caught.value.hint
    assert api.objects == before


def test_a_server_dry_run_keeps_nothing(api: KubernetesApi) -> None:
    from hyperpod_ext.jobs.submit import rehearse

    rehearse(plan())
    assert api.objects == {}
    assert [query["dryRun"] for verb, _, query, _ in api.requests if verb == "POST"] == ["All", "All"]


def test_what_was_made_before_a_refusal_goes_again(api: KubernetesApi) -> None:
    api.orders.append(Order(403, "POST", JOBS, body={"message": "quota"}))
    with pytest.raises(UnreachableError, match="quota"):
        submit(plan())
    assert list(api.objects) == [f"{SECRETS}/a-hpx"]


def test_a_cluster_without_the_operator_is_told_before_anything_is_made(api: KubernetesApi) -> None:
    api.known.remove("hyperpodpytorchjobs")
    with pytest.raises(NotFoundError, match="has no kind hyperpodpytorchjobs") as caught:
        submit(plan())
    assert "operator is installed" in caught.value.hint
    assert api.asked("POST") == []


def test_fields_that_the_server_refuses_are_all_told(api: KubernetesApi) -> None:
    causes = [{"field": "spec.a", "message": "Required value"}, {"field": "spec.b", "message": "Unsupported"}]
    api.orders.append(Order(422, "POST", JOBS, body={"message": "is invalid", "details": {"causes": causes}}))
    with pytest.raises(ConfigError) as caught:
        submit(plan())
    assert [problem.path for problem in caught.value.problems] == ["spec.a", "spec.b"]


# --- answers and retries ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error", "code", "words"),
    [
        (401, UnreachableError, 4, "credentials"),
        (403, UnreachableError, 4, "not allowed"),
        (404, NotFoundError, 6, "has no kind a"),
        (409, ConflictError, 5, "ordered 409"),
        (429, UnreachableError, 4, "is overloaded"),
        (500, UnreachableError, 4, "HTTP 500"),
    ],
)
def test_each_refusal_has_its_error_and_exit_code(
    api: KubernetesApi, status: int, error: type[HyperpodExtError], code: int, words: str
) -> None:
    api.orders.append(Order(status, times=99))
    with pytest.raises(error, match=words) as caught:
        jobs.status(HYPERPOD, HANDLE)
    assert caught.value.exit_code == code
    assert caught.value.hint


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_reading_is_tried_again_where_that_is_right(api: KubernetesApi, status: int) -> None:
    submit(plan())
    api.requests.clear()
    api.orders.append(Order(status, times=3))
    assert jobs.status(HYPERPOD, HANDLE).name == "a"
    assert len(api.requests) == 4


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
def test_other_refusals_are_final(api: KubernetesApi, status: int) -> None:
    api.orders.append(Order(status, times=99))
    with pytest.raises(HyperpodExtError):
        jobs.status(HYPERPOD, HANDLE)
    assert len(api.requests) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_creating_is_tried_again_where_nothing_was_done(api: KubernetesApi, status: int) -> None:
    api.orders.append(Order(status, "POST"))
    client().create(JOBS, {"metadata": {"name": "b"}})
    assert len(api.asked("POST")) == 2


LOST = [Order(500, "POST", JOBS), Order(504, "POST", JOBS), Order(0, "POST", JOBS, cut=True)]


@pytest.mark.parametrize("order", LOST, ids=["500", "504", "cut"])
def test_an_object_whose_creation_had_no_answer_is_created_once(api: KubernetesApi, order: Order) -> None:
    api.orders.append(replace(order))
    submit(plan())
    assert len(api.asked("POST")) == 4
    api.orders.append(replace(order, done=True))
    api.objects.pop(f"{JOBS}/a")
    assert submit(plan(nodes=2)).name == "a"
    assert api.objects[f"{JOBS}/a"]["spec"]["replicaSpecs"][0]["replicas"] == 2
    assert (len(api.asked("POST")), len(api.objects)) == (7, 3)


def test_a_secret_and_a_policy_whose_answers_were_lost_are_there_once(api: KubernetesApi) -> None:
    api.orders += [Order(0, "POST", SECRETS, cut=True, done=True), Order(500, "POST", POLICIES, done=True)]
    submit(plan())
    assert sorted(api.objects) == sorted([f"{SECRETS}/a-hpx", f"{POLICIES}/a-hpx", f"{JOBS}/a"])
    assert len(api.asked("POST")) == 3


def test_another_job_under_the_name_is_not_taken_for_the_one_whose_answer_was_lost(api: KubernetesApi) -> None:
    def another(path: str) -> None:
        api.put(f"{JOBS}/a", yaml.safe_load(plan(nodes=3, env={"A": "b"}).files["job.yaml"]))

    api.orders.append(Order(500, "POST", JOBS, before=another))
    with pytest.raises(ConflictError, match="exists and differs") as caught:
        submit(plan(nodes=2))
    for words in ("spec.nodes: 3 -> 2", 'spec.env: {"A": "b"} -> (nothing)'):
        assert words in caught.value.message
    assert list(api.objects) == [f"{SECRETS}/a-hpx", f"{JOBS}/a"], "the policy of the job that was not created is gone"


def test_a_server_that_stays_silent_leaves_what_was_made_and_says_so(api: KubernetesApi) -> None:
    def silent(path: str) -> None:
        api.orders.append(Order(500, "GET", f"{JOBS}/a", times=99))

    api.orders.append(Order(500, "POST", JOBS, done=True, before=silent))
    with pytest.raises(UnknownOutcomeError, match="the change may have been made anyway"):
        submit(plan())
    assert f"{POLICIES}/a-hpx" in api.objects


def test_a_deletion_whose_answer_was_lost_is_one(api: KubernetesApi) -> None:
    submit(plan())
    api.orders.append(Order(0, "DELETE", JOBS, cut=True, done=True))
    assert jobs.cancel(HYPERPOD, HANDLE, poll_s=FAST_S).state == "cancelled"


def test_the_server_says_how_long_to_wait(api: KubernetesApi) -> None:
    pauses: list[float] = []
    said: list[str] = []
    api.orders.append(Order(429, headers={"Retry-After": "7"}))
    api.put(f"{JOBS}/a", {"metadata": {"name": "a"}})
    Client(load_access(), pauses.append, said.append).get(f"{JOBS}/a")
    assert pauses == [7.0]
    assert "HTTP 429" in said[0]


def test_pauses_grow_and_end(api: KubernetesApi) -> None:
    pauses: list[float] = []
    api.orders.append(Order(500, times=99))
    with pytest.raises(UnreachableError):
        Client(load_access(), pauses.append).get(f"{JOBS}/a")
    assert len(pauses) == 4
    assert all(later > earlier for earlier, later in itertools.pairwise(pauses))


def test_a_connection_that_breaks_is_tried_again(api: KubernetesApi) -> None:
    api.put(f"{JOBS}/a", {"metadata": {"name": "a"}})
    api.orders.append(Order(0, "GET", cut=True))
    assert jobs.status(HYPERPOD, HANDLE).name == "a"


def test_nobody_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as gone:
        monkeypatch.setenv("KUBECONFIG", str(gone.kubeconfig(tmp_path / "config")))
    with pytest.raises(UnreachableError, match="cannot reach http") as caught:
        Client(load_access(), lambda _s: None).get(JOBS)
    assert "context here" in caught.value.hint


# --- who we are -------------------------------------------------------------------------------------


def sign_in_with(api: KubernetesApi, folder: Path, script: str) -> Path:
    """A kubeconfig that gets its token from a program, as EKS has it."""
    program = python_program(folder / "get-token", script)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": str(program), "args": ["x"]}}
    return api.kubeconfig(folder / "config", user=user)


TOKENS = """\
import json, pathlib, sys
count = pathlib.Path(sys.argv[0] + ".count")
n = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(n))
print(json.dumps({"status": {"token": "old-token" if n == 1 else "good-token"}}))
"""


def test_an_expired_token_is_asked_for_again_once(api: KubernetesApi, tmp_path: Path) -> None:
    sign_in_with(api, tmp_path, TOKENS)
    api.put(f"{JOBS}/a", {"metadata": {"name": "a"}})
    assert client().get(f"{JOBS}/a")["metadata"]["name"] == "a"
    assert (tmp_path / "get-token.count").read_text() == "2"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit('Token has expired and refresh failed')", "Token has expired"),
        ("print('{}')", "did not print a token"),
    ],
)
def test_a_program_that_gives_no_token_is_told(api: KubernetesApi, tmp_path: Path, script: str, words: str) -> None:
    sign_in_with(api, tmp_path, script)
    with pytest.raises(UnreachableError, match=words) as caught:
        client().get(JOBS)
    assert caught.value.exit_code == 4


def test_a_program_that_is_not_there_is_told(api: KubernetesApi, tmp_path: Path) -> None:
    api.kubeconfig(tmp_path / "config", user={"exec": {"command": "no-such-program"}})
    with pytest.raises(UnreachableError, match="`no-such-program`, which is not installed"):
        client().get(JOBS)


def test_a_file_that_cannot_be_run_is_told(api: KubernetesApi, tmp_path: Path) -> None:
    """The same error as from a folder of PATH that may not be read."""
    (tmp_path / "program").write_text("")
    api.kubeconfig(tmp_path / "config", user={"exec": {"command": str(tmp_path / "program")}})
    with pytest.raises(UnreachableError, match="program`, which cannot be started: Permission denied"):
        client().get(JOBS)


def test_no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UnreachableError, match="no kubeconfig") as caught:
        load_access()
    assert "aws eks update-kubeconfig" in caught.value.hint


def test_a_context_that_is_not_there_names_the_nearest(api: KubernetesApi) -> None:
    with pytest.raises(UnreachableError, match="no context `heer`") as caught:
        load_access("heer")
    assert "`here`" in caught.value.hint


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "contexts: [{name: here}]\ncurrent-context: here"])
def test_a_broken_kubeconfig_is_an_error_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UnreachableError):
        load_access()


def test_the_token_is_in_no_message(api: KubernetesApi) -> None:
    assert "good-token" not in repr(load_access())
    api.token = "another"
    with pytest.raises(UnreachableError) as caught:
        client().get(JOBS)
    assert "good-token" not in str(caught.value)


# --- status, list, logs, watch, cancel --------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ([], "starting"),
        (["Created"], "starting"),
        (["Created", "Running"], "running"),
        (["Created", "PodsRunning"], "running"),
        (["Running", "Completed"], "succeeded"),
        (["Running", "Succeeded"], "succeeded"),
        (["Running", "Failed"], "failed"),
        (["SomethingNew"], "starting"),
    ],
)
def test_states_are_read_from_conditions(conditions: list[str], state: str) -> None:
    found = {"status": {"conditions": [{"type": kind, "status": "True"} for kind in conditions]}}
    assert state_of(found) == state


@pytest.mark.parametrize("status", [None, "x", {"conditions": None}, {"conditions": ["x", 3]}, {"conditions": [{}]}])
def test_a_status_of_another_shape_does_not_stop_a_listing(status: Any) -> None:
    assert state_of({"status": status}) == "starting"


def test_a_listing_goes_over_all_pages_and_bears_fields_it_does_not_know(api: KubernetesApi) -> None:
    for number in range(5):
        body = {"metadata": {"name": f"j{number}"}, "spec": {"new": 1}, "status": {"unknownField": {"x": [2.5]}}}
        api.put(f"{JOBS}/j{number}", body)
    assert [one.name for one in jobs.list_jobs(HYPERPOD)] == ["j0", "j1", "j2", "j3", "j4"]


def test_a_failed_job_says_why_in_the_operators_words(api: KubernetesApi) -> None:
    submit(plan())
    api.condition(f"{JOBS}/a", "Failed", reason="LogHang_loss", message="no line for 600 s")
    found = jobs.result(HYPERPOD, HANDLE)
    assert (found["state"], found["error"]["message"]) == ("failed", "LogHang_loss: no line for 600 s")


def test_logs_of_all_pods_and_of_one_rank(api: KubernetesApi) -> None:
    submit(plan(nodes=11, workers_per_node=2))
    for number in (10, 9):
        api.pod(f"a-nodes-{number}", {HPJOB: "a"}, "Succeeded", [f"from {number}"])
    api.pod("another", {HPJOB: "b"}, "Succeeded", ["not ours"])
    assert list(jobs.logs(HYPERPOD, HANDLE)) == ["a-nodes-9 | from 9", "a-nodes-10 | from 10"]
    assert list(jobs.logs(HYPERPOD, HANDLE, rank=2)) == ["a-nodes-10 | from 10"]


def test_lines_of_one_rank_are_found_wherever_it_runs(api: KubernetesApi) -> None:
    submit(plan(nodes=2, workers_per_node=2))
    api.pod("a-nodes-0", {HPJOB: "a"}, "Succeeded", ["rank 2 | here", "rank 0 | x", "[default0]:other", "of the pod"])
    api.pod("a-nodes-1", {HPJOB: "a"}, "Succeeded", ["rank 20 | y", "rank 2 | there", "[default0]:its own", "bare"])
    found = ["a-nodes-0 | rank 2 | here", "a-nodes-1 | rank 2 | there", "a-nodes-1 | [default0]:its own"]
    assert list(jobs.logs(HYPERPOD, HANDLE, rank=2)) == [*found, "a-nodes-1 | bare"]
    api.condition(f"{JOBS}/a", "Completed")
    assert sorted(jobs.logs(HYPERPOD, HANDLE, rank=2, follow=True, poll_s=FAST_S)) == sorted(
        [*found, "a-nodes-1 | bare"]
    )
    with pytest.raises(NotFoundError, match="no rank 4"):
        list(jobs.logs(HYPERPOD, HANDLE, rank=4))


@pytest.mark.parametrize("follow", [False, True])
def test_logs_of_a_pod_with_a_sidecar_are_those_of_the_container_that_trains(api: KubernetesApi, follow: bool) -> None:
    submit(plan())
    api.pod("a-nodes-0", {HPJOB: "a"}, "Succeeded", ["one"], containers=("worker", "log"))
    api.condition(f"{JOBS}/a", "Completed")
    assert list(jobs.logs(HYPERPOD, HANDLE, follow=follow, poll_s=FAST_S)) == ["a-nodes-0 | one"]


def test_followed_logs_take_in_pods_that_come_later_and_end_with_the_job(api: KubernetesApi) -> None:
    submit(plan())
    api.pod("a-nodes-0", {HPJOB: "a"}, "Running", ["one"])
    seen: list[str] = []

    def follow() -> None:
        seen.extend(jobs.logs(HYPERPOD, HANDLE, follow=True, poll_s=FAST_S))

    reader = threading.Thread(target=follow)
    reader.start()
    until(lambda: any(path.endswith("a-nodes-0/log") for path in api.asked("GET")))
    api.pod("a-nodes-0", {HPJOB: "a"}, "Succeeded", ["two"])
    api.pod("a-nodes-1", {HPJOB: "a"}, "Succeeded", ["of the replacement"])
    until(lambda: any(path.endswith("a-nodes-1/log") for path in api.asked("GET")))
    api.condition(f"{JOBS}/a", "Completed")
    reader.join(10)
    assert not reader.is_alive()
    assert sorted(seen) == ["a-nodes-0 | one", "a-nodes-0 | two", "a-nodes-1 | of the replacement"]


def test_a_log_that_breaks_goes_on_where_it_was(api: KubernetesApi) -> None:
    submit(plan())
    api.pod("a-nodes-0", {HPJOB: "a"}, "Running", ["one", "two", "three"])
    api.cut_logs_after += [1, 1, 2]
    lines = jobs.logs(HYPERPOD, HANDLE, follow=True, poll_s=FAST_S)
    seen = [next(lines) for _ in range(3)]
    api.pod("a-nodes-0", {HPJOB: "a"}, "Succeeded", ["four"])
    api.condition(f"{JOBS}/a", "Completed")
    assert [*seen, *lines] == [f"a-nodes-0 | {word}" for word in ("one", "two", "three", "four")]
    assert len([path for path in api.asked("GET") if path.endswith("/log")]) >= 3


def test_a_job_that_is_deleted_while_it_is_watched(api: KubernetesApi) -> None:
    submit(plan())
    moments = jobs.watch(HYPERPOD, HANDLE, with_lines=False, poll_s=0.0)
    assert next(moments).status.state == "starting"
    api.objects.pop(f"{JOBS}/a")
    with pytest.raises(NotFoundError, match="was deleted while hp-ext watched it") as caught:
        next(moments)
    assert caught.value.exit_code == 6


def test_watching_ends_with_the_job(api: KubernetesApi) -> None:
    submit(plan())
    api.pod("a-nodes-0", {HPJOB: "a"}, "Succeeded", ["last words"])
    api.condition(f"{JOBS}/a", "Completed")
    (moment,) = jobs.watch(HYPERPOD, HANDLE, with_lines=True, poll_s=FAST_S)
    assert (moment.status.state, moment.lines) == ("succeeded", ("a-nodes-0 | last words",))


def test_cancel_returns_when_the_pods_are_gone(api: KubernetesApi) -> None:
    submit(plan())
    pod = "/api/v1/namespaces/team-a/pods/a-nodes-0"
    api.pod("a-nodes-0", {HPJOB: "a"})
    looks = iter(range(3))

    def one_look_later(_path: str) -> None:
        threading.Thread(target=lambda: (until(lambda: len(api.asked("GET")) > 5), api.objects.pop(pod))).start()

    api.on_delete = lambda path: one_look_later(path) if path == f"{JOBS}/a" and next(looks) == 0 else None
    assert jobs.cancel(HYPERPOD, HANDLE, poll_s=FAST_S).state == "cancelled"
    assert list(api.objects) == [f"{SECRETS}/a-hpx"]


def test_a_job_that_has_ended_is_not_deleted(api: KubernetesApi) -> None:
    submit(plan())
    api.condition(f"{JOBS}/a", "Completed")
    assert jobs.cancel(HYPERPOD, HANDLE).state == "succeeded"
    assert f"{JOBS}/a" in api.objects


def test_no_such_job(api: KubernetesApi) -> None:
    for ask in (jobs.status, jobs.cancel, jobs.result):
        with pytest.raises(NotFoundError, match='"a" not found'):
            ask(HYPERPOD, HANDLE)


def test_a_handle_names_contexts_with_slashes(api: KubernetesApi, tmp_path: Path) -> None:
    text = Path(os.environ["KUBECONFIG"]).read_text().replace("here", "arn:aws:eks:us-west-2:1:cluster/prod")
    Path(os.environ["KUBECONFIG"]).write_text(text)
    handle = submit(plan())
    assert str(handle) == "hyperpod-eks://team-a@arn:aws:eks:us-west-2:1:cluster%2Fprod/a"
    assert jobs.status(HYPERPOD, JobHandle.parse(str(handle))).name == "a"

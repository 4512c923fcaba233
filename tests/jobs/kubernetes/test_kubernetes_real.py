"""What is rendered and submitted, before a real Kubernetes API server; and what it refuses, as the user hears of it."""

from __future__ import annotations

import json
import re
import tempfile
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Done, call_hp_ext
from crds import SPECS, definition
from hypothesis import HealthCheck, Phase, given, settings
from job_configs import jobs
from kube_apiserver import ApiServer, api_server

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD, PYTORCH, TRAIN, Kind
from hyperpod_ext.jobs.plan import find_problems, make_plan

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1800)]  # the first builds the server

KINDS = {kind.name: kind for kind in (HYPERPOD, PYTORCH, TRAIN)}
WAYS = {
    "HyperPodPyTorchJob": ("hyperpod-eks", {}),
    "PyTorchJob": ("kubeflow", {}),
    "TrainJob": ("kubeflow", {"kubeflow_api": "trainjob"}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with tempfile.TemporaryDirectory(prefix="hpx-k8s-") as place, api_server(Path(place)) as running:
        for name, kind in KINDS.items():
            running.define(definition(kind, SPECS[name]()))
        for name in ("hyperpod-ns-research", "kubeflow", "team-a"):
            running.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for name in ("base-priority", "low-priority"):
            known = {"metadata": {"name": name}, "value": 1}
            running.ask("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", known)
        yield running


@pytest.fixture
def here(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a kubeconfig for the server and a script."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config", namespace="team-a")))
    monkeypatch.setenv("HPX_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    yield tmp_path
    for kind in KINDS.values():
        server.ask("DELETE", kind.path("team-a"))
    for collection in (
        "/api/v1/namespaces/team-a/pods",
        "/apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies",
    ):
        server.ask("DELETE", f"{collection}?gracePeriodSeconds=0")


def lost(sent: Any, kept: Any, path: str = "") -> list[str]:
    """Where the server kept less than was sent, or something else; it may add defaults."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [one for key, value in sent.items() for one in lost(value, kept.get(key), f"{path}/{key}")]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return [one for at, value in enumerate(sent) for one in lost(value, kept[at], f"{path}/{at}")]
    return [] if sent == kept or (sent == "" and kept is None) else [path]


def lost_of_pod(sent: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """`lost`, but the core adds tolerations of its own, writes 5120Mi as 5Gi, and 1.20 does not know minDomains."""
    kept["spec"]["tolerations"] = kept["spec"]["tolerations"][: len(sent["spec"].get("tolerations", []))]
    size = re.compile(r"/(sizeLimit|(requests|limits)/(memory|cpu|ephemeral-storage|hugepages-2Mi)|minDomains)$")
    return [path for path in lost(sent, kept) if not size.search(path)]


def collection(found: dict[str, Any]) -> str:
    namespace = found["metadata"].get("namespace", "default")
    if found["kind"] == "NetworkPolicy":
        return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    return KINDS[found["kind"]].path(namespace)


def pods(found: dict[str, Any]) -> list[dict[str, Any]]:
    spec = found.get("spec", {})
    groups = [*spec.get("replicaSpecs", []), *spec.get("pytorchReplicaSpecs", {}).values()]
    return [group["template"] for group in groups]


def examples() -> list[Path]:
    return sorted((Path(__file__).resolve().parents[3] / "examples").glob("*/rendered/**/*.yaml"))


@pytest.mark.parametrize("file", examples(), ids=lambda file: "/".join(file.parts[-4:]).replace("rendered/", ""))
def test_the_server_takes_every_example_whole_and_the_pods_in_it(server: ApiServer, file: Path) -> None:
    taken_whole(server, yaml.safe_load(file.read_text()))


def without_empty(found: Any) -> Any:
    """1.20, built with a Go as new as this, takes empty text in custom resources for null; in pods it does not."""
    if isinstance(found, dict):
        return {key: without_empty(value) for key, value in found.items()}
    return [without_empty(one) for one in found] if isinstance(found, list) else "x" if found == "" else found


def taken_whole(server: ApiServer, found: dict[str, Any]) -> None:
    """The server takes the object, and each pod in it, and drops nothing."""
    sent = without_empty(found)
    dropped = lost(sent, server.ask("POST", f"{collection(found)}?dryRun=All", sent))
    assert [path for path in dropped if not path.endswith("/endPort")] == []  # of policies, since 1.21
    namespace = found["metadata"].get("namespace", "default")
    for pod in pods(found):
        one = {"metadata": pod["metadata"] | {"name": "a"}, "spec": pod["spec"]}
        made = server.ask("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", one)
        assert lost_of_pod(one, made) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata/name", "Upper"),
        ("metadata/labels/team", "no spaces, please"),
        ("spec/nprocPerNode", 8),
        ("spec/replicaSpecs/0/replicas", "two"),
        ("spec/replicaSpecs/0/template/spec/containers/0/env", [{"value": "no name"}]),
        ("spec/runPolicy/restartPolicy", {"maxFullJobRestarts": 1}),
        ("spec/runPolicy/cleanPodPolicy", "Running"),
    ],
)
def test_the_server_refuses_a_planted_mistake(server: ApiServer, path: str, value: object) -> None:
    """Else the test above would say nothing."""
    found: Any = yaml.safe_load((examples()[0].parents[2] / "rendered" / "job" / "job.yaml").read_text())
    at = found
    *before, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    for part in before:
        at = at[part]
    at[last] = value
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask("POST", f"{collection(found)}?dryRun=All", found)
    assert refused.value.code == 422


def test_a_field_that_the_definition_does_not_have_is_lost_and_seen_to_be(server: ApiServer) -> None:
    found = yaml.safe_load((examples()[0].parents[2] / "rendered" / "job" / "job.yaml").read_text())
    found["spec"]["replicaSpecs"][0]["spare"] = 1
    kept = server.ask("POST", f"{collection(found)}?dryRun=All", found)
    assert lost(found, kept) == ["/spec/replicaSpecs/0/spare"]


def fit(job: JobConfig, target: str) -> JobConfig:
    """The job in a namespace that is there, and without priorities that are not."""
    groups = tuple(group.model_copy(update={"pod_priority_class": None}) for group in job.node_groups)
    scheduling = job.scheduling.model_copy(update={"pod_priority_class": None, "queue": "q", "priority": None})
    kubernetes = job.kubernetes.model_copy(update={"namespace": "team-a"})
    more = {"node_groups": groups, "scheduling": scheduling, "kubernetes": kubernetes, "image": "repo/train:1"}
    return job.model_copy(update=more | ({"spares": 0, "node_groups": ()} if target == "kubeflow" else {}))


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
def test_the_server_takes_any_job_that_is_valid(server: ApiServer, target: str) -> None:
    accepted = 0

    @settings(
        max_examples=250, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(job=jobs())
    def check(job: JobConfig) -> None:
        nonlocal accepted
        wanted = fit(job, target)
        if find_problems(wanted, None, target):
            return
        for text in make_plan(wanted, target=target).files.values():
            try:
                taken_whole(server, yaml.safe_load(text))
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read().decode()) from None
        accepted += 1

    check()
    print(f"{target}: {accepted} jobs accepted")
    assert accepted >= 50


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
def test_the_server_takes_pods_of_user_1000(server: ApiServer, target: str) -> None:
    """That the processes of such pods work is shown in tests/faults/test_pods_of_users.py."""
    user = {"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 2000}
    overlay = {"kubernetes": {"pod": {"securityContext": user}}}
    document = {"name": "a", "script": "train.py", "image": "repo/train:1", "overlay": overlay}
    job = JobConfig.model_validate_json(json.dumps(document | {"kubernetes": {"namespace": "team-a"}}))
    found = yaml.safe_load(make_plan(job, target=target).files["job.yaml"])
    assert [pod["spec"]["securityContext"] for pod in pods(found)] == [user]
    taken_whole(server, found)


def write(folder: Path, kind: str, **fields: Any) -> tuple[str, str]:
    """A spec for this kind; returns the target option."""
    target, only = WAYS[kind]
    spec = {"name": "a", "script": "train.py", "image": "repo/train:1", "nodes": 2, "workers_per_node": 2}
    (folder / "job.yaml").write_text(json.dumps(spec | {"kubernetes": only} | fields))
    return "--target", target


def names(server: ApiServer, path: str) -> list[str]:
    return [one["metadata"]["name"] for one in server.ask("GET", path)["items"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_life_of_a_job(server: ApiServer, here: Path, kind: str) -> None:
    target = write(here, kind)
    create = ("create-job", "-f", "job.yaml", *target, "-o", "json")
    path = KINDS[kind].path("team-a")

    rehearsed = call_hp_ext(*create, "--server-dry-run", cwd=here)
    assert (rehearsed.code, names(server, path)) == (0, []), rehearsed.stderr
    made = call_hp_ext(*create, cwd=here)
    assert made.code == 0, made.stderr
    url = made.json["handle"]
    assert names(server, path) == ["a"]
    policies, secrets = (
        "/apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies",
        "/api/v1/namespaces/team-a/secrets",
    )
    assert names(server, policies) == ["a-hpx"]
    assert "a-hpx" in names(server, secrets)

    assert call_hp_ext("status", url, "-o", "json").json["state"] == "starting"
    assert [one["handle"] for one in call_hp_ext("list", *target, "-o", "json").json] == [url]
    again = call_hp_ext(*create, cwd=here)
    assert (again.code, f"{kind} named a exists already" in again.stderr) == (5, True), again.stderr
    assert call_hp_ext("diff", "-f", "job.yaml", *target, "--exit-code", cwd=here).code == 0
    assert call_hp_ext("diff", "-f", "job.yaml", *target, "--set", "nodes=3", "--exit-code", cwd=here).code == 10

    labels = {KINDS[kind].pod_label: "a"}
    for node in range(2):
        lines = [f"rank {2 * node + local} | hello" for local in range(2)]
        server.pod(f"a-node-{node}", labels, "Succeeded", lines, "team-a")
    server.condition(f"{path}/a", "Running")
    assert call_hp_ext("status", url, "-o", "json").json["state"] == "running"
    assert call_hp_ext("logs", url, "--rank", "3").stdout == "a-node-1 | rank 3 | hello\n"
    for node in range(2):
        server.ask("DELETE", f"/api/v1/namespaces/team-a/pods/a-node-{node}?gracePeriodSeconds=0")
    cancelled = call_hp_ext("cancel", url, "-o", "json")
    assert (cancelled.code, cancelled.json["state"]) == (0, "cancelled"), cancelled.stderr
    assert (names(server, path), names(server, policies)) == ([], [])

    assert call_hp_ext(*create, cwd=here).code == 0  # the secret is kept, the name is free again
    server.condition(f"{path}/a", "Complete" if kind == "TrainJob" else "Succeeded")
    waited = call_hp_ext("wait", url, "-o", "json")
    assert (waited.code, waited.json["state"]) == (0, "succeeded"), waited.stderr
    assert call_hp_ext("cancel", url).stdout.endswith("had ended already (succeeded)\n")


def test_a_job_that_is_resized_gets_other_bounds(server: ApiServer, here: Path) -> None:
    target = write(here, "HyperPodPyTorchJob", elastic={"min_nodes": 1, "max_nodes": 4}, global_batch_size=24)
    made = call_hp_ext("create-job", "-f", "job.yaml", *target, "-o", "json", cwd=here)
    assert made.code == 0, made.stderr
    path = HYPERPOD.path("team-a", "a")
    before = server.ask("GET", path)
    for node in range(3):
        server.pod(f"a-node-{node}", {HYPERPOD.pod_label: "a"}, "Running", [], "team-a")
    done = call_hp_ext("resize", made.json["handle"], "--nodes", "3", "-o", "json")
    assert (done.code, done.json) == (0, {"nodes": 3, "of": 3}), done.stderr
    after = server.ask("GET", path)
    assert after["spec"]["elasticPolicy"]["maxReplicas"] == after["spec"]["replicaSpecs"][0]["maxReplicas"] == 3
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    changed = set(lost(before["spec"], after["spec"]))
    assert changed == {"/elasticPolicy/maxReplicas", "/replicaSpecs/0/maxReplicas"}


def test_a_token_that_is_not_known_and_rights_that_are_not_given(server: ApiServer, here: Path) -> None:
    target = write(here, "HyperPodPyTorchJob")

    def create(token: str) -> Done:
        server.kubeconfig(here / "config", token=token, namespace="team-a")
        return call_hp_ext("create-job", "-f", "job.yaml", *target, cwd=here)

    stranger, nobody = create("not-a-token"), create(server.nobody)
    assert (stranger.code, "does not accept these credentials" in stranger.stderr) == (4, True), stranger.stderr
    assert (nobody.code, 'User "nobody" cannot' in nobody.stderr) == (4, True), nobody.stderr


def test_a_namespace_that_is_not_there(server: ApiServer, here: Path) -> None:
    target = write(here, "HyperPodPyTorchJob", kubernetes={"namespace": "team-b"})
    refused = call_hp_ext("create-job", "-f", "job.yaml", *target, cwd=here)
    assert (refused.code, "team-b" in refused.stderr) == (6, True), refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_cluster_without_the_operator(server: ApiServer, here: Path) -> None:
    kind: Kind = KINDS["TrainJob"]
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.plural}.{kind.group}"
    server.ask("DELETE", path)
    try:
        for _ in range(600):  # the server forgets it in its own time
            with suppress(urllib.error.HTTPError):
                server.ask("GET", kind.path("team-a"))
                continue
            break
        refused = call_hp_ext("create-job", "-f", "job.yaml", *write(here, "TrainJob"), cwd=here)
        assert (refused.code, "has no kind trainjobs" in refused.stderr) == (6, True), refused.stderr
    finally:
        server.define(definition(kind, SPECS["TrainJob"]()))


def test_what_the_server_refuses_names_the_fields(server: ApiServer, here: Path) -> None:
    target = write(here, "HyperPodPyTorchJob", labels={"team": "a"})
    own = here / "mine" / "hyperpod_eks"
    own.mkdir(parents=True)
    root = Path(__file__).resolve().parents[3]
    text = (root / "templates" / "hyperpod_eks" / "job.yaml.j2").read_text()
    (own / "job.yaml.j2").write_text(text.replace("nprocPerNode:", "nprocPerNode: 8 #"))
    done = call_hp_ext("create-job", "-f", "job.yaml", *target, "--templates", str(here / "mine"), cwd=here)
    assert done.code == 3
    assert "nprocPerNode" in done.stderr


def test_doctor_finds_the_operators_and_that_they_take_what_is_rendered(server: ApiServer, here: Path) -> None:
    found = {one["what"]: one for one in call_hp_ext("doctor", "-o", "json").json}
    assert f"at {server.url}, namespace team-a" in found["kubernetes"]["finding"]
    assert {found[name]["state"] for name in KINDS} == {"ok"}, found

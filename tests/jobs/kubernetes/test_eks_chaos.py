"""Faults that are ordered in a HyperPodPyTorchJob that runs, and faults of a spec that goes to a cluster."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from command import call_hp_ext
from kubernetes_api import KubernetesApi

from hyperpod_ext.catalog.labels import HPJOB
from hyperpod_ext.config.fault_injection import InjectedFault, NodeFault
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.plan import find_problems, make_plan
from hyperpod_ext.jobs.submit import submit
from hyperpod_ext.runtime.fault_injection.orders import orders_folder, read_orders
from hyperpod_ext.runtime.ipc.environment import ENV_RUN_DIR
from hyperpod_ext.runtime.state.progress import Progress

CHAOS = ("chaos", "hyperpod-eks://team-a@here/a")
KUBECTL = """\
#!/bin/sh
# runs the command as in that pod: kubectl ... exec -i POD -- COMMAND
while [ "$1" != exec ]; do shift; done
export HPX_RUN_DIR="$(dirname "$0")/$3"
shift 4
exec "$@"
"""


@pytest.fixture
def pods(api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the run folder of each pod that will run."""
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for number, ranks in enumerate(((2, 3), (0, 1), ())):  # the operator gives ranks as it likes; the last is a spare
        api.pod(f"a-{number}", {HPJOB: "a"})
        (tmp_path / f"a-{number}" / "logs").mkdir(parents=True)
        for rank in ranks:
            (tmp_path / f"a-{number}" / "logs" / f"rank{rank}.log").touch()
    return tmp_path


def submitted(api: KubernetesApi, **fields: object) -> None:
    document = {"name": "a", "script": "train.py", "image": "repo/train:1", "nodes": 2, "workers_per_node": 2}
    document["kubernetes"] = {"launcher": "ours"}
    submit(make_plan(JobConfig.model_validate_json(json.dumps(document | fields)), target="hyperpod-eks"))
    api.condition("/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs/a", "Running")


def ordered(pods: Path) -> dict[str, list[InjectedFault | NodeFault]]:
    """What each pod is to do."""
    found = {pod.name: list(read_orders(pod).values()) for pod in pods.glob("a-*")}
    return {name: orders for name, orders in found.items() if orders}


def test_the_pod_that_has_the_rank_gets_the_order_and_no_other(api: KubernetesApi, pods: Path) -> None:
    submitted(api)
    done = call_hp_ext(*CHAOS, "--hang", "--rank", "2", "--step", "7", "--yes", "-o", "json")
    assert (done.code, done.json["rank"]) == (0, 2), done.stderr
    assert ordered(pods) == {"a-0": [InjectedFault(kind="hang", rank=2, step=7)]}
    assert call_hp_ext(*CHAOS, "--sigkill", "--node", "0", "--yes").code == 0
    assert ordered(pods)["a-1"] == [NodeFault(kind="sigkill", node=0)]
    assert not list(pods.glob("a-*/chaos/orders/.new"))


@pytest.mark.parametrize(
    ("words", "fields", "code", "why"),
    [
        (["--sigkill", "--rank", "4", "--yes"], {}, 3, "there is no rank 4"),
        (["--sigkill", "--rank", "3"], {}, 130, "a runs on machines that cost money. Inject sigkill into rank 3?"),
        (["--sigkill", "--rank", "0", "--yes"], {"mode": "plain", "kubernetes": {}}, 3, "is of mode plain"),
        (["--sigkill", "--node", "1", "--yes"], {"kubernetes": {}}, 3, "kubectl delete pod --force"),
        (["--sigkill", "--rank", "5", "--yes"], {"nodes": 3}, 5, "no pod of a has rank 5 yet"),
    ],
)
def test_what_no_pod_could_carry_out_is_refused(
    api: KubernetesApi,
    pods: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    fields: dict[str, object],
    code: int,
    why: str,
) -> None:
    submitted(api, **fields)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    told = call_hp_ext(*CHAOS, *words)
    assert (told.code, why in told.stderr) == (code, True), told.stderr
    assert ordered(pods) == {}


def test_a_pod_that_takes_no_command_is_named(api: KubernetesApi, pods: Path) -> None:
    submitted(api)
    (pods / "kubectl").write_text("#!/bin/sh\necho 'error: pods exec is forbidden' >&2; exit 1\n")
    told = call_hp_ext(*CHAOS, "--sigkill", "--rank", "0", "--yes")
    assert (told.code, "pods exec is forbidden" in told.stderr) == (4, True)


def test_a_rank_without_an_agent_of_ours_looks_for_orders_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    progress = Progress()
    assert not progress.has_orders
    orders_folder(tmp_path).mkdir(parents=True)
    assert progress.has_orders
    assert not progress.has_orders
    (orders_folder(tmp_path) / "a.json").touch()
    os.utime(orders_folder(tmp_path), ns=(1, 1))  # of a file system whose times are coarse, another one
    assert progress.has_orders


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow", "hyperpod-slurm", "sagemaker"])
def test_a_spec_says_that_its_faults_are_meant_for_clusters(target: str) -> None:
    def said(**fields: object) -> list[str]:
        least = {"name": "a", "script": "a.py", "image": "a:1", "chaos": {"inject": [{"kind": "oom", "rank": 0}]}}
        job = JobConfig.model_validate_json(json.dumps(least | fields))
        return [problem.path for problem in find_problems(job, None, target) if problem.path.startswith("chaos")]

    meant = {"inject": [{"kind": "oom", "rank": 0}], "on_clusters": True}
    assert said() == ["chaos"]
    assert said(chaos=meant) == []
    assert said(chaos=meant, mode="plain") == ["chaos"]
    killed = {"faults": [{"rank": 0, "step": 1}], "on_clusters": True}
    assert said(chaos=killed) == (["chaos.faults"] if target == "hyperpod-eks" else [])
    assert said(chaos=killed, kubernetes={"launcher": "ours"}) == []

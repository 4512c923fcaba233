"""Commands of containers as people write them: what starts the workers is found, and what is beside it is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.contract.yaml_text import read_all
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports import shell
from hyperpod_ext.jobs.plan import make_plan

pytest.importorskip("tree_sitter_bash")


def job_of(*groups: dict[str, Any], policy: dict[str, Any] | None = None, **pod: Any) -> str:
    """A PyTorchJob with a Master and three Workers, whose containers have these fields."""
    first, *others = groups
    roles = {"Master": (1, first), "Worker": (3, (others or [first])[-1])}
    replicas = {
        name: {
            "replicas": count,
            "template": {"spec": {"containers": [{"name": "pytorch", "image": "repo/a:1"} | container], **pod}},
        }
        for name, (count, container) in roles.items()
    }
    spec = {"pytorchReplicaSpecs": replicas, **(policy or {})}
    return json.dumps({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}, "spec": spec})


def read(*words: str, env: dict[str, str] | None = None) -> Any:
    variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
    return import_file(job_of({"command": list(words), "env": variables}), "a.json")


def in_shell(script: str, *more: str, env: dict[str, str] | None = None) -> Any:
    return read("bash", "-c", script, *more, env=env)


TRAIN = "torchrun --nproc_per_node=8 /a/t.py"


@pytest.mark.parametrize(
    ("script", "args", "named"),
    [
        (f"{TRAIN} --a 1 2>&1 | tee /tmp/log", ["--a", "1"], "| tee /tmp/log: the target stores the workers' output"),
        (f"{TRAIN} --a 1 > /tmp/log 2>&1", ["--a", "1"], "> /tmp/log: the target stores the workers' output"),
        (f"exec {TRAIN}", [], ""),
        (f"bash -lc '{TRAIN} --a'", ["--a"], ""),
        (f'ARGS=(--a "x y"); {TRAIN} "${{ARGS[@]}}"', ["--a", "x y"], ""),
        (f"torchrun --nproc_per_node=4 /a/x.py && {TRAIN}", [], "is not run: torchrun --nproc_per_node=4 /a/x.py"),
        (f"pip install -r more.txt\n{TRAIN}\nsleep infinity", [], "is not run: sleep infinity"),
        (f"{TRAIN} --rank $RANK", ["--rank", "$RANK"], "$RANK: is evaluated when the job runs"),
        (f"{TRAIN} --data $DATA --nodes $NNODES", ["--data", "/fsx", "--nodes", "4"], ""),
    ],
)  # fmt: skip
def test_the_shell_is_read_as_the_shell_reads_it(script: str, args: list[str], named: str) -> None:
    found = in_shell(script, env={"DATA": "/fsx"})
    assert (found.job.script, list(found.job.args), found.job.workers_per_node) == ("/a/t.py", args, 8)
    assert named in "\n".join(found.left_out)
    assert bool(found.left_out) == bool(named)


def test_what_the_shell_sets_before_it_starts_is_carried() -> None:
    script = f"export A=1 B='x y'\ncd /work\ncd src; NCCL_DEBUG=INFO {TRAIN.replace('/a/', '')}"
    found = in_shell(script, env={"C": "2"})
    assert found.job.env == {"A": "1", "C": "2", "B": "x y", "NCCL_DEBUG": "INFO"}
    assert (found.job.working_dir, found.job.script, found.left_out) == ("/work/src", "t.py", [])


def test_words_behind_the_script_are_its_arguments() -> None:
    assert in_shell(f'{TRAIN} "$@"', "--", "--lr", "a b").job.args == ("--lr", "a b")


def test_variables_that_kubernetes_fills_in_have_their_values() -> None:
    assert read("torchrun", "/a/t.py", "--d=$(D)/x", "--no=$$(D)", env={"D": "/data"}).job.args == (
        "--d=/data/x",
        "--no=$(D)",
    )
    container = {
        "command": ["torchrun", "/a/t.py", "--token=$(T)"],
        "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    }
    assert "Kubernetes would replace T" in "\n".join(import_file(job_of(container), "a.json").left_out)


def test_processes_of_accelerate_are_those_of_all_machines() -> None:
    found = read("accelerate", "launch", "--num_processes", "32", "--num_machines", "4", "/a/t.py")
    assert (found.job.nodes, found.job.workers_per_node) == (4, 8)


def test_a_range_of_nodes_is_named() -> None:
    found = read("torchrun", "--nproc_per_node=8", "--nnodes=1:4", "/a/t.py")
    assert "--nnodes=1:4: the rendered job has exactly 4 nodes" in "\n".join(found.left_out)


@pytest.mark.parametrize("script", ["bash /a/run.sh", f"for i in 1 2; do {TRAIN}; done"])
def test_what_is_no_single_script_is_carried_as_a_command(script: str) -> None:
    found = in_shell(script).job
    assert (found.mode, found.words) == ("plain", ["bash", "-c", script])


def test_what_nobody_sets_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="NOBODY_SETS_IT"):
        in_shell(f"{TRAIN} --x $NOBODY_SETS_IT")


def test_groups_that_differ_are_named() -> None:
    one = {"command": ["torchrun", "--nproc_per_node=8", "/a/t.py"], "env": [{"name": "A", "value": "1"}]}
    other = {"command": ["torchrun", "--nproc_per_node=4", "/a/b.py"], "image": "repo/b:1", "env": []}
    named = "\n".join(import_file(job_of(one, other), "a.json").left_out)
    for what in (
        "container image differs from",
        "container command differs from",
        "has no container env A, as Master has",
    ):
        assert what in named, named


def test_labels_of_pods_and_policies_of_the_operator_are_carried() -> None:
    metrics = [{"type": "Resource", "resource": {"name": "cpu"}}]
    policy = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "rdzvHost": "etcd", "metrics": metrics}}
    policy["runPolicy"] = {"schedulingPolicy": {"minAvailable": 2}}
    text = json.loads(job_of({"command": ["torchrun", "/a/t.py"]}, policy=policy))
    text["spec"]["nprocPerNode"] = "2"
    for role in text["spec"]["pytorchReplicaSpecs"].values():
        role["template"]["metadata"] = {"labels": {"app": "a", "team": "b"}}
    found = import_file(json.dumps(text), "a.json")
    assert found.left_out == []
    assert found.job.labels == {"app": "a", "team": "b"}
    (rendered,) = read_all(make_plan(found.job, target="kubeflow").files["job.yaml"])
    assert rendered["spec"]["elasticPolicy"].items() >= policy["elasticPolicy"].items()
    assert rendered["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": 2}


def test_what_is_only_added_is_no_loss() -> None:
    found = read("torchrun", "--nproc_per_node=8", "/a/t.py", env={"A": "/a", "B": "$(A)/b"})
    assert found.left_out == []
    notes = "\n".join(found.notes)
    assert "container securityContext is added" in notes
    assert found.job.kubernetes.clean_pods == "none"  # Kubeflow's own, where a file says nothing
    assert "variable B: $(A)/b was replaced by its value /a/b" in notes


@pytest.mark.parametrize(
    ("target", "kubernetes"),
    [("hyperpod-eks", {}), ("kubeflow", {}), ("kubeflow", {"kubeflow_api": "trainjob"})],
)
@pytest.mark.parametrize("mode", ["ours", "plain"])
def test_our_own_file_that_was_changed_is_its_spec_as_it_is_now(
    target: str, kubernetes: dict[str, str], mode: str
) -> None:
    document = {"name": "a", "script": "t.py", "image": "repo/a:1", "mode": mode, "nodes": 2, "kubernetes": kubernetes}
    job = JobConfig.model_validate_json(json.dumps(document))
    text = make_plan(job, target=target).files["job.yaml"]
    (found,) = read_all(text)
    text = text.replace("repo/a:1", "repo/b:2").replace("priv", "x-priv", 0)
    for more in ("replicas: 2", "numNodes: 2", "replicas: 1\n      restartPolicy: OnFailure\n      template"):
        text = text.replace(
            more, more.replace("2", "3") if "2" in more else more.replace("replicas: 1", "replicas: 2"), 1
        )
    note = json.dumps(found["metadata"]["annotations"]["hyperpod-ext/spec"])
    assert note not in text  # the image is in it, too
    back = import_file(text.replace("name: HPX_RUN_DIR\n", "name: OTHER\n"), "job.yaml")
    assert (back.job.nodes, back.job.image, back.job.mode, back.job.volumes) == (3, "repo/b:2", mode, ())
    named = "\n".join(back.left_out)
    assert "the file was edited after hp-ext wrote it" in named
    assert ("variable OTHER is not carried" in named) == (mode == "ours"), named


def test_a_changed_group_of_our_own_file_is_named() -> None:
    groups = [{"name": "one", "nodes": 1}, {"name": "two", "nodes": 2, "instance_type": "ml.g5.xlarge"}]
    document = {"name": "a", "script": "t.py", "image": "repo/a:1", "nodes": 3, "node_groups": groups}
    text = make_plan(JobConfig.model_validate_json(json.dumps(document)), target="hyperpod-eks").files["job.yaml"]
    found = import_file(text.replace("replicas: 2", "replicas: 4"), "job.yaml")
    assert found.job.nodes == 3
    assert "spec.replicaSpecs.1.replicas: is 4 in this file, 2 in the rendered spec" in "\n".join(found.left_out)


def test_a_variable_before_a_command_is_that_commands_alone() -> None:
    found = shell.read_script("A=1 echo\nB=2 srun torchrun t.py\ntorchrun x.py | tee $A", "a")
    assert {name: value for name, (value, _line) in found.exports.items()} == {"B": "2"}
    assert [words for words, _line in found.steps] == [["srun", "torchrun", "t.py"], ["torchrun", "x.py"]]

"""`command:` — a job that is no Python script: started once for each worker, on each target that can, and read back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import begin_hp_ext, call_hp_ext
from local_place import LocalPlace

from hyperpod_ext.config.files.load import read_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, UnsupportedError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import make_plan

SHOW = 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK at $MASTER_ADDR $MASTER_PORT: $0"'
FILES = {"hyperpod-eks": "job.yaml", "kubeflow": "job.yaml", "hyperpod-slurm": "job.sbatch"}


def job(command: object, **more: Any) -> JobConfig:
    document = {"name": "a", "command": command, "mode": "plain", "image": "r:1", "nodes": 2} | more
    return JobConfig.model_validate_json(json.dumps(document))


def told(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read_text(JobConfig, f"name: a\n{text}\n", "job.yaml")
    return [str(one) for one in refused.value.problems]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mode: plain", "script: is missing"),
        ("command: ./a.sh", "mode: mode `ours`, the default, works only with a script"),
        ("command: ./a.sh\nmode: aws-checkpointless", "mode: mode `aws-checkpointless` works only with a script"),
        ("command: ./a.sh\nmode: plain\nworking_dir: /a\nscript: a.py", "script: the command runs instead"),
        ("command: ./a.sh\nmode: plain\nargs: [a]", "args: arguments belong to a script"),
        ("command: [a, 4]\nmode: plain", "command: a command is a list of words"),
        ("command: []\nmode: plain", "command: a command is a list of words"),
        ("command: ' '\nmode: plain", "command: a command is a list of words"),
    ],
)
def test_what_does_not_go_with_a_command_is_refused(text: str, says: str) -> None:
    found = told(text)
    assert any(says in one for one in found), found


def test_a_text_is_the_shells_and_words_are_not() -> None:
    assert job("a && b").words == ["/bin/sh", "-c", "a && b"]
    assert job(["./a.sh", "x y"]).words == ["./a.sh", "x y"]


def test_sagemaker_names_what_it_cannot_run() -> None:
    with pytest.raises(UnsupportedError) as refused:
        make_plan(job(["./a.sh"]), target="sagemaker")
    assert "command: target sagemaker starts only Python scripts" in str(refused.value)


@pytest.mark.parametrize("api", ["pytorchjob", "trainjob"])
def test_one_worker_of_a_node_is_the_command_itself_on_kubeflow(api: str) -> None:
    asked = job(["/bin/sh", "-c", SHOW, "x $(y)"], kubernetes={"kubeflow_api": api}, rendezvous={"port": 1})
    found = yaml.safe_load(make_plan(asked, target="kubeflow").files["job.yaml"])["spec"]
    container = found.get("trainer") or found["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    given = (
        {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "here"} if api == "trainjob" else {"RANK": "1", "MASTER_ADDR": "here"}
    )
    assert _printed(container["args"][0].replace("$$", "$"), given) == "1 of 2, 0 at here 1: x $(y)\n"


def test_one_worker_of_a_node_is_the_command_itself_on_slurm(tmp_path: Path) -> None:
    script = make_plan(job(["/bin/sh", "-c", SHOW, "x"], image=None, rendezvous={"port": 7}), target="hyperpod-slurm")
    env = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
    env |= {"HPX_JOB_DIR": str(tmp_path), "HPX_SOURCE_DIR": "/"}
    _printed(script.files["job.sbatch"], env, "sh", "node")
    assert (tmp_path / "0.0/logs/node1.log").read_text() == "1 of 2, 0 at n1 7: x\n"


@pytest.mark.parametrize("target", sorted(FILES))
def test_several_workers_are_started_by_the_launcher(target: str) -> None:
    text = make_plan(job("echo $RANK", workers_per_node=2), target=target).files[FILES[target]]
    assert "--no-python " in text
    assert "/bin/sh -c 'echo $$" in text
    found = import_file(text, FILES[target])
    assert (found.job, found.left_out) == (job("echo $RANK", workers_per_node=2), [])


def _printed(script: str, env: dict[str, str], *words: str) -> str:
    env = {"PATH": os.environ["PATH"]} | env
    return subprocess.run(["sh", "-c", script, *words], env=env, capture_output=True, text=True, check=True).stdout


FOREIGN = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: tiny}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              image: repo/tiny:1
              env: [{name: DATA, value: /data}]
              command: [bash, -c]
              args: ['for i in 1 2; do ./run.sh "$i" "$RANK" $(DATA) "$DATA"; done']
"""


def test_a_job_of_others_that_starts_no_python_is_carried_as_it_is() -> None:
    found = import_file(FOREIGN, "tiny.yaml")
    words = ["bash", "-c", 'for i in 1 2; do ./run.sh "$i" "$RANK" /data "$DATA"; done']
    assert (found.job.words, found.job.mode, found.job.workers_per_node, found.job.nodes) == (words, "plain", 1, 2)
    assert found.job.rendezvous.port == 23456
    assert not any("command" in one for one in found.left_out)
    text = make_plan(found.job, target="kubeflow").files["job.yaml"]
    assert "torchrun" not in text


@pytest.mark.parametrize("shell", [False, True])
def test_what_torchrun_starts_without_python_is_a_command(shell: bool) -> None:
    line = "torchrun --nproc_per_node=4 --no-python ./train --lr 1"
    text = f"command: [bash, -c, {line}]" if shell else f"command: [{', '.join(line.split())}]"
    before, _, _args = FOREIGN.partition("command: [bash, -c]")
    found = import_file(before + text + "\n", "tiny.yaml")
    assert (found.job.words, found.job.workers_per_node) == (["./train", "--lr", "1"], 4)
    assert not any("no-python" in one for one in found.left_out)


def test_what_srun_starts_without_python_is_a_command() -> None:
    pytest.importorskip("tree_sitter_bash")
    line = "srun torchrun --nproc_per_node=4 --no-python ./train --lr 1"
    found = import_file(f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH --job-name=a\n{line}\n", "a.sbatch")
    assert (found.job.words, found.job.mode, found.job.workers_per_node) == (["./train", "--lr", "1"], "plain", 4)
    assert not any("no-python" in one for one in found.left_out)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("value: /data", "valueFrom: {fieldRef: {fieldPath: metadata.name}}", "starts no Python file"),
        ("command: [bash, -c]", "tty: false", "the image's own program gets the arguments"),
        ("  pytorch", "  elasticPolicy: {minReplicas: 1, maxReplicas: 2}\n  pytorch", "starts no Python file"),
        ("./run.sh", "./run.sh ${STEPS}", "--set STEPS=VALUE"),
    ],
)
def test_what_would_not_be_the_same_is_refused(old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        import_file(FOREIGN.replace(old, new, 1), "tiny.yaml")
    assert says in str(refused.value)


@pytest.mark.slow
def test_a_command_runs_here_once_for_each_worker(place: LocalPlace, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(
        "name: raw\nmode: plain\nworkers_per_node: 2\ncommand: 'echo \"rank=$RANK of $WORLD_SIZE\"; test $RANK = 0'\n"
    )
    done = begin_hp_ext("create-job", "-f", spec, "--target", "local", "--wait").wait()
    assert done.code != 0
    assert "rank 1 (node 0) at step 0: rank=1 of 2 (exit code 1)" in done.stdout + done.stderr
    spec.write_text(spec.read_text().replace("test $RANK = 0", "true"))
    assert begin_hp_ext("create-job", "-f", spec, "--target", "local", "--wait").wait().code == 0
    printed = call_hp_ext("logs", "raw").stdout.splitlines()
    assert sorted(printed) == ["rank 0 | rank=0 of 2", "rank 1 | rank=1 of 2"]

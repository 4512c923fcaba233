"""The name of a job that does not exist: the error has the command that lists all jobs of its target."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import call_hp_ext as hp_ext
from kubernetes_api import serve
from local_place import LocalPlace

from hyperpod_ext.jobs.contract import records
from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.jobs.sagemaker.client import explain


@pytest.mark.parametrize(
    "words", ["status", "logs", "wait", "cancel", "top", "report", "delete", "exec -- true", "port-forward 80"]
)
def test_of_this_machine(place: LocalPlace, words: str) -> None:
    command, *more = words.split()
    done = hp_ext(command, "nobody", *more)
    assert (done.code, done.stderr) == (
        6,
        "error: there is no local job named nobody\nhint: `hp-ext list` lists all local jobs; "
        "for a job of another target, write its URL, such as hyperpod-slurm://CLUSTER/NAME\n",
    )


@pytest.mark.parametrize("words", ["delete gpt", "exec gpt -- true", "port-forward gpt 80"])
def test_a_local_job_has_no_objects_and_no_pods(place: LocalPlace, words: str) -> None:
    with local_store.locked("gpt"):
        local_store.create("gpt")
    done = hp_ext(*words.split())
    assert (done.code, "jobs of target local" in done.stderr) == (3, True)


def test_of_slurm(place: LocalPlace) -> None:
    records.remember("hyperpod-slurm", "tiny-gpt", {})
    assert hint(hp_ext("status", "tiny-gtp", "--target", "hyperpod-slurm").stderr) == (
        "did you mean `tiny-gpt`? `hp-ext list --target hyperpod-slurm` lists all"
    )


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
@pytest.mark.parametrize("command", ["status", "logs", "cancel", "describe", "delete"])
def test_of_kubernetes(target: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        done = hp_ext(command, "nobody", "--target", target)
    assert (done.code, hint(done.stderr)) == (6, f"`hp-ext list --target {target}` lists all"), done.stderr


@pytest.mark.parametrize(
    ("doing", "command"),
    [("DescribeTrainingJob a", "hp-ext list --target sagemaker"), ("DescribeCluster a", "hp-ext cluster list")],
)
def test_of_sagemaker(doing: str, command: str) -> None:
    error = explain(doing, {"Error": {"Code": "ResourceNotFound", "Message": "none"}})
    assert (error.exit_code, error.hint) == (6, f"`{command}` lists all")


def hint(stderr: str) -> str:
    return stderr.splitlines()[-1].removeprefix("hint: ")

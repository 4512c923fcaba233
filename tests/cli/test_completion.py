"""Shells complete the values of arguments and options."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from command import call_hp_ext
from hyperpod_ext.cli import hp_ext
from kubernetes_api import serve
from local_place import LocalPlace

from hyperpod_ext.jobs.contract.targets import TARGETS


def completed(line: str) -> list[str]:
    """Values that the shell offers for the last word of a line."""
    *words, incomplete = line.split(" ")
    found = BashComplete(hp_ext, {}, "hp-ext", "_HP_EXT_COMPLETE").get_completions(words, incomplete)
    return [one.value for one in found]


@pytest.fixture
def jobs(place: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of this machine."""
    monkeypatch.setattr("hyperpod_ext.jobs.local.target.list_jobs", lambda: [Named("bert"), Named("tiny-gpt")])


class Named:
    """A job of which only the name matters."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    "command",
    ["logs", "status", "wait", "cancel", "report", "top", "describe", "resize", "checkpoints list", "doctor --job"],
)
def test_names_of_jobs(jobs: None, command: str) -> None:
    assert completed(f"{command} ") == ["bert", "tiny-gpt"]
    assert completed(f"{command} t") == ["tiny-gpt"]


def test_a_missing_job_lists_the_names_of_all(jobs: None) -> None:
    assert "Missing argument 'NAME|URL'. Jobs: bert, tiny-gpt" in call_hp_ext("logs").stderr


def test_names_of_jobs_of_the_target(place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        path = "/apis/sagemaker.amazonaws.com/v1/namespaces/team-a/hyperpodpytorchjobs/gpt"
        api.put(path, {"metadata": {"name": "gpt"}, "spec": {}})
        assert completed("logs --target hyperpod-eks ") == ["gpt"]
    assert completed("logs --target hyperpod-eks ") == []  # the server is gone


def test_targets() -> None:
    assert completed("create-job --target ") == list(TARGETS)


@pytest.mark.parametrize(
    ("begun", "wanted"),
    [
        ("HPX00", {"HPX001", "HPX003"}),
        ("res", {"restart", "resources"}),
        ("restart.p", {"restart.policy", "restart.preload"}),
        ("cluster.v", {"cluster.vpc"}),
        ("HPW", {"HPWrapper"}),
        ("tier-", {"tier-1", "tier-4"}),
    ],
)
def test_names_to_explain(begun: str, wanted: set[str]) -> None:
    found = completed(f"explain {begun}")
    assert wanted <= set(found)
    assert all(name.startswith(begun) for name in found)
    for name in wanted:
        assert call_hp_ext("explain", name).code == 0

"""Every spec of the examples renders for every target that can run it; where a target cannot, it says why."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load, load_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.targets import TARGETS
from hyperpod_ext.jobs.plan import find_problems, make_plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def specs() -> list[Path]:
    return sorted(file for file in EXAMPLES.glob("*/*.yaml") if "\nscript:" in file.read_text())


def rules_against(spec: Path, target: str) -> set[str]:
    """What keeps the target from running the spec; empty if it renders."""
    beside = spec.parent / "cluster.yaml"
    cluster = load(ClusterConfig, beside) if beside.is_file() and spec.stem == "checkpointless" else None
    job = load_text(JobConfig, spec.read_text(), str(spec))  # some scripts are to be copied there first
    problems = find_problems(job, cluster, target)
    if not problems:
        assert all(make_plan(job, cluster, target, spec.parent).files.values())
    assert all(problem.hint for problem in problems), problems
    return {problem.rule or problem.path for problem in problems}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", specs(), ids=lambda spec: f"{spec.parent.name}/{spec.stem}")
def test_an_example_renders_or_is_refused_with_a_reason(spec: Path, target: str) -> None:
    rules_against(spec, target)


@pytest.mark.parametrize(
    ("spec", "target", "rules"),
    [
        ("01-local/job", "local", set()),
        ("01-local/job", "hyperpod-eks", {"chaos", "chaos.faults", "HPX131"}),
        ("04-hyperpod-eks/job", "hyperpod-eks", set()),
        ("04-hyperpod-eks/elastic", "hyperpod-eks", set()),
        ("04-hyperpod-eks/elastic", "kubeflow", {"HPX110"}),
        ("04-hyperpod-eks/checkpointless", "hyperpod-eks", set()),
        ("04-hyperpod-eks/checkpointless", "kubeflow", {"mode", "HPX131"}),
        ("04-hyperpod-eks/managed-tier", "hyperpod-eks", set()),
        ("04-hyperpod-eks/managed-tier", "hyperpod-slurm", {"mode"}),
        ("06-kubeflow/job", "kubeflow", set()),
        ("06-kubeflow/job", "hyperpod-eks", set()),
        ("06-kubeflow/job", "hyperpod-slurm", {"volumes.0"}),
        ("05-slurm/job", "hyperpod-slurm", set()),
        ("07-sagemaker/job", "sagemaker", set()),
        ("06-kubeflow/elastic", "kubeflow", set()),
        ("06-kubeflow/elastic", "hyperpod-eks", set()),
    ],
)
def test_which_target_runs_which_example(spec: str, target: str, rules: set[str]) -> None:
    assert rules_against(EXAMPLES / f"{spec}.yaml", target) == rules


def test_the_script_of_an_example_with_log_rules_prints_what_they_look_for() -> None:
    """`run.log` prints nothing: a rule about it would fault a healthy job for ever."""
    folder = EXAMPLES / "04-hyperpod-eks"
    job = load_text(JobConfig, (folder / "job.yaml").read_text())
    started = [sys.executable, str(folder / job.script), "--steps", "20"]
    done = subprocess.run(started, capture_output=True, text=True, check=True, timeout=120)
    for rule in job.log_rules:
        found = [match[1] for line in done.stdout.splitlines() if (match := re.match(rule.pattern, line))]
        assert len(found) == 2, done.stdout
        assert all(float(number) > 0 for number in found)


@pytest.mark.parametrize("example", ["05-slurm", "07-sagemaker", "09-spare"])
def test_examples_that_need_the_script_beside_them_have_the_same(
    example: str, golden: Callable[[Path, str], None]
) -> None:
    """Each target sends or mounts the folder of the spec, so that each has its copy; `make golden` renews them."""
    golden(EXAMPLES / example / "train.py", (EXAMPLES / "01-local" / "train.py").read_text())

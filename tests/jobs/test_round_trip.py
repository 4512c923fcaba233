"""Any accepted job renders; the render is what its operator takes; import gives the same job and bytes back."""

from __future__ import annotations

import pytest
import round_trip
from hypothesis import HealthCheck, given, settings
from job_configs import jobs

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.jobs.contract.targets import get_target
from hyperpod_ext.jobs.contract.yaml_text import read_all
from hyperpod_ext.jobs.kubernetes.schemas import check_yaml
from hyperpod_ext.jobs.plan import find_problems

QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much)
DROPS = {
    "kubeflow": {"spares": 0, "node_groups": ()},
    "hyperpod-eks": {},
}
"""What a target refuses for good: drawn jobs are made fit for it, so that few are thrown away."""


def mended(job: JobConfig, target: str) -> JobConfig | None:
    """`job`, or what of it the target can run; None where a rule still refuses it."""
    changes: dict[str, object] = dict(DROPS[target])
    if job.mode.startswith("aws-") and target == "kubeflow":
        changes["mode"] = "plain"
    if target == "kubeflow" and job.kubernetes.kubeflow_api == "trainjob":
        pytorch = {"kubeflow_api": "pytorchjob"}
        changes["kubernetes"] = job.kubernetes.model_copy(
            update=pytorch if job.elastic else {"host_network": False, "pull_policy": None}
        )
        changes["scheduling"] = job.scheduling.model_copy(update={"pod_priority_class": None})
        changes["timeouts"] = job.timeouts.model_copy(update={"keep_s": None})
    changed = job.model_copy(update=changes)
    return None if find_problems(changed, None, target) else changed


def goes_round(job: JobConfig, target: str) -> None:
    files = get_target(target).render(job, None)  # `mended` has asked the rules
    for name, text in files.items():
        check_yaml(name, text)
    round_trip.goes_round(job, target, dict(files))
    pod = read_all(files["job.yaml"])[0]["spec"]
    containers = (
        pod["trainer"]
        if "trainer" in pod
        else next(iter(pod.get("pytorchReplicaSpecs", {}).values() or pod["replicaSpecs"]))
    )
    environment = containers.get("env") or containers.get("template", {}).get("spec", {}).get("containers", [{}])[
        0
    ].get("env", [])
    rules = () if target == "hyperpod-eks" else job.log_rules  # there the operator tells them
    told = RuntimeConfig.of(job.model_copy(update={"log_rules": rules}))
    for entry in environment:
        if entry["name"] == "HPX_RUNTIME":
            assert RuntimeConfig.model_validate_json(entry["value"].replace("$$", "$")) == told


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
def test_any_job_goes_round(target: str) -> None:
    accepted = _run(target, examples=100)
    assert accepted >= 60


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
@pytest.mark.parametrize("jobs", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_jobs_of_each_target_go_round(target: str, jobs: int) -> None:
    accepted = _run(target, examples=jobs * 3 // 2)
    print(f"{target}: {accepted} jobs rendered, parsed and imported")
    assert accepted >= jobs


def _run(target: str, examples: int) -> int:
    accepted = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, database=None, derandomize=True)
    @given(job=jobs())
    def check(job: JobConfig) -> None:
        nonlocal accepted
        if (fit := mended(job, target)) is not None:
            goes_round(fit, target)
            accepted += 1

    check()
    return accepted

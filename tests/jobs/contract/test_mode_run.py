"""Mode `run` on every target: the same files as in mode `ours`, but for the mode that the runtime reads."""

from __future__ import annotations

import re

import pytest

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.plan import make_plan

OURS = {
    "name": "train",
    "script": "train.py",
    "nodes": 2,
    "workers_per_node": 4,
    "image": "1.dkr.ecr.us-west-2.amazonaws.com/t:1",
}
TARGETS = ["local", "hyperpod-eks", "kubeflow", "hyperpod-slurm", "sagemaker"]
EKS = {"kubernetes": {"launcher": "ours"}}
SAGEMAKER = {
    "resources": {"instance_type": "ml.p5.48xlarge"},
    "sagemaker": {"role": "arn:aws:iam::123456789012:role/r", "output": "s3://bucket/out", "region": "us-west-2"},
}


def rendered(target: str, mode: str) -> dict[str, str]:
    more = {"hyperpod-eks": EKS, "sagemaker": SAGEMAKER}.get(target, {})
    job = JobConfig.model_validate({**OURS, "mode": mode, "workers_per_node": 8, **more})
    return dict(make_plan(job, target=target).files)


@pytest.mark.parametrize("target", TARGETS)
def test_the_files_of_mode_run_are_those_of_mode_ours(target: str) -> None:
    ours, run = rendered(target, "ours"), rendered(target, "run")
    assert ours.keys() == run.keys()
    assert ours != run
    for name, text in run.items():
        text, before = (re.sub(r'",\s*"HPX_RUNTIME_\d+": "', "", one) for one in (text, ours[name]))
        # in the runtime's settings, and in the note that holds the spec
        plain = re.sub(r'\\*"mode\\*": ?\\*"run\\*",? ?|^ *mode: run\n', "", text, flags=re.MULTILINE)
        same = re.sub(r'\\*"mode\\*": ?\\*"ours\\*",? ?', "", before, flags=re.MULTILINE)
        assert plain == same, name


def test_hyperpodrun_is_refused() -> None:
    job = JobConfig.model_validate({**OURS, "mode": "run"})
    with pytest.raises(UnsupportedError, match="needs this project's agent, but"):
        make_plan(job, target="hyperpod-eks")


def test_hyperpodrun_does_not_replace_packages() -> None:
    job = JobConfig.model_validate({**OURS, "compat": "aws"})
    with pytest.raises(UnsupportedError, match="compat: has no effect under hyperpodrun"):
        make_plan(job, target="hyperpod-eks")
    job = job.model_validate({**OURS, "compat": "aws", "kubernetes": {"launcher": "ours"}})
    assert any(
        '"compat": "aws"' in text.replace("\\", "") for text in make_plan(job, target="hyperpod-eks").files.values()
    )

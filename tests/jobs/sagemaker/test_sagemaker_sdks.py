"""What sagemaker 2.x and 3.x send for our helper's arguments, beside the neutral request: equal, member by member."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sdk_venvs import python_of
from training_jobs import CASES, V2_ALONE, V3_ALONE

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.sagemaker.container import arguments_of
from hyperpod_ext.jobs.sagemaker.request import CODE_CHANNEL, Request, training_job_request
from hyperpod_ext.jobs.sagemaker.strict import check_request

pytestmark = [pytest.mark.sdks, pytest.mark.timeout(1800)]

ALL = CASES | V2_ALONE | V3_ALONE
TRAINER_SCRIPT = "/opt/ml/input/data/sm_drivers/sm_train.sh"
REFUSED_BY = {"v2": V3_ALONE, "v3": V2_ALONE}


@pytest.fixture(scope="module", params=["v2", "v3"])
def sdk(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, list[Any]]]:
    """Name of an SDK, and what it sent for each of ALL, `whole` and with `distribution` `alone`."""
    python = python_of(request.param)
    folder = tmp_path_factory.mktemp("source")
    (folder / "train.py").write_text("print('hello')\n")
    jobs = tmp_path_factory.mktemp("jobs") / "jobs.json"
    jobs.write_text(json.dumps(list(ALL.values())))
    script = root / "tests" / "support" / "capture_sdk.py"
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [str(python), str(script), str(jobs), str(folder)],
        env=env | {"PYTHONPATH": str(root)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def root() -> Path:
    return Path(__file__).resolve().parents[3]


def as_model_trainer_sends_it(request: Mapping[str, Any], job: JobConfig, job_name: str, inputs: str) -> Request:
    """Return `request` in the form of sagemaker 3.x: with its entry point, and the code as channels.

    Args:
        job_name: ModelTrainer's name, from `base_job_name` and the time.
        inputs: S3 prefix of its channels.
    """
    changed: Request = copy.deepcopy(dict(request))
    changed["TrainingJobName"] = job_name
    changed["HyperParameters"] = dict(arguments_of(job)) if job.mode == "plain" else {}
    changed["AlgorithmSpecification"] |= {
        "ContainerEntrypoint": ["/bin/bash"],
        "ContainerArguments": ["-c", f"chmod +x {TRAINER_SCRIPT} && {TRAINER_SCRIPT}"],
    }
    own = [
        {
            "ChannelName": name,
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": f"{inputs}/{name}",
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
            "InputMode": "File",
        }
        for name in (CODE_CHANNEL, "sm_drivers")
    ]
    given = [one for one in changed.get("InputDataConfig", []) if one["ChannelName"] != CODE_CHANNEL]
    changed["InputDataConfig"] = [*given, *own]
    changed.pop("ProfilerConfig", None)
    return changed


@pytest.mark.parametrize("name", ALL)
def test_the_sdk_sends_the_neutral_request(sdk: tuple[str, dict[str, list[Any]]], name: str) -> None:
    version, all_sent = sdk
    sent = all_sent["whole"][list(ALL).index(name)]
    spec = JobConfig.model_validate_json(json.dumps(ALL[name]))
    if name in REFUSED_BY[version]:
        assert (
            sent == {"v2": ["sagemaker.max_pending_s"], "v3": ["sagemaker.experiment", "sagemaker.profiler"]}[version]
        )
        return
    neutral = training_job_request(spec, "the-job-1")
    if version == "v3":
        job_name = sent["TrainingJobName"]
        inputs = f"s3://sdk-default-bucket/tiny-gpt/{job_name}/input"
        neutral = as_model_trainer_sends_it(neutral, spec, job_name, inputs)
    assert sent == neutral
    assert check_request("CreateTrainingJob", sent) == []


def test_the_secret_that_the_containers_read_is_created_once(sdk: tuple[str, dict[str, list[Any]]]) -> None:
    _, printed = sdk
    read = [one["Environment"].get("HPX_SECRET_ID") for one in printed["whole"] if "Environment" in one]
    assert sorted(printed["secrets"]) == sorted({name for name in read if name and not name.startswith("arn:")})


@pytest.mark.parametrize("name", ALL)
def test_distribution_alone_starts_torchrun_or_is_refused(sdk: tuple[str, dict[str, list[Any]]], name: str) -> None:
    version, all_sent = sdk
    sent = all_sent["alone"][list(ALL).index(name)]
    if ALL[name].get("mode") != "plain":
        assert sent == ["mode"]
    elif "node_groups" in ALL[name]:
        assert sent == ["node_groups"]
    elif version == "v2":
        assert sent["HyperParameters"]["sagemaker_torch_distributed_enabled"] == "true"
    else:
        assert "torchrun_driver.py" in sent["started by"]

"""The neutral CreateTrainingJob request, what of a spec it refuses, and the strict check of requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import CASES, V2_ALONE, V3_ALONE, job

from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.sagemaker.container import environment_of
from hyperpod_ext.jobs.sagemaker.estimator import distribution, estimator_kwargs, model_trainer_kwargs
from hyperpod_ext.jobs.sagemaker.request import submitted_as, training_job_request
from hyperpod_ext.jobs.sagemaker.source import pack
from hyperpod_ext.jobs.sagemaker.strict import check_request
from hyperpod_ext.runtime.container_sagemaker import join_parts, place_of

TARGET = "sagemaker"
FILE = "create_training_job.json"


def test_what_is_rendered_for_the_example_is_what_the_repository_shows(
    golden: Callable[[Path, str], None], root: Path
) -> None:
    example = root / "examples" / "07-sagemaker"
    given = load(JobConfig, example / "job.yaml")
    for name, text in make_plan(given, target=TARGET, source_dir=example).files.items():
        golden(example / "rendered" / TARGET / name, text)


@pytest.mark.parametrize("name", CASES | V2_ALONE | V3_ALONE)
def test_every_request_passes_the_strict_check(name: str) -> None:
    given = JobConfig.model_validate_json(json.dumps((CASES | V2_ALONE | V3_ALONE)[name]))
    request = json.loads(make_plan(given, target=TARGET).files[FILE])
    assert check_request("CreateTrainingJob", request) == []


def test_settings_that_are_too_long_for_a_variable_come_in_parts_and_are_whole_again() -> None:
    long = job(restart={"preload": ["a" * 60] * 20})
    variables = environment_of(long)
    assert len(variables) > 2
    assert all(len(value) <= 512 for value in variables.values())
    assert RuntimeConfig.model_validate_json(join_parts(variables)) == RuntimeConfig.of(long)


def test_every_node_sees_the_same_order_of_hosts() -> None:
    hosts = [f"algo-{number}" for number in (10, 2, 1)]
    assert place_of({"hosts": hosts, "current_host": "algo-2"}) == (["algo-1", "algo-2", "algo-10"], 1)


def test_only_the_name_and_what_follows_from_it_change_at_submission() -> None:
    isolated = job(sagemaker={"network_isolation": True})
    for given in (job(args=["a"]), isolated, job(sagemaker={"code": "s3://bucket/code.tar.gz"})):
        assert submitted_as(training_job_request(given), "later") == training_job_request(given, "later")


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no image": ("image", {"image": None}),
    "no role": ("sagemaker.role", {"sagemaker": {"role": None}}),
    "no output": ("sagemaker.output", {"sagemaker": {"output": None}}),
    "no type": ("resources.instance_type", {"resources": {}}),
    "retries": ("relaunch.max_times", {"relaunch": {"max_times": 31}}),
    "a month": ("timeouts.run_s", {"timeouts": {"run_s": 29 * 86400}}),
    "a long variable": ("env.LONG", {"env": {"LONG": "x" * 513}}),
    "many variables": ("env", {"env": {f"V{number}": "1" for number in range(100)}}),
    "a long argument": ("args.1", {"args": ["a", "x" * 257]}),
    "a line break": ("args.0", {"args": ["a\nb"]}),
    "arguments that are no pairs": ("args", {"mode": "plain", "args": ["train", "--fast"]}),
    "an option that comes twice": ("args", {"mode": "plain", "args": ["--data", "/a", "--data=/b"]}),
    "spot and a warm pool": ("sagemaker.keep_alive_s", {"sagemaker": {"spot": True, "keep_alive_s": 60}}),
    "a wait without spot": ("sagemaker.max_wait_s", {"sagemaker": {"max_wait_s": 100}}),
    "a wait that is too short": ("sagemaker.max_wait_s", {"sagemaker": {"spot": True, "max_wait_s": 100}}),
    "isolated S3": (
        "sagemaker.network_isolation",
        {
            "sagemaker": {"network_isolation": True},
            "checkpoint": {"tiers": [{"kind": "s3", "uri": "s3://bucket/a"}]},
        },
    ),
    "isolated nodes": ("sagemaker.network_isolation", {"nodes": 2, "sagemaker": {"network_isolation": True}}),
    "files nowhere": ("checkpoint.tiers.0", {"checkpoint": {"tiers": [{"kind": "file", "path": "/fsx"}]}}),
    "its own channel": (
        "sagemaker.channels.code",
        {"sagemaker": {"channels": {"code": {"uri": "s3://bucket/a", "kind": "s3"}}}},
    ),
    "AWS's modes": ("mode", {"mode": "aws-managed-tier"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sagemaker_cannot_do_is_refused_with_its_field(name: str) -> None:
    path, fields = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        make_plan(job(**fields), target=TARGET)
    assert path in [problem.path for problem in caught.value.problems]
    assert all(problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize("helper", [estimator_kwargs, model_trainer_kwargs])
def test_what_an_sdk_would_ignore_is_refused(helper: Callable[[JobConfig], dict[str, Any]]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        helper(job(sagemaker={"code": "s3://bucket/code.tar.gz"}))
    assert [problem.path for problem in caught.value.problems] == ["sagemaker.code"]


def test_distribution_alone_says_what_to_add_where_it_would_do_nothing() -> None:
    with pytest.raises(UnsupportedError) as caught:
        distribution(job(nodes=2))
    (problem,) = caught.value.problems
    assert (problem.path, "starts no agent" in problem.message) == ("mode", True)
    assert "pass **estimator_kwargs(job)" in (problem.hint or "")
    assert distribution(job(mode="plain", nodes=2)) == {"torch_distributed": {"enabled": True}}


def test_a_bound_on_waiting_that_pytorch_would_ignore_is_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        estimator_kwargs(job(sagemaker={"max_pending_s": 3600}))
    assert [problem.path for problem in caught.value.problems] == ["sagemaker.max_pending_s"]
    kwargs = model_trainer_kwargs(job(sagemaker={"max_pending_s": 3600}))
    assert kwargs["stopping_condition"]["max_pending_time_in_seconds"] == 3600


def test_what_the_platform_does_not_do_is_in_the_plan() -> None:
    said = "\n".join(make_plan(job(nodes=2, sagemaker={"spot": True}), target=TARGET).warnings)
    assert "does not replace a single node" in said
    assert "restarts from step 0" in said


WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "missing": ("RoleArn", "is missing", {"RoleArn": None}),
    "unknown": ("Enviroment", "did you mean `Environment`", {"Enviroment": {}}),
    "type": ("Environment.A", "not the number 1", {"Environment": {"A": 1}}),
    "enum": (
        "AlgorithmSpecification.TrainingInputMode",
        "did you mean `FastFile`",
        {"AlgorithmSpecification": {"TrainingInputMode": "FastFyle"}},
    ),
    "pattern": ("TrainingJobName", "does not match", {"TrainingJobName": "bad_name!"}),
    "largest": (
        "ResourceConfig.KeepAlivePeriodInSeconds",
        "at most 21600",
        {"ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1, "KeepAlivePeriodInSeconds": 30000}},
    ),
    "least": ("StoppingCondition.MaxRuntimeInSeconds", "at least 1", {"StoppingCondition": {"MaxRuntimeInSeconds": 0}}),
    "too many": ("Tags", "at most 50", {"Tags": [{"Key": str(number), "Value": ""} for number in range(51)]}),
    "a number for a truth": ("EnableNetworkIsolation", "not the number 1", {"EnableNetworkIsolation": 1}),
    "a truth for a number": (
        "StoppingCondition.MaxRuntimeInSeconds",
        "must be a whole number, not `true`",
        {"StoppingCondition": {"MaxRuntimeInSeconds": True}},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_strict_check_finds_what_botocore_lets_pass(name: str) -> None:
    path, said, change = WRONG[name]
    request = {key: value for key, value in (training_job_request(job()) | change).items() if value is not None}
    (problem,) = check_request("CreateTrainingJob", request)
    assert problem.path == path
    assert said in f"{problem.message} {problem.hint}"


def test_the_archive_of_the_code_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "__pycache__").mkdir()
    before = pack(tmp_path)
    (tmp_path / "__pycache__" / "train.pyc").write_text("x")
    (tmp_path / "train.py").touch()
    assert pack(tmp_path) == before
    (tmp_path / "more.py").write_text("")
    assert pack(tmp_path) != before

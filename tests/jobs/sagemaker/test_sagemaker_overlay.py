"""`overlay.sagemaker`: members added to the request, what is refused and where, and that import brings it back."""

from __future__ import annotations

import json

import pytest
from training_jobs import job

from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import find_problems, make_plan
from hyperpod_ext.jobs.sagemaker.estimator import estimator_kwargs
from hyperpod_ext.jobs.sagemaker.overlay import with_overlay
from hyperpod_ext.jobs.sagemaker.request import plain_request

pytest.importorskip("botocore")
TARGET = "sagemaker"
FILE = "create_training_job.json"
ADDED = {
    "DebugHookConfig": {"S3OutputPath": "s3://bucket/debug"},
    "Environment": {"MORE": "1"},
    "Tags": [{"Key": "cost", "Value": "42"}],
}


def told(request: dict[str, object]) -> list[tuple[str, str]]:
    given = job(overlay={"sagemaker": {"request": request}})
    return [(one.path, one.message) for one in find_problems(given, None, TARGET)]


def test_the_request_has_what_the_overlay_says_and_nothing_less() -> None:
    given = job(overlay={"sagemaker": {"request": ADDED}})
    plan = make_plan(given, target=TARGET)
    request, plain = json.loads(plan.files[FILE]), plain_request(given)
    assert request["DebugHookConfig"] == ADDED["DebugHookConfig"]
    assert request["Environment"] == plain["Environment"] | {"MORE": "1"}
    assert request["Tags"] == [*plain["Tags"], {"Key": "cost", "Value": "42"}]
    assert {name: value for name, value in request.items() if name not in ADDED} == {
        name: value for name, value in plain.items() if name not in ADDED
    }
    assert any(
        "overlay.sagemaker: DebugHookConfig.S3OutputPath, Environment.MORE, Tags" in one for one in plan.warnings
    )
    assert import_file(plan.files[FILE], FILE).job == given


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        ({"TrainingJobName": "other"}, "TrainingJobName"),
        ({"AlgorithmSpecification": {"ContainerEntrypoint": ["sh"]}}, "AlgorithmSpecification.ContainerEntrypoint"),
        ({"ResourceConfig": {"InstanceCount": 9}}, "ResourceConfig.InstanceCount"),
        ({"ResourceConfig": {"InstancePreferences": [{}]}}, "ResourceConfig.InstancePreferences"),
        ({"RoleArn": None}, "RoleArn"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 5}}, "StoppingCondition.MaxRuntimeInSeconds"),
        ({"Environment": {"RANK": "0"}}, "Environment.RANK"),
        ({"HyperParameters": {"sagemaker_mpi_enabled": "true"}}, "HyperParameters.sagemaker_mpi_enabled"),
        ({"DebugHookConfg": {}}, "DebugHookConfg"),
        ({"DebugHookConfig": {"LocalPath": "/opt/ml/x"}}, "DebugHookConfig"),
        ({"Tags": [{"Key": 1, "Value": "a"}]}, "Tags.0.Key"),
    ],
)
def test_what_would_break_the_job_or_is_no_member_is_refused_at_its_path(
    request_: dict[str, object], path: str
) -> None:
    assert [at for at, _message in told(request_)] == [f"overlay.sagemaker.request.{path}"]


def test_the_sdks_estimators_refuse_it_as_they_make_the_request_themselves() -> None:
    with pytest.raises(UnsupportedError, match=r"overlay\.sagemaker"):
        estimator_kwargs(job(overlay={"sagemaker": {"request": ADDED}}))


def test_members_without_a_field_are_imported_into_it() -> None:
    request = with_overlay(plain_request(job(mode="plain")), {"DebugHookConfig": {"S3OutputPath": "s3://bucket/debug"}})
    request["Environment"].pop("HPX_SPEC", None)
    found = import_file(json.dumps(request), FILE)
    assert found.job.overlay.sagemaker.request == {"DebugHookConfig": {"S3OutputPath": "s3://bucket/debug"}}
    assert not [one for one in found.left_out if "DebugHook" in one]

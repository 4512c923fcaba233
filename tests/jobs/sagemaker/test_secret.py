"""The secret that a job's containers read: created by every way to submit the job, and kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aws_stand_in import AwsStandIn, Failure, aws_here
from training_jobs import S3_TIER, job

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConflictError, NotFoundError
from hyperpod_ext.jobs.sagemaker import client as client_module
from hyperpod_ext.jobs.sagemaker.estimator import estimator_kwargs, model_trainer_kwargs
from hyperpod_ext.jobs.sagemaker.secret import ensure_secret

HELPERS: list[Callable[[JobConfig], Any]] = [estimator_kwargs, model_trainer_kwargs]
NAMES = ["2.x", "3.x"]
ARN = "arn:aws:secretsmanager:us-west-2:123456789012:secret:mine-AbCdEf"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsStandIn]:
    monkeypatch.setattr(client_module, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(client_module, "_LONGEST_DELAY_S", 0.001)
    with aws_here(monkeypatch) as state:
        yield state


@pytest.mark.parametrize("helper", HELPERS, ids=NAMES)
def test_the_arguments_of_the_sdk_name_a_secret_that_exists(aws: AwsStandIn, helper: Callable[..., Any]) -> None:
    arguments = helper(job(nodes=2))
    created = dict(aws.secrets)
    assert list(created) == [arguments["environment"]["HPX_SECRET_ID"]] == ["hyperpod_ext/tiny-gpt"]
    helper(job(checkpoint=S3_TIER))
    assert aws.secrets == created, "checkpoints are signed with it"


@pytest.mark.parametrize("helper", HELPERS, ids=NAMES)
def test_a_job_that_needs_no_secret_asks_nobody(aws: AwsStandIn, helper: Callable[..., Any]) -> None:
    helper(job())
    assert aws.calls == []


@pytest.mark.parametrize("helper", HELPERS, ids=NAMES)
def test_without_access_the_command_that_creates_it_is_in_a_warning(
    aws: AwsStandIn, helper: Callable[..., Any]
) -> None:
    aws.failures["DescribeSecret"] = Failure(400, "AccessDeniedException")
    with pytest.warns(
        UserWarning, match="aws secretsmanager create-secret --region us-west-2 --name hyperpod_ext/tiny"
    ):
        helper(job(nodes=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        helper(job())


def test_an_arn_that_leads_nowhere_and_a_secret_that_is_being_deleted_are_refused(aws: AwsStandIn) -> None:
    with pytest.raises(NotFoundError, match=r"sagemaker\.secret"):
        ensure_secret(job({"secret": ARN}, nodes=2))
    aws.secrets["hyperpod_ext/tiny-gpt"] = "x"
    aws.on_DescribeSecret = lambda _request: {"Name": "x", "DeletedDate": 1.8e9}  # type: ignore[method-assign]
    with pytest.raises(ConflictError, match="scheduled for deletion") as caught:
        ensure_secret(job(nodes=2))
    assert "restore-secret" in caught.value.hint

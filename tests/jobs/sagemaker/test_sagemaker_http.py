"""Training jobs submitted over HTTP: to moto, and to a stand-in for what moto does not do."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import moto_server
import pytest
from aws_stand_in import AwsStandIn, Failure, aws_stand_in
from command import HP_EXT, Done
from training_jobs import S3_TIER, spec

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

TARGET = ("--target", "sagemaker")
URL = "sagemaker://us-west-2/tiny-gpt"


@dataclass
class Place:
    folder: Path
    url: str
    home: str = "home"
    """What this machine remembers."""
    region: str = ""
    credentials: dict[str, str] = field(
        default_factory=lambda: {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    )

    def write_job(self, **fields: Any) -> None:
        (self.folder / "train.py").write_text("print('hello')\n")
        (self.folder / "job.yaml").write_text(json.dumps(spec(**fields)))

    def hp_ext(self, *arguments: str) -> Done:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        env = clean | self.credentials | {"AWS_ENDPOINT_URL": self.url, "HPX_HOME": str(self.folder / self.home)}
        env |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nowhere", "HOME": str(self.folder)}
        if self.region:
            env["AWS_REGION"] = self.region
        done = subprocess.run(
            [HP_EXT, *arguments], env=env, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def create(self, *more: str) -> Done:
        return self.hp_ext("create-job", "-f", "job.yaml", *TARGET, "-o", "json", *more)


@pytest.fixture
def aws() -> Iterator[AwsStandIn]:
    with aws_stand_in() as state:
        yield state


@pytest.fixture
def place(tmp_path: Path, aws: AwsStandIn) -> Place:
    return Place(tmp_path, aws.url)


def test_a_job_is_submitted_to_moto_with_its_code_and_its_secret(tmp_path: Path) -> None:
    import boto3

    place = Place(tmp_path, moto_server.endpoint())
    ours = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-west-2"}
    s3 = boto3.client("s3", endpoint_url=place.url, **ours)
    s3.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    place.write_job(nodes=2, checkpoint=S3_TIER, args=["--steps", "4"])
    submitted = place.create()
    assert (submitted.code, submitted.json["handle"]) == (0, URL), submitted.stderr

    (job,) = boto3.client("sagemaker", endpoint_url=place.url, **ours).list_training_jobs()["TrainingJobSummaries"]
    described = boto3.client("sagemaker", endpoint_url=place.url, **ours).describe_training_job(
        TrainingJobName=job["TrainingJobName"]
    )
    assert described["AlgorithmSpecification"]["ContainerArguments"] == ["--steps", "4"]
    where = json.loads(described["HyperParameters"]["sagemaker_submit_directory"])
    key = where.removeprefix("s3://bucket/")
    body = s3.get_object(Bucket="bucket", Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert "train.py" in archive.getnames()
    manager = boto3.client("secretsmanager", endpoint_url=place.url, **ours)
    secret = manager.get_secret_value(SecretId="hyperpod_ext/tiny-gpt")["SecretString"]
    assert len(secret) == 64
    assert secret not in json.dumps(described, default=str)

    shown = place.hp_ext("status", URL, "-o", "json").json
    assert shown["state"] == "succeeded"  # moto's jobs have always ended
    assert place.create("--wait").code == 0
    assert manager.get_secret_value(SecretId="hyperpod_ext/tiny-gpt")["SecretString"] == secret


def test_jobs_of_other_machines_are_listed_and_found_by_their_tag(place: Place, aws: AwsStandIn) -> None:
    for name in ("a", "b", "tiny-gpt", "a"):
        place.write_job(name=name)
        assert place.create().code == 0
        newest = list(aws.jobs)[-1]
        aws.jobs[newest]["TrainingJobStatus"] = "Completed"  # so that the name may be used again
        aws.jobs[f"{newest}-{len(aws.jobs)}"] = aws.jobs.pop(newest) | {"TrainingJobName": f"{newest}-{len(aws.jobs)}"}
    aws.jobs["not-ours"] = {"TrainingJobName": "not-ours", "TrainingJobStatus": "InProgress", "CreationTime": 1.8e9}
    aws.jobs[last := list(aws.jobs)[-2]]["TrainingJobStatus"] = "InProgress"
    elsewhere = replace(place, home="elsewhere/home", region="us-west-2")
    listed = elsewhere.hp_ext("list", *TARGET, "-o", "json").json
    assert [(one["name"], one["state"]) for one in listed] == [
        ("a", "running"),
        ("b", "succeeded"),
        ("tiny-gpt", "succeeded"),
    ]
    by_name = elsewhere.hp_ext("status", "a", *TARGET, "-o", "json")
    assert by_name.json["handle"] == listed[0]["handle"] == "sagemaker://us-west-2/a"
    shown = elsewhere.hp_ext("cancel", listed[0]["handle"], "-o", "json")
    assert (shown.json["state"], aws.jobs[last]["TrainingJobStatus"]) == ("cancelled", "Stopped"), shown.stderr
    aws.failures["Search"] = Failure(400, "AccessDeniedException")
    refused = elsewhere.hp_ext("list", *TARGET)
    assert (refused.code, refused.stdout) == (4, "")
    assert len(place.hp_ext("list", *TARGET, "-o", "json").json) == 3


def test_a_running_job_is_followed_refused_a_second_time_and_cancelled(place: Place, aws: AwsStandIn) -> None:
    place.write_job()
    assert place.create().code == 0
    (name,) = aws.jobs
    assert name.startswith("tiny-gpt-")
    aws.lines[f"{name}/algo-1-1700000000"] = ["rank 0 | one", "rank 1 | two", "rank 0 | three"]
    aws.lines[f"{name}/algo-2-1700000000"] = ["rank 3 | four"]
    printed = place.hp_ext("logs", URL).stdout.splitlines()
    assert (printed[0], printed[-1], len(printed)) == ("algo-1 | rank 0 | one", "algo-2 | rank 3 | four", 4)
    by_name = place.hp_ext("logs", "tiny-gpt", *TARGET, "--rank", "0")  # its region is known of the submission
    assert len(by_name.stdout.splitlines()) == 2, by_name
    second = place.create()
    assert (second.code, "is running" in second.stderr) == (5, True)
    cancelled = place.hp_ext("cancel", URL, "-o", "json").json
    assert cancelled["state"] == "cancelled"
    assert (aws.count("StopTrainingJob"), aws.count("CreateTrainingJob")) == (1, 1)
    assert place.create().code == 0  # the name is free again: SageMaker's own has the time in it


def test_a_job_that_fails_says_why_and_exits_with_seven(place: Place, aws: AwsStandIn) -> None:
    place.write_job()
    assert place.create().code == 0
    (job,) = aws.jobs.values()
    job |= {"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: no such luck"}
    status = place.hp_ext("status", URL, "-o", "json").json
    assert (status["state"], status["error"]["message"]) == ("failed", "AlgorithmError: no such luck")
    aws.jobs.clear()
    aws.on_CreateTrainingJob = lambda request: aws.jobs.update({request["TrainingJobName"]: request | job}) or {}  # type: ignore[method-assign]
    waited = place.create("--wait")
    assert (waited.code, "no such luck" in waited.stderr) == (7, True)


FAILURES = {
    "throttled": (Failure(400, "ThrottlingException", times=2), 0, 3),
    "too many": (Failure(429, "TooManyRequestsException", times=1), 0, 2),
    "broken for a moment": (Failure(500, "InternalFailure", times=2), 0, 3),
    "denied": (Failure(400, "AccessDeniedException"), 4, 1),
    "forbidden": (Failure(403, "Forbidden"), 4, 1),
    "expired": (Failure(400, "ExpiredTokenException"), 4, 1),
    "in use": (Failure(400, "ResourceInUse"), 5, 1),
    "quota": (Failure(400, "ResourceLimitExceeded"), 4, 1),
    "refused": (Failure(400, "ValidationException"), 3, 1),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_the_service_answers_has_its_exit_code_and_is_tried_again_where_that_is_right(
    place: Place, aws: AwsStandIn, name: str
) -> None:
    failure, code, tries = FAILURES[name]
    aws.failures["CreateTrainingJob"] = Failure(failure.status, failure.code, times=failure.times)
    place.write_job()
    done = place.create()
    assert (done.code, aws.count("CreateTrainingJob")) == (code, tries), done.stderr
    if code:
        assert done.json["error"]["exit_code"] == code
        assert "on order" in done.stderr


def test_a_request_that_the_model_refuses_is_not_sent(place: Place, aws: AwsStandIn) -> None:
    place.write_job(resources={"instance_type": "ml.p9.huge"})
    done = place.create()
    assert (done.code, aws.calls) == (3, [])
    assert "ResourceConfig.InstanceType" in done.stderr


def test_no_network_no_credentials_and_no_job_are_said(place: Place) -> None:
    place.write_job()
    assert place.hp_ext("status", "sagemaker://us-west-2/other").code == 6
    place.credentials = {}
    nobody = place.create()
    assert (nobody.code, "credentials" in nobody.stderr) == (4, True)
    place.credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    place.url = "http://127.0.0.1:9"
    away = place.create()
    assert (away.code, "network" in away.stderr) == (4, True)

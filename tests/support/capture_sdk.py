"""Runs inside an environment with one of SageMaker's SDKs: what CreateTrainingJob request does it send?

`python capture_sdk.py JOBS.json FOLDER` prints a list: the request of each job, or what its helper
refused. Nothing leaves this machine: botocore's own events answer each call before it is sent.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ |= {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-west-2",
    "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "HTTPS_PROXY": "http://127.0.0.1:9",  # nobody is there: the SDKs' telemetry stays here, too
    "HTTP_PROXY": "http://127.0.0.1:9",
}

from importlib.metadata import version

import boto3

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.submit.sagemaker import estimator

BUCKET = "sdk-default-bucket"
captured: list[dict[str, Any]] = []


class Answer:
    status_code = 200


def answer(params: Any, model: Any, **_more: Any) -> Any:
    """Instead of the network."""
    if model.name == "CreateTrainingJob":
        return Answer(), {"TrainingJobArn": "arn:aws:sagemaker:us-west-2:123456789012:training-job/x"}
    if model.name == "DescribeTrainingJob":
        return Answer(), {"TrainingJobName": "x", "TrainingJobStatus": "Completed"}
    if model.name == "GetRole":
        return Answer(), {"Role": {"Arn": f"arn:aws:iam::123456789012:role/{params['body']['RoleName']}"}}
    if model.name == "ListBuckets":
        return Answer(), {"Buckets": [{"Name": BUCKET, "CreationDate": datetime.now(UTC)}]}
    if model.name == "GetCallerIdentity":
        return Answer(), {"Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/x"}
    return Answer(), {"ResponseMetadata": {"HTTPStatusCode": 200}, "Contents": []}


def capture(params: Any, model: Any, **_more: Any) -> None:
    captured.append(json.loads(json.dumps(params)))


def boto_session() -> Any:
    session = boto3.Session(region_name="us-west-2")
    session.events.register("provide-client-params.sagemaker.CreateTrainingJob", capture)
    session.events.register("before-call", answer)
    return session


def with_v2(job: JobConfig, folder: str) -> None:
    import sagemaker
    from sagemaker.pytorch import PyTorch

    session = sagemaker.Session(boto_session(), default_bucket=BUCKET)
    arguments = estimator.estimator_kwargs(job)
    made = PyTorch(
        entry_point=job.script,
        source_dir=folder,
        distribution=estimator.distribution(job),
        sagemaker_session=session,
        **arguments,
    )
    made.fit(**estimator.fit_kwargs(job), wait=False, job_name="the-job-1")


def with_v3(job: JobConfig, folder: str) -> None:
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.train import ModelTrainer

    session = Session(boto_session(), default_bucket=BUCKET)
    arguments = estimator.model_trainer_kwargs(job, source_dir=folder)
    trainer = estimator.model_trainer(ModelTrainer(sagemaker_session=session, **arguments), job)
    trainer.train(wait=False, logs=False)


if __name__ == "__main__":
    send = with_v2 if version("sagemaker").startswith("2.") else with_v3
    found: list[Any] = []
    for given in json.loads(Path(sys.argv[1]).read_text()):
        captured.clear()
        try:
            send(JobConfig.model_validate_json(json.dumps(given)), sys.argv[2])
        except UnsupportedError as error:
            found.append([problem.path for problem in error.problems])
            continue
        (request,) = captured
        found.append(request)
    print("\n" + json.dumps(found))

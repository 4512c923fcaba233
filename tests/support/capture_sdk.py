"""Runs inside an environment with one of SageMaker's SDKs: what CreateTrainingJob request does it send?

`python capture_sdk.py JOBS.json FOLDER` prints the names of the secrets that were created, and two lists: for each job
the request, or what its helper refused; `whole` with all that the helpers give, `alone` with `distribution` and none of
it; there 3.x's upload that starts the script is "started by". Nothing leaves this machine: botocore's own events answer
each call before it is sent.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
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
from botocore.exceptions import ClientError

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.sagemaker import estimator

BUCKET = "sdk-default-bucket"
captured: list[dict[str, Any]] = []
uploaded: list[str] = []
secrets: list[str] = []


class Answer:
    status_code = 200


def answer(params: Any, model: Any, **_more: Any) -> Any:
    """Instead of the network."""
    if model.name == "PutObject" and params["url_path"].endswith("/sm_train.sh"):
        uploaded.append(params["body"].read().decode())
    if model.name == "CreateTrainingJob":
        return Answer(), {"TrainingJobArn": "arn:aws:sagemaker:us-west-2:123456789012:training-job/x"}
    if model.name == "CreateSecret":
        secrets.append(str(json.loads(params["body"])["Name"]))
        return Answer(), {"Name": secrets[-1]}
    if model.name == "DescribeSecret" and json.loads(params["body"])["SecretId"] not in secrets:
        missing = {"Error": {"Code": "ResourceNotFoundException", "Message": "Secrets Manager can't find it."}}
        raise ClientError(missing, model.name)
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
    arguments = estimator.estimator_kwargs(job, boto_session())
    made = PyTorch(
        entry_point=job.script,
        source_dir=folder,
        sagemaker_session=session,
        **arguments,
    )
    made.fit(**estimator.fit_kwargs(job), wait=False, job_name="the-job-1")


def with_v3(job: JobConfig, folder: str) -> None:
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.train import ModelTrainer

    session = Session(boto_session(), default_bucket=BUCKET)
    arguments = estimator.model_trainer_kwargs(job, source_dir=folder, boto_session=boto_session())
    trainer = estimator.model_trainer(ModelTrainer(sagemaker_session=session, **arguments), job)
    trainer.train(wait=False, logs=False)


def alone_with_v2(job: JobConfig, folder: str) -> None:
    import sagemaker
    from sagemaker.pytorch import PyTorch

    made = PyTorch(
        entry_point=job.script,
        source_dir=folder,
        distribution=estimator.distribution(job),
        role=job.sagemaker.role,
        image_uri=job.image,
        instance_count=2,
        instance_type="ml.p5.48xlarge",
        sagemaker_session=sagemaker.Session(boto_session(), default_bucket=BUCKET),
    )
    made.fit(wait=False, job_name="the-job-1")


def alone_with_v3(job: JobConfig, folder: str) -> None:
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.train import ModelTrainer

    trainer = ModelTrainer(
        sagemaker_session=Session(boto_session(), default_bucket=BUCKET),
        role=job.sagemaker.role,
        training_image=job.image,
        source_code={"source_dir": folder, "entry_script": job.script},
        distributed=estimator.distributed(job),
        compute={"instance_count": 2, "instance_type": "ml.p5.48xlarge"},
    )
    trainer.train(wait=False, logs=False)
    captured[0]["started by"] = uploaded[-1]


def sent(send: Callable[[JobConfig, str], None], job: JobConfig, folder: str) -> Any:
    captured.clear()
    try:
        send(job, folder)
    except UnsupportedError as error:
        return [problem.path for problem in error.problems]
    (request,) = captured
    return request


if __name__ == "__main__":
    senders = (with_v2, alone_with_v2) if version("sagemaker").startswith("2.") else (with_v3, alone_with_v3)
    jobs = [JobConfig.model_validate_json(json.dumps(one)) for one in json.loads(Path(sys.argv[1]).read_text())]
    whole, alone = ([sent(send, job, sys.argv[2]) for job in jobs] for send in senders)
    print("\n" + json.dumps({"whole": whole, "alone": alone, "secrets": secrets}))

"""The job's secret in Secrets Manager, which authenticates nodes and signs checkpoints."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConflictError, NotFoundError
from hyperpod_ext.jobs.sagemaker.client import call, client
from hyperpod_ext.jobs.sagemaker.container import needs_secret, secret_id


def ensure_secret(job: JobConfig, boto_session: Any = None) -> None:
    """Create the secret that the job's containers read, if the job needs one. An existing secret is not changed.

    Args:
        boto_session: a `boto3.Session`, with which the secret is created; None uses the identity and region of this
            environment.

    Raises:
        NotFoundError: `sagemaker.secret` is an ARN of a secret that does not exist.
        ConflictError: the secret is about to be deleted.
        UnreachableError: Secrets Manager cannot be reached, or refuses this identity.
    """
    if not needs_secret(job):
        return
    name, region = secret_id(job), job.sagemaker.region
    make = client if boto_session is None else boto_session.client
    service = make("secretsmanager", region)
    try:
        found = call(f"DescribeSecret {name}", lambda: service.describe_secret(SecretId=name))
    except NotFoundError as error:
        if name.startswith("arn:"):
            hint = "create the secret, or remove sagemaker.secret: the job then gets a new secret"
            raise NotFoundError(f"sagemaker.secret: {error.message}", hint=hint) from None
        text = secrets.token_hex(32)
        with suppress(ConflictError):  # another submission, or an attempt without response, has created the secret
            call(f"CreateSecret {name}", lambda: service.create_secret(Name=name, SecretString=text))
        return
    if found.get("DeletedDate"):
        hint = f"aws secretsmanager restore-secret --secret-id {name}"
        raise ConflictError(f"the job's secret {name} is scheduled for deletion", hint=hint)


def how_to_create(job: JobConfig) -> str:
    """Return the AWS CLI command that creates the job's secret."""
    region = f" --region {job.sagemaker.region}" if job.sagemaker.region else ""
    return f'aws secretsmanager create-secret{region} --name {secret_id(job)} --secret-string "$(openssl rand -hex 32)"'

"""Section of a job's spec for the checkpoint tier in Amazon S3."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from hyperpod_ext.config.checkpoint.tier import DurableTier


def _uri_may_be_the_clusters(schema: dict[str, Any]) -> None:
    schema["required"].remove("uri")
    if not schema["required"]:
        del schema["required"]


class S3Tier(DurableTier):
    """A prefix in an S3 bucket. Checkpoints survive the loss of the whole cluster."""

    model_config = ConfigDict(json_schema_extra=_uri_may_be_the_clusters)

    schemes = ("s3",)
    store = "hyperpod_ext.runtime.storage.s3:S3Store"
    distance = 7
    kind: Literal["s3"] = "s3"
    uri: Annotated[
        str,
        Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$", examples=["s3://bucket/prefix"]),
    ]
    """Bucket and prefix, `s3://bucket/prefix`. Checkpoints are stored under `prefix/NAME-OF-THE-JOB/`. Default: the
    checkpoint bucket of the job's `cluster`. Required if the job has no `cluster`."""

    @property
    def place(self) -> str:
        return self.uri

"""Target `sagemaker`: runs a job as a SageMaker training job, created with one CreateTrainingJob request."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hyperpod_ext.catalog.labels import JOB as TAG
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import (
    ConfigError,
    ConflictError,
    HyperpodExtError,
    NotFoundError,
    UnknownOutcomeError,
    UnreachableError,
)
from hyperpod_ext.jobs.contract import records
from hyperpod_ext.jobs.contract.capabilities import Capabilities
from hyperpod_ext.jobs.contract.differences import differences
from hyperpod_ext.jobs.contract.handle import ANYWHERE, JobHandle
from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
from hyperpod_ext.jobs.job_files.job_report import TrainingJobRecord
from hyperpod_ext.jobs.local.result import EMPTY_REPORT
from hyperpod_ext.jobs.sagemaker.client import call, client
from hyperpod_ext.jobs.sagemaker.job_logs import JobLogs
from hyperpod_ext.jobs.sagemaker.problems import problems as problems
from hyperpod_ext.jobs.sagemaker.problems import warnings as warnings
from hyperpod_ext.jobs.sagemaker.request import code_uri, submitted_as, training_job_request
from hyperpod_ext.jobs.sagemaker.secret import ensure_secret

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.jobs.contract.plan_type import Plan
    from hyperpod_ext.jobs.contract.targets import Target

NAME = "sagemaker"
PARTS: dict[str, str] = {}
INSTEAD = {
    "leftovers": "SageMaker keeps training jobs for ever; their files are below sagemaker.output",
    "move": "a training job keeps its first instances, and has no spares",
    "ports": "with sagemaker.remote_debug, AWS Systems Manager's Session Manager can forward ports",
    "resize": "a training job keeps its first instances: submit the job again with other `nodes`; the job "
    "continues from its newest durable checkpoint",
    "shell": "with sagemaker.remote_debug, use `aws ssm start-session --target sagemaker-training-job:NAME_algo-1`",
}
FILE = "create_training_job.json"
_ASK_EVERY_S = 5.0
_CANCEL_TIMEOUT_S = 300.0
_STATES = {
    "InProgress": "running",
    "Stopping": "running",
    "Deleting": "running",
    "Completed": "succeeded",
    "Failed": "failed",
    "Stopped": "cancelled",
}
_LONGEST_NAME = 63
_MOST_PAGES = 10
"""Maximum number of pages that a search reads. Each page has a hundred jobs, newest first. The search is limited
because SageMaker never deletes jobs."""


def capabilities() -> Capabilities:
    """Return the capabilities of target `sagemaker`, which cannot replace nodes of a running job."""
    return Capabilities(
        no_node_disk="the disks of a training job's nodes are deleted with the job",
        image=True,
        process_restart=True,
        reads=frozenset(
            {
                "resources",
                "node_groups",
                "relaunch",
                "timeouts",
                "labels",
                "sagemaker",
                "metrics",
                "network",
                "log_rules",
            }
        ),
    )


def render(job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
    """Return the file with the request as JSON.

    `submit` appends the time to the job's name in the request, because SageMaker does not allow a name to be reused.
    """
    del cluster  # SageMaker provides the nodes, so a cluster is not needed
    return {FILE: json.dumps(training_job_request(job), indent=2) + "\n"}


def submit(plan: Plan) -> JobHandle:
    """Create the job's secret, upload its code, and send its request.

    Raises:
        ConfigError: SageMaker refuses the request.
        ConflictError: the newest job with the name in the spec has not ended.
        UnreachableError: SageMaker cannot be reached, or denies access.
    """
    region = plan.job.sagemaker.region
    job_name = f"{plan.name[: _LONGEST_NAME - 16].rstrip('-')}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    request = submitted_as(json.loads(plan.files[FILE]), job_name)
    service = client("sagemaker", region)
    if plan.name in records.names(NAME):
        _refuse_a_second(plan.name)
    ensure_secret(plan.job)
    if plan.job.sagemaker.code is None:
        _put_code(plan, code_uri(request["OutputDataConfig"]["S3OutputPath"], job_name), region)
    place = region or str(service.meta.region_name)
    record = {"job_name": job_name, "region": place, "world_size": plan.world_size}
    try:
        _create(service, request)
    except UnknownOutcomeError:
        records.remember(NAME, plan.name, record)  # this job may exist, so let the next submission check it
        raise
    records.remember(NAME, plan.name, record)
    return JobHandle(NAME, place, plan.name)


def _create(service: Any, request: Mapping[str, Any]) -> None:
    name = str(request["TrainingJobName"])

    def existing() -> Mapping[str, Any]:
        """Return the training job that an earlier attempt created, if the response of the attempt was lost.

        Members of the request that DescribeTrainingJob does not return are not compared with the training job.
        """
        doing = f"DescribeTrainingJob {name}"
        found: Mapping[str, Any] = call(doing, lambda: service.describe_training_job(TrainingJobName=name))
        asked = {member: value for member, value in request.items() if member != "Tags"}
        if other := [str(one) for one in differences(asked, found) if one.there is not None]:
            hint = "this is another job: submit again, which chooses another name"
            raise ConflictError(f"a training job {name} exists and differs: {'; '.join(other)}", hint=hint)
        return found

    call(f"CreateTrainingJob {name}", lambda: service.create_training_job(**request), existing=existing)


def list_jobs() -> list[JobStatus]:
    """Return the status of the newest submission of every job name.

    Lists jobs of hp-ext in the region of the environment, which have a tag, and jobs submitted from this machine. The
    state of a job is `unknown` if SageMaker cannot be reached.

    Raises:
        UnreachableError: SageMaker cannot be reached, and this machine has submitted no jobs.
    """
    known = {
        JobHandle(NAME, str(records.recall(NAME, name, TrainingJobRecord)["region"]), name)
        for name in records.names(NAME)
    }
    found: dict[JobHandle, JobStatus] = {}
    try:
        service = client("sagemaker", None)
        for name, described in _newest_by_name(service).items():
            handle = JobHandle(NAME, str(service.meta.region_name), name)
            found[handle] = _status(handle, described)
    except UnreachableError:
        if not known:
            raise
    for handle in known - found.keys():
        try:
            found[handle] = status(handle)
        except (UnreachableError, NotFoundError) as error:
            found[handle] = JobStatus(name=handle.name, handle=str(handle), state="unknown", error=error.to_json())
    return sorted(found.values(), key=lambda one: (one.name, one.handle))


def status(handle: JobHandle) -> JobStatus:
    """Return the status of the newest submission with the handle's name, or of the training job with this name."""
    handle = _with_region(handle)
    return _status(handle, _describe(handle))


def watch(handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
    """Yield an update every few seconds until the job has ended."""
    handle = _with_region(handle)
    printed = JobLogs(handle.place, _job_name(handle))
    while True:
        now = status(handle)
        yield StatusUpdate(now, (), tuple(printed.new_lines()) if with_lines else ())
        if now.ended:
            return
        time.sleep(_ASK_EVERY_S)


def logs(handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the job's output from CloudWatch, line by line.

    Args:
        rank: yield only lines of this rank; None yields lines of all ranks.
        follow: wait for new lines until the job has ended.
    """
    handle = _with_region(handle)
    printed = JobLogs(handle.place, _job_name(handle))
    of_rank = None if rank is None else f"rank {rank} | "
    while True:
        ended = not follow or status(handle).ended  # query the state before reading lines, so that no line is missed
        yield from (line for line in printed.new_lines() if of_rank is None or of_rank in line)
        if ended:
            return
        time.sleep(_ASK_EVERY_S)


def cancel(handle: JobHandle) -> JobStatus:
    """Call StopTrainingJob, then wait until the job has stopped. Nothing is sent if the job has already ended."""
    handle = _with_region(handle)
    service, job_name = client("sagemaker", handle.place), _job_name(handle)
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S
    asked = False
    while not (now := status(handle)).ended:
        if not asked:
            call(f"StopTrainingJob {job_name}", lambda: service.stop_training_job(TrainingJobName=job_name))
            asked = True
        if time.monotonic() > deadline:
            raise HyperpodExtError(f"{job_name} does not stop", hint="the SageMaker console may show why")
        time.sleep(1.0)
    return now


def result(handle: JobHandle) -> Mapping[str, Any]:
    """Return the job's final state, error and billed time.

    The complete report, with losses and recoveries, is not read: it is in the job's output on S3.

    Raises:
        NotFoundError: the job has not ended.
    """
    handle = _with_region(handle)
    described = _describe(handle)
    now = _status(handle, described)
    if not now.ended:
        raise handle.no_result()
    found = EMPTY_REPORT | {"state": now.state, "error": now.error, "name": handle.name, "target": NAME}
    found |= {"handle": str(handle), "training_job": described["TrainingJobName"]}
    billed = described.get("BillableTimeInSeconds")
    found["seconds"] = {} if billed is None else {"billed": billed}
    found["model"] = described.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    return found


def _status(handle: JobHandle, described: Mapping[str, Any]) -> JobStatus:
    state = _STATES.get(described["TrainingJobStatus"], "running")
    if state == "running" and described.get("SecondaryStatus") in ("Starting", "Pending", "LaunchingMLInstances"):
        state = "starting"
    error = None
    if state == "failed":
        hint = f"`hp-ext logs {handle}` shows the job's output"
        error = {
            "code": "JobFailedError",
            "message": described.get("FailureReason", "SageMaker reports no reason"),
            "hint": hint,
        }
    return JobStatus(
        name=handle.name,
        handle=str(handle),
        state=state,
        submitted_at=_iso_time(described.get("CreationTime")) or "",
        ended_at=_iso_time(described.get("TrainingEndTime")),
        error=error,
        folder=described.get("OutputDataConfig", {}).get("S3OutputPath", ""),
    )


def _describe(handle: JobHandle) -> Mapping[str, Any]:
    service, job_name = client("sagemaker", handle.place), _job_name(handle)
    answer: Mapping[str, Any] = call(
        f"DescribeTrainingJob {job_name}", lambda: service.describe_training_job(TrainingJobName=job_name)
    )
    return answer


def _job_name(handle: JobHandle) -> str:
    """Return the name of the training job for a handle.

    Three names are tried, in this order: the job that this machine has submitted last under the handle's name; the
    newest training job that is tagged with this name; the name itself.
    """
    try:
        return str(records.recall(NAME, handle.name, TrainingJobRecord)["job_name"])
    except NotFoundError:
        return _tagged(handle.place, handle.name) or handle.name


@functools.cache
def _tagged(region: str, name: str) -> str | None:
    """Return the name of the newest training job whose tag has the job name `name`; None if there is none.

    The result is cached, so that a command that watches a job does not switch to a newer job.
    """
    try:
        found = _newest_by_name(client("sagemaker", region), name)
    except (UnreachableError, ConfigError):  # the user may lack permission for SageMaker's Search API
        return None
    return str(found[name]["TrainingJobName"]) if name in found else None


def _with_region(handle: JobHandle) -> JobHandle:
    """Return the handle with a region: its own region, the region of the job's submission from this machine, or the
    region of the environment.
    """
    if handle.place != ANYWHERE:
        return handle
    try:
        region = str(records.recall(NAME, handle.name, TrainingJobRecord)["region"])
    except NotFoundError:
        region = str(client("sagemaker", None).meta.region_name)
    return JobHandle(NAME, region, handle.name)


def _refuse_a_second(name: str) -> None:
    handle = JobHandle(NAME, records.recall(NAME, name, TrainingJobRecord)["region"], name)
    try:
        if status(handle).ended:
            return
    except NotFoundError:
        return  # the earlier training job was deleted
    raise ConflictError(
        f"a job named {name} is running", hint=f"cancel it with `hp-ext cancel {handle}`, or use another name"
    )


def _put_code(plan: Plan, uri: str, region: str | None) -> None:
    from hyperpod_ext.jobs.sagemaker.source import pack

    bucket, _, key = uri.removeprefix("s3://").partition("/")
    body = pack(plan.source_dir)
    call(f"PutObject {uri}", lambda: client("s3", region).put_object(Bucket=bucket, Key=key, Body=body))


def _iso_time(at: datetime | None) -> str | None:
    return at.astimezone(UTC).isoformat(timespec="seconds") if at else None


def _newest_by_name(service: Any, name: str | None = None) -> dict[str, Mapping[str, Any]]:
    """Return the newest training job of hp-ext for each job name, found with SageMaker's Search API.

    Args:
        name: return only the job with this name; None returns the jobs of all names.

    Raises:
        UnreachableError: SageMaker cannot be reached, or denies access to Search.
    """
    condition = {"Operator": "Exists"} if name is None else {"Operator": "Equals", "Value": name}
    request: dict[str, Any] = {
        "Resource": "TrainingJob",
        "SearchExpression": {"Filters": [{"Name": f"Tags.{TAG}"} | condition]},
        "SortBy": "CreationTime",
        "SortOrder": "Descending",
        "MaxResults": 100,
    }
    found: dict[str, Mapping[str, Any]] = {}
    for _ in range(_MOST_PAGES):
        page = call("Search TrainingJob", lambda: service.search(**request))
        for job in (one["TrainingJob"] for one in page.get("Results", []) if "TrainingJob" in one):
            ours = {tag["Key"]: tag["Value"] for tag in job.get("Tags", [])}.get(TAG)
            if ours is not None:
                found.setdefault(ours, job)
        if not page.get("NextToken") or (name is not None and found):
            break
        request["NextToken"] = page["NextToken"]
    return found


if TYPE_CHECKING:
    import hyperpod_ext.jobs.sagemaker.target as this_module

    _checked: Target = this_module

"""A stand-in for SageMaker, Secrets Manager, CloudWatch Logs and S3 over HTTP, for what moto does not do.

It remembers what it was sent, answers as the services would, and fails on order. Where moto can answer (creating and
describing training jobs), tests use moto.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from serving import serving

if TYPE_CHECKING:
    import pytest  # not installed where moto runs

CUT = 0
"""Status of a failure that closes the connection without an answer."""


@dataclass
class Failure:
    """What goes wrong, and how often."""

    status: int
    code: str
    message: str = "on order"
    times: int = 1 << 30
    done: bool = False
    """Whether the operation is carried out all the same: only its answer is lost."""


@dataclass
class AwsStandIn:
    """The services' state, which tests read and change."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """Of all clusters, as ListClusterNodes shows them, each with its ClusterName."""
    secrets: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    """Of each log stream."""
    failures: dict[str, Failure] = field(default_factory=dict)
    """By operation."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def count(self, operation: str) -> int:
        return sum(1 for name, _ in self.calls if name == operation)

    def answer(self, operation: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append((operation, request))
        failure = self.failures.get(operation)
        if failure is not None and failure.times > 0:
            failure.times -= 1
            if failure.done:
                getattr(self, f"on_{operation}")(request)
            return failure.status, {"__type": failure.code, "message": failure.message}
        method = getattr(self, f"on_{operation}", None)
        if method is None:
            return 400, {"__type": "UnknownOperationException", "message": operation}
        found = method(request)
        return found if isinstance(found, tuple) else (200, found)

    # --- training jobs ---------------------------------------------------------------------------

    def on_CreateTrainingJob(self, request: dict[str, Any]) -> Any:  # noqa: N802, the API's own name
        if request["TrainingJobName"] in self.jobs:
            return 400, {"__type": "ResourceInUse", "message": "Training job names must be unique"}
        self.jobs[request["TrainingJobName"]] = request | {"TrainingJobStatus": "InProgress", "CreationTime": 1.8e9}
        return {"TrainingJobArn": "arn:aws:sagemaker:us-west-2:123456789012:training-job/x"}

    def on_DescribeTrainingJob(self, request: dict[str, Any]) -> Any:  # noqa: N802
        job = self.jobs.get(request["TrainingJobName"])
        if job is None:
            return 400, {"__type": "ValidationException", "message": "Requested resource not found."}
        if job["TrainingJobStatus"] == "Stopping":
            job["TrainingJobStatus"] = "Stopped"
            return job | {"TrainingJobStatus": "Stopping"}
        return job

    def on_Search(self, request: dict[str, Any]) -> Any:  # noqa: N802
        (wanted,) = request["SearchExpression"]["Filters"]
        key = wanted["Name"].removeprefix("Tags.")
        found = []
        for job in reversed(self.jobs.values()):  # newest first
            tags = {tag["Key"]: tag["Value"] for tag in job.get("Tags", [])}
            if key in tags and tags[key] == wanted.get("Value", tags[key]):
                found.append({"TrainingJob": job})
        start = int(request.get("NextToken", "0"))
        more = {"NextToken": str(start + 2)} if start + 2 < len(found) else {}
        return {"Results": found[start : start + 2]} | more

    def on_StopTrainingJob(self, request: dict[str, Any]) -> Any:  # noqa: N802
        self.jobs[request["TrainingJobName"]]["TrainingJobStatus"] = "Stopping"
        return {}

    # --- secrets and logs ------------------------------------------------------------------------

    def on_DescribeSecret(self, request: dict[str, Any]) -> Any:  # noqa: N802
        if request["SecretId"] in self.secrets:
            return {"Name": request["SecretId"]}
        return 400, {"__type": "ResourceNotFoundException", "message": "Secrets Manager can't find it."}

    def on_CreateSecret(self, request: dict[str, Any]) -> Any:  # noqa: N802
        self.secrets[request["Name"]] = request["SecretString"]
        return {"Name": request["Name"]}

    def on_DescribeLogStreams(self, request: dict[str, Any]) -> Any:  # noqa: N802
        prefix = request["logStreamNamePrefix"]
        start = int(request.get("nextToken", "0"))
        names = [name for name in self.lines if name.startswith(prefix)]
        more = {"nextToken": str(start + 1)} if start + 1 < len(names) else {}  # pages of one
        return {"logStreams": [{"logStreamName": name} for name in names[start : start + 1]]} | more

    def on_GetLogEvents(self, request: dict[str, Any]) -> Any:  # noqa: N802
        lines = self.lines[request["logStreamName"]]
        start = int(request.get("nextToken", "0"))
        events = [{"message": line, "timestamp": 1} for line in lines[start : start + 2]]  # pages of two
        return {"events": events, "nextForwardToken": str(start + len(events))}

    # --- clusters --------------------------------------------------------------------------------

    def on_CreateCluster(self, request: dict[str, Any]) -> Any:  # noqa: N802
        if request["ClusterName"] in self.clusters:
            return 400, {"__type": "ResourceInUse", "message": "it is there"}
        self.clusters[request["ClusterName"]] = as_described(request)
        return {"ClusterArn": ARN}

    def on_UpdateCluster(self, request: dict[str, Any]) -> Any:  # noqa: N802
        cluster = self.clusters[request["ClusterName"]]
        changed = as_described(request)
        gone = set(request.get("InstanceGroupsToDelete", []))
        for kind in ("InstanceGroups", "RestrictedInstanceGroups"):
            groups = {group["InstanceGroupName"]: group for group in cluster.get(kind, [])}
            groups |= {group["InstanceGroupName"]: group for group in changed.pop(kind, [])}
            cluster[kind] = [group for name, group in groups.items() if name not in gone]
        cluster |= {name: value for name, value in changed.items() if name != "InstanceGroupsToDelete"}
        return {"ClusterArn": ARN}

    def on_DescribeCluster(self, request: dict[str, Any]) -> Any:  # noqa: N802
        cluster = self.clusters.get(request["ClusterName"])
        if cluster is None:
            return 400, {"__type": "ResourceNotFound", "message": "Cluster does not exist"}
        return cluster

    def on_ListClusterNodes(self, request: dict[str, Any]) -> Any:  # noqa: N802
        found = [node for node in self.nodes if node["ClusterName"] == request["ClusterName"]]
        start = int(request.get("NextToken", "0"))
        more = {"NextToken": str(start + 2)} if start + 2 < len(found) else {}
        return {"ClusterNodeSummaries": found[start : start + 2]} | more

    def on_BatchRebootClusterNodes(self, request: dict[str, Any]) -> Any:  # noqa: N802
        """Moves each node that is Running to Pending, and refuses the others, as the service does."""
        if len(request["NodeIds"]) > 25:
            return 400, {"__type": "ValidationException", "message": "length less than or equal to 25"}
        answer: dict[str, list[Any]] = {"Successful": [], "Failed": []}
        for node in (node for node in self.nodes if node["InstanceId"] in request["NodeIds"]):
            if node["InstanceStatus"]["Status"] == "Running":
                node["InstanceStatus"] = {"Status": "Pending"}
                answer["Successful"].append(node["InstanceId"])
            else:
                refusal = {"ErrorCode": "InvalidInstanceStatus", "Message": "the node is not Running"}
                answer["Failed"].append({"NodeId": node["InstanceId"]} | refusal)
        return answer

    on_BatchReplaceClusterNodes = on_BatchRebootClusterNodes  # noqa: N815

    def on_ListTags(self, request: dict[str, Any]) -> Any:  # noqa: N802
        return {"Tags": next(iter(self.clusters.values())).get("Tags", [])}


ARN = "arn:aws:sagemaker:us-west-2:123456789012:cluster/abcdefghijkl"


def as_described(request: dict[str, Any]) -> dict[str, Any]:
    """A cluster as DescribeCluster shows it: other names for some members, and more of them."""
    found = json.loads(json.dumps(request))
    for kind in ("InstanceGroups", "RestrictedInstanceGroups"):
        for group in found.get(kind, []):
            count = group.pop("InstanceCount")
            group |= {"CurrentCount": count, "TargetCount": count, "Status": "InService"}
            for old, new in (
                ("MinInstanceCount", "MinCount"),
                ("ImageId", "DesiredImageId"),
                ("ImageReleaseVersion", "DesiredImageReleaseVersion"),
            ):
                if old in group:
                    group[new] = group.pop(old)
            if "InstanceRequirements" in group:
                types = group["InstanceRequirements"]["InstanceTypes"]
                group["InstanceRequirements"] = {"CurrentInstanceTypes": types, "DesiredInstanceTypes": types}
            if kubernetes := group.get("KubernetesConfig"):
                group["KubernetesConfig"] = {f"Desired{name}": value for name, value in kubernetes.items()}
            if "PatchSchedule" in group.get("AutoPatchConfig", {}):
                group["AutoPatchConfig"]["DesiredPatchSchedule"] = group["AutoPatchConfig"].pop("PatchSchedule")
            group.setdefault("ThreadsPerCore", 1)
    if shared := found.get("RestrictedInstanceGroupsConfig"):
        environment = shared["SharedEnvironmentConfig"]
        shared["SharedEnvironmentConfig"] = {f"Desired{name}": value for name, value in environment.items()}
    return found | {"ClusterArn": ARN, "ClusterStatus": "InService"}


@contextmanager
def aws_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsStandIn]:
    """The services, as AWS for this process."""
    from hyperpod_ext.jobs.sagemaker import client

    with aws_stand_in() as state:
        for name, value in {
            "AWS_ENDPOINT_URL": state.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_CONFIG_FILE": "/nowhere",
        }.items():
            monkeypatch.setenv(name, value)
        client.client.cache_clear()
        yield state
        client.client.cache_clear()


@contextmanager
def aws_stand_in() -> Iterator[AwsStandIn]:
    """The services, on a port of this machine; `url` is what AWS_ENDPOINT_URL should be."""
    state = AwsStandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self._body() or b"{}")
            status, found = state.answer(self.headers["X-Amz-Target"].rpartition(".")[2], request)
            if status == CUT:
                self.close_connection = True
                return
            self._send(status, json.dumps(found).encode())

        def do_PUT(self) -> None:
            state.objects[self.path] = self._body()
            self._send(200, b"")

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    with serving(server):
        yield state

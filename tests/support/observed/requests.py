"""Requests to AWS, to the API of Kubernetes and to Slurm's commands, as stand-ins for them receive them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from aws_stand_in import AwsStandIn, aws_here
from clusters import CASES, GROUP
from kubernetes_api import serve

from observed.cli import Place
from observed.commands import shown
from observed.pool import Text, text_of

_COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel")
_ANSWERS = {
    "sbatch": "echo '17;research'",
    "scontrol": "echo 'ClusterName = research'",
    "squeue": 'case "$*" in *%T*) echo "17|$(cat state)|2026-11-21T10:00:00|N/A|None";; esac',
    "scancel": "echo CANCELLED >state",
}
_JOB = "--target sagemaker -o json"
_NODES = ("reboot", "replace")


def requests(_fast: bool) -> Iterator[tuple[str, Any]]:
    """Each command that sends something: its outcome, and all that it sends."""
    for target, make in (("sagemaker", _to_aws), ("kubernetes", _to_kubernetes), ("slurm", _to_slurm)):
        with Place() as place:
            for number, (name, found) in enumerate(make(place)):
                yield f"{target} {number:02} {name}", found


def _to_aws(place: Place) -> Iterator[tuple[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, aws_here(patch) as aws:
        yield from _jobs_to_aws(place, aws)
        yield from _clusters_to_aws(place, aws)


def _jobs_to_aws(place: Place, aws: AwsStandIn) -> Iterator[tuple[str, Any]]:
    create = f"create-job -f examples/07-sagemaker/job.yaml {_JOB}"
    for line in (create, create, f"list {_JOB}", f"status tiny-gpt {_JOB}", f"cancel tiny-gpt {_JOB}"):
        yield line.partition(" --target")[0], _sent(place, line, aws)


def _clusters_to_aws(place: Place, aws: AwsStandIn) -> Iterator[tuple[str, Any]]:
    for name, case in CASES.items():
        aws.clusters.clear()
        place.write("cluster.yaml", text_of(case))
        yield f"cluster create of {name}", _sent(place, "cluster create -f cluster.yaml --wait -o json", aws)
    groups = [{"name": "head", "instance_type": "ml.m5.xlarge", "count": 1, "slurm": {"node_type": "Controller"}}]
    place.write("cluster.yaml", text_of(CASES["slurm"] | {"instance_groups": [*groups, GROUP | _COMPUTE]}))
    yield "cluster update", _sent(place, "cluster update -f cluster.yaml --yes -o json", aws)
    aws.nodes.append(_NODE)
    for words in ("cluster nodes research", *(f"node {one} research workers-0 --yes" for one in _NODES)):
        yield words, _sent(place, f"{words} --region us-west-2 -o json", aws)


_COMPUTE = {"count": 6, "slurm": {"node_type": "Compute", "partition": "dev"}}
_NODE = {
    "ClusterName": "research",
    "InstanceGroupName": "workers",
    "InstanceId": f"i-{1:017x}",
    "NodeLogicalId": "workers-0",
    "InstanceType": "ml.p5.48xlarge",
    "LaunchTime": 1.8e9,
    "InstanceStatus": {"Status": "Running"},
}


def _sent(place: Place, line: str, aws: AwsStandIn) -> dict[str, Any]:
    aws.calls.clear()
    aws.objects.clear()
    outcome = shown(place.run(*line.split()))
    secret = {"SecretString": "SECRET", "ClientRequestToken": "TOKEN"}
    calls = [[name, request | {key: secret[key] for key in request.keys() & secret}] for name, request in aws.calls]
    sent = [json.loads(place.neutral(json.dumps(one))) for one in (*calls, *(["PUT", path] for path in aws.objects))]
    return outcome | {"sent": _once(sent)}


def _once(sent: list[Any]) -> list[Any]:
    """Without repetitions: a command that waits repeats its question."""
    return [one for before, one in zip([None, *sent], sent, strict=False) if one != before]


def _to_kubernetes(place: Place) -> Iterator[tuple[str, Any]]:
    for target, (example, job) in _ON_KUBERNETES.items():
        with serve() as api:
            api.kubeconfig(place.folder / "kubeconfig")
            file = f"-f examples/{example}/job.yaml --target {target}"
            url = f"{target}://{job}"
            for words in (f"create-job {file}", f"create-job {file}", f"list --target {target}", f"diff {file}"):
                yield words, _asked(place, f"{words} -o json", api)
            for words in (f"status {url}", f"cancel {url}", f"delete {url} --yes"):
                yield words, _asked(place, f"{words} -o json", api)


_ON_KUBERNETES = {
    "hyperpod-eks": ("04-hyperpod-eks", "hyperpod-ns-research@here/gpt-7b"),
    "kubeflow": ("06-kubeflow", "kubeflow@here/gpt-1b"),
}


def _asked(place: Place, line: str, api: Any) -> dict[str, Any]:
    api.requests.clear()
    outcome = shown(place.run(*line.split()))
    return outcome | {"sent": _once([[*rest, _body(place, body)] for *rest, body in api.requests])}


def _body(place: Place, body: dict[str, Any] | None) -> Any:
    if body is None:
        return None
    found = body | {name: dict.fromkeys(body[name], "SECRET") for name in ("data", "stringData") if name in body}
    if metadata := body.get("metadata"):
        found["metadata"] = {name: value for name, value in metadata.items() if name not in _BY_SERVER}
    return Text(place.neutral(json.dumps(found, sort_keys=True)))


_BY_SERVER = ("creationTimestamp", "resourceVersion", "uid")
"""Fields that the stand-in adds to the object that it received."""


def _to_slurm(place: Place) -> Iterator[tuple[str, Any]]:
    sent = place.folder / "sent"
    for name in _COMMANDS:
        script = f'#!/bin/sh\ncd {place.folder}\necho "{name} $*" >>sent\n{_ANSWERS.get(name, "true")}\n'
        place.write(name, script).chmod(0o755)
    place.write("state", "RUNNING\n")
    place.set("PATH", f"{place.folder}:/usr/bin:/bin")
    for words in ("create-job -f examples/05-slurm/job.yaml", "list", "status tiny-gpt", "cancel tiny-gpt"):
        sent.write_text("")
        outcome = shown(place.run(*f"{words} --target hyperpod-slurm -o json".split()))
        yield words, outcome | {"sent": _once(place.neutral(sent.read_text()).splitlines())}

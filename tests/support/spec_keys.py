"""Every key of a job's spec, each with a value that is not its default: what a key changes is seen by it."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.files.schema_path import annotation_of
from hyperpod_ext.config.job.job import JobConfig

FILES = {"kind": "file-system", "id": "fs-0123456789abcdef0", "directory": "/fsx", "access": "rw"}
LEAST: dict[str, Any] = {
    "name": "a",
    "script": "train.py",
    "nodes": 2,
    "image": "repo/train:1",
    "resources": {"instance_type": "ml.p5.48xlarge"},
    "sagemaker": {"role": "arn:aws:iam::123456789012:role/training", "output": "s3://bucket/output"},
}
"""A job that every target renders."""
MORE: dict[str, dict[str, Any]] = {
    "command": {"mode": "plain"},
    "sagemaker.max_wait_s": {"sagemaker": {"spot": True}},
    "sagemaker.checkpoint_path": {"sagemaker": {"checkpoint_uri": "s3://bucket/a"}},
    "checkpoint.grace_s": {"checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "file", "path": "/x"}]}},
    "slurm.requeue_at_limit": {
        "checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "file", "path": "/x"}]},
        "timeouts": {"run_s": 3600},
    },
    "relaunch.max_process_restarts": {"elastic": {"min_nodes": 1, "max_nodes": 3}},
}
"""What a key needs beside itself to change anything."""
EXEC = {"exec": {"command": ["true"]}}
OF_POD: dict[str, Any] = {
    "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}},
    "containers": [{"name": "log", "image": "repo/log:1"}],
    "dnsConfig": {"nameservers": ["10.0.0.2"]},
    "dnsPolicy": "Default",
    "ephemeralContainers": [{"name": "debug", "image": "repo/debug:1"}],
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["store"]}],
    "imagePullSecrets": [{"name": "registry"}],
    "initContainers": [{"name": "fetch", "image": "repo/fetch:1"}],
    "nodeSelector": {"disk": "fast"},
    "os": {"name": "linux"},
    "overhead": {"cpu": "1"},
    "preemptionPolicy": "Never",
    "readinessGates": [{"conditionType": "example.com/ready"}],
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
    "resources": {"limits": {"cpu": "1"}},
    "restartPolicy": "Never",
    "schedulingGates": [{"name": "example.com/wait"}],
    "schedulingGroup": {"podGroupName": "a"},
    "securityContext": {"fsGroup": 1000},
    "tolerations": [{"operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "volumes": [{"name": "more", "emptyDir": {}}],
}
"""Least values of fields of a pod that are no plain word, number or yes."""
OF_CONTAINER: dict[str, Any] = {
    "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    "envFrom": [{"configMapRef": {"name": "settings"}}],
    "imagePullPolicy": "Always",
    "lifecycle": {"preStop": EXEC},
    "livenessProbe": EXEC,
    "ports": [{"containerPort": 9000}],
    "readinessProbe": EXEC,
    "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}],
    "resources": {"claims": [{"name": "gpu"}]},
    "restartPolicy": "Never",
    "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}],
    "securityContext": {"readOnlyRootFilesystem": True},
    "startupProbe": EXEC,
    "terminationMessagePolicy": "File",
    "volumeDevices": [{"name": "disk", "devicePath": "/dev/a"}],
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
}
"""Least values of fields of a container."""
VALUES: dict[str, Any] = {
    "name": "b",
    "script": "other.py",
    "nodes": 4,
    "command": ["./train.sh"],
    "args": ["--lr", "1"],
    "env": {"A": "1"},
    "working_dir": "/app",
    "elastic": {"min_nodes": 1, "max_nodes": 3},
    "network": {"interface": "ens5"},
    "metrics": {"port": 9464},
    "chaos": {"faults": [{"rank": 0, "step": 1}]},
    "log_rules": [{"name": "loss", "pattern": "loss", "every_s": 60}],
    "labels": {"team": "a"},
    "annotations": {"note": "a"},
    "node_groups": [
        {"name": "one", "nodes": 1},
        {"name": "two", "nodes": 1, "instance_type": "ml.p4d.24xlarge", "pod_priority_class": "low"},
    ],
    "volumes": [{"kind": "host", "path": "/data", "host_path": "/fsx"}],
    "scheduling.topology": {"level": "topology.k8s.aws/network-node-layer-3"},
    "scheduling.tolerations": [{"key": "a"}],
    "scheduling.node_selector": {"a": "b"},
    "resources.accelerators": 4,
    "resources.hugepages_mib": 1024,
    "resources.instance_type": "ml.p4d.24xlarge",
    "checkpoint.grace_s": 99.0,
    "checkpoint.tiers": [{"kind": "memory"}, {"kind": "file", "path": "/x"}],
    "kubernetes.operator_addresses": ["10.1.0.0/16"],
    "kubernetes.container.terminationMessagePath": "/log",
    "kubernetes.secret_env": [{"name": "A", "secret": "a", "key": "a"}],
    "sagemaker.role": "arn:aws:iam::123456789012:role/another",
    "sagemaker.output": "s3://bucket/another",
    "sagemaker.channels": {"data": FILES},
    "sagemaker.checkpoint_path": "/opt/ml/another",
    "sagemaker.training_plan": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/a",
    "sagemaker.vpc": {"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef0"]},
    "sagemaker.experiment": {"name": "a", "trial": "b", "run": "c"},
    "sagemaker.metrics": [{"name": "loss", "regex": "loss"}],
    "sagemaker.max_pending_s": 1800,
    "sagemaker.max_wait_s": 100000,
    "sagemaker.tags": {"team": "a"},
    "slurm.setup": ["true"],
    "slurm.sbatch": {"mail-type": "END"},
}
"""Values that do not follow from the key's type."""
VALUES |= {f"kubernetes.pod.{name}": value for name, value in OF_POD.items()}
VALUES |= {f"kubernetes.container.{name}": value for name, value in OF_CONTAINER.items()}


def keys(model: type[Config] = JobConfig, above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that holds a value, by its path; the overlay, which is in the target's own words, is left out."""
    for name, field in model.model_fields.items():
        kind = annotation_of(field)
        if isinstance(kind, type) and issubclass(kind, Config):
            if above + name != "overlay":
                yield from keys(kind, f"{above}{name}.")
        else:
            yield above + name, field


def value_of(key: str, field: FieldInfo) -> Any:
    """One that is not the key's default."""
    return VALUES[key] if key in VALUES else _other(field)


def job(*parts: dict[str, Any]) -> JobConfig:
    """LEAST and these; what is said later wins."""
    found: dict[str, Any] = LEAST
    for part in parts:
        found = _over(found, part)
    return JobConfig.model_validate_json(json.dumps(found))


def at(key: str, value: Any) -> dict[str, Any]:
    """`value` at `key`, as a part of a spec."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return typing.cast("dict[str, Any]", value)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for name, value in above.items():
        before = found.get(name)
        nested = isinstance(before, dict) and isinstance(value, dict) and name not in ("channels", "tags")
        found[name] = _over(before, value) if nested and isinstance(before, dict) else value
    return found


def _other(field: FieldInfo) -> Any:
    kinds = [one for one in _plain(field.annotation) if one is not type(None)]
    examples = (field.json_schema_extra or {}).get("examples") if isinstance(field.json_schema_extra, dict) else None
    if found := field.examples or examples or _examples(field.annotation):
        return found[0]
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            return next(one for one in typing.get_args(kind) if one != field.default)
        if kind is bool:
            return not field.default
        if kind in (int, float):
            return (field.default if isinstance(field.default, int | float) else 1) + 1
        if kind is str:
            return "another"
        if typing.get_origin(kind) is tuple:
            return ["another"]
    raise AssertionError(f"no value for {field}")


def _plain(kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is typing.Annotated:
        yield from _plain(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for one in typing.get_args(kind):
            yield from _plain(one)
    else:
        yield kind


def _examples(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is typing.Annotated:
        return next((one.examples for one in kind.__metadata__ if getattr(one, "examples", None)), [])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((found for one in typing.get_args(kind) if (found := _examples(one))), [])
    return []

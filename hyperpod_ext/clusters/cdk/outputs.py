"""CloudFormation outputs of a deployed cluster that jobs need: bucket, roles, queue, subnets.

`hp-ext cluster outputs` reads the outputs from CloudFormation, and stores them in $HPX_HOME/clusters/NAME.json. A job
prefers the file .hyperpod_ext/clusters/NAME.json in the folder of its spec, which a team can share or edit by hand.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.clusters.cdk import stacks
from hyperpod_ext.errors import ConfigError, NotFoundError, Problem
from hyperpod_ext.files import write_atomically

STACKS = ("storage", "cluster")
"""Last parts of the names of the stacks whose outputs jobs use. A stack is named `CLUSTER-PART`."""
_HOUR_S, _DAY_S = 3600, 86400


@dataclass(frozen=True, slots=True)
class ClusterOutputs:
    """CloudFormation outputs of the stacks of one cluster."""

    name: str
    region: str
    read_at: float
    """Time at which the outputs were read from AWS, in seconds since 1970."""
    values: Mapping[str, str]
    """Values of the outputs by key, such as `CheckpointBucket`. Outputs that do not apply to the cluster are
    missing."""

    def get(self, key: str) -> str | None:
        """Return the value of the output `key`; None if the cluster has no such output."""
        return self.values.get(key) or None

    def items(self, key: str) -> tuple[str, ...]:
        """Return the items of the output `key`, whose value is a list separated by commas."""
        return tuple(one.strip() for one in self.values.get(key, "").split(",") if one.strip())

    def age(self, now: float | None = None) -> str:
        """Return the time since the outputs were read as text, such as `2 hours ago`."""
        seconds = max((time.time() if now is None else now) - self.read_at, 0)
        for size, word in ((_DAY_S, "day"), (_HOUR_S, "hour"), (60, "minute")):
            if (count := int(seconds // size)) >= 1:
                return f"{count} {word}{'s' if count > 1 else ''} ago"
        return "just now"


def fetch(name: str, region: str | None) -> ClusterOutputs:
    """Read the outputs of the cluster `name` from AWS.

    Raises:
        NotFoundError: no cluster with this name was deployed in the region.
        UnreachableError: AWS cannot be reached.
    """
    values: dict[str, str] = {}
    for end in STACKS:
        found = stacks.outputs(f"{name}-{end}", region)
        if found is None:
            where = f" in {region}" if region else ""
            hint = "create it with `hp-ext cluster deploy -f cluster.yaml`, or set AWS_REGION to another region"
            raise NotFoundError(f"cluster {name}: there is no stack {name}-{end}{where}", hint=hint)
        values |= found
    return ClusterOutputs(name, region or _region_of(values), time.time(), values)


def keep(found: ClusterOutputs, file: Path | None = None) -> Path:
    """Store the outputs in `file`, and return the file. By default, the file is this machine's file, which `recall`
    reads."""
    file = file or _own(found.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(found), indent=2) + "\n")
    return file


def recall(name: str, spec_folder: Path) -> ClusterOutputs | None:
    """Return the outputs of the cluster `name` that are stored in `spec_folder` or on this machine. None if the outputs
    of the cluster are not stored."""
    for file in (spec_folder / ".hyperpod_ext" / "clusters" / f"{name}.json", _own(name)):
        if file.is_file():
            return _read(file, name)
    return None


def _own(name: str) -> Path:
    from hyperpod_ext.jobs.contract.home import home

    return home().parent / "clusters" / f"{name}.json"


def _read(file: Path, name: str) -> ClusterOutputs:
    """Read a file with outputs, and check it, because users may edit it and it may contain another cluster's
    outputs."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        values = {str(key): str(value) for key, value in found["values"].items()}
        outputs = ClusterOutputs(str(found["name"]), str(found["region"]), float(found["read_at"]), values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = f"write the file again with `hp-ext cluster outputs {name}`"
        raise ConfigError(
            [Problem(f"does not contain outputs of a cluster: {error}", source=str(file), hint=hint)]
        ) from None
    if outputs.name != name:
        problem = Problem(f"contains the outputs of cluster {outputs.name}, not of {name}", source=str(file))
        raise ConfigError([problem])
    return outputs


def _region_of(values: Mapping[str, str]) -> str:
    """Return the AWS region in the first ARN among the outputs; empty if there is no ARN."""
    for value in values.values():
        parts = value.split(":")
        if len(parts) > 4 and parts[0] == "arn" and parts[3]:
            return parts[3]
    return ""


def to_json(found: ClusterOutputs) -> dict[str, Any]:
    """Return the outputs as JSON."""
    return {"name": found.name, "region": found.region, "read_at": found.read_at, "outputs": dict(found.values)}

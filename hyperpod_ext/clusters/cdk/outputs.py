"""Outputs of a deployed cluster for jobs: bucket, roles, queue, subnets. Read from CloudFormation, and stored:

DIR/.hyperpod_ext/clusters/NAME.json      next to a spec, for a team or a CI: maintained by hand
$HPX_HOME/clusters/NAME.json              this machine's copy; `hp-ext cluster outputs` renews it
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
"""Stacks whose outputs jobs use, by the ends of their names."""
_HOUR_S, _DAY_S = 3600, 86400


@dataclass(frozen=True, slots=True)
class ClusterOutputs:
    """Outputs of one cluster's stacks."""

    name: str
    region: str
    read_at: float
    """Time of reading, in seconds since 1970."""
    values: Mapping[str, str]
    """Values by key, such as CheckpointBucket. Keys that do not apply are missing."""

    def get(self, key: str) -> str | None:
        """Return one value, or None."""
        return self.values.get(key) or None

    def items(self, key: str) -> tuple[str, ...]:
        """Return a value that is a list."""
        return tuple(one.strip() for one in self.values.get(key, "").split(",") if one.strip())

    def age(self, now: float | None = None) -> str:
        """Return the time since the outputs were read, as text."""
        seconds = max((time.time() if now is None else now) - self.read_at, 0)
        for size, word in ((_DAY_S, "day"), (_HOUR_S, "hour"), (60, "minute")):
            if (count := int(seconds // size)) >= 1:
                return f"{count} {word}{'s' if count > 1 else ''} ago"
        return "just now"


def fetch(name: str, region: str | None) -> ClusterOutputs:
    """Read the outputs from AWS.

    Raises:
        NotFoundError: no such cluster was deployed in the region.
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
    """Store the outputs for `recall`, or in `file`."""
    file = file or _own(found.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(found), indent=2) + "\n")
    return file


def recall(name: str, spec_folder: Path) -> ClusterOutputs | None:
    """Return the outputs stored in `spec_folder` or by this machine; None if there are none."""
    for file in (spec_folder / ".hyperpod_ext" / "clusters" / f"{name}.json", _own(name)):
        if file.is_file():
            return _read(file, name)
    return None


def _own(name: str) -> Path:
    from hyperpod_ext.jobs.contract.home import home

    return home().parent / "clusters" / f"{name}.json"


def _read(file: Path, name: str) -> ClusterOutputs:
    """Read and check a file, which may have been edited or be of another cluster."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        values = {str(key): str(value) for key, value in found["values"].items()}
        outputs = ClusterOutputs(str(found["name"]), str(found["region"]), float(found["read_at"]), values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = f"write it again with `hp-ext cluster outputs {name}`"
        raise ConfigError(
            [Problem(f"does not contain outputs of a cluster: {error}", source=str(file), hint=hint)]
        ) from None
    if outputs.name != name:
        problem = Problem(f"contains the outputs of cluster {outputs.name}, not of {name}", source=str(file))
        raise ConfigError([problem])
    return outputs


def _region_of(values: Mapping[str, str]) -> str:
    """Return the region of the outputs' ARNs."""
    for value in values.values():
        parts = value.split(":")
        if len(parts) > 4 and parts[0] == "arn" and parts[3]:
            return parts[3]
    return ""


def to_json(found: ClusterOutputs) -> dict[str, Any]:
    """Return the outputs as JSON."""
    return {"name": found.name, "region": found.region, "read_at": found.read_at, "outputs": dict(found.values)}

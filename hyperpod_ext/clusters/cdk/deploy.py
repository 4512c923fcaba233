"""Deployment steps from templates to a cluster: stacks, Helm chart, and scripts."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.clusters.cdk.assembly import Assembly
from hyperpod_ext.clusters.cdk.changes import CLUSTER
from hyperpod_ext.clusters.network_rules import makes_eks
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import HyperpodExtError, NotFoundError
from hyperpod_ext.jobs.sagemaker.client import call, client

_LAST = frozenset({"cluster", "addons", "observability"})
CHART = "https://github.com/aws/sagemaker-hyperpod-cli"


@dataclass(frozen=True, slots=True)
class MakeStacks:
    """Create or update stacks with CloudFormation."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InstallChart:
    """Install HyperPod's Helm chart in EKS, which CreateCluster requires."""

    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UploadScripts:
    """Upload the scripts of new machines to a stack's bucket."""

    stack: str
    output: str
    """Key of the stack's output that names the bucket."""
    prefix: str


Step = MakeStacks | InstallChart | UploadScripts


def steps(cluster: ClusterConfig, assembly: Assembly, there: frozenset[str]) -> list[Step]:
    """Return the steps in order. Pure.

    Args:
        there: names of existing stacks.
    """
    made = cluster.infrastructure
    assert made is not None, "deployment.problems says so"
    names = [stack.name for stack in assembly.stacks]
    last = [name for name in names if name.removeprefix(f"{cluster.name}-") in _LAST]
    found: list[Step] = [MakeStacks(tuple(name for name in names if name not in last))]
    new = f"{cluster.name}-cluster" not in there
    if new and cluster.orchestrator == "eks" and makes_eks(cluster) and made.eks.dependencies == "external":
        found.append(InstallChart(tuple(chart_commands(cluster))))
    prefix = scripts_prefix(cluster, assembly)
    if prefix is not None:
        found.append(UploadScripts(f"{cluster.name}-storage", "LifecycleBucket", prefix))
    return [*found, MakeStacks(tuple(last))]


def chart_commands(cluster: ClusterConfig, chart: str | None = None) -> Iterator[str]:
    """Yield the commands that install HyperPod's chart in the cluster's EKS; `chart`: its folder, with subcharts."""
    made = cluster.infrastructure
    # only one of chart and add-on may install the CRDs of cert-manager
    own = made is not None and made.add_ons.cert_manager
    yield f"aws eks update-kubeconfig --name {cluster.name} --region {cluster.region}"
    if chart is None:
        chart = "sagemaker-hyperpod-cli/helm_chart/HyperPodHelmChart"
        yield f"git clone --depth 1 {CHART}"
        yield f"helm dependency update {chart}"
    yield (
        f"helm upgrade --install hyperpod-dependencies {shlex.quote(chart)} --namespace kube-system"
        + (" --set cert-manager.enabled=false" if own else "")
    )


def install_chart(cluster: ClusterConfig, chart: Path) -> None:
    """Install the chart from a folder, with `aws` and `helm`. Does not change the user's kubeconfig.

    Raises:
        NotFoundError: the folder has no chart.
        HyperpodExtError: a program is missing, or fails.
    """
    if not (chart / "Chart.yaml").is_file():
        raise NotFoundError(
            f"{chart} has no Chart.yaml", hint=f"use the folder helm_chart/HyperPodHelmChart of {CHART}"
        )
    for program in ("aws", "helm"):
        if shutil.which(program) is None:
            raise HyperpodExtError(f"{program}, which installs the chart, is not installed", hint="install it")
    with tempfile.TemporaryDirectory(prefix="hpx-chart-") as scratch:
        environment = {**os.environ, "KUBECONFIG": str(Path(scratch) / "kubeconfig")}
        for command in chart_commands(cluster, str(chart.resolve())):
            done = subprocess.run(shlex.split(command), env=environment, stdout=2, check=False)
            if done.returncode != 0:
                hint = "check that this machine can reach EKS's API: see infrastructure.eks.public_access"
                raise HyperpodExtError(f"{command} failed", hint=hint)


def scripts_prefix(cluster: ClusterConfig, assembly: Assembly) -> str | None:
    """Return the prefix of the app's scripts in their bucket; None if no group uses them."""
    made = cluster.infrastructure
    if cluster.orchestrator != "slurm" or made is None or not made.lifecycle_scripts:
        return None
    ours = {group.name for group in cluster.instance_groups if group.lifecycle is None}
    for _stack, properties in assembly.of_kind(CLUSTER):
        for group in properties.get("InstanceGroups", []):
            source = group.get("LifeCycleConfig", {}).get("SourceS3Uri")
            if source is not None and group["InstanceGroupName"] in ours:
                return _key_of(source)
    return None


def _key_of(uri: Any) -> str:
    """Return the key in `s3://bucket/scripts`, or in `{"Fn::Join": ["", ["s3://", BUCKET, "/scripts"]]}`."""
    if isinstance(uri, str):
        return uri.removeprefix("s3://").partition("/")[2].strip("/")
    parts = uri.get("Fn::Join", ["", []])[1]
    return parts[-1].strip("/") if len(parts) > 2 and isinstance(parts[-1], str) else ""


def run_cdk(program: Path, environment: Mapping[str, str], region: str, *arguments: str) -> None:
    """Run the CDK CLI, with its output on stderr.

    Raises:
        HyperpodExtError: the CDK CLI fails.
    """
    command = [str(program), *arguments, "--no-notices", "--ci", "false"]
    regions = {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    sys.stderr.flush()
    done = subprocess.run(command, env={**environment, **regions}, stdout=2, check=False)
    if done.returncode != 0:
        hint = "see the lines above; the same command continues with the unfinished steps"
        raise HyperpodExtError(f"cdk {' '.join(arguments[:2])} failed", hint=hint)


def upload(folder: Path, bucket: str, prefix: str, region: str) -> list[str]:
    """Upload every file of `folder` to the bucket, and return their URIs.

    Raises:
        NotFoundError: there is no such folder, or it is empty.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
    if not files:
        raise NotFoundError(
            f"{folder} has no scripts for new machines", hint="name the folder of the CDK app with --app"
        )
    found = []
    store = client("s3", region)
    for file in files:
        key = "/".join(part for part in (prefix, file.relative_to(folder).as_posix()) if part)
        put = functools.partial(store.put_object, Bucket=bucket, Key=key, Body=file.read_bytes())
        call(f"PutObject s3://{bucket}/{key}", put)
        found.append(f"s3://{bucket}/{key}")
    return found

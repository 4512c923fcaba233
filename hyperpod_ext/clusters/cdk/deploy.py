"""The steps of a deployment: create stacks, install HyperPod's Helm chart, and upload lifecycle scripts."""

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
    """Step that creates or updates stacks with CloudFormation."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InstallChart:
    """Step that installs HyperPod's Helm chart in the EKS cluster. CreateCluster requires the chart."""

    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UploadScripts:
    """Step that uploads the scripts for new machines to a bucket of a stack."""

    stack: str
    output: str
    """Key of the stack's output with the name of the bucket."""
    prefix: str


Step = MakeStacks | InstallChart | UploadScripts


def steps(cluster: ClusterConfig, assembly: Assembly, there: frozenset[str]) -> list[Step]:
    """Return the steps of a deployment in their order. Pure.

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
    """Yield the shell commands that install HyperPod's Helm chart in the EKS cluster.

    Args:
        chart: folder of the chart with its subcharts. None: the commands also download the chart.
    """
    made = cluster.infrastructure
    # if the EKS add-on cert-manager is installed, the chart must not install cert-manager's CRDs, too
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
    """Install HyperPod's Helm chart from the folder `chart`, with the programs `aws` and `helm`. The user's kubeconfig
    is not changed.

    Raises:
        NotFoundError: the folder contains no chart.
        HyperpodExtError: `aws` or `helm` is not installed, or fails.
    """
    if not (chart / "Chart.yaml").is_file():
        raise NotFoundError(
            f"{chart} has no Chart.yaml", hint=f"use the folder helm_chart/HyperPodHelmChart of {CHART}"
        )
    for program in ("aws", "helm"):
        if shutil.which(program) is None:
            raise HyperpodExtError(
                f"{program}, which is needed to install the chart, is not installed", hint=f"install {program}"
            )
    with tempfile.TemporaryDirectory(prefix="hpx-chart-") as scratch:
        environment = {**os.environ, "KUBECONFIG": str(Path(scratch) / "kubeconfig")}
        for command in chart_commands(cluster, str(chart.resolve())):
            done = subprocess.run(shlex.split(command), env=environment, stdout=2, check=False)
            if done.returncode != 0:
                hint = "check that this machine can reach EKS's API: see infrastructure.eks.public_access"
                raise HyperpodExtError(f"{command} failed", hint=hint)


def scripts_prefix(cluster: ClusterConfig, assembly: Assembly) -> str | None:
    """Return the prefix in the lifecycle bucket below which this project's scripts are uploaded; None if no group uses
    these scripts."""
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
    """Return the key in an S3 URI: `scripts` for `s3://bucket/scripts`, and for the equivalent expression in a
    template, `{"Fn::Join": ["", ["s3://", BUCKET, "/scripts"]]}`."""
    if isinstance(uri, str):
        return uri.removeprefix("s3://").partition("/")[2].strip("/")
    parts = uri.get("Fn::Join", ["", []])[1]
    return parts[-1].strip("/") if len(parts) > 2 and isinstance(parts[-1], str) else ""


def run_cdk(program: Path, environment: Mapping[str, str], region: str, *arguments: str) -> None:
    """Run the CDK command line, and write its output to stderr.

    Raises:
        HyperpodExtError: the CDK command line fails.
    """
    command = [str(program), *arguments, "--no-notices", "--ci", "false"]
    regions = {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    sys.stderr.flush()
    done = subprocess.run(command, env={**environment, **regions}, stdout=2, check=False)
    if done.returncode != 0:
        hint = "see the lines above; the same command continues with the unfinished steps"
        raise HyperpodExtError(f"cdk {' '.join(arguments[:2])} failed", hint=hint)


def upload(folder: Path, bucket: str, prefix: str, region: str) -> list[str]:
    """Upload every file in `folder` to a bucket below `prefix`, and return the S3 URIs of the files.

    Raises:
        NotFoundError: the folder does not exist or is empty.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
    if not files:
        raise NotFoundError(
            f"{folder}, the folder with the scripts for new machines, is missing or empty",
            hint="name the folder of the CDK app with --app",
        )
    found = []
    store = client("s3", region)
    for file in files:
        key = "/".join(part for part in (prefix, file.relative_to(folder).as_posix()) if part)
        put = functools.partial(store.put_object, Bucket=bucket, Key=key, Body=file.read_bytes())
        call(f"PutObject s3://{bucket}/{key}", put)
        found.append(f"s3://{bucket}/{key}")
    return found

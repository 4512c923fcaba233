"""Checks a cluster's spec and its section `infrastructure` before a deployment. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from hyperpod_ext.catalog.regions import known_regions, kubernetes_versions, regions_of, regions_with
from hyperpod_ext.clusters import rules
from hyperpod_ext.clusters.bindings import EXAMPLE, bound
from hyperpod_ext.clusters.checks import findings, named_types
from hyperpod_ext.clusters.network_rules import makes_eks, network_problems
from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.infrastructure import AddOns, Eks, Infrastructure
from hyperpod_ext.errors import Problem

_AT = "infrastructure"
_GOVERNANCE_NEEDS = (1, 30)
"""Oldest version of Kubernetes that AWS's task governance supports."""


def problems(cluster: ClusterConfig, ignore: Collection[str] = ()) -> Iterator[Problem]:
    """Yield a problem for every reason why `cluster` cannot be deployed with CloudFormation. Rules in `ignore` are
    skipped."""
    # drop problems about DrainFirst: CloudFormation does not support DrainFirst, so the hints of these problems do not
    # help
    found = rules.problems(bound(cluster, EXAMPLE))
    yield from (one for one in found if not one.message.endswith(rules.WITH_DRAIN))
    yield from findings(cluster, "error", ignore)
    if not cluster.name[0].isalpha():
        yield Problem(
            "must begin with a letter, because names of CloudFormation stacks begin with the cluster's name",
            path="name",
            hint="choose a name that begins with a letter",
        )
    yield from _regions(cluster)
    yield from _only_in_the_api(cluster)
    made = cluster.infrastructure
    if made is None:
        hint = "add the section with the resources to create; the minimum is network: {zones: [...]}"
        yield Problem("is required to deploy a cluster", path=_AT, hint=hint)
        return
    yield from network_problems(cluster, made)
    yield from _buckets(cluster, made)
    yield from _file_system(made)
    yield from (_on_eks if cluster.orchestrator == "eks" else _on_slurm)(cluster, made)


def _regions(cluster: ClusterConfig) -> Iterator[Problem]:
    region = cluster.region
    if region not in known_regions():
        return  # skip a region whose instance types are not in the catalog
    if region not in regions_of("cluster"):
        hint = f"supported regions: {', '.join(regions_of('cluster'))}"
        yield Problem(f"CloudFormation cannot create HyperPod clusters in {region}", path="region", hint=hint)
    for path, name in named_types(cluster):
        if not regions_with(name):  # a type that only other regions have is reported by HPX201
            hint = "use another type, or create the cluster with `hp-ext cluster create`"
            yield Problem(f"CloudFormation does not support {name} in any known region", path=path, hint=hint)


def _groups(cluster: ClusterConfig) -> Iterator[tuple[int, InstanceGroup]]:
    return iter(enumerate(cluster.instance_groups))


def _only_in_the_api(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that CreateCluster supports but CloudFormation does not. tests/cdk/test_drift.py
    lists all such settings."""
    hint = "remove it, or create the cluster with `hp-ext cluster create`"
    message = "CloudFormation does not support this"
    for index, group in _groups(cluster):
        patch, path = group.auto_patch, f"instance_groups.{index}.auto_patch"
        if patch is None:
            continue
        for field in ("next_date", "idle_s", "drain_timeout_s", "on_drain_timeout"):
            if getattr(patch, field) is not None:
                yield Problem(message, path=f"{path}.{field}", hint=hint)
        if patch.strategy == "DrainFirst":
            hint_of = "write WhenIdle or WhenAllIdle, or create the cluster with `hp-ext cluster create`"
            yield Problem("CloudFormation does not support DrainFirst", path=f"{path}.strategy", hint=hint_of)
    for index, restricted in enumerate(cluster.restricted_groups):
        if restricted.scheduled_update is not None:
            yield Problem(message, path=f"restricted_groups.{index}.scheduled_update", hint=hint)
    for field in ("instance_groups", "restricted_groups"):
        for index, one in enumerate(getattr(cluster, field)):
            if "MultiNodeTrainingValidation" in one.deep_health_checks:
                yield Problem(
                    "CloudFormation does not support MultiNodeTrainingValidation",
                    path=f"{field}.{index}.deep_health_checks",
                    hint="remove it, or create the cluster with `hp-ext cluster create`",
                )


def _buckets(cluster: ClusterConfig, made: Infrastructure) -> Iterator[Problem]:
    names: Counter[str] = Counter()
    for field in ("checkpoints", "data", "lifecycle", "logs"):
        bucket, path = getattr(made.buckets, field), f"{_AT}.buckets.{field}"
        name = bucket.existing or bucket.name
        where = f"{path}.existing" if bucket.existing else f"{path}.name"
        if bucket.kms_key and not bucket.existing:
            hint = "remove it: a new bucket is encrypted with the key of the cluster"
            yield Problem("is only valid for an existing bucket", path=f"{path}.kms_key", hint=hint)
        if bucket.name and bucket.existing:
            yield Problem("has both a new and an existing bucket", path=path, hint="remove either name or existing")
        if name is None:
            continue
        names[name] += 1
        if names[name] > 1:
            yield Problem(
                f"`{name}` is used for two buckets", path=where, hint="use a different bucket for each purpose"
            )
        if field == "lifecycle" and not name.startswith("sagemaker-"):
            hint = f"write sagemaker-{name}"[:74]
            hint = "use another existing bucket, or remove `existing` to create a bucket" if bucket.existing else hint
            yield Problem(
                "HyperPod reads scripts only from buckets with names that begin with sagemaker-", path=where, hint=hint
            )
        if field != "lifecycle" and name.startswith("sagemaker-"):
            message = "begins with sagemaker-, so every HyperPod role of the account can read the bucket"
            example = f"choose another name, such as `{name.removeprefix('sagemaker-')}`"
            hint = "use another existing bucket" if bucket.existing else example
            yield Problem(message, path=where, hint=hint)
    open_names = [f for f in ("checkpoints", "data", "logs") if not _named(getattr(made.buckets, f))]
    if cluster.name.lower().startswith("sagemaker-") and open_names:
        message = "every HyperPod role of the account could read new buckets, whose names would begin with sagemaker-"
        hint = f"choose another name, or set {', '.join(f'{_AT}.buckets.{field}.name' for field in open_names)}"
        yield Problem(message, path="name", hint=hint)
    wanted = made.buckets.checkpoints
    if cluster.checkpoint_bucket not in (None, wanted.existing or wanted.name):
        hint = f"set {_AT}.buckets.checkpoints.existing to this bucket, or remove checkpoint_bucket"
        yield Problem(f"differs from the bucket in {_AT}.buckets.checkpoints", path="checkpoint_bucket", hint=hint)


def _named(bucket: object) -> bool:
    return bool(getattr(bucket, "name", None) or getattr(bucket, "existing", None))


def _file_system(made: Infrastructure) -> Iterator[Problem]:
    wanted = made.file_system
    if wanted is not None and wanted.size_gib != 1200 and wanted.size_gib % 2400:
        up = -(-wanted.size_gib // 2400) * 2400
        yield Problem("must be 1200 or a multiple of 2400", path=f"{_AT}.file_system.size_gib", hint=f"write {up}")


def _on_eks(cluster: ClusterConfig, made: Infrastructure) -> Iterator[Problem]:
    governance, path = made.add_ons.task_governance, f"{_AT}.add_ons.task_governance"
    if makes_eks(cluster):
        version = tuple(int(part) for part in made.eks.version.split("."))
        oldest, newest = kubernetes_versions()
        if not oldest <= version <= newest:
            span = f"1.{oldest[1]} to 1.{newest[1]}"
            hint = f"write {newest[0]}.{newest[1]}"
            yield Problem(f"HyperPod supports only Kubernetes {span}", path=f"{_AT}.eks.version", hint=hint)
        elif governance is not None and version < _GOVERNANCE_NEEDS:
            yield Problem("task governance needs 1.30", path=f"{_AT}.eks.version", hint="write 1.30 or newer")
        if made.add_ons.training_operator and not made.add_ons.cert_manager:
            hint = "write cert_manager: true"
            yield Problem(
                "is required, because the training operator needs cert-manager",
                path=f"{_AT}.add_ons.cert_manager",
                hint=hint,
            )
    seen: set[tuple[str, str]] = set()
    for index, role in enumerate(made.job_roles):
        key = (role.namespace, role.service_account)
        if key in seen:
            hint = "a service account can have only one role"
            yield Problem("is a second role for this service account", path=f"{_AT}.job_roles.{index}", hint=hint)
        seen.add(key)
    if governance is None:
        return
    types = {kind for _, kind in named_types(cluster)}
    for field, able in (("teams", regions_of("compute_quota")), ("priorities", regions_of("scheduler_config"))):
        if getattr(governance, field) and cluster.region in known_regions() and cluster.region not in able:
            hint = "remove them, and create them in the console or with the AWS CLI"
            yield Problem(f"CloudFormation cannot create these in {cluster.region}", path=f"{path}.{field}", hint=hint)
        names = Counter(one.name for one in getattr(governance, field))
        for name in (name for name, times in names.items() if times > 1):
            yield Problem(f"`{name}` is listed twice", path=f"{path}.{field}", hint="list each name once")
    for index, team in enumerate(governance.teams):
        if team.instance_type not in types:
            hint = f"types of the cluster: {', '.join(sorted(types))}"
            yield Problem("no group has machines of this type", path=f"{path}.teams.{index}.instance_type", hint=hint)


def _on_slurm(cluster: ClusterConfig, made: Infrastructure) -> Iterator[Problem]:
    for field, stated in (
        ("eks", made.eks != Eks()),
        ("add_ons", made.add_ons != AddOns()),
        ("job_roles", bool(made.job_roles)),
        ("network.control_plane_subnets", bool(made.network.vpc_id and made.network.control_plane_subnets)),
    ):
        if stated:
            hint = "remove it, or use orchestrator eks"
            yield Problem("is only valid for orchestrator eks", path=f"{_AT}.{field}", hint=hint)

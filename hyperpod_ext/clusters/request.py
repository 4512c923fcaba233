"""Builds CreateCluster requests from a cluster's spec. Every member of a CreateCluster request is supported. Pure."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import (
    AutoPatch,
    BatchSize,
    EbsVolume,
    FsxLustre,
    FsxOpenZfs,
    LustreSize,
    RestrictedGroup,
    Rollout,
    ScheduledUpdate,
)
from hyperpod_ext.config.job.sagemaker import Vpc

Request = dict[str, Any]


def create_cluster_request(cluster: ClusterConfig) -> Request:
    """Return the CreateCluster request for `cluster`. `rules.problems` must find no problem in `cluster`."""
    shared, tiered, scaling = cluster.restricted_environment, cluster.tiered_storage, cluster.auto_scaling
    return given(
        ClusterName=cluster.name,
        InstanceGroups=[_group(cluster, group) for group in cluster.instance_groups],
        RestrictedInstanceGroups=[_restricted(cluster, group) for group in cluster.restricted_groups],
        RestrictedInstanceGroupsConfig=shared
        and {
            "SharedEnvironmentConfig": {
                "FSxLustreDeletionPolicy": shared.deletion,
                "FSxLustreConfig": _lustre(shared.lustre),
            }
        },
        VpcConfig=_vpc(cluster.vpc),
        Tags=[{"Key": key, "Value": value} for key, value in cluster.tags.items()],
        Orchestrator=_orchestrator(cluster),
        NodeRecovery=cluster.node_recovery,
        TieredStorageConfig=tiered
        and given(
            Mode="Enable" if tiered.enabled else "Disable", InstanceMemoryAllocationPercentage=tiered.memory_percent
        ),
        NodeProvisioningMode="Continuous" if cluster.continuous_provisioning else None,
        ClusterRole=cluster.cluster_role,
        AutoScaling=scaling and {"Mode": "Enable" if scaling.enabled else "Disable", "AutoScalerType": scaling.scaler},
    )


def given(**members: Any) -> Request:
    """Return the members whose values are neither None nor empty. Members with the values False and 0 are kept."""
    return {name: value for name, value in members.items() if value not in (None, [], {}, ())}


def _orchestrator(cluster: ClusterConfig) -> Request | None:
    if cluster.orchestrator == "eks":
        return {"Eks": {"ClusterArn": cluster.eks_cluster_arn}}
    if cluster.slurm is None:
        return None
    database = cluster.slurm.accounting
    accounting = database and given(
        Endpoint=database.endpoint, Port=database.port, Name=database.name, SecretArn=database.secret_arn
    )
    return {"Slurm": given(SlurmConfigStrategy=cluster.slurm.strategy, AccountingDatabase=accounting)}


def _group(cluster: ClusterConfig, group: InstanceGroup) -> Request:
    several = {"InstanceTypes": [group.instance_type, *group.other_types]}
    spot: Request = {"Spot": {}} if group.capacity == "spot" else {"OnDemand": {}}
    lifecycle, slurm = group.lifecycle, group.slurm
    return given(
        InstanceGroupName=group.name,
        InstanceType=None if group.other_types else group.instance_type,
        InstanceRequirements=several if group.other_types else None,
        InstanceCount=group.count,
        MinInstanceCount=group.min_count,
        LifeCycleConfig=lifecycle
        and given(
            SourceS3Uri=lifecycle.source, OnCreate=lifecycle.on_create, OnInitComplete=lifecycle.on_init_complete
        ),
        ExecutionRole=group.execution_role or cluster.execution_role,
        **_common(group),
        ImageId=group.image,
        ImageReleaseVersion=group.image_release,
        AutoPatchConfig=_auto_patch(group.auto_patch),
        KubernetesConfig=given(
            Labels=dict(group.labels),
            Taints=[given(Key=taint.key, Value=taint.value, Effect=taint.effect) for taint in group.taints],
        ),
        SlurmConfig=slurm
        and given(NodeType=slurm.node_type, PartitionNames=[slurm.partition] if slurm.partition else None),
        CapacityRequirements=spot if group.capacity else None,
        NetworkInterface={"InterfaceType": group.network_interface} if group.network_interface else None,
    )


def _restricted(cluster: ClusterConfig, group: RestrictedGroup) -> Request:
    return given(
        InstanceGroupName=group.name,
        InstanceType=group.instance_type,
        InstanceCount=group.count,
        ExecutionRole=group.execution_role or cluster.execution_role,
        **_common(group),
        EnvironmentConfig={"FSxLustreConfig": _lustre(group.lustre)} if group.lustre else None,
    )


def _common(group: InstanceGroup | RestrictedGroup) -> Request:
    return {
        "ThreadsPerCore": group.threads_per_core,
        "InstanceStorageConfigs": [_storage(one) for one in group.storage],
        "OnStartDeepHealthChecks": list(group.deep_health_checks),
        "TrainingPlanArn": group.training_plan,
        "OverrideVpcConfig": _vpc(group.vpc),
        "ScheduledUpdateConfig": _scheduled(group.scheduled_update),
    }


def _storage(storage: EbsVolume | FsxLustre | FsxOpenZfs) -> Request:
    match storage:
        case EbsVolume():
            root = True if storage.root else None
            return {
                "EbsVolumeConfig": given(
                    VolumeSizeInGB=storage.size_gib, VolumeKmsKeyId=storage.kms_key, RootVolume=root
                )
            }
        case FsxLustre():
            members = given(DnsName=storage.dns_name, MountName=storage.mount_name, MountPath=storage.path)
            return {"FsxLustreConfig": members}
        case FsxOpenZfs():
            return {"FsxOpenZfsConfig": given(DnsName=storage.dns_name, MountPath=storage.path)}


def _vpc(vpc: Vpc | None) -> Request | None:
    return None if vpc is None else {"SecurityGroupIds": list(vpc.security_groups), "Subnets": list(vpc.subnets)}


def _lustre(size: LustreSize) -> Request:
    return {"SizeInGiB": size.size_gib, "PerUnitStorageThroughput": size.throughput}


def _scheduled(update: ScheduledUpdate | None) -> Request | None:
    return (
        None if update is None else given(ScheduleExpression=update.schedule, DeploymentConfig=_rollout(update.rollout))
    )


def _rollout(rollout: Rollout | None) -> Request | None:
    if rollout is None:
        return None
    policy = given(MaximumBatchSize=_batch(rollout.batch), RollbackMaximumBatchSize=_batch(rollout.rollback_batch))
    return given(
        RollingUpdatePolicy=policy,
        WaitIntervalInSeconds=rollout.wait_s,
        AutoRollbackConfiguration=[{"AlarmName": name} for name in rollout.alarms],
    )


def _batch(size: BatchSize | None) -> Request | None:
    if size is None:
        return None
    if size.nodes is not None:
        return {"Type": "INSTANCE_COUNT", "Value": size.nodes}
    return {"Type": "CAPACITY_PERCENTAGE", "Value": size.percent}


def _auto_patch(patch: AutoPatch | None) -> Request | None:
    return (
        None
        if patch is None
        else given(
            PatchingStrategy=patch.strategy,
            PatchSchedule={"NextPatchDate": patch.next_date} if patch.next_date else None,
            DeploymentConfig=_rollout(patch.rollout),
            IdleWaitWindowInSeconds=patch.idle_s,
            DrainPolicy=given(DrainTimeoutInSeconds=patch.drain_timeout_s, OnDrainTimeout=patch.on_drain_timeout),
        )
    )

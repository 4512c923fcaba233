"""Stack with the KMS key, the buckets and the file system, which outlive the cluster. Even if the stack is deleted, the
buckets are kept."""

from __future__ import annotations

from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from hyperpod_cdk.network import SubnetPlacement
from hyperpod_cdk.stack_base import StackBase
from hyperpod_ext.clusters.bindings import Mount
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.clusters.infrastructure import Bucket

JOBS, EPHEMERAL, MILESTONES = "jobs", "ephemeral", "milestones"
"""Folders of the checkpoint bucket. Objects in `jobs` never expire by age, because after a long outage even the newest
checkpoint is old."""
LIFECYCLE = "lifecycle"
"""Folder of the lifecycle bucket that contains the scripts for new machines."""
_LUSTRE_PORTS = ((988, 988), (1018, 1023))


@dataclass(frozen=True)
class BucketLocation:
    """ARN of a bucket, which IAM policies in other stacks need."""

    arn: str

    def below(self, path: str) -> str:
        """Return the ARN of objects in the bucket by their path, such as `jobs/*`."""
        return f"{self.arn}/{path}"


@dataclass(frozen=True)
class Stored:
    """Resources of the storage stack that other stacks use."""

    key: kms.IKey
    checkpoints: BucketLocation
    data: BucketLocation
    lifecycle: s3.IBucket | None
    mount: Mount | None


class StorageStack(StackBase):
    """Stack with the KMS key, the buckets and the file system. The stack is protected against accidental deletion."""

    def __init__(self, scope: Construct, config: ClusterConfig, places: SubnetPlacement) -> None:
        super().__init__(scope, config, "storage", "key, buckets and file system", kept=True)
        buckets = self.made.buckets
        self._key = kms.Key(
            self,
            "Key",
            description=f"Checkpoints, data and file system of HyperPod cluster {config.name}",
            enable_key_rotation=True,
            removal_policy=cdk.RemovalPolicy.RETAIN,
        )
        scripts = config.orchestrator == "slurm" and self.made.lifecycle_scripts
        kept = self._kept()
        used = [buckets.checkpoints, buckets.data, *([buckets.lifecycle] if scripts else [])]
        logs = None
        if any(one.existing is None for one in used):
            logs = self._bucket("Logs", buckets.logs, [*kept, self._expire(None, buckets.log_days)], None)
        checkpoints = self._bucket(
            "Checkpoints",
            buckets.checkpoints,
            [
                *kept,
                self._expire(f"{EPHEMERAL}/", buckets.ephemeral_days),
                s3.LifecycleRule(
                    prefix=f"{MILESTONES}/",
                    transitions=[
                        s3.Transition(
                            storage_class=s3.StorageClass.INTELLIGENT_TIERING, transition_after=cdk.Duration.days(0)
                        )
                    ],
                ),
            ],
            logs,
        )
        data = self._bucket("Data", buckets.data, kept, logs)
        lifecycle = self._bucket("Lifecycle", self._named_lifecycle(), kept, logs) if scripts else None
        mount = self._file_system(places, data) if self.made.file_system is not None else None
        self.stored = Stored(self._key, self._place(checkpoints), self._place(data), lifecycle, mount)
        self.output("CheckpointBucket", checkpoints.bucket_name, "Bucket for checkpoints of jobs")
        self.output("CheckpointPrefix", JOBS, "Folder in the checkpoint bucket; each job has its own folder below it")
        self.output("DataBucket", data.bucket_name, "Bucket that jobs read data from")
        self.output("LifecycleBucket", lifecycle and lifecycle.bucket_name, "Bucket of the scripts for new machines")
        self.output("KmsKeyArn", self._key.key_arn, "Key of buckets and file system")
        self.output("FileSystemDns", mount and mount.dns_name, "DNS name of the file system")
        self.output("FileSystemMount", mount and mount.mount_name, "Mount name of the file system")

    def _place(self, bucket: s3.IBucket) -> BucketLocation:
        """Return the location of a bucket; the ARN of a new bucket is exported to other stacks. The export must exist
        before policies refer to the bucket, because the export changes the text of the ARN, by which findings about
        wildcards in policies are acknowledged."""
        made_here = bucket.node.find_all()[1:]
        return BucketLocation(str(self.export_value(bucket.bucket_arn)) if made_here else bucket.bucket_arn)

    def _named_lifecycle(self) -> Bucket:
        """Return the lifecycle bucket of the spec. A bucket without a name gets a name with the prefix `sagemaker-`,
        which HyperPod requires."""
        wanted = self.made.buckets.lifecycle
        if wanted.name or wanted.existing:
            return wanted
        name = f"sagemaker-{self.config.name.lower()[:20]}-{self.account}-{self.region}"
        return Bucket.model_construct(name=name, existing=None)

    def _kept(self) -> list[s3.LifecycleRule]:
        """Return the S3 lifecycle rules that every bucket has, which delete unfinished uploads and old versions, but no
        current versions of objects."""
        buckets = self.made.buckets
        return [
            s3.LifecycleRule(
                abort_incomplete_multipart_upload_after=cdk.Duration.days(buckets.multipart_days),
                noncurrent_version_expiration=cdk.Duration.days(buckets.noncurrent_days),
            )
        ]

    def _expire(self, prefix: str | None, days: int) -> s3.LifecycleRule:
        return s3.LifecycleRule(prefix=prefix, expiration=cdk.Duration.days(days))

    def _bucket(self, name: str, wanted: Bucket, rules: list[s3.LifecycleRule], logs: s3.IBucket | None) -> s3.IBucket:
        if wanted.existing is not None:
            return s3.Bucket.from_bucket_name(self, name, wanted.existing)
        plain = logs is None  # no KMS key for the log bucket: S3 cannot write access logs with a KMS key
        bucket = s3.Bucket(
            self,
            name,
            bucket_name=wanted.name,
            encryption=s3.BucketEncryption.S3_MANAGED if plain else s3.BucketEncryption.KMS,
            encryption_key=None if plain else self._key,
            bucket_key_enabled=None if plain else True,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            versioned=True,
            lifecycle_rules=rules,
            server_access_logs_bucket=logs,
            server_access_logs_prefix=None if plain else f"{name.lower()}/",
            removal_policy=cdk.RemovalPolicy.RETAIN,
        )
        if not plain:
            self._only_our_key(bucket)
        return bucket

    def _only_our_key(self, bucket: s3.Bucket) -> None:
        """Add a policy to the bucket that refuses writes with another KMS key or another encryption in their header.
        Writes without an encryption header are encrypted with the cluster's key."""
        how = "s3:x-amz-server-side-encryption"
        for sid, header, wanted in (
            ("OnlyKms", how, "aws:kms"),
            ("OnlyOurKey", "s3:x-amz-server-side-encryption-aws-kms-key-id", self._key.key_arn),
        ):
            bucket.add_to_resource_policy(
                iam.PolicyStatement(
                    sid=sid,
                    effect=iam.Effect.DENY,
                    principals=[iam.AnyPrincipal()],
                    actions=["s3:PutObject"],
                    resources=[bucket.arn_for_objects("*")],
                    # `Null` exempts writes without the header, which StringNotEquals alone would also match
                    conditions={"StringNotEquals": {header: wanted}, "Null": {how: "false"}},
                )
            )

    def _file_system(self, places: SubnetPlacement, data: s3.IBucket) -> Mount:
        wanted = self.made.file_system
        assert wanted is not None
        system = fsx.CfnFileSystem(
            self,
            "FileSystem",
            file_system_type="LUSTRE",
            file_system_type_version="2.15",
            storage_capacity=wanted.size_gib,
            # create the file system in the zone of the machines, because traffic between zones costs money
            subnet_ids=[places.machine_subnets[0]],
            security_group_ids=[self._lustre_group(places)],
            kms_key_id=self._key.key_arn,
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type="PERSISTENT_2",
                per_unit_storage_throughput=wanted.throughput,
                data_compression_type="LZ4",
            ),
        )
        if wanted.keep:
            system.apply_removal_policy(cdk.RemovalPolicy.RETAIN)
        for rule in self._lustre_rules:
            system.add_resource_dependency(rule)
        if wanted.link_data:
            self._link(system, data)
        return Mount(system.attr_dns_name, system.attr_lustre_mount_name, wanted.path)

    def _lustre_group(self, places: SubnetPlacement) -> str:
        """Create the security group of the file system, and return its id. The group allows traffic from machines and
        from the file system's own servers, only on Lustre's ports."""
        group = ec2.CfnSecurityGroup(
            self,
            "FileSystemGroup",
            group_description=f"File system of {self.config.name}: Lustre, from machines",
            vpc_id=places.vpc_id,
        )
        own = group.attr_group_id
        self._lustre_rules: list[cdk.CfnResource] = []
        for number, source in enumerate((own, *places.all_security_groups)):
            for first, last in _LUSTRE_PORTS:
                self._lustre_rules.append(
                    ec2.CfnSecurityGroupIngress(
                        self,
                        f"Lustre{number}Port{first}",
                        group_id=own,
                        ip_protocol="tcp",
                        from_port=first,
                        to_port=last,
                        source_security_group_id=source,
                    )
                )
        return own

    def _link(self, system: fsx.CfnFileSystem, data: s3.IBucket) -> None:
        events = ["NEW", "CHANGED", "DELETED"]
        fsx.CfnDataRepositoryAssociation(
            self,
            "DataLink",
            file_system_id=system.ref,
            file_system_path="/data",
            data_repository_path=f"s3://{data.bucket_name}",
            batch_import_meta_data_on_create=True,
            s3=fsx.CfnDataRepositoryAssociation.S3Property(
                auto_import_policy=fsx.CfnDataRepositoryAssociation.AutoImportPolicyProperty(events=events)
            ),
        )
        self._key.add_to_resource_policy(  # allow FSx's service-linked role to read the data bucket
            iam.PolicyStatement(
                sid="FileSystemReadsData",
                principals=[iam.AccountRootPrincipal()],
                actions=["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"],
                resources=["*"],
                conditions={
                    "ArnLike": {
                        "aws:PrincipalArn": f"arn:{cdk.Aws.PARTITION}:iam::{self.account}:role/aws-service-role/"
                        "s3.data-source.lustre.fsx.amazonaws.com/*"
                    }
                },
            )
        )

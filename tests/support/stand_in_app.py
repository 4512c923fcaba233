"""A CDK app without CDK: writes an assembly as CDK's library would, from the same file and environment.

Copied as `app.py` into a folder of its own. Its stacks: `-network`, `-storage` and `-cluster`; moto can make them.
"""

import json
import os
from pathlib import Path

config = json.loads(Path(os.environ["HPX_CLUSTER"]).read_text())
context = json.loads(os.environ["CDK_CONTEXT_JSON"])
out, name, scale = Path(os.environ["CDK_OUTDIR"]), config["name"], context.get("scale") == "true"
slurm = config.get("orchestrator") == "slurm"

groups = [
    {
        "InstanceGroupName": group["name"],
        "InstanceType": group["instance_type"],
        "InstanceCount": group["count"] if scale else 0,
    }
    for group in config["instance_groups"]
]
if slurm:
    source = {"Fn::Join": ["", ["s3://", {"Fn::ImportValue": f"{name}-scripts"}, "/scripts"]]}
    groups = [group | {"LifeCycleConfig": {"SourceS3Uri": source}} for group in groups]


def bucket(purpose: str) -> dict[str, object]:
    return {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": f"{name}-{purpose}"}, "DeletionPolicy": "Retain"}


templates = {
    "network": {
        "Resources": {
            "Vpc": {
                "Type": "AWS::EC2::VPC",
                "Properties": {"CidrBlock": config["infrastructure"]["network"].get("cidr", "10.192.0.0/16")},
            }
        },
        "Outputs": {"Vpc": {"Value": {"Ref": "Vpc"}, "Export": {"Name": f"{name}-vpc"}}},
    },
    "storage": {
        "Resources": {"Checkpoints": bucket("checkpoints"), "Scripts": bucket("scripts")},
        "Outputs": {
            "CheckpointBucket": {"Value": {"Ref": "Checkpoints"}},
            "CheckpointPrefix": {"Value": "jobs"},
            "DataBucket": {"Value": f"{name}-data"},
            "LifecycleBucket": {"Value": {"Ref": "Scripts"}, "Export": {"Name": f"{name}-scripts"}},
        },
    },
    "cluster": {
        "Resources": {
            "Role": {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": {}}},
            "Cluster": {
                "Type": "AWS::SageMaker::Cluster",
                "Properties": {
                    "ClusterName": name,
                    "InstanceGroups": groups,
                    "VpcConfig": {"Subnets": [{"Fn::ImportValue": f"{name}-vpc"}]},
                },
            },
        },
        "Outputs": {
            "ClusterName": {"Value": name},
            "ExecutionRoleArn": {"Value": {"Fn::GetAtt": ["Role", "Arn"]}},
            "Namespace": {"Value": "hyperpod-ns-research"},
            "ServiceAccount": {"Value": "training"},
            "QueueName": {"Value": "hyperpod-ns-research-localqueue"},
            "SubnetIds": {"Value": "subnet-0,subnet-1"},
            "SecurityGroupIds": {"Value": "sg-0"},
        },
    },
}
artifacts = {}
for end, template in templates.items():
    file = f"{name}-{end}.template.json"
    (out / file).write_text(json.dumps(template))
    needs = [] if end != "cluster" else [f"{name}-network", f"{name}-storage"]
    artifacts[f"{name}-{end}"] = {
        "type": "aws:cloudformation:stack",
        "properties": {"templateFile": file, "requiresBootstrapStackVersion": 6},
        "dependencies": needs,
    }
(out / "manifest.json").write_text(json.dumps({"version": "48.0.0", "artifacts": artifacts}))

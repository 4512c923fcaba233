"""Types of CloudFormation that moto does not make, or not rightly. Import this before the first stack is created.

The HyperPod cluster itself is the stand-in's: requests pass the service's own model first, an update is an
UpdateCluster, and a property that only a new cluster can have replaces it, as the schema of the type says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from aws_stand_in import AwsStandIn
from moto.cloudformation.models import Stack
from moto.core.common_models import CloudFormationModel
from moto.ec2.models import ec2_backends
from moto.ec2.models.route_tables import RouteTable
from moto.kms.models import Key

from hyperpod_ext.jobs.sagemaker.strict import check_request

_CREATE_ONLY = ("ClusterName", "VpcConfig")


@dataclass
class World:
    """What there is beside moto's own."""

    sagemaker: AwsStandIn = field(default_factory=AwsStandIn)
    replaced: list[str] = field(default_factory=list)
    """Clusters that a stack's update made again."""
    recorded: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Properties of other resources that are there, by type."""


WORLD = World()


def forget() -> World:
    """An empty world, for one test."""
    WORLD.__init__()  # type: ignore[misc]
    return WORLD


class _Model:
    """Common to all: `physical_resource_id` is what Ref gives, `attributes` what GetAtt does."""

    kind = ""
    name_property = ""

    def __init__(self, name: str, properties: dict[str, Any], account: str, region: str) -> None:
        self.physical_resource_id = name
        self.properties = properties
        self.attributes = _attributes(self.kind, name, properties, account, region)

    @classmethod
    def cloudformation_type(cls) -> str:
        return cls.kind

    @classmethod
    def cloudformation_name_type(cls) -> str:
        return cls.name_property

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr in _attributes(cls.kind, "x", {}, "x", "x")

    def get_cfn_attribute(self, attr: str) -> str:
        return self.attributes[attr]

    def is_created(self) -> bool:
        return True

    @classmethod
    def create_from_cloudformation_json(cls, name: str, found: Any, account_id: str, region_name: str, **_: Any) -> Any:
        made = cls(name, found["Properties"], account_id, region_name)
        made.create(region_name)
        return made

    @classmethod
    def update_from_cloudformation_json(
        cls, original_resource: Any, new_resource_name: str, cloudformation_json: Any, account_id: str, region_name: str
    ) -> Any:
        made = cls(original_resource.physical_resource_id, cloudformation_json["Properties"], account_id, region_name)
        made.update(original_resource, region_name)
        return made

    def create(self, region: str) -> None:
        WORLD.recorded.setdefault(self.kind, []).append(self.properties)

    def update(self, before: Any, region: str) -> None:
        before.delete("", region)
        self.create(region)

    def delete(self, _account: str, region: str) -> None:
        WORLD.recorded[self.kind].remove(self.properties)


def _attributes(kind: str, name: str, properties: Any, account: str, region: str) -> dict[str, str]:
    short = name.lower()[-8:]
    where = f"{region}:{account}"
    match kind:
        case "AWS::EKS::Cluster":
            return {"Arn": f"arn:aws:eks:{where}:cluster/{properties.get('Name')}"}
        case "AWS::FSx::FileSystem":
            return {"DNSName": f"fs-0123456789abcdef0.fsx.{region}.amazonaws.com", "LustreMountName": "abcdefgh"}
        case "AWS::APS::Workspace":
            arn = f"arn:aws:aps:{where}:workspace/ws-{short}"
            return {
                "Arn": arn,
                "PrometheusEndpoint": f"https://aps-workspaces.{region}.amazonaws.com/workspaces/{short}/",
            }
        case "AWS::SageMaker::Cluster":
            return {"ClusterArn": f"arn:aws:sagemaker:{where}:cluster/abcdefghijkl"}
    return {}


class _Cluster(_Model):
    def create(self, region: str) -> None:
        self._send("CreateCluster", self.properties)

    def update(self, before: Any, region: str) -> None:
        has, wanted = before.properties, self.properties
        moved = any(has.get(name) != wanted.get(name) for name in _CREATE_ONLY)
        if moved or has.get("Orchestrator", {}).get("Eks") != wanted.get("Orchestrator", {}).get("Eks"):
            WORLD.replaced.append(wanted["ClusterName"])
            before.delete("", region)
            self.create(region)
            return
        names = {group["InstanceGroupName"] for group in wanted["InstanceGroups"]}
        gone = [
            group["InstanceGroupName"] for group in has["InstanceGroups"] if group["InstanceGroupName"] not in names
        ]
        left = {name: value for name, value in wanted.items() if name not in ("VpcConfig", "Tags", "Orchestrator")}
        self._send("UpdateCluster", left | ({"InstanceGroupsToDelete": gone} if gone else {}))

    def delete(self, _account: str, region: str) -> None:
        del WORLD.sagemaker.clusters[self.properties["ClusterName"]]

    def _send(self, operation: str, request: dict[str, Any]) -> None:
        found = check_request(operation, request)
        assert not found, found
        status, answer = WORLD.sagemaker.answer(operation, json.loads(json.dumps(request)))
        assert status == 200, answer


def _register(kind: str, base: type[_Model] = _Model, name_property: str = "") -> type:
    # moto finds direct subclasses only, and reads the service from a dotted module
    members = {"kind": kind, "name_property": name_property, "__module__": "tests.shims.cfn"}
    return type(kind.replace("::", ""), (base, CloudFormationModel), members)


MODELS = [
    _register("AWS::SageMaker::Cluster", _Cluster),
    _register("AWS::EKS::Cluster", name_property="Name"),
    *(
        _register(kind)
        for kind in (
            *("AWS::EKS::Addon", "AWS::EKS::AccessEntry", "AWS::EKS::PodIdentityAssociation"),
            "AWS::S3::BucketPolicy",  # moto's own would refuse what only its conditions refuse
            *("AWS::FSx::FileSystem", "AWS::FSx::DataRepositoryAssociation", "AWS::EC2::SecurityGroupEgress"),
            *("AWS::APS::Workspace", "AWS::SageMaker::ComputeQuota", "AWS::SageMaker::ClusterSchedulerConfig"),
        )
    ),
]
"""Kept: moto holds no reference to them."""

_create_key = Key.create_from_cloudformation_json.__func__  # type: ignore[attr-defined]


def _create_tagged_key(cls: type[Key], name: str, found: Any, account_id: str, region_name: str, **rest: Any) -> Any:
    tags = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in found["Properties"].pop("Tags", [])]
    return _create_key(cls, name, {"Properties": found["Properties"] | {"Tags": tags}}, account_id, region_name, **rest)


Key.create_from_cloudformation_json = classmethod(_create_tagged_key)  # type: ignore[method-assign, assignment]


def _delete_routes(_cls: type[RouteTable], name: str, _found: Any, account_id: str, region_name: str) -> None:
    backend = ec2_backends[account_id][region_name]
    backend.get_route_table(name).associations.clear()
    backend.delete_route_table(name)


RouteTable.delete_from_cloudformation_json = classmethod(_delete_routes)  # type: ignore[method-assign, assignment]

Stack.parse_template = staticmethod(json.loads)  # type: ignore[method-assign]
"""Ours are JSON, which moto reads as YAML: for more CPU than all that it then makes."""

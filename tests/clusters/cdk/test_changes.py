"""What a change of templates replaces."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hyperpod_ext.clusters.cdk.changes import ResourceChange, find_changes

GROUP = {"InstanceGroupName": "workers", "InstanceType": "ml.p5.48xlarge", "InstanceCount": 0}
SUBNET = {"Type": "AWS::EC2::Subnet", "Properties": {"VpcId": {"Ref": "Vpc"}, "CidrBlock": "10.0.0.0/24"}}
NETWORK: dict[str, Any] = {
    "Resources": {"Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/16"}}, "Subnet": SUBNET},
    "Outputs": {"S": {"Value": {"Ref": "Subnet"}, "Export": {"Name": "research-network:subnet"}}},
}
CLUSTER: dict[str, Any] = {
    "Resources": {
        "Cluster": {
            "Type": "AWS::SageMaker::Cluster",
            "Properties": {
                "ClusterName": "research",
                "InstanceGroups": [GROUP, GROUP | {"InstanceGroupName": "others"}],
                "VpcConfig": {
                    "Subnets": [{"Fn::ImportValue": "research-network:subnet"}],
                    "SecurityGroupIds": ["sg-0"],
                },
                "Orchestrator": {"Eks": {"ClusterArn": "arn:one"}},
                "Tags": [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}],
            },
        },
        "CDKMetadata": {"Type": "AWS::CDK::Metadata", "Properties": {"Analytics": "x"}},
    }
}
THERE = {"research-network": NETWORK, "research-cluster": CLUSTER}


def changed(edit: Any) -> list[ResourceChange]:
    """What differs once `edit` has changed a copy of the templates."""
    wanted = copy.deepcopy(THERE)
    edit(wanted)
    return find_changes(THERE, wanted)


def properties(templates: dict[str, Any], stack: str = "research-cluster", name: str = "Cluster") -> dict[str, Any]:
    found: dict[str, Any] = templates[stack]["Resources"][name]["Properties"]
    return found


def test_nothing_changes_where_only_order_and_notes_do() -> None:
    def edit(wanted: dict[str, Any]) -> None:
        properties(wanted)["Tags"].reverse()
        properties(wanted)["InstanceGroups"].reverse()
        properties(wanted, name="CDKMetadata")["Analytics"] = "y"

    assert changed(edit) == []


def test_scaling_is_an_update_of_its_field() -> None:
    (change,) = changed(lambda wanted: properties(wanted)["InstanceGroups"][0].update(InstanceCount=16))
    assert (change.effect, change.breaks) == ("update", False)
    assert [(one.path, one.before, one.after) for one in change.fields] == [
        ("InstanceGroups.workers.InstanceCount", 0, 16)
    ]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("ClusterName",), "other", "ClusterName"),
        (("VpcConfig", "SecurityGroupIds"), ["sg-0", "sg-1"], "VpcConfig.SecurityGroupIds"),
        (("Orchestrator", "Eks", "ClusterArn"), "arn:two", "Orchestrator.Eks.ClusterArn"),
        (("Orchestrator",), {"Slurm": {"SlurmConfigStrategy": "Managed"}}, "Orchestrator.Eks"),
        (("Orchestrator",), None, "Orchestrator"),
    ],
)
def test_what_an_update_cannot_change_replaces_the_cluster(path: tuple[str, ...], value: Any, field: str) -> None:
    def edit(wanted: dict[str, Any]) -> None:
        holder = properties(wanted)
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = value
        if value is None:
            del holder[path[-1]]

    (change,) = changed(edit)
    assert (change.effect, change.breaks) == ("replace", True)
    assert field in [one.path for one in change.fields if one.effect == "replace"]


def test_a_group_that_goes_or_gets_another_type_takes_its_machines_with_it() -> None:
    (gone,) = changed(lambda wanted: properties(wanted)["InstanceGroups"].pop())
    assert (gone.effect, gone.breaks) == ("update", True)
    assert [(one.path, one.effect) for one in gone.fields] == [("InstanceGroups.others", "delete group")]
    (other,) = changed(lambda wanted: properties(wanted)["InstanceGroups"][0].update(InstanceType="ml.p5e.48xlarge"))
    assert [(one.path, one.effect) for one in other.fields] == [
        ("InstanceGroups.workers.InstanceType", "replace group")
    ]
    (added,) = changed(lambda wanted: properties(wanted)["InstanceGroups"].append(GROUP | {"InstanceGroupName": "c"}))
    assert not added.breaks


def test_a_replaced_network_replaces_the_cluster_in_another_stack() -> None:
    found = changed(lambda wanted: properties(wanted, "research-network", "Vpc").update(CidrBlock="10.1.0.0/16"))
    effects = {f"{one.stack}.{one.id}": one.effect for one in found}
    assert effects == {
        "research-network.Vpc": "replace",
        "research-network.Subnet": "replace",
        "research-cluster.Cluster": "replace",
    }
    (cluster,) = (one for one in found if one.id == "Cluster")
    assert [(one.path, one.after) for one in cluster.fields] == [("VpcConfig", "what replaces research-network.Subnet")]


def test_a_renamed_cluster_is_replaced_stacks_and_all() -> None:
    def rename(wanted: dict[str, Any]) -> None:
        for stack in list(wanted):
            wanted[stack.replace("research", "other")] = wanted.pop(stack)
        properties(wanted, "other-cluster")["ClusterName"] = "other"

    (change,) = (one for one in changed(rename) if one.breaks)
    assert (change.stack, [one.path for one in change.fields]) == ("other-cluster", ["ClusterName"])


def test_what_is_retained_is_left_and_the_rest_is_deleted() -> None:
    there = copy.deepcopy(THERE)
    there["research-network"]["Resources"] |= {
        "Kept": {"Type": "AWS::S3::Bucket", "DeletionPolicy": "Retain"},
        "Gone": {"Type": "AWS::EC2::NatGateway"},
    }
    found = {one.id: (one.effect, one.breaks) for one in find_changes(there, THERE)}
    assert found == {"Kept": ("keep", False), "Gone": ("delete", True)}


def test_a_type_that_is_not_known_may_be_replaced() -> None:
    there = {"a-x": {"Resources": {"R": {"Type": "AWS::New::Thing", "Properties": {"A": 1}}}}}
    wanted = {"a-x": {"Resources": {"R": {"Type": "AWS::New::Thing", "Properties": {"A": 2}}}}}
    (change,) = find_changes(there, wanted)
    assert (change.effect, change.breaks) == ("may replace", True)


def test_a_new_stack_is_created() -> None:
    found = find_changes({}, THERE)
    assert {one.effect for one in found} == {"create"}
    assert len(found) == 3

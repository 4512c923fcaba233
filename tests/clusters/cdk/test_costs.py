"""What a cluster costs an hour, by arithmetic that can be done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clusters import GROUP, cluster

from hyperpod_ext.catalog.instances import instances
from hyperpod_ext.catalog.prices import lustre_price, machine_price, regions, resource_price, sources
from hyperpod_ext.clusters.cdk.assembly import Assembly, Stack
from hyperpod_ext.clusters.cdk.costs import CostItem, estimate

P5 = 63.296


def assembly(count: int = 0, **resources: Any) -> Assembly:
    group = {"InstanceGroupName": "workers", "InstanceCount": count}
    made = {"Cluster": {"Type": "AWS::SageMaker::Cluster", "Properties": {"InstanceGroups": [group]}}} | resources
    return Assembly(Path(), (Stack("research-cluster", {"Resources": made}),))


def line(found: tuple[CostItem, ...], what: str) -> CostItem:
    (one,) = (each for each in found if what in each.what)
    return one


def test_machines_cost_nothing_until_they_are_there() -> None:
    found = estimate(cluster(), assembly())
    assert line(found.items, "workers").price == machine_price("ml.p5.48xlarge", "us-west-2")
    assert (found.now, found.scaled) == (0, pytest.approx(4 * P5))
    assert estimate(cluster(), assembly(count=2)).now == pytest.approx(2 * P5)


def test_what_has_no_price_here_is_said_and_never_nothing() -> None:
    unknown = GROUP | {"instance_type": "ml.p5e.48xlarge"}
    spot = GROUP | {"name": "spot", "capacity": "spot"}
    found = estimate(cluster(instance_groups=[GROUP | {"name": "known"}, unknown, spot]), assembly())
    assert [one.what for one in found.unknown] == ["ml.p5e.48xlarge, group workers", "ml.p5.48xlarge, group spot"]
    assert found.scaled == pytest.approx(4 * P5)
    told = found.to_json()
    assert told["unknown"] == [one.what for one in found.unknown]
    assert [one["usd_scaled"] for one in told["lines"]] == [pytest.approx(4 * P5), None, None]


def test_a_region_without_prices_has_none() -> None:
    found = estimate(cluster(region="eu-central-1"), assembly())
    assert (found.scaled, len(found.unknown), found.dated) == (0, 1, None)


def test_what_stands_around_the_machines_costs_too() -> None:
    found = estimate(
        cluster(),
        assembly(
            Nat={"Type": "AWS::EC2::NatGateway"},
            S3={"Type": "AWS::EC2::VPCEndpoint", "Properties": {"VpcEndpointType": "Gateway"}},
            Ecr={"Type": "AWS::EC2::VPCEndpoint", "Properties": {"VpcEndpointType": "Interface", "SubnetIds": [1, 2]}},
            Eks={"Type": "AWS::EKS::Cluster"},
            Role={"Type": "AWS::IAM::Role"},
            Bucket={"Type": "AWS::S3::Bucket"},
            Odd={"Type": "AWS::Odd::Thing"},
            Fsx={
                "Type": "AWS::FSx::FileSystem",
                "Properties": {
                    "StorageCapacity": 2400,
                    "LustreConfiguration": {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
                },
            },
        ),
    )
    assert found.now == pytest.approx(0.045 + 2 * 0.01 + 0.10 + 2400 * 0.145 / 730)
    assert [one.what for one in found.unknown] == ["AWS::Odd::Thing"]
    assert [kind for kind, _how in found.by_use] == ["AWS::S3::Bucket"]


def test_a_disk_is_among_what_is_not_known() -> None:
    group = GROUP | {"storage": [{"kind": "ebs", "size_gib": 500}]}
    (unknown,) = estimate(cluster(instance_groups=[group]), assembly()).unknown
    assert (unknown.what, unknown.scaled) == ("500 GiB of EBS, group workers", 4)


def test_every_price_is_of_a_type_that_exists_has_a_source_and_is_more_than_nothing() -> None:
    from hyperpod_ext.catalog import facts

    known = instances()
    for region in regions():
        for tables in facts("prices.json")["regions"][region].values():
            for source, found in tables.items():
                assert source in sources()
                assert all(usd > 0 for usd in found.values())
        for name in (n for t in facts("prices.json")["regions"][region]["machines"].values() for n in t):
            assert name in known
    assert resource_price("AWS::EKS::Cluster", "us-west-2") is not None
    assert lustre_price(1200, 77, "us-west-2") is None

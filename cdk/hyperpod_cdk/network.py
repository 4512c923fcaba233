"""Stack with the VPC, in which machines reach S3 and AWS's services without the internet, and each other over EFA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from hyperpod_cdk.acknowledgements import accept
from hyperpod_cdk.stack_base import StackBase
from hyperpod_cdk.subnets import plan_subnets
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.job.sagemaker import Vpc

ENDPOINTS = (
    *("ecr.api", "ecr.dkr", "sts", "logs", "monitoring", "ec2", "ssm", "ssmmessages", "ec2messages"),
    "sagemaker.api",
)
"""AWS services for which the VPC gets interface endpoints. S3 is not listed, because it has a gateway endpoint."""
_ONLY_EKS = ("eks-auth",)


@dataclass(frozen=True)
class SubnetPlacement:
    """VPC, subnets and security groups of a cluster, each as an id or as a CDK token."""

    vpc_id: str
    machine_subnets: tuple[str, ...]
    """Subnets of the cluster, all in the first availability zone. A group in another zone gets a subnet of its own
    instead, because VpcConfig of a cluster cannot be updated."""
    control_subnets: tuple[str, ...]
    """Subnets of the EKS control plane, in at least two availability zones."""
    security_groups: tuple[str, ...]
    """Security groups of the machines."""
    group_subnets: Mapping[str, str] = field(default_factory=dict)
    """Subnets of groups that are not in the first availability zone, by the group's name."""
    named: tuple[Vpc, ...] = ()
    """VPC settings of groups that have a `vpc` of their own in the spec."""

    @property
    def all_machine_subnets(self) -> tuple[str, ...]:
        """Return every subnet in which machines can be."""
        of_groups = (*self.group_subnets.values(), *(subnet for vpc in self.named for subnet in vpc.subnets))
        return tuple(dict.fromkeys((*self.machine_subnets, *of_groups)))

    @property
    def all_security_groups(self) -> tuple[str, ...]:
        """Return every security group that machines can have."""
        return tuple(
            dict.fromkeys((*self.security_groups, *(one for vpc in self.named for one in vpc.security_groups)))
        )


def existing_places(config: ClusterConfig) -> SubnetPlacement:
    """Return the subnets and security groups of a cluster in the existing VPC that its spec names."""
    assert config.infrastructure is not None
    assert config.vpc is not None
    network = config.infrastructure.network
    return SubnetPlacement(
        vpc_id=str(network.vpc_id),
        machine_subnets=config.vpc.subnets,
        control_subnets=network.control_plane_subnets,
        security_groups=config.vpc.security_groups,
        named=tuple(group.vpc for group in (*config.instance_groups, *config.restricted_groups) if group.vpc),
    )


class NetworkStack(StackBase):
    """Stack with the VPC, its subnets in each zone, gateways, endpoints, and the security group of machines."""

    def __init__(self, scope: Construct, config: ClusterConfig) -> None:
        super().__init__(scope, config, "network", "its network")
        network = self.made.network
        self._vpc = ec2.CfnVPC(
            self,
            "Vpc",
            cidr_block=network.cidr,
            enable_dns_hostnames=True,
            enable_dns_support=True,
            tags=[cdk.CfnTag(key="Name", value=config.name)],
        )
        plans = plan_subnets(network.cidr, network.zones)
        self._tables: list[str] = []
        gateways = self._gateways([plan.public for plan in plans])
        self._machines = {
            plan.zone: self._subnet(f"Machines{place}", plan.zone, plan.machines, gateways[place])
            for place, plan in enumerate(plans, 1)
        }
        self._control = {
            plan.zone: self._subnet(f"Control{place}", plan.zone, plan.control, gateways[place])
            for place, plan in enumerate(plans, 1)
        }
        group = self._machine_group()
        self._endpoints(network.cidr)
        self._flow_logs()
        zones = list(network.zones)
        self.places = SubnetPlacement(
            vpc_id=self._vpc.ref,
            machine_subnets=(self._machines[zones[0]],),
            control_subnets=tuple(self._control.values()),
            security_groups=(group,),
            group_subnets={name: self._machines[zone] for name, zone in network.group_zones.items()},
        )

    def _gateways(self, cidrs: list[str]) -> dict[int, str | None]:
        """Create the NAT gateways, and return the gateway of each zone; None without NAT gateways. Zones are counted
        from 1."""
        network = self.made.network
        if network.nat == "none":
            return dict.fromkeys(range(1, len(cidrs) + 1))
        internet = ec2.CfnInternetGateway(self, "Internet")
        attached = ec2.CfnVPCGatewayAttachment(
            self, "InternetAttachment", vpc_id=self._vpc.ref, internet_gateway_id=internet.ref
        )
        table = ec2.CfnRouteTable(self, "PublicRoutes", vpc_id=self._vpc.ref)
        route = ec2.CfnRoute(
            self, "ToInternet", route_table_id=table.ref, destination_cidr_block="0.0.0.0/0", gateway_id=internet.ref
        )
        route.add_resource_dependency(attached)
        found: dict[int, str | None] = {}
        for place, (zone, cidr) in enumerate(zip(network.zones, cidrs, strict=True), 1):
            if network.nat == "one" and place > 1:
                found[place] = found[1]
                continue
            subnet = self._plain_subnet(f"Public{place}", zone, cidr)
            ec2.CfnSubnetRouteTableAssociation(self, f"Public{place}Routes", route_table_id=table.ref, subnet_id=subnet)
            address = ec2.CfnEIP(self, f"Nat{place}Address", domain="vpc")
            nat = ec2.CfnNatGateway(self, f"Nat{place}", subnet_id=subnet, allocation_id=address.attr_allocation_id)
            nat.add_resource_dependency(attached)
            found[place] = nat.ref
        return found

    def _subnet(self, name: str, zone: str, cidr: str, nat: str | None) -> str:
        """Create a private subnet with its own route table, and return the subnet. With `nat`, the table has a route to
        the internet over the NAT gateway `nat`."""
        subnet = self._plain_subnet(name, zone, cidr)
        table = ec2.CfnRouteTable(self, f"{name}Routes", vpc_id=self._vpc.ref)
        ec2.CfnSubnetRouteTableAssociation(self, f"{name}Association", route_table_id=table.ref, subnet_id=subnet)
        if nat is not None:
            ec2.CfnRoute(
                self,
                f"{name}ToInternet",
                route_table_id=table.ref,
                destination_cidr_block="0.0.0.0/0",
                nat_gateway_id=nat,
            )
        self._tables.append(table.ref)
        return subnet

    def _plain_subnet(self, name: str, zone: str, cidr: str) -> str:
        where = {"availability_zone_id": zone} if "-az" in zone else {"availability_zone": zone}
        tags = [cdk.CfnTag(key="Name", value=f"{self.config.name}-{name}")]
        subnet = ec2.CfnSubnet(self, name, vpc_id=self._vpc.ref, cidr_block=cidr, tags=tags, **where)
        if "availability_zone" in where:
            accept(subnet, "CloudFormation-Validate::W3010", "capacity is in one zone, which the cluster's spec sets")
        return subnet.ref

    def _machine_group(self) -> str:
        """Create the security group of machines, and return its id.

        EFA traffic needs two rules, one for each direction, whose source or destination is the security group itself.
        AWS's default egress rule does not match EFA traffic. The rules are separate resources, because the definition
        of a security group cannot refer to the group itself.
        """
        group = ec2.CfnSecurityGroup(
            self,
            "MachineGroup",
            group_description=f"Machines of {self.config.name}: among themselves everything, outwards everything",
            vpc_id=self._vpc.ref,
        )
        own = group.attr_group_id
        ec2.CfnSecurityGroupIngress(
            self, "FromOneAnother", group_id=own, ip_protocol="-1", source_security_group_id=own
        )
        ec2.CfnSecurityGroupEgress(
            self, "ToOneAnother", group_id=own, ip_protocol="-1", destination_security_group_id=own
        )
        ec2.CfnSecurityGroupEgress(self, "ToAll", group_id=own, ip_protocol="-1", cidr_ip="0.0.0.0/0")
        return own

    def _endpoints(self, cidr: str) -> None:
        region = self.config.region
        ec2.CfnVPCEndpoint(
            self,
            "S3",
            vpc_id=self._vpc.ref,
            vpc_endpoint_type="Gateway",
            service_name=f"com.amazonaws.{region}.s3",
            route_table_ids=self._tables,  # without routes to the S3 endpoint, checkpoints would use the NAT gateway
        )
        if not self.made.network.private_endpoints:
            return
        group = ec2.CfnSecurityGroup(
            self,
            "EndpointGroup",
            group_description="HTTPS from the network to services of AWS",
            vpc_id=self._vpc.ref,
            security_group_ingress=[
                ec2.CfnSecurityGroup.IngressProperty(
                    ip_protocol="tcp", from_port=443, to_port=443, cidr_ip=cidr, description="HTTPS"
                )
            ],
        )
        busy = dict.fromkeys([self.made.network.zones[0], *self.made.network.group_zones.values()])
        for service in self._services():
            ec2.CfnVPCEndpoint(
                self,
                "".join(part.capitalize() for part in service.replace("-", ".").split(".")),
                vpc_id=self._vpc.ref,
                vpc_endpoint_type="Interface",
                service_name=f"com.amazonaws.{region}.{service}",
                private_dns_enabled=True,
                # create the endpoint only in zones with machines, to save costs
                subnet_ids=[self._control[zone] for zone in busy],
                security_group_ids=[group.attr_group_id],
            )

    def _services(self) -> Iterator[str]:
        """Yield the names of the AWS services that machines and pods of add-ons reach through interface endpoints."""
        yield from ENDPOINTS
        if self.config.orchestrator == "eks":
            yield from _ONLY_EKS
        if self.made.add_ons.observability is not None:
            yield "aps-workspaces"
        if self.config.slurm is not None and self.config.slurm.accounting is not None:
            yield "secretsmanager"

    def _flow_logs(self) -> None:
        group = logs.CfnLogGroup(self, "FlowLogs", retention_in_days=90)
        role = iam.Role(
            self,
            "FlowLogsRole",
            assumed_by=iam.ServicePrincipal("vpc-flow-logs.amazonaws.com"),
            inline_policies={
                "logs": iam.PolicyDocument(
                    statements=[
                        iam.PolicyStatement(
                            actions=["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"],
                            resources=[group.attr_arn],
                        )
                    ]
                )
            },
        )
        ec2.CfnFlowLog(
            self,
            "FlowLog",
            resource_id=self._vpc.ref,
            resource_type="VPC",
            traffic_type="REJECT",
            log_group_name=group.ref,
            deliver_logs_permission_arn=role.role_arn,
        )

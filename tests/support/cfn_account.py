"""An AWS account of moto's, which stacks are deployed to."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import boto3
from cdk_app import Templates

if TYPE_CHECKING:
    from cfn_shims import World

REGION = "us-west-2"


@cache
def client(service: str) -> Any:
    """Of whichever account of moto's there is: botocore takes a fifth of a second to read a service."""
    return boto3.client(service, REGION)


class Account:
    """An AWS account that stacks are deployed to."""

    def __init__(self, world: World) -> None:
        self.world = world
        """What there is beside moto's own."""
        self.cloudformation = client("cloudformation")
        self.s3 = client("s3")
        client("ssm").put_parameter(
            Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String"
        )  # as `cdk bootstrap` leaves it

    def deploy(self, name: str, templates: Templates) -> None:
        """Create what is not there, update what is another, in order."""
        there = {one["StackName"] for one in self.cloudformation.describe_stacks()["Stacks"]}
        for part, template in templates.items():
            body = {"StackName": f"{name}-{part}", "TemplateBody": json.dumps(template)}
            if body["StackName"] not in there:
                self.cloudformation.create_stack(**body)
            elif self._template(body["StackName"]) != template:
                self.cloudformation.update_stack(**body)

    def _template(self, stack: str) -> Any:
        return json.loads(json.dumps(self.cloudformation.get_template(StackName=stack)["TemplateBody"]))

    def delete(self, name: str, templates: Templates) -> None:
        for part in reversed(templates):
            self.cloudformation.delete_stack(StackName=f"{name}-{part}")

    def statuses(self) -> dict[str, str]:
        return {one["StackName"]: one["StackStatus"] for one in self.cloudformation.describe_stacks()["Stacks"]}

    def outputs(self, stack: str) -> dict[str, str]:
        (found,) = self.cloudformation.describe_stacks(StackName=stack)["Stacks"]
        return {one["OutputKey"]: one["OutputValue"] for one in found.get("Outputs", [])}

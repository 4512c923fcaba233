"""Functions that acknowledge findings of template validators such as cdk-nag. Each acknowledgement needs a reason, and
is made where the resource with the finding is created."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import IConstruct

_NAG = "AwsSolutions::AwsSolutions-"


def accept(scope: IConstruct, finding: str, because: str) -> None:
    """Acknowledge the finding with the full id `finding`, for `scope` and all constructs inside `scope`."""
    cdk.Validations.of(scope).acknowledge(cdk.Acknowledgment(id=finding, reason=because))


def accept_nag(scope: IConstruct, finding: str, because: str) -> None:
    """Acknowledge a finding of cdk-nag by its short id, such as `EKS1`."""
    accept(scope, f"{_NAG}{finding}", because)


def allow(role: iam.Role, because: str = "", **statement: Any) -> None:
    """Add a policy statement to `role`. If the statement contains wildcards, `because` must give a reason, with which
    the function acknowledges cdk-nag's finding for each wildcard."""
    made = iam.PolicyStatement(**statement)
    role.add_to_policy(made)
    for wildcard in _wildcards(role, statement):
        assert because, f"{statement.get('sid')}: the reason for {wildcard} is missing"
        accept_nag(role, f"IAM5[{wildcard}]", because)


def accept_managed_policy(scope: IConstruct, arn: str, because: str) -> None:
    """Acknowledge cdk-nag's finding that `scope` uses the AWS managed policy `arn`."""
    accept_nag(scope, f"IAM4[Policy::{as_text(cdk.Stack.of(scope).resolve(arn))}]", because)


def as_text(value: Any) -> str:
    """Return a template value as text, with references in the format of cdk-nag, such as
    `arn:<AWS::Partition>:s3:::name`."""
    match value:
        case str():
            return value
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(as_text(part) for part in parts)
        case {"Ref": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [resource, attribute]}:
            return f"<{resource}.{attribute}>"
        case {"Fn::ImportValue": name}:
            return as_text(name)
    raise TypeError(f"no text for {value!r}")


def _wildcards(role: iam.Role, statement: dict[str, Any]) -> Iterator[str]:
    stack = cdk.Stack.of(role)
    for resource in statement["resources"]:
        text = as_text(stack.resolve(resource))
        if "*" in text:
            yield f"Resource::{text}"
    for action in statement["actions"]:
        if "*" in action:
            yield f"Action::{action}"

"""Reads templates and outputs of CloudFormation stacks from AWS."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from hyperpod_ext.clusters.cdk.assembly import Template
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.jobs.sagemaker.client import call, client

BOOTSTRAP = "CDKToolkit"
_NOT_THERE = frozenset({"REVIEW_IN_PROGRESS", "DELETE_COMPLETE"})
_NEVER_MADE = frozenset({"ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED"})


def account(region: str) -> str:
    """Return the number of the AWS account that the credentials belong to.

    Raises:
        UnreachableError: there are no credentials, or AWS refuses them.
    """
    return str(call("GetCallerIdentity", lambda: client("sts", region).get_caller_identity())["Account"])


def describe(name: str, region: str | None) -> Mapping[str, Any] | None:
    """Return AWS's description of the stack `name`; None if the stack does not exist."""
    answer = _or_none(
        f"DescribeStacks {name}", lambda: client("cloudformation", region).describe_stacks(StackName=name)
    )
    found: Mapping[str, Any] | None = answer and answer["Stacks"][0]
    return None if found is None or found["StackStatus"] in _NOT_THERE else found


def outputs(name: str, region: str | None) -> dict[str, str] | None:
    """Return the outputs of the stack `name`; None if the stack does not exist.

    Raises:
        HyperpodExtError: the stack exists, but its creation has failed.
    """
    stack = describe(name, region)
    if stack is None:
        return None
    if stack["StackStatus"] in _NEVER_MADE:
        hint = f"the stack's events show why: aws cloudformation describe-stack-events --stack-name {name}"
        raise HyperpodExtError(f"stack {name} has status {stack['StackStatus']}: its creation failed", hint=hint)
    return {one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs", [])}


def templates(names: Iterable[str], region: str) -> dict[str, Template]:
    """Return the templates of those stacks in `names` that exist, by the name of the stack."""
    found = {}
    for name in names:
        stack = describe(name, region)
        if stack is None or stack["StackStatus"] in _NEVER_MADE:
            continue
        if (answer := _ask_template(name, region)) is not None:
            found[name] = _template(name, answer["TemplateBody"])
    return found


def _ask_template(name: str, region: str) -> Any:
    cloudformation = client("cloudformation", region)
    ask = functools.partial(cloudformation.get_template, StackName=name, TemplateStage="Original")
    return _or_none(f"GetTemplate {name}", ask)


def _template(name: str, body: Any) -> Template:
    """Return a template as data. boto3 returns a JSON template as data, and other templates as text."""
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            message = f"the template of stack {name} is not JSON, so CDK did not create the stack"
            raise HyperpodExtError(message, hint="choose another name for the cluster") from None
    found: Template = body
    return found


def _or_none(doing: str, ask: Any) -> Any:
    """Send a request with `ask`, and return the response. Return None if CloudFormation reports that the stack does not
    exist.

    Args:
        doing: description of the request, for error messages.
        ask: function that sends the request.
    """
    from botocore.exceptions import ClientError

    def attempt() -> Any:
        try:
            return ask()
        except ClientError as error:
            answer = error.response.get("Error", {})
            if answer.get("Code") == "ValidationError" and "does not exist" in str(answer.get("Message")):
                return None
            raise

    return call(doing, attempt)

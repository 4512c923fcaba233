"""Stands in for the CDK CLI: `deploy NAME... --app DIR` and `bootstrap`, with boto3; notes its calls in $CDK_CALLS."""

import json
import os
import sys
from pathlib import Path

import boto3
from botocore.exceptions import ClientError

with Path(os.environ["CDK_CALLS"]).open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\n")
cloudformation = boto3.client("cloudformation")


def make(name: str, template: str) -> None:
    given = {"StackName": name, "TemplateBody": template, "Capabilities": ["CAPABILITY_NAMED_IAM"]}
    try:
        cloudformation.create_stack(**given)
    except ClientError as error:
        if error.response["Error"]["Code"] != "AlreadyExistsException":
            raise
        try:
            cloudformation.update_stack(**given)
        except ClientError as same:
            if "No updates" not in str(same):
                raise


if sys.argv[1] == "bootstrap":
    make("CDKToolkit", json.dumps({"Resources": {"B": {"Type": "AWS::S3::Bucket"}}}))
else:
    names = sys.argv[2 : sys.argv.index("--app")]
    folder = Path(sys.argv[sys.argv.index("--app") + 1])
    for name in names:
        make(name, (folder / f"{name}.template.json").read_text())
print("made", *sys.argv[2:4])

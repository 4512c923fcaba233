"""Stands in for the CDK CLI: `deploy NAME... --app DIR` and `bootstrap`; notes its calls in $CDK_CALLS.

It asks CloudFormation at $AWS_ENDPOINT_URL over plain HTTP: it is started often, and importing boto3 took most of it.
"""

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

with Path(os.environ["CDK_CALLS"]).open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\n")
SCOPE = f"{os.environ['AWS_ACCESS_KEY_ID']}/20260101/{os.environ['AWS_REGION']}/cloudformation/aws4_request"
SIGNED = {"Authorization": f"AWS4-HMAC-SHA256 Credential={SCOPE}, SignedHeaders=host, Signature=none"}
"""Moto reads the service and the region from it, and checks no signature."""


def refusal(action: str, name: str, template: str) -> str:
    """Why CloudFormation does not do it; empty where it does."""
    given = {"Action": action, "Version": "2010-05-15", "StackName": name, "TemplateBody": template}
    given["Capabilities.member.1"] = "CAPABILITY_NAMED_IAM"
    body = urllib.parse.urlencode(given).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(os.environ["AWS_ENDPOINT_URL"], body, SIGNED)).close()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ""


def make(name: str, template: str) -> None:
    refused = refusal("CreateStack", name, template)
    if "AlreadyExistsException" in refused:
        refused = refusal("UpdateStack", name, template)
        if "No updates" in refused:
            return
    if refused:
        sys.exit(refused)


if sys.argv[1] == "bootstrap":
    make("CDKToolkit", json.dumps({"Resources": {"B": {"Type": "AWS::S3::Bucket"}}}))
else:
    names = sys.argv[2 : sys.argv.index("--app")]
    folder = Path(sys.argv[sys.argv.index("--app") + 1])
    for name in names:
        make(name, (folder / f"{name}.template.json").read_text())
print("made", *sys.argv[2:4])

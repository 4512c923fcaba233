"""Every kind of cluster synthesises without a network, and three validators have nothing to say against it.

Tests import the CDK where they use it: it starts node, and all processes of a test run collect this file.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cdk_app import CDK, Templates, kept, new_app, synthesise
from deployments import CASES, deployment

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load
from hyperpod_ext.errors import ConfigError

pytestmark = pytest.mark.slow  # the CDK starts node, which takes seconds

EXAMPLES = CDK.parent / "examples"
CLUSTERS = {name: deployment(case) for name, case in CASES.items()} | {
    name: load(ClusterConfig, EXAMPLES / name / "cluster.yaml") for name in ("10-cluster-eks", "11-cluster-slurm")
}
MADE_OF_CODE = ("AWS::Lambda::", "Custom::", "AWS::CloudFormation::CustomResource", "AWS::CloudFormation::Stack")
KNOWN_WARNINGS = {
    "W6001",  # what only another stack knows is an output of the cluster's stack too: people read one place
    "W3010",  # capacity is in one zone, which the cluster's spec sets
}


def reports(folder: Path) -> dict[str, Any]:
    """What each validator has said, by its name."""
    found = json.loads((folder / "validation-report.json").read_text())["pluginReports"]
    return {report["pluginName"]: report for report in found}


def without_code(templates: Templates, folder: Path) -> None:
    """No Lambda, no custom resource, no asset, and nothing that was to be looked up in the account."""
    kinds = Counter(one["Type"] for template in templates.values() for one in template["Resources"].values())
    assert [kind for kind in kinds if kind.startswith(MADE_OF_CODE)] == []
    assets = [json.loads(file.read_text()) for file in folder.glob("*.assets.json")]
    files = [one["source"]["path"] for manifest in assets for one in manifest["files"].values()]
    assert files
    assert [path for path in files if not path.endswith(".template.json")] == []
    assert [manifest["dockerImages"] for manifest in assets if manifest.get("dockerImages")] == []
    assert json.loads((folder / "manifest.json").read_text()).get("missing", []) == []


def lint(templates: Templates) -> list[tuple[str, str]]:
    """Rule and message of all that cfn-lint finds."""

    def matches() -> list[tuple[str, str]]:
        from cfnlint.config import ConfigMixIn
        from cfnlint.decode.decode import decode_str
        from cfnlint.runner import Runner

        runner = Runner(ConfigMixIn(regions=["us-west-2"]))  # one: it takes half a second to read its rules
        decoded = [decode_str(json.dumps(template)) for template in templates.values()]
        assert all(mistakes == [] for _, mistakes in decoded)
        return [(one.rule.id, one.message) for found, _ in decoded for one in runner.validate_template(found)]

    return [(rule, message) for rule, message in kept(matches, json.dumps(templates))]


# those of the examples are synthesised below as people do it; what that validates need not be here
ALIKE = {"10-cluster-eks", "11-cluster-slurm"}


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *(pytest.param(name, True, marks=[pytest.mark.thorough] if name in ALIKE else []) for name in CLUSTERS),
        ("11-cluster-slurm", False),
    ],
)
def test_no_validator_has_anything_against_a_cluster(name: str, scale: bool, tmp_path: Path) -> None:
    templates = synthesise(CLUSTERS[name], tmp_path, scale=scale, validate=True, nag=True)
    without_code(templates, tmp_path)
    found = reports(tmp_path)
    assert "AwsSolutions" in found  # the other one is silent when it has found nothing
    assert {report["conclusion"] for report in found.values()} == {"success"}
    assert [violation for report in found.values() for violation in report["violations"]] == []
    accepted = [one for report in found.values() for one in report["suppressedViolations"]]
    assert all(len(one["reason"].split()) > 3 for one in accepted)
    assert [match for match in lint(templates) if match[0] not in KNOWN_WARNINGS] == []


WRONG: dict[str, dict[str, Any]] = {
    "share": {"TieredStorageConfig": {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 150}},
    "member": {"NodeRecover": "Automatic"},
    "both": {"Orchestrator": {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:123456789012:cluster/a"}, "Slurm": {}}},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_validator_is_set_to_fail(name: str, tmp_path: Path) -> None:
    group = {"InstanceGroupName": "a", "InstanceType": "ml.p5.48xlarge", "InstanceCount": 1}
    group["ExecutionRole"] = "arn:aws:iam::123456789012:role/machines"
    properties = {"ClusterName": "a", "InstanceGroups": [group]} | WRONG[name]

    def refusal() -> str:
        import aws_cdk as cdk

        app = new_app(tmp_path, validate=True)
        stack = cdk.Stack(app, "Wrong", env=cdk.Environment(region="us-west-2"))
        cdk.CfnResource(stack, "Cluster", type="AWS::SageMaker::Cluster", properties=properties)
        with pytest.raises(RuntimeError) as raised:
            app.synth()
        return str(raised.value)

    assert "ValidationFailed" in kept(refusal, properties)


def test_a_finding_that_nobody_accepted_fails(tmp_path: Path) -> None:
    def refusal() -> str:
        import aws_cdk as cdk
        from cdk_nag import AwsSolutionsChecks

        app = new_app(tmp_path)
        stack = cdk.Stack(app, "Open")
        cdk.aws_s3.Bucket(stack, "Bucket")
        cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
        with pytest.raises(RuntimeError) as raised:
            app.synth()
        return str(raised.value)

    assert "AwsSolutions-S1" in kept(refusal)


def test_what_is_newer_than_the_validator_passes_it(tmp_path: Path) -> None:
    group = CASES["least"]["instance_groups"][0]
    groups = [group | {"image_release": "1.2.3"}, group | {"name": "others", "image": "default"}]
    synthesise(deployment(instance_groups=groups), tmp_path, validate=True)
    assert reports(tmp_path)["CloudFormation Validate"]["conclusion"] == "success"


def run_app(
    folder: Path, config: Path, *prefix: str, validate: bool = False, **context: str
) -> subprocess.CompletedProcess[str]:
    """`cdk/app.py` as the CDK's command line starts it."""
    flags = json.loads((CDK / "cdk.json").read_text())["context"] | context
    environ = os.environ | {
        "CDK_OUTDIR": str(folder),
        "CDK_CONTEXT_JSON": json.dumps(flags),
        "HPX_CLUSTER": str(config),
    }
    environ |= {} if validate else {"CDK_VALIDATION": "false"}
    environ = {name: value for name, value in environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [*prefix, sys.executable, "app.py"], cwd=CDK, env=environ, capture_output=True, text=True, check=False
    )


def without_a_network() -> list[str]:
    """A command that takes the network away, where this machine lets us."""
    command = ["unshare", "-rn"]
    if os.geteuid() != 0:  # who becomes root in it finds that /home is nobody's, and there jsii keeps nothing
        command += ["env", "JSII_RUNTIME_PACKAGE_CACHE=disabled"]
    able = (
        shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    )
    return command if able else []


def test_the_app_needs_no_network_and_no_account(tmp_path: Path) -> None:
    alone, config = without_a_network(), EXAMPLES / "10-cluster-eks" / "cluster.yaml"
    done = run_app(tmp_path, config, *alone, validate=True, scale="true")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    parts = {"network", "storage", "eks", "cluster", "addons", "observability"}
    assert {file.name for file in tmp_path.glob("*.template.json")} == {
        f"research-{part}.template.json" for part in parts
    }
    stacks = json.loads((tmp_path / "manifest.json").read_text())["artifacts"]
    kept = {name for name, one in stacks.items() if one.get("properties", {}).get("terminationProtection")}
    assert kept == {"research-storage"}


@pytest.mark.thorough
def test_without_scale_no_machine_is_asked_for(tmp_path: Path) -> None:
    done = run_app(tmp_path, EXAMPLES / "11-cluster-slurm" / "cluster.yaml", *without_a_network())
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    template = json.loads((tmp_path / "lab-cluster.template.json").read_text())
    groups = template["Resources"]["Cluster"]["Properties"]["InstanceGroups"]
    assert [group["InstanceCount"] for group in groups] == [0, 0]


def test_a_mistake_is_told_with_its_line_and_nothing_is_made(tmp_path: Path) -> None:
    text = (EXAMPLES / "10-cluster-eks" / "cluster.yaml").read_text().replace('"1.34"', '"1.36"')
    config = tmp_path / "cluster.yaml"
    config.write_text(text)
    done = run_app(tmp_path / "out", config)
    line = text.splitlines().index('    version: "1.36"') + 1
    told = "infrastructure.eks.version: HyperPod supports only Kubernetes 1.28 to 1.34 (write 1.34)"
    assert (done.returncode, done.stderr) == (3, f"{config}:{line}: {told}\n")
    assert list((tmp_path / "out").glob("*.template.json")) == []


@pytest.fixture
def context_of_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """The app's context, by what the CDK's command line has put into a file as too long for a variable."""

    def read(text: str) -> dict[str, Any]:
        file = tmp_path / "context.json"
        file.write_text(text)
        monkeypatch.setenv("CDK_CONTEXT_JSON", '{"cluster": "a.yaml", "scale": "true"}')
        monkeypatch.setenv("CONTEXT_OVERFLOW_LOCATION_ENV", str(file) if text else "not there")
        found: dict[str, Any] = runpy.run_path(str(CDK / "app.py"))["context"]()
        return found

    return read


def test_a_context_that_is_too_long_for_a_variable_comes_in_a_file(context_of_app: Any) -> None:
    assert context_of_app('{"cluster": "b.yaml"}') == {"cluster": "b.yaml", "scale": "true"}


@pytest.mark.parametrize("text", ['{"cluster":', "[1]", ""], ids=["cut", "a list", "no file"])
def test_a_context_that_cannot_be_read_is_told_with_its_variable(context_of_app: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="CONTEXT_OVERFLOW_LOCATION_ENV: does not contain a JSON object"):
        context_of_app(text)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = run_app(tmp_path / "out", tmp_path / "none.yaml")
    assert (done.returncode, "Traceback" in done.stderr) == (6, False)
    assert "none.yaml" in done.stderr

"""hp-ext cluster, with a stand-in for CDK's library and its CLI, and AWS as moto serves it over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command import Done, call_hp_ext
from moto_server import endpoint
from programs import python_program

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FILE = ("-f", "cluster.yaml", "--app", "app")
SPEC: dict[str, Any] = {
    "region": "us-west-2",
    "instance_groups": [{"name": "workers", "instance_type": "ml.p5.48xlarge", "count": 4}],
    "infrastructure": {"network": {"zones": ["usw2-az1", "usw2-az2"]}},
}
JOB = "name: tiny\nscript: train.py\nimage: a/b:1\nworking_dir: /w\n"


@dataclass
class Workplace:
    """A folder with an app and a cluster's file, and an account of its own."""

    folder: Path
    name: str

    def write(self, **fields: Any) -> None:
        """The cluster's file, with these fields changed."""
        (self.folder / "cluster.yaml").write_text(json.dumps({"name": self.name} | SPEC | fields, indent=1))

    def run(self, *arguments: str) -> Done:
        return call_hp_ext("cluster", *arguments, cwd=self.folder)

    def calls(self) -> list[list[str]]:
        """What the CDK CLI was called with."""
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """Everything but an account."""
    from hyperpod_ext.clusters.cdk.tools import cli_folder
    from hyperpod_ext.jobs.sagemaker import client

    (tmp_path / "app" / "lifecycle").mkdir(parents=True)
    (tmp_path / "app" / "lifecycle" / "on_init.sh").write_text("#!/bin/sh\n")
    shutil.copy(SUPPORT / "stand_in_app.py", tmp_path / "app" / "app.py")
    program(tmp_path / "bin" / "node", "#!/bin/sh\necho v22.20.0\n")
    monkeypatch.setattr(sys, "executable", sys.executable)
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HPX_HOME": str(tmp_path / "home"),
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_CALLS": str(tmp_path / "calls"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    cli = (SUPPORT / "stand_in_cdk.py").read_text()
    python_program(cli_folder(os.environ) / "node_modules" / ".bin" / "cdk", cli)
    found = Workplace(tmp_path, f"c{uuid.uuid4().hex[:8]}")
    found.write()
    client.client.cache_clear()
    yield found
    client.client.cache_clear()


@pytest.fixture
def aws(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """With an account, which is empty."""
    urllib.request.urlopen(urllib.request.Request(f"{endpoint()}/moto-api/reset", method="POST")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    return here


def test_synth_tells_what_is_made_and_what_it_costs_without_an_account(here: Workplace) -> None:
    told = here.run("synth", *FILE, "-o", "json")
    assert told.code == 0, told.stderr
    assert list(told.json["stacks"]) == [f"{here.name}-{end}" for end in ("network", "storage", "cluster")]
    assert told.json["stacks"][f"{here.name}-storage"] == {"AWS::S3::Bucket": 2}
    assert told.json["costs"]["usd_an_hour_now"] == 0
    assert told.json["costs"]["usd_an_hour_scaled"] == pytest.approx(4 * 63.296)
    assert (here.folder / "cdk.out" / "manifest.json").is_file()
    text = here.run("synth", *FILE).stdout
    assert "4 x ml.p5.48xlarge, group workers  63.30  0.00  253.18" in text
    assert "on-demand prices in us-west-2 of 2026-09-01" in text
    assert "paid by use, not in the sum: S3::Bucket" in text


def test_a_diff_that_would_replace_the_cluster_exits_with_10_and_names_the_field(here: Workplace) -> None:
    assert here.run("synth", *FILE, "--out", "old").code == 0
    against = (*FILE, "--against", "old")
    same = here.run("diff", *against, "--exit-code")
    assert (same.code, same.stdout) == (0, "nothing changes\n")
    scaled = here.run("diff", *against, "--scale", "-o", "json")
    assert (scaled.code, scaled.json["replaces"]) == (0, [])
    assert here.run("diff", *against, "--scale", "--exit-code").code == 11
    here.write(infrastructure={"network": {"zones": ["usw2-az1", "usw2-az2"], "cidr": "10.0.0.0/16"}})
    told = here.run("diff", *against, "-o", "json")
    assert told.code == 10
    assert f"{here.name}-cluster.Cluster.VpcConfig" in told.json["replaces"]
    assert "AWS::SageMaker::Cluster Cluster: VpcConfig (replace)" in told.stderr
    here.write(name=f"{here.name}x")
    renamed = here.run("diff", *against)
    assert (renamed.code, "ClusterName (replace)" in renamed.stderr) == (10, True)


def test_counts_stay_as_they_are_unless_it_is_said(here: Workplace) -> None:
    assert here.run("synth", *FILE, "--scale", "--out", "old").code == 0
    assert here.run("diff", *FILE, "--against", "old").stdout == "nothing changes\n"
    gone = here.run("diff", *FILE, "--against", "old", "--no-scale")
    assert "InstanceGroups.workers.InstanceCount: 4 -> 0" in gone.stdout


@pytest.mark.slow
def test_from_deploy_to_a_job_without_copy_and_paste(aws: Workplace) -> None:
    unprepared = aws.run("deploy", *FILE, "--yes")
    assert unprepared.code == 6
    assert "bootstrap aws://123456789012/us-west-2" in unprepared.stderr
    early = aws.run("deploy", *FILE, "--yes", "--scale")
    assert (early.code, "first deploy without --scale" in early.stderr) == (6, True)
    stopped = aws.run("deploy", *FILE, "--yes", "--bootstrap")
    assert stopped.code == 1
    assert "helm upgrade --install hyperpod-dependencies" in stopped.stderr
    assert f"aws eks update-kubeconfig --name {aws.name} --region us-west-2" in stopped.stderr
    done = aws.run("deploy", *FILE, "--yes", "--chart-installed", "-o", "json")
    assert done.code == 0, done.stderr
    assert done.json["outputs"]["CheckpointBucket"] == f"{aws.name}-checkpoints"
    assert [call[1:3] for call in aws.calls() if call[0] == "deploy"] == [
        [f"{aws.name}-network", f"{aws.name}-storage"],
        [f"{aws.name}-network", f"{aws.name}-storage"],
        [f"{aws.name}-cluster", "--app"],
    ]
    assert aws.run("diff", *FILE, "--exit-code").stdout == "nothing changes\n"

    (aws.folder / "train.py").touch()
    tiers = "checkpoint: {tiers: [{kind: memory}, {kind: s3}]}\n"
    (aws.folder / "job.yaml").write_text(
        f"{JOB}cluster: {aws.name}\n{tiers}resources: {{instance_type: ml.p5.48xlarge}}\n"
    )
    rendered = call_hp_ext("render", "-f", "job.yaml", "--target", "hyperpod-eks", cwd=aws.folder)
    assert rendered.code == 0, rendered.stderr
    assert f"s3://{aws.name}-checkpoints/jobs" in rendered.stdout
    assert "namespace: hyperpod-ns-research" in rendered.stdout
    assert "serviceAccountName: training" in rendered.stdout
    assert "hyperpod-ns-research-localqueue" in rendered.stdout
    assert f"cluster {aws.name}: outputs read just now" in rendered.stderr


def test_the_chart_is_installed_from_a_copy(here: Workplace) -> None:
    from hyperpod_ext.clusters.cdk.deploy import install_chart
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.load import load
    from hyperpod_ext.errors import HyperpodExtError, NotFoundError

    cluster = load(ClusterConfig, here.folder / "cluster.yaml")
    chart, calls = here.folder / "my chart", here.folder / "programs"
    for name in ("aws", "helm"):
        program(here.folder / "bin" / name, f'#!/bin/sh\necho "{name} $*" >> {calls}\ntest -n "$KUBECONFIG"\n')
    with pytest.raises(NotFoundError, match=r"has no Chart\.yaml"):
        install_chart(cluster, chart)
    chart.mkdir()
    (chart / "Chart.yaml").touch()
    install_chart(cluster, chart)
    assert calls.read_text().splitlines() == [
        f"aws eks update-kubeconfig --name {here.name} --region us-west-2",
        f"helm upgrade --install hyperpod-dependencies {chart} --namespace kube-system",
    ]
    program(here.folder / "bin" / "helm", "#!/bin/sh\nexit 1\n")
    with pytest.raises(HyperpodExtError, match="public_access"):
        install_chart(cluster, chart)


@pytest.mark.slow
def test_a_scaled_cluster_is_a_step_of_its_own_and_what_would_be_replaced_is_refused(aws: Workplace) -> None:
    assert aws.run("deploy", *FILE, "--yes", "--bootstrap", "--chart-installed").code == 0
    scaled = aws.run("deploy", *FILE, "--yes", "--scale", "-o", "json")
    (change,) = scaled.json["changes"]
    assert [(one["path"], one["before"], one["after"]) for one in change["fields"]] == [
        ("InstanceGroups.workers.InstanceCount", 0, 4)
    ]
    again = aws.run("deploy", *FILE, "--yes", "-o", "json")
    assert (again.json["changes"], again.json["scale"]) == ([], True)
    before = len(aws.calls())
    aws.write(infrastructure={"network": {"zones": ["usw2-az1", "usw2-az2"], "cidr": "10.0.0.0/16"}})
    refused = aws.run("deploy", *FILE, "--yes")
    assert (refused.code, len(aws.calls())) == (10, before)
    assert "VpcConfig (replace)" in refused.stderr
    assert aws.run("diff", *FILE).code == 10


def test_scripts_of_slurm_are_uploaded_between_the_stacks(aws: Workplace) -> None:
    import boto3

    head = {"name": "head", "instance_type": "ml.m5.xlarge", "count": 1, "slurm": {"node_type": "Controller"}}
    workers = SPEC["instance_groups"][0] | {"slurm": {"node_type": "Compute", "partition": "dev"}}
    aws.write(orchestrator="slurm", instance_groups=[head, workers])
    done = aws.run("deploy", *FILE, "--yes", "--bootstrap")
    assert done.code == 0, done.stderr
    store = boto3.client("s3", region_name="us-west-2")
    listed = store.list_objects_v2(Bucket=f"{aws.name}-scripts")["Contents"]
    assert [one["Key"] for one in listed] == ["scripts/on_init.sh"]


def test_outputs_are_read_kept_and_handed_on(aws: Workplace) -> None:
    assert aws.run("outputs", aws.name, "--cached").code == 6
    missing = aws.run("outputs", aws.name, "--region", "us-west-2")
    assert (missing.code, f"there is no stack {aws.name}-storage in us-west-2" in missing.stderr) == (6, True)
    assert aws.run("deploy", *FILE, "--yes", "--bootstrap", "--chart-installed").code == 0
    read = aws.run("outputs", aws.name, "--region", "us-west-2", "--out", "kept.json", "-o", "json")
    assert read.json["outputs"]["QueueName"] == "hyperpod-ns-research-localqueue"
    assert json.loads((aws.folder / "kept.json").read_text())["values"] == read.json["outputs"]
    assert aws.run("outputs", aws.name, "--cached", "-o", "json").json == read.json


def test_without_credentials_node_app_or_library_one_error_says_what_to_do(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (("deploy", *FILE, "--yes"), ("diff", *FILE), ("outputs", "research", "--region", "us-west-2")):
        told = here.run(*command)
        assert (told.code, "there are no AWS credentials" in told.stderr) == (4, True), told
    nowhere = here.run("synth", "-f", "cluster.yaml", "--app", "nowhere")
    assert (nowhere.code, "--app" in nowhere.stderr) == (6, True)
    (here.folder / "app" / "app.py").write_text("import aws_cdk_that_is_not_there\n")
    broken = here.run("synth", *FILE)
    assert (broken.code, "aws_cdk_that_is_not_there" in broken.stderr) == (1, True)
    (here.folder / "app" / "app.py").write_text("raise ModuleNotFoundError(\"No module named 'aws_cdk'\")\n")
    without = here.run("synth", *FILE)
    assert (without.code, "pip install 'hyperpod-ext[cdk]'" in without.stderr) == (1, True)
    program(here.folder / "bin" / "node", "#!/bin/sh\necho v18.1.0\n")
    monkeypatch.setattr(sys, "executable", str(here.folder / "bin" / "python"))
    old = here.run("synth", *FILE)
    assert (old.code, "needs Node.js 20 or newer" in old.stderr) == (1, True)
    monkeypatch.setenv("PATH", str(here.folder / "empty"))
    (here.folder / "bin" / "node").unlink()
    none = here.run("synth", *FILE)
    assert (none.code, "Node.js, which CDK needs, is not installed" in none.stderr) == (1, True)


def test_a_file_that_cannot_be_deployed_is_told_with_its_line(here: Workplace) -> None:
    (here.folder / "cluster.yaml").write_text(
        "name: research\nregion: us-west-2\ninstance_groups:\n"
        "  - {name: a, instance_type: ml.p5.48xlarge, count: 1}\n"
        "infrastructure:\n  network: {zones: [usw2-az1]}\n"
    )
    told = here.run("synth", *FILE)
    assert told.code == 3
    assert "cluster.yaml:6: infrastructure.network.zones" in told.stderr


@pytest.mark.parametrize("command", [("deploy",), ("create", "--dry-run")])
def test_a_spec_of_a_job_is_named_as_one(here: Workplace, command: tuple[str, ...]) -> None:
    (here.folder / "job.yaml").write_text("name: a\nscript: train.py\n")
    (here.folder / "mixed.yaml").write_text("name: a\nregion: us-west-2\nscript: train.py\n")
    done = call_hp_ext("cluster", *command, "-f", "job.yaml", cwd=here.folder)
    assert (done.code, done.stderr.count("error:")) == (3, 1)
    assert "job.yaml: is the spec of a job, not of a cluster" in done.stderr
    mixed = call_hp_ext("cluster", *command, "-f", "mixed.yaml", cwd=here.folder)
    assert (mixed.code, "mixed.yaml:3: script: is not a known field" in mixed.stderr) == (3, True)


def test_a_job_takes_from_its_cluster_only_what_it_leaves_open(here: Workplace) -> None:
    values = {
        "CheckpointBucket": "of-the-cluster",
        "ExecutionRoleArn": "arn:aws:iam::123456789012:role/machines",
        "DataBucket": "data",
        "SubnetIds": "subnet-0,subnet-1",
        "SecurityGroupIds": "sg-0",
    }
    kept = {"name": "research", "region": "us-west-2", "read_at": 0, "values": values}
    place = here.folder / ".hyperpod_ext" / "clusters" / "research.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(kept))
    (here.folder / "train.py").touch()
    machines = "resources: {instance_type: ml.p5.48xlarge}\ntimeouts: {run_s: 60}\n"
    spec = f"{JOB.replace('working_dir: /w', 'nodes: 1')}cluster: research\n{machines}"
    job = here.folder / "job.yaml"
    own_fields = "sagemaker: {output: s3://mine/x, role: 'arn:aws:iam::123456789012:role/training'}\n"
    job.write_text(f"{spec}checkpoint: {{tiers: [{{kind: memory}}, {{kind: s3}}]}}\n")
    render = ("render", "-f", "job.yaml", "--target", "sagemaker")
    without = call_hp_ext(*render, cwd=here.folder)
    assert (without.code, "sagemaker.role: is required" in without.stderr) == (3, True), without.stderr
    job.write_text(f"{job.read_text()}{own_fields}")
    rendered = call_hp_ext(*render, cwd=here.folder)
    assert rendered.code == 0, rendered.stderr
    request = json.loads(rendered.stdout)
    assert request["RoleArn"].endswith("role/training"), "machines' own could not read the job's secret"
    assert request["VpcConfig"] == {"SecurityGroupIds": ["sg-0"], "Subnets": ["subnet-0", "subnet-1"]}
    assert request["OutputDataConfig"]["S3OutputPath"].startswith("s3://mine/x")
    assert "s3://of-the-cluster" in rendered.stdout
    assert "days ago" in rendered.stderr
    planned = call_hp_ext("plan", "-f", "job.yaml", "--params", "1B", "-o", "json", cwd=here.folder)
    assert (planned.code, "days ago" in planned.stderr) == (0, True), planned.stderr
    job.write_text(f"{spec}checkpoint: {{tiers: [{{kind: memory}}, {{kind: s3, uri: s3://mine/y}}]}}\n{own_fields}")
    own = call_hp_ext(*render, cwd=here.folder)
    assert ("s3://mine/y" in own.stdout, "of-the-cluster" in own.stdout) == (True, False)
    place.write_text(json.dumps(kept | {"name": "other"}))
    wrong = call_hp_ext(*render, cwd=here.folder)
    assert (wrong.code, "contains the outputs of cluster other" in wrong.stderr) == (3, True)
    place.write_text("{")
    broken = call_hp_ext(*render, cwd=here.folder)
    assert (broken.code, "does not contain outputs of a cluster" in broken.stderr) == (3, True)


def test_a_queue_of_the_cluster_is_as_good_as_one_of_the_spec(here: Workplace) -> None:
    kept = {"name": "research", "region": "us-west-2", "read_at": 0, "values": {"QueueName": "team-queue"}}
    place = here.folder / ".hyperpod_ext" / "clusters" / "research.json"
    place.parent.mkdir(parents=True)
    (here.folder / "job.yaml").write_text(f"{JOB}cluster: research\nscheduling: {{priority: high}}\n")
    for values, code in (({}, 3), (kept["values"], 0)):
        place.write_text(json.dumps(kept | {"values": values}))
        told = call_hp_ext("validate", "job.yaml", cwd=here.folder)
        assert (told.code, "needs a queue of Kueue" in told.stderr) == (code, code == 3), told.stderr


def test_a_cluster_that_is_not_there_is_told_with_the_jobs_line(aws: Workplace) -> None:
    (aws.folder / "train.py").touch()
    (aws.folder / "job.yaml").write_text(
        "name: tiny\nscript: train.py\ncluster: nowhere\nsagemaker: {region: us-west-2}\n"
    )
    told = call_hp_ext("validate", "job.yaml", cwd=aws.folder)
    assert told.code == 3
    assert "job.yaml:3: cluster: cluster nowhere: there is no stack nowhere-storage in us-west-2" in told.stderr

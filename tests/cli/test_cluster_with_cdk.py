"""hp-ext cluster with everything real but AWS: the CDK app, node, the CDK CLI from npm; moto makes the stacks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Done, call_hp_ext
from sdk_venvs import python_of

from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import die_with_parent

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("aws_cdk") is None, reason="`make cdk` installs the CDK"),
]

FILE = ("-f", "cluster.yaml")
SPEC: dict[str, Any] = {
    "name": "dense",
    "region": "us-west-2",
    "orchestrator": "slurm",
    "slurm": {"strategy": "Managed"},
    "instance_groups": [
        {"name": "head", "instance_type": "ml.m5.xlarge", "count": 1, "slurm": {"node_type": "Controller"}},
        {"name": "workers", "instance_type": "ml.p5.48xlarge", "count": 4, "slurm": {"node_type": "Compute"}},
    ],
    "infrastructure": {"network": {"zones": ["usw2-az1"]}},
}


@pytest.fixture
def url(root: Path, tmp_path: Path) -> Iterator[str]:
    """An account of its own."""
    port = free_port()
    parent = os.getpid()
    support = root / "tests" / "support"
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(python_of("moto")), str(support / "cfn_server.py"), str(port)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(support)])},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(parent),
        )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail((tmp_path / "server.log").read_text()[-1000:])
        yield f"http://localhost:{port}"  # by this name moto finds buckets in paths
    finally:
        process.kill()
        process.wait()


def test_a_cluster_of_slurm_from_its_file_to_a_job(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from hyperpod_ext.jobs.sagemaker.client import client

    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HPX_HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION", raising=False)

    def write(**fields: Any) -> None:
        (tmp_path / "cluster.yaml").write_text(json.dumps(SPEC | fields))

    def run(*arguments: str) -> Done:
        done = call_hp_ext("cluster", *arguments, cwd=tmp_path)
        said = capfd.readouterr().err  # what the CDK CLI prints does not pass through ours
        return Done(done.code, done.stdout, f"{said}{done.stderr}")

    write()
    client.cache_clear()
    made = run("deploy", *FILE, "--yes", "--bootstrap", "-o", "json")
    assert made.code == 0, made.stderr
    assert made.json["outputs"]["CheckpointPrefix"] == "jobs"
    assert "uploaded s3://sagemaker-dense-" in made.stderr
    assert counts() == {"head": 0, "workers": 0}
    assert run("diff", *FILE, "--exit-code").stdout == "nothing changes\n"

    scaled = run("deploy", *FILE, "--yes", "--scale", "-o", "json")
    assert scaled.code == 0, scaled.stderr
    assert [change["effect"] for change in scaled.json["changes"]] == ["update"]
    assert counts() == {"head": 1, "workers": 4}

    write(infrastructure={"network": {"zones": ["usw2-az1"], "cidr": "10.0.0.0/16"}})
    refused = run("deploy", *FILE, "--yes")
    assert refused.code == 10
    assert "VpcConfig" in refused.stderr
    write()

    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(
        "name: tiny\nscript: train.py\ncluster: dense\nnodes: 2\ncheckpoint: {tiers: [{kind: memory}, {kind: s3}]}\n"
    )
    rendered = call_hp_ext("render", "-f", "job.yaml", "--target", "local", cwd=tmp_path)
    assert rendered.code == 0, rendered.stderr
    assert f"s3://{made.json['outputs']['CheckpointBucket']}/jobs" in rendered.stdout


def counts() -> dict[str, int]:
    """Machines that the deployed template asks for."""
    from hyperpod_ext.clusters.cdk.stacks import templates

    found = templates(["dense-cluster"], "us-west-2")["dense-cluster"]["Resources"]["Cluster"]["Properties"]
    return {group["InstanceGroupName"]: group["InstanceCount"] for group in found["InstanceGroups"]}

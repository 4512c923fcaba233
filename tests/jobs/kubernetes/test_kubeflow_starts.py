"""The rendered start of a Kubeflow job, really run: two nodes on this machine, started as the operator starts pods."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hyperpod_ext.cli.report.runs import read_run

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.ports import free_port

TRAIN = """\
import os, pathlib, sys
os.write(1, f"from {os.environ['RANK']}\\n".encode())
pathlib.Path(f"rank{os.environ['RANK']}").write_text(f"{os.environ['WORLD_SIZE']} {sys.argv[1:]}")
"""


def containers(spec: JobConfig) -> list[dict[str, Any]]:
    """The container of each pod, node 0 first."""
    roles = yaml.safe_load(make_plan(spec, target="kubeflow").files["job.yaml"])["spec"]["pytorchReplicaSpecs"]
    return [role["template"]["spec"]["containers"][0] for role in roles.values() for _ in range(role["replicas"])]


def as_kubernetes_gives_it(text: str) -> str:
    return re.sub(r"\$\$", "$", text)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ours", pytest.param("plain", marks=pytest.mark.thorough)])
def test_two_nodes_start_all_ranks(mode: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    port = free_port()
    document = {
        "name": "a",
        "script": "train.py",
        "args": ["x y", "$(A) $$ ${local_rank}"],
        "image": "r:1",
        "mode": mode,
    }
    document |= {"nodes": 2, "workers_per_node": 2, "rendezvous": {"port": port}}
    if mode == "ours":
        document["restart"] = {"preload": []}  # the script needs no torch
        document["checkpoint"] = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": str(tmp_path / "durable")}]}
        document["volumes"] = [{"kind": "host", "path": str(tmp_path), "host_path": str(tmp_path)}]
    running = []
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as sockets:  # short, for the paths of sockets
        for node, container in enumerate(containers(JobConfig.model_validate_json(json.dumps(document)))):
            environment = {one["name"]: as_kubernetes_gives_it(one["value"]) for one in container.get("env", [])}
            environment |= {"RANK": str(node), "MASTER_ADDR": "127.0.0.1", "TMPDIR": sockets}
            environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
            if mode == "ours":
                environment |= {"HPX_SECRET_FILE": str(secret), "HPX_RUN_DIR": str(tmp_path / f"run{node}")}
            script = as_kubernetes_gives_it(container["args"][0])
            command = [*container["command"], script]
            running.append(
                subprocess.Popen(
                    command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        try:
            printed = [process.communicate(timeout=90)[0].decode() for process in running]
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(printed)
    assert {file.name: file.read_text() for file in tmp_path.glob("rank*")} == {
        f"rank{rank}": "4 ['x y', '$(A) $$ ${local_rank}']" for rank in range(4)
    }
    if mode == "ours":  # both pods are gone, and their folders with them
        kept = read_run(str(tmp_path / "durable" / "a"))
        assert (kept["name"], kept["state"], kept["world_size"]) == ("a", "succeeded", 4)
    lines = [line for text in printed for line in text.splitlines()]
    assert {f"rank {rank} | from {rank}" for rank in range(4)} <= set(lines), lines

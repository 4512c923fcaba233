"""The real `hyperpodrun` reads the command line that is rendered for it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import Any

import pytest
import yaml
from hyperpodrun_env import START, hyperpodrun

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.submit.plan import make_plan

READ = """
import json
parser = agent.get_args_parser()
agent.add_additional_hyperpod_args(parser)
found = parser.parse_args()
names = ("nproc_per_node", "log_dir", "redirects", "tee", "inprocess_restart", "inprocess_timeout")
names += ("monitor_interval",)
names += ("module", "no_python", "training_script")
before_lines = agent.config_from_args(found)[0].log_line_prefix_template
more = {"args": found.training_script_args, "before lines": before_lines}
print(json.dumps({name: str(getattr(found, name)) for name in names} | more))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ours", "plain"])
def test_hyperpodrun_reads_what_is_rendered(mode: str) -> None:
    document = {
        "name": "a",
        "script": "train.py",
        "args": ["--x", "a b"],
        "image": "r:1",
        "mode": mode,
        "workers_per_node": 4,
    }
    read = _read(document)
    in_process = mode == "ours"
    assert read == {
        "nproc_per_node": "4",
        "log_dir": "/tmp/hyperpod",
        "redirects": "3",
        "tee": "3",
        "inprocess_restart": str(in_process),
        "inprocess_timeout": "60" if in_process else "None",
        "monitor_interval": "0.02" if in_process else "0.1",
        "no_python": "False",
        "module": str(in_process),  # the pod's fork server has a process ready
        "training_script": "hyperpod_ext.runtime.prefork" if in_process else "train.py",
        "args": ["train.py", "--x", "a b"] if in_process else ["--x", "a b"],
        "before lines": "rank ${rank} | ",
    }


@pytest.mark.slow
def test_hyperpodrun_starts_a_command_without_python() -> None:
    document = {"name": "a", "command": ["./a.sh", "x y"], "image": "r:1", "mode": "plain", "workers_per_node": 4}
    read = _read(document)
    started = [read["no_python"], read["training_script"], read["args"], read["inprocess_restart"]]
    assert started == ["True", "./a.sh", ["x y"], "False"]


def _read(document: dict[str, Any]) -> dict[str, Any]:
    """What its parser makes of the container's command."""
    job = JobConfig.model_validate_json(json.dumps(document))
    rendered = yaml.safe_load(make_plan(job, target="hyperpod-eks").files["job.yaml"])
    container = rendered["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    script = container["args"][0]
    environment = {one["name"]: one["value"] for one in container["env"]}
    words = shlex.split(script[script.index("exec hyperpodrun") :].replace("\\\n", " "))
    python = hyperpodrun().with_name("python")
    program = START.replace("agent.main()", READ)
    done = subprocess.run(
        [python, "-c", program, *words[2:]], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

"""The real `hyperpodrun` reads the command line that is rendered for it."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest
import whole_run
import yaml
from hyperpodrun_env import START, hyperpodrun

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.plan import make_plan

READ = """
import json, os
for words, environment in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0, words
        continue
    os.environ.update(environment)
    sys.argv[1:] = words
    parser = agent.get_args_parser()
    agent.add_additional_hyperpod_args(parser)
    found = parser.parse_args()
    names = ("nproc_per_node", "log_dir", "redirects", "tee", "inprocess_restart", "inprocess_timeout")
    names += ("monitor_interval", "module", "no_python", "training_script")
    before_lines = agent.config_from_args(found)[0].log_line_prefix_template
    more = {"args": found.training_script_args, "before lines": before_lines}
    print(json.dumps({name: str(getattr(found, name)) for name in names} | more), flush=True)
    os._exit(0)
"""
SCRIPT = {"script": "train.py", "args": ["--x", "a b"]}
JOBS: dict[str, dict[str, Any]] = {
    "ours": SCRIPT | {"mode": "ours"},
    "plain": SCRIPT | {"mode": "plain"},
    "command": {"command": ["./a.sh", "x y"], "mode": "plain"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ours", "plain"])
def test_hyperpodrun_reads_what_is_rendered(mode: str) -> None:
    read = _read(mode)
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
    read = _read("command")
    started = [read["no_python"], read["training_script"], read["args"], read["inprocess_restart"]]
    assert started == ["True", "./a.sh", ["x y"], "False"]


def _read(name: str) -> dict[str, Any]:
    """What its parser makes of the command of this job's container."""
    found: dict[str, Any] = whole_run.once("hyperpodrun-flags", _read_all)[name]
    return found


def _read_all() -> dict[str, dict[str, Any]]:
    """In one process with its imports, which take seconds, and for each job one that is forked from it."""
    python = hyperpodrun().with_name("python")
    program = START.replace("agent.main()", READ)
    told = json.dumps([_started(document) for document in JOBS.values()])
    done = subprocess.run([python, "-c", program, told], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(JOBS, map(json.loads, answers), strict=True))


def _started(document: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Arguments of `hyperpodrun` in the container, and its environment."""
    job = JobConfig.model_validate_json(json.dumps({"name": "a", "image": "r:1", "workers_per_node": 4} | document))
    rendered = yaml.safe_load(make_plan(job, target="hyperpod-eks").files["job.yaml"])
    container = rendered["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    script = container["args"][0]
    words = shlex.split(script[script.index("exec hyperpodrun") :].replace("\\\n", " "))
    return words[2:], {one["name"]: one["value"] for one in container["env"]}

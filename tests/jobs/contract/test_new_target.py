"""A target in a package of its own, entered in TARGETS alone: every command runs or refuses it by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hyperpod_ext.cli import hp_ext

from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.contract import targets

MODULE = """
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.jobs.contract.capabilities import Capabilities
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate

PARTS = {"shell": "paper.shell"}
INSTEAD = {"resize": "take another sheet"}
JOBS = {}


def capabilities():
    return Capabilities()


def problems(job):
    return iter(())


def warnings(job):
    yield "paper may burn"


def render(job, cluster):
    return {"sheet.txt": job.name}


def submit(plan):
    JOBS[plan.name] = plan.files["sheet.txt"]
    return JobHandle("paper", "desk", plan.name)


def list_jobs():
    return [status(JobHandle("paper", "desk", name)) for name in JOBS]


def status(handle):
    if handle.name not in JOBS:
        raise NotFoundError(f"no sheet is called {handle.name}")
    return JobStatus(name=handle.name, handle=str(handle), state="succeeded")


def watch(handle, with_lines=False):
    yield StatusUpdate(status(handle))


def logs(handle, rank=None, follow=False):
    yield JOBS[handle.name]


def cancel(handle):
    return status(handle)


def result(handle):
    return {**status(handle).to_json(), "error": None}
"""
SHELL = """
def exec_command(handle, node, words, terminal):
    return ["true", *words]
"""
JOB, RUNS = "paper://desk/tiny", 0
COMMANDS = [
    (RUNS, "validate {spec} --target paper"),
    (RUNS, "render -f {spec} --target paper"),
    (RUNS, "create-job -f {spec} --target paper"),
    (RUNS, "create-job -f {spec} --target paper --dry-run"),
    (RUNS, "list --target paper"),
    (RUNS, f"status {JOB}"),
    (RUNS, f"wait {JOB}"),
    (RUNS, f"logs {JOB}"),
    (RUNS, f"report {JOB}"),
    (RUNS, f"describe {JOB}"),
    (RUNS, f"cancel {JOB}"),
    (RUNS, f"exec {JOB} -- ls"),
    (RUNS, "init made --target paper"),
    (3, "create-job -f {spec} --target paper --set spares=1"),
    (3, f"resize {JOB} --nodes 2"),
    (3, f"move {JOB} --node 0"),
    (3, f"delete {JOB}"),
    (3, f"port-forward {JOB} 80"),
    (3, f"chaos {JOB} --sigkill --rank 0"),
    (3, "create-job -f {spec} --target paper --server-dry-run"),
    (6, "status paper://desk/other"),
]
"""Exit code of each command line."""


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A spec, in a folder that has the package of the target too."""
    package = tmp_path / "paper"
    package.mkdir()
    (package / "__init__.py").write_text(MODULE)
    (package / "shell.py").write_text(SHELL)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text("name: tiny\nscript: train.py\nnodes: 1\nworkers_per_node: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(targets.TARGETS, "paper", "paper")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPX_HOME", str(tmp_path / "home"))
    yield tmp_path / "job.yaml"
    for name in ("paper", "paper.shell"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("code", "line"), COMMANDS)
def test_a_command_runs_or_names_what_the_target_lacks(paper: Path, code: int, line: str) -> None:
    if "://" in line:
        assert CliRunner().invoke(hp_ext, ["create-job", "-f", str(paper), "--target", "paper"]).exit_code == 0
    done = CliRunner().invoke(hp_ext, line.format(spec=paper).split())
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    assert code == RUNS or "paper" in done.output or "sheet" in done.output


def test_every_command_that_takes_a_target_or_a_job_is_tried() -> None:
    tried = {line.split()[0] for _, line in COMMANDS}
    context = click.Context(hp_ext)
    takes = {
        name
        for name in hp_ext.list_commands(context)
        if any(option.name == "target" for option in getattr(hp_ext.get_command(context, name), "params", ()))
    }
    assert takes - tried == {"diff", "plan", "top"} & takes


def test_a_missing_part_is_refused_with_its_hint(paper: Path) -> None:
    with pytest.raises(UnsupportedError, match="jobs of target paper cannot be resized") as caught:
        targets.RESIZE.of("paper")
    assert caught.value.problems[0].hint == "take another sheet"
    assert not targets.MOVE.offered("paper")

"""What is loaded when: exact, by sys.modules; and once by the clock."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from command import HP_EXT

HEAVY = {"pydantic", "yaml", "jinja2", "boto3", "torch", "rich", "numpy", "aws_cdk"}

LOADED_BY_COMMAND = """\
import json, sys
from importlib.metadata import entry_points
(entry,) = entry_points(group="console_scripts", name="hp-ext")
sys.argv = ["hp-ext", *sys.argv[1:]]
try:
    entry.load()()
except SystemExit:
    pass
print("\\n" + json.dumps(sorted(sys.modules)))
"""


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Top-level packages, and the project's own modules, in sys.modules at the end of `code`."""
    command = [sys.executable, "-c", code, *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    modules = json.loads(printed.splitlines()[-1])
    return {module.partition(".")[0] for module in modules} | {m for m in modules if m.startswith("hyperpod_ext")}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        [],
        ["create-job", "--help"],
        ["status", "--help"],
        ["cluster", "update", "--help"],
        ["cluster", "deploy", "--help"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_by(LOADED_BY_COMMAND, *arguments)
    assert "click" in loaded
    assert loaded & HEAVY == set()


def test_help_of_all_loads_no_command() -> None:
    ours = {module for module in loaded_by(LOADED_BY_COMMAND, "--help") if module.startswith("hyperpod_ext.")}
    light = {"hyperpod_ext.cli.lazy_group", "hyperpod_ext.standard_streams", "hyperpod_ext.terminal"}
    assert ours == {"hyperpod_ext.cli", "hyperpod_ext.lazy", "hyperpod_ext.version", *light}


def test_validate_loads_neither_templates_nor_torch(root: Path) -> None:
    loaded = loaded_by(LOADED_BY_COMMAND, "validate", str(root / "examples" / "01-local" / "job.yaml"))
    assert {"pydantic", "yaml"} <= loaded
    assert loaded & {"jinja2", "torch", "rich", "boto3"} == set()
    assert loaded & {f"hyperpod_ext.config.job.pods.{name}" for name in ("models", "values")} == set()


def test_templates_of_a_cluster_are_made_in_another_process(root: Path, tmp_path: Path) -> None:
    spec = root / "examples" / "10-cluster-eks" / "cluster.yaml"
    app = tmp_path / "app.py"
    app.write_text("raise SystemExit('here')\n")
    loaded = loaded_by(LOADED_BY_COMMAND, "cluster", "synth", "-f", str(spec), "--app", str(tmp_path))
    assert "hyperpod_ext.clusters.cdk.synth" in loaded
    assert loaded & {"aws_cdk", "jsii", "cfnlint", "torch", "boto3", "jinja2", "rich"} == set()


@pytest.mark.parametrize(
    "module", ["hyperpod_ext", "hyperpod_ext.runtime", "hyperpod_ext.runtime.data", "hyperpod_ext.errors"]
)
def test_importing_a_package_costs_nothing(module: str) -> None:
    loaded = loaded_by(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))")
    assert module in loaded
    assert loaded & (HEAVY | {"click"}) == set()


def test_the_estimator_helper_loads_neither_aws_nor_an_sdk() -> None:
    loaded = loaded_by(
        "import json, sys, hyperpod_ext.jobs.sagemaker.estimator; print(json.dumps(sorted(sys.modules)))"
    )
    assert loaded & {"boto3", "botocore", "sagemaker", "torch", "jinja2", "click", "rich"} == set()


def test_the_local_engine_starts_on_the_standard_library() -> None:
    engine = "hyperpod_ext.jobs.local.engine"
    loaded = loaded_by(f"import json, sys, {engine}; print(json.dumps(sorted(sys.modules)))")
    assert loaded & (HEAVY | {"click"}) == set()


def cpu_seconds(command: list[str]) -> float:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.measures
def test_a_full_spec_is_checked_in_a_third_of_a_second(root: Path) -> None:
    spec = root / "examples" / "04-hyperpod-eks" / "job.yaml"
    spent = min(cpu_seconds([HP_EXT, "validate", str(spec), "--target", "hyperpod-eks"]) for _ in range(7))
    floor = min(cpu_seconds([sys.executable, "-c", "import click, pydantic, yaml"]) for _ in range(7))
    print(f"hp-ext validate costs {spent:.2f} s of CPU, {spent / floor:.1f} times what it imports")
    assert spent <= max(0.35, 4 * floor)  # 0.22 on a quiet machine; a slow one takes longer for anything


@pytest.mark.measures
def test_help_costs_at_most_three_times_click() -> None:
    click, ours = [], []
    for _ in range(15):
        click.append(cpu_seconds([sys.executable, "-c", "import click"]))
        ours.append(cpu_seconds([HP_EXT, "--help"]))
    ratio = statistics.median(ours) / statistics.median(click)
    print(f"hp-ext --help costs {ratio:.2f} times `python -c 'import click'`")
    assert ratio <= 3


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
def test_checking_a_spec_for_a_cluster_loads_no_client_and_no_templates(root: Path, target: str) -> None:
    spec = root / "examples" / "06-kubeflow" / "job.yaml"
    loaded = loaded_by(LOADED_BY_COMMAND, "validate", str(spec), "--target", target)
    assert "hyperpod_ext.jobs.rules.machines" in loaded
    assert "hyperpod_ext.config.clusters.cluster" not in loaded  # two fifths of the time, for nothing
    assert loaded & {"jinja2", "torch", "rich", "boto3", "ssl", "kubernetes"} == set()

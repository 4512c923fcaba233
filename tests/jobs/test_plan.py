"""A plan is decided without network or disk, and refuses what its target cannot do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import ConfigError, HyperpodExtError, UnsupportedError
from hyperpod_ext.jobs.contract.capabilities import Capabilities, unsupported, unused
from hyperpod_ext.jobs.contract.render import check_shell, own_templates, render
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target
from hyperpod_ext.jobs.plan import make_plan

SHOW = """\
import json, os, sys
json.dump({"args": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}, sys.stdout)
"""


def job(**fields: object) -> JobConfig:
    return JobConfig.model_validate_json(json.dumps({"name": "a", "script": "train.py"} | fields))


def run_rendered(spec: JobConfig, folder: Path) -> dict[str, dict[str, str]]:
    """Run the rendered node.sh with an interpreter that only shows what it was given."""
    show = folder / "show.py"
    show.write_text(SHOW)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec python3 {show} "$@"\n')
    python.chmod(0o755)
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HPX_PYTHON": str(python),
        "HPX_SOURCE_DIR": str(folder),
        "HPX_NODE_RANK": "1",
        "HPX_RDZV_ENDPOINT": "127.0.0.1:2345",
    }
    script = make_plan(spec).files["node.sh"]
    done = subprocess.run(["sh", "-c", script], env=variables, capture_output=True, check=True)
    shown: dict[str, dict[str, str]] = json.loads(done.stdout)
    return shown


def test_what_is_rendered_for_the_example_is_what_the_repository_shows(
    golden: Callable[[Path, str], None], root: Path
) -> None:
    example = root / "examples" / "01-local"
    plan = make_plan(load(JobConfig, example / "job.yaml"), target="local", source_dir=example)
    for name, text in plan.files.items():
        golden(example / "rendered" / "local" / name, text)


def test_rendered_shell_starts_the_agent_with_settings_and_environment_intact(tmp_path: Path) -> None:
    nasty = 'it\'s "$HOME" `id` \\ two\nlines'
    spec = job(nodes=2, workers_per_node=3, args=["--text", nasty], env={"NASTY": nasty, "LD_X": ""})
    shown = run_rendered(spec, tmp_path)
    assert shown["args"] == [
        *("-m", "hyperpod_ext.runtime.agent", "--nnodes", "2", "--nproc-per-node", "3", "--node-rank", "1"),
        *("--rdzv-endpoint", "127.0.0.1:2345", "--", "train.py", "--text", nasty),
    ]
    assert shown["env"]["NASTY"] == nasty
    assert RuntimeConfig.model_validate_json(shown["env"]["HPX_RUNTIME"]) == RuntimeConfig.of(spec)
    assert shown["cwd"] == str(tmp_path)


TIERS = [
    {"kind": "memory"},
    {"kind": "peer"},
    {"kind": "s3", "uri": "s3://bucket/a"},
    {"kind": "file", "path": "/x"},
    {"kind": "disk", "path": "/nvme"},
]


def test_everything_a_target_cannot_do_is_refused_at_once() -> None:
    spec = job(nodes=3, checkpoint={"tiers": TIERS}, chaos={"faults": [{"rank": 0, "step": 1}]})
    problems = list(unsupported(spec, "islet", Capabilities(no_node_disk="its disks are read-only")))
    paths = [problem.path for problem in problems]
    assert paths == ["checkpoint.tiers.4", "chaos"]
    assert "target islet has no disk tier: its disks are read-only" in str(problems[0])
    assert all(problem.hint for problem in problems)


@pytest.mark.parametrize("target", TARGETS)
def test_tls_is_refused_where_nothing_would_speak_it(target: str) -> None:
    can = get_target(target).capabilities()
    told = [problem.path for problem in unsupported(job(network={"tls": True}), target, can)]
    assert told.count("network.tls") == ("network" not in can.reads)
    assert not any("network" in problem.path for problem in unsupported(job(network={"interface": "e"}), target, can))
    plain = job(network={"tls": True}, mode="plain")
    assert "network.tls" in [problem.path for problem in unsupported(plain, target, can)]


def test_a_laptop_has_every_tier() -> None:
    assert make_plan(job(nodes=3, checkpoint={"tiers": TIERS})).world_size == 3


def test_a_cluster_that_is_too_small_is_refused() -> None:
    cluster = ClusterConfig(
        name="c",
        region="us-west-2",
        instance_groups=(InstanceGroup(name="g", instance_type="ml.p5.48xlarge", count=3, spares=1),),
    )
    with pytest.raises(UnsupportedError) as caught:
        make_plan(job(nodes=3), cluster)
    assert [problem.path for problem in caught.value.problems] == ["nodes"]
    assert make_plan(job(nodes=2), cluster).world_size == 2


def test_an_image_on_a_laptop_is_a_warning_not_a_refusal() -> None:
    plan = make_plan(job(image="pytorch:2"))
    assert ["image is ignored" in warning for warning in plan.warnings] == [True]
    assert make_plan(job()).warnings == ()


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "hyperpod-eks"])
def test_rules_on_what_is_printed_are_followed_where_our_agent_runs_and_nowhere_else(target: str) -> None:
    rules = [{"name": "loss", "pattern": "loss", "every_s": 60}]

    def warned(mode: str) -> list[str]:
        asked = job(log_rules=rules, mode=mode)
        return [one for one in unused(asked, target, get_target(target).capabilities()) if "log_rules" in one]

    assert warned("ours") == []
    assert warned("plain") == [
        f"log_rules is ignored on {target} in mode plain: it needs this project's agent (mode ours)"
    ]
    assert RuntimeConfig.of(job(log_rules=rules)).log_rules[0].name == "loss"


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `local`"):
        get_target("locale")


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_module_has_all_functions_of_the_protocol(name: str) -> None:
    functions = ("capabilities", "render", "submit", "list_jobs", "status", "watch", "logs", "cancel", "result")
    assert all(callable(getattr(get_target(name), function)) for function in functions)


def test_a_name_that_a_template_does_not_get_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "node.sh.j2").write_text("echo {{ nobody }}\n")
    with own_templates(tmp_path), pytest.raises(ConfigError, match="'nobody' is undefined"):
        render("local/node.sh.j2")


def test_shell_that_does_not_parse_is_not_sent() -> None:
    check_shell("node.sh", "echo fine\n")
    with pytest.raises(HyperpodExtError, match=r"node\.sh is not valid shell"):
        check_shell("node.sh", "if true; then\n")


@pytest.mark.parametrize("target", ["hyperpod-eks", "kubeflow"])
def test_pods_mount_the_nodes_folder_for_a_tier_on_its_disk(target: str) -> None:
    def volumes(spec: JobConfig) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        text = make_plan(spec, target=target).files["job.yaml"]
        (pod,) = [pod for pod in pods_in(yaml.safe_load(text)) if pod["containers"]]
        return pod["volumes"], pod["containers"][0]["volumeMounts"]

    disk = {
        "image": "repo/train:1",
        "checkpoint": {"tiers": [{"kind": "memory"}, {"kind": "disk", "path": "/nvme/ck"}]},
    }
    source = {"path": "/nvme/ck", "type": "DirectoryOrCreate"}
    made, mounted = volumes(job(**disk))
    assert {"name": "hyperpod-ext-disk-0", "hostPath": source} in made
    assert {"name": "hyperpod-ext-disk-0", "mountPath": "/nvme/ck"} in mounted
    made, mounted = volumes(job(**disk, volumes=[{"kind": "host", "path": "/nvme", "host_path": "/mnt/k8s-disks/0"}]))
    assert [one["mountPath"] for one in mounted if str(one["mountPath"]).startswith("/nvme")] == ["/nvme"]


def pods_in(value: object) -> Iterator[dict[str, Any]]:
    """Every pod spec of a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods_in(inner)


def test_nodes_that_share_this_machine_have_disks_of_their_own() -> None:
    spec = job(nodes=2, checkpoint={"tiers": [{"kind": "memory"}, {"kind": "disk", "path": "/nvme/ck"}]})
    assert '"path":"/nvme/ck/node-{node}"' in make_plan(spec, target="local").files["node.sh"]
    assert "{node}" not in make_plan(spec, target="hyperpod-slurm").files["job.sbatch"]

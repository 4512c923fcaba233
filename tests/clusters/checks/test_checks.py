"""Wrong clusters, one error each; put right, none. The docs' table has every check."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import CASES, EKS, GROUP, LEAST, PLAN, ROLE, SLURM
from command import call_hp_ext

from hyperpod_ext.clusters.checks import all_checks, findings
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load

KEY = "arn:aws:kms:us-west-2:123456789012:key/0"
FSX = {"kind": "fsx-lustre", "dns_name": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com", "mount_name": "fsx"}
LIFECYCLE = {"source": "s3://sagemaker-a/b"}
SCRIPTED = {name: SLURM[name] for name in ("name", "region", "orchestrator", "execution_role")}

ONE_SUBNET = {"subnets": ["subnet-0"], "security_groups": ["sg-0"]}
ACCOUNT: dict[str, Any] = LEAST | {
    "vpc": ONE_SUBNET,
    "account": {
        "subnets": {
            "subnet-0": {"zone": "usw2-az2", "free_addresses": 2043},
            "subnet-1": {"zone": "usw2-az3", "free_addresses": 2043},
        },
        "training_plans": {PLAN: {"instance_type": "ml.p5.48xlarge", "zone": "usw2-az2", "count": 4}},
        "file_systems": {"fs-0123456789abcdef0": "usw2-az2"},
        "quotas": {"ml.p5.48xlarge": {"machines": 64, "code": "L-0123ABCD"}},
    },
}
P5EN = {"instance_groups": [GROUP | {"instance_type": "ml.p5en.48xlarge"}]}
PLANNED = ACCOUNT | {"instance_groups": [GROUP | {"training_plan": PLAN}]}

PATCHED = GROUP | {"auto_patch": {"strategy": "DrainFirst", "rollout": {"batch": {"nodes": 1}}}}
ELSEWHERE = LEAST | {"orchestrator": "slurm", "eks_cluster_arn": None}
ELSEWHERE |= {"instance_groups": [GROUP | {"slurm": {"node_type": "Controller"}, "count": 1}]}
WRONG: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "a type of other regions": (
        "HPX201",
        "instance_groups.0.instance_type",
        "ml.p6-b300.48xlarge",
        LEAST | {"region": "sa-east-1", "eks_cluster_arn": LEAST["eks_cluster_arn"].replace("us-west-2", "sa-east-1")},
    ),
    "GovCloud": ("HPX222", "region", "us-gov-west-1", ELSEWHERE),
    "China": ("HPX222", "region", "cn-north-1", ELSEWHERE),
    "a key of another region": (
        "HPX202",
        "instance_groups.0.storage.0.kms_key",
        KEY.replace("west", "east"),
        LEAST | {"instance_groups": [GROUP | {"storage": [{"kind": "ebs", "size_gib": 500, "kms_key": KEY}]}]},
    ),
    "a file system of another region": (
        "HPX202",
        "instance_groups.0.storage.0.dns_name",
        FSX["dns_name"].replace("west", "east"),
        LEAST | {"instance_groups": [GROUP | {"storage": [FSX]}]},
    ),
    "EKS of another region": ("HPX202", "eks_cluster_arn", LEAST["eks_cluster_arn"].replace("west", "east"), LEAST),
    "a plan of another region": (
        "HPX202",
        "instance_groups.0.training_plan",
        PLAN.replace("west", "east"),
        LEAST | {"instance_groups": [GROUP | {"training_plan": PLAN}]},
    ),
    "a secret of another region": (
        "HPX202",
        "slurm.accounting.secret_arn",
        SLURM["slurm"]["accounting"]["secret_arn"].replace("west", "east"),
        SLURM,
    ),
    "a plan for a type without plans": (
        "HPX203",
        "instance_groups.0.instance_type",
        "ml.g5.48xlarge",
        LEAST | {"instance_groups": [GROUP | {"training_plan": PLAN}]},
    ),
    "a plan for two types": (
        "HPX204",
        "instance_groups.1.instance_type",
        "ml.p5e.48xlarge",
        LEAST | {"instance_groups": [GROUP | {"training_plan": PLAN}, GROUP | {"name": "b", "training_plan": PLAN}]},
    ),
    "neither scripts nor parts": (
        "HPX205",
        "instance_groups.1.lifecycle",
        None,
        SCRIPTED
        | {"instance_groups": [GROUP | {"name": name, "lifecycle": LIFECYCLE} for name in ("head", "workers")]},
    ),
    "a long name of a role": ("HPX206", "execution_role", ROLE + "d" * 60, LEAST),
    "all memory": ("HPX207", "tiered_storage.memory_percent", 100, LEAST | {"tiered_storage": {"memory_percent": 20}}),
    "no script in the folder": (
        "HPX208",
        "account.lifecycle_files",
        ["s3://sagemaker-a/b/other.sh"],
        SCRIPTED
        | {
            "account": {"lifecycle_files": ["s3://sagemaker-a/b/on_create.sh"]},
            "instance_groups": [GROUP | {"name": "head", "lifecycle": LIFECYCLE}],
        },
    ),
    "an old Kubernetes": ("HPX209", "account.eks_version", "1.27", LEAST | {"account": {"eks_version": "1.34"}}),
    "too few addresses": (
        "HPX211",
        "account.subnets.subnet-0.free_addresses",
        251,
        ACCOUNT | {"instance_groups": [GROUP | {"count": 16}]},
    ),
    "a zone without the machines": ("HPX212", "account.subnets.subnet-0.zone", "usw2-az1", ACCOUNT | P5EN),
    "EFA over zones": ("HPX213", "vpc.subnets", ["subnet-0", "subnet-1"], ACCOUNT),
    "other zones for a group": (
        "HPX213",
        "instance_groups.0.vpc.subnets",
        ["subnet-0", "subnet-1"],
        ACCOUNT | {"instance_groups": [GROUP | {"vpc": ONE_SUBNET}]},
    ),
    "a plan of another type": ("HPX214", "instance_groups.0.instance_type", "ml.p5en.48xlarge", PLANNED),
    "a plan in another zone": ("HPX214", "account.subnets.subnet-0.zone", "usw2-az1", PLANNED),
    "a plan of fewer": ("HPX214", "instance_groups.0.count", 5, PLANNED),
    "EFA of machines without": (
        "HPX217",
        "instance_groups.0.instance_type",
        "ml.g5.xlarge",
        LEAST | {"instance_groups": [GROUP | {"network_interface": "efa"}]},
    ),
    "a path taken twice": (
        "HPX218",
        "instance_groups.0.storage.1.path",
        "/fsx/",
        LEAST | {"instance_groups": [GROUP | {"storage": [FSX | {"path": "/fsx"}, FSX | {"path": "/data"}]}]},
    ),
    "spares alone": (
        "HPX219",
        "instance_groups.0.spares",
        4,
        LEAST | {"instance_groups": [GROUP | {"spares": 1}]},
    ),
    "a file system elsewhere": (
        "HPX215",
        "account.file_systems.fs-0123456789abcdef0",
        "usw2-az1",
        ACCOUNT | {"instance_groups": [GROUP | {"storage": [FSX]}]},
    ),
}
"""What is wrong: the check, the field that makes it so, the wrong value, and the cluster that is right."""


def with_value(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(spec)
    at: Any = changed
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name) if name.isdigit() else name]
    at[int(last) if last.isdigit() else last] = value
    return changed


def config(spec: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig.model_validate_json(json.dumps(spec))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cluster_has_one_error_with_file_and_line_and_none_once_put_right(name: str, tmp_path: Path) -> None:
    check, path, value, right = WRONG[name]
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(with_value(right, path, value), indent=1))
    told = call_hp_ext("cluster", "create", "-f", str(file), "--dry-run", "-o", "json")
    assert told.code == 3
    (problem,) = told.json["error"]["problems"]
    assert (problem["rule"], problem["source"]) == (check, str(file))
    *_, field = problem["path"].split(".")
    assert field.isdigit() or field == "subnets" or f'"{field}"' in file.read_text().splitlines()[problem["line"] - 1]
    assert problem["hint"]
    ignored = call_hp_ext("cluster", "create", "-f", str(file), "--dry-run", "-o", "json", "--ignore", check)
    assert ignored.code == 0
    file.write_text(json.dumps(right, indent=1))
    assert call_hp_ext("cluster", "create", "-f", str(file), "--dry-run", "-o", "json").code == 0


def test_every_error_is_shown_by_a_wrong_cluster() -> None:
    errors = {one.id for one in all_checks().values() if one.severity == "error"}
    assert errors == {check for check, *_ in WRONG.values()}


@pytest.mark.parametrize("name", CASES)
def test_right_clusters_have_neither_errors_nor_warnings(name: str) -> None:
    assert [*both(config(CASES[name]))] == []


def test_examples_have_neither_errors_nor_warnings(root: Path) -> None:
    files = sorted((root / "examples").glob("*/cluster.yaml"))
    assert len(files) >= 4
    assert {str(file): [*both(load(ClusterConfig, file))] for file in files} == {str(file): [] for file in files}


def test_an_unknown_region_has_no_findings_about_types() -> None:
    assert [*findings(config(EKS | {"region": "xx-west-9"}), "error", ["HPX202"])] == []


def test_a_cluster_may_have_restricted_groups_alone_but_not_no_groups(tmp_path: Path) -> None:
    alone = {name: value for name, value in LEAST.items() if name != "instance_groups"}
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(alone | {"restricted_groups": [GROUP]}))
    done = call_hp_ext("cluster", "create", "-f", str(file), "--dry-run", "-o", "json")
    assert (done.code, "InstanceGroups" in done.json["request"]) == (0, False)
    file.write_text(json.dumps(alone))
    refused = call_hp_ext("cluster", "create", "-f", str(file), "--dry-run")
    assert (refused.code, "at least one group" in refused.stderr) == (3, True)


def test_a_quota_is_a_warning_with_its_code() -> None:
    assert [*both(config(ACCOUNT))] == []
    (told,) = findings(config(with_value(ACCOUNT, "instance_groups.0.count", 80)), "warning", ())
    assert (told.rule, told.path) == ("HPX216", "instance_groups.0.count")
    assert "L-0123ABCD" in told.message


@pytest.mark.parametrize(
    ("check", "path", "wrong", "right"),
    [
        ("HPX220", "instance_groups.0.instance_type", "ml.g5.xlarge", SLURM),
        ("HPX223", "instance_groups.0.auto_patch.idle_s", 3600, LEAST | {"instance_groups": [PATCHED]}),
        ("HPX230", "instance_groups.0.instance_type", "ml.p6e-gb200.36xlarge", LEAST),
        (
            "HPX221",
            "instance_groups.0.other_types.0",
            "ml.g5.xlarge",
            LEAST | {"instance_groups": [GROUP | {"other_types": ["ml.p5e.48xlarge"]}]},
        ),
    ],
)
def test_what_stands_idle_is_a_warning(check: str, path: str, wrong: Any, right: dict[str, Any]) -> None:
    assert [*both(config(right))] == []
    (told,) = both(config(with_value(right, path, wrong)))
    assert (told.rule, told.path) == (check, path)


def made(**fields: Any) -> ClusterConfig:
    spec = {"name": "lab", "region": "us-west-2", "instance_groups": [GROUP | {"count": 12}]}
    return config(spec | {"infrastructure": fields})


def test_a_new_network_is_checked_by_its_range_and_zones() -> None:
    zones = ["usw2-az2", "usw2-az1"]
    assert [*both(made(network={"zones": zones, "cidr": "10.0.0.0/20"}))] == []
    small = made(network={"zones": zones, "cidr": "10.0.0.0/20"}).model_dump(mode="json")
    (told,) = findings(config(with_value(small, "instance_groups.0.count", 13)), "error")
    assert (told.rule, told.path) == ("HPX211", "instance_groups.0.count")
    assert told.hint.startswith("write at most 12, or use a larger infrastructure.network.cidr")
    apart = {"zones": zones, "group_zones": {"workers": "usw2-az1"}}
    assert [*both(made(network=apart))] == []
    assert [*both(made(network=apart, file_system={}))] == []
    mounted = made(network=apart, file_system={}).model_copy(update={"orchestrator": "slurm"})
    (far,) = findings(mounted, "error", ["HPX205"])
    assert (far.rule, far.path) == ("HPX215", "infrastructure.network.group_zones.workers")


def test_a_misspelt_check_is_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(json.dumps(LEAST))
    done = call_hp_ext("cluster", "create", "-f", "cluster.yaml", "--dry-run", "--ignore", "HPX2001", cwd=tmp_path)
    assert (done.code, "did you mean `HPX201`?" in done.stderr) == (2, True)


def test_the_page_has_a_row_for_every_check(root: Path) -> None:
    page = (root / "docs" / "clusters.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| HPX2")]
    assert rows == [f"| {one.id} | {one.severity} | {one.title} |" for one in all_checks().values()]


def both(cluster: ClusterConfig) -> Iterator[Any]:
    yield from findings(cluster, "error")
    yield from findings(cluster, "warning")

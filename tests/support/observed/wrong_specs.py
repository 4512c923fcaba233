"""Specs of jobs and clusters with one mistake each: tables of the tests, and what these lack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import clusters
import yaml

from observed.case import Case, parameters, short, spec_case, table_of
from observed.pool import Document, text_of

LEAST: Document = {"name": "a", "script": "train.py"}
POD: Document = LEAST | {"image": "repo/train:1"}
ON_SAGEMAKER: Document = POD | {
    "sagemaker": {"role": "arn:aws:iam::123456789012:role/train", "output": "s3://bucket/out"},
    "resources": {"instance_type": "ml.p5.48xlarge"},
    "mode": "plain",
}
_PEER, _MEMORY = {"kind": "peer"}, {"kind": "memory"}


def _tiers(*tiers: Document) -> Document:
    return {"checkpoint": {"tiers": list(tiers)}}


CHECKS: list[Document] = [
    {"script": "train.sh"},
    {"script": "../train.py"},
    {"script": "trian.py"},
    {"command": ["sleep", "1"]},
    {"script": None, "command": ["sleep", "1"], "args": ["x"], "mode": "plain"},
    {"script": None, "command": ["sleep", "1"]},
    {"nodes": 2, "workers_per_node": 2, "global_batch_size": 15},
    {
        "nodes": 4,
        "global_batch_size": 12,
        "elastic": {"min_nodes": 2, "max_nodes": 8, "batch": {"micro_batch_size": 5}},
    },
    _tiers(_MEMORY, _PEER, _MEMORY) | {"nodes": 2},
    _tiers(_PEER) | {"nodes": 1},
    _tiers(_PEER | {"replicas": 3}) | {"nodes": 2},
    _tiers(_PEER | {"parity": 4}) | {"nodes": 2},
    _tiers(_PEER | {"parity": 4}) | {"nodes": 3},
    _tiers(_PEER | {"parity": 3}) | {"nodes": 4, "elastic": {"min_nodes": 3, "max_nodes": 8}},
    _tiers(_PEER | {"parity": 3, "replicas": 2}) | {"nodes": 4},
    _tiers(_PEER | {"parity": 3, "transport": "nixl"}) | {"nodes": 4},
    _tiers(_PEER | {"transport": "nixl"}) | {"nodes": 4, "network": {"tls": True}},
    {"nodes": 2, "restart": {"samples": "fewer"}},
    {"nodes": 4, "mode": "plain", "restart": {"policy": "continue"}},
    {"nodes": 4, "elastic": {"min_nodes": 1, "max_nodes": 8}, "restart": {"policy": "continue"}},
    {"nodes": 4, "parallelism": {"tensor": 2}, "restart": {"policy": "continue"}},
    {"nodes": 1, "restart": {"policy": "continue"}},
    _tiers(_PEER | {"parity": 3}) | {"nodes": 4, "restart": {"policy": "continue"}},
    {"mode": "plain", "compat": "aws"},
    {"nodes": 2, "chaos": {"faults": [{"rank": 5, "step": 1}]}},
    {"nodes": 2, "chaos": {"faults": [{"node": 5, "step": 1}]}},
    {"nodes": 2, "chaos": {"faults": [{"node": 1, "rank": 1, "step": 1}]}},
    {"nodes": 2, "chaos": {"faults": [{"step": 1}]}},
    {"env": {"HPX_PORT_BASE": "80"}},
    {"env": {"HPX_HYPERPODRUN_MODE": "inprocess"}},
    {"env": {"HPX_SOCKET_DIR": "sockets"}},
    {"env": {"HPX_RUNTIME": "x"}},
    {"elastic": {"min_nodes": 1, "max_nodes": 4, "step": 1, "sizes": [1, 2]}},
    _tiers({"kind": "file", "path": "/x", "every_steps": 5, "every_seconds": 3}),
    {"name": "Tiny GPT"},
]
"""Fields that make a job wrong on a laptop."""

TARGETS: list[tuple[str, Document]] = [
    ("kubeflow", {"spares": 1}),
    ("sagemaker", {"spares": 1}),
    ("sagemaker", {"elastic": {"min_nodes": 1, "max_nodes": 2}}),
    ("kubeflow", {"mode": "aws-checkpointless"}),
    ("kubeflow", {"script": None, "command": ["sleep", "1"], "mode": "plain"}),
    ("sagemaker", {"script": None, "command": ["sleep", "1"], "mode": "plain"}),
    ("hyperpod-eks", {"chaos": {"faults": [{"rank": 0, "step": 1}]}}),
    ("hyperpod-eks", {"chaos": {"faults": [{"rank": 0, "step": 1}], "on_clusters": True}}),
    ("hyperpod-eks", {"mode": "plain", "chaos": {"faults": [{"rank": 0, "step": 1}], "on_clusters": True}}),
    ("hyperpod-eks", {"mode": "run"}),
    ("hyperpod-eks", {"compat": "aws"}),
    ("hyperpod-eks", {"nodes": 2, "restart": {"policy": "continue"}}),
    ("hyperpod-eks", {"nodes": 3} | _tiers(_PEER | {"parity": 3})),
    ("hyperpod-eks", {"mode": "plain", "kubernetes": {"launcher": "ours"}}),
    ("hyperpod-eks", {"network": {"tls": True}, "mode": "plain"}),
    ("hyperpod-eks", {"network": {"tls": True}}),
    ("hyperpod-eks", {"kubernetes": {"operator_addresses": ["10.0.0.1"]}}),
    ("hyperpod-eks", {"kubernetes": {"launcher": "ours"}, "rendezvous": {"port": 8080}}),
    ("sagemaker", _tiers({"kind": "disk", "path": "/tmp/ck"})),
    ("kubeflow", {"nodes": 2, "network": {"tls": True}, "mode": "plain"}),
]

_ELASTIC: Document = {"elastic": {"min_nodes": 2, "max_nodes": 4}, "nodes": 2}
_CLUSTER: Document = clusters.LEAST | {"name": "c"}
_SPOT = _CLUSTER | {"instance_groups": [clusters.GROUP | {"capacity": "spot"}]}
_OF_CLUSTERS: list[tuple[str, Document, Document, str]] = [
    ("HPX108", _ELASTIC | {"mode": "plain"}, _CLUSTER | {"auto_scaling": {}}, "hyperpod-eks"),
    ("HPX119", {"resources": {"instance_type": "ml.p4d.24xlarge"}}, _CLUSTER, "hyperpod-eks"),
    ("HPX119", {"resources": {"instance_type": "ml.p5.48xlarge"}, "nodes": 5}, _CLUSTER, "hyperpod-eks"),
    ("HPX120", _ELASTIC | {"mode": "plain"}, _SPOT, "hyperpod-eks"),
    ("HPX121", {"mode": "aws-managed-tier"}, _CLUSTER, "hyperpod-eks"),
    (
        "HPX122",
        {"resources": {"instance_type": "ml.p5.48xlarge", "memory_mib": 1700 * 1024}},
        _CLUSTER | {"tiered_storage": {"enabled": True, "memory_percent": 20}},
        "hyperpod-eks",
    ),
    ("HPX123", {}, _CLUSTER, "hyperpod-slurm"),
    ("HPX126", {"mode": "aws-checkpointless", "nodes": 2}, _CLUSTER | {"node_recovery": "None"}, "hyperpod-eks"),
    ("HPX133", {"image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/a:1"}, _CLUSTER, "hyperpod-eks"),
]
"""Rules that compare a job with a cluster: rule, fields of the job, cluster, target."""

_WITHOUT: list[tuple[str, Document, str]] = [
    ("HPX102", _ELASTIC, "kubeflow"),
    ("HPX109", _ELASTIC | {"mode": "plain", "kubernetes": {"kubeflow_api": "trainjob"}}, "kubeflow"),
    ("HPX110", {"node_groups": [{"name": "g", "nodes": 1}]}, "kubeflow"),
    ("HPX153", {"relaunch": {"max_times": 2}, "kubernetes": {"namespace": "team"}}, "kubeflow"),
    ("HPX154", {"kubernetes": {"kubeflow_api": "trainjob", "host_network": True}}, "kubeflow"),
    ("HPX175", {"log_rules": [{"name": "a", "pattern": "b", "fault_on_match": True}]}, "hyperpod-eks"),
]
"""Further rules: rule, fields, target."""
_SCRIPTS: list[tuple[str, str, Document]] = [
    ("HPX176", "import lightning\n\ntrainer = lightning.Trainer()\n", {}),
    ("HPX177", "import nvidia_resiliency_ext.inprocess\n", {}),
]
"""Scripts that rules warn of."""


def job_cases() -> Iterator[Case]:
    """Specs of jobs: values, checks of several fields, rules, targets, overlays."""
    return chain(_values(), _checks(), _rules(), _rules_of_clusters(), _targets(), _overlays())


def _values() -> Iterator[Case]:
    table = parameters("config/test_load.py", "test_a_mistake_is_explained_with_what_to_write_instead")
    good = "name: a\nscript: train.py\n"
    texts = [*(f"{good}{line}\n" for line, *_ in table), "# nothing yet\n", "- a\n", "just words\n"]
    texts += [f"{good}args: [1, 2\n", f"{good}a: b: c\n", f"{good}env:\n\tA: b\n", f"{good}---\nname: b\n"]
    texts += [f"{good}nodes: 1\nnodes: 2\n", "name: \x07\n", f"{good}a: " + "[" * 2000 + "\n"]
    for text in texts:
        how = short(text.removeprefix(good).replace("\t", "TAB"))
        yield Case("Job spec", how, ("validate", "job.yaml"), {"job.yaml": text, "train.py": ""})


def _checks() -> Iterator[Case]:
    for fields in CHECKS:
        yield spec_case("Job spec", short(fields), _merged(LEAST, fields), "local")


def _rules() -> Iterator[Case]:
    for rule, wrong, _right, _path in table_of("jobs/rules/test_rules.py").CASES:
        yield spec_case("Rules for jobs", f"{rule} {short(wrong)}", _merged(POD, wrong), "hyperpod-eks")
    for rule, wrong, target in _WITHOUT:
        yield spec_case("Rules for jobs", f"{rule} {short(wrong)}, target {target}", POD | wrong, target)
    for rule, text, fields in _SCRIPTS:
        spec = {"spec.yaml": text_of(LEAST | fields), "train.py": text}
        how = f"{rule} {short(text)}"
        yield Case("Rules for jobs", how, ("validate", "spec.yaml", "--target", "local"), spec)


def _rules_of_clusters() -> Iterator[Case]:
    for rule, wrong, cluster, target in _OF_CLUSTERS:
        files = {"spec.yaml": text_of(POD | wrong), "cluster.yaml": text_of(cluster), "train.py": ""}
        words = ("validate", "spec.yaml", "--target", target, "--cluster", "cluster.yaml")
        yield Case("Rules for jobs", f"{rule} {short(wrong)}, with a cluster, target {target}", words, files)


def _targets() -> Iterator[Case]:
    for target, fields in TARGETS:
        base = ON_SAGEMAKER | {"mode": "ours"} if target == "sagemaker" else POD
        yield spec_case("Targets", f"{target} {short(fields)}", _merged(base, fields), target)
    ours = ON_SAGEMAKER | {"mode": "ours"}
    for _path, fields in table_of("jobs/sagemaker/test_sagemaker_request.py").REFUSED.values():
        yield spec_case("Targets", f"sagemaker {short(fields)}", _merged(ours, fields), "sagemaker")
    for fields in table_of("jobs/slurm/test_slurm_script.py").REFUSED.values():
        yield spec_case("Targets", f"hyperpod-slurm {short(fields)}", LEAST | fields, "hyperpod-slurm")


def _overlays() -> Iterator[Case]:
    base = POD | {"nodes": 2, "working_dir": "/app"}
    test = "test_what_would_break_a_job_is_refused_where_it_is_written"
    for line, *_ in parameters("jobs/kubernetes/test_overlay.py", test):
        overlay = {"overlay": {"kubernetes": yaml.safe_load(line)}}
        yield spec_case("Overlays", f"kubernetes: {short(line)}", base | overlay, "hyperpod-eks")
    test = "test_what_would_break_the_job_is_refused_with_line_and_path"
    for line, _path in parameters("jobs/slurm/test_slurm_overlay.py", test):
        overlay = {"overlay": {"slurm": yaml.safe_load(line)}}
        yield spec_case("Overlays", f"slurm: {short(line)}", LEAST | overlay, "hyperpod-slurm")
    test = "test_what_would_break_the_job_or_is_no_member_is_refused_at_its_path"
    for request, _path in parameters("jobs/sagemaker/test_sagemaker_overlay.py", test):
        overlay = {"overlay": {"sagemaker": {"request": request}}}
        yield spec_case("Overlays", f"sagemaker: {short(request)}", ON_SAGEMAKER | overlay, "sagemaker")


def cluster_cases() -> Iterator[Case]:
    """Specs of clusters."""
    create = ("cluster", "create", "-f", "cluster.yaml", "--dry-run")
    for name, (check, path, value, right) in table_of("clusters/checks/test_checks.py").WRONG.items():
        wrong = table_of("clusters/checks/test_checks.py").with_value(right, path, value)
        yield Case("Clusters", f"{check} {name}", create, {"cluster.yaml": text_of(wrong)})
    for name, (_path, cluster) in table_of("clusters/test_clusters.py").WRONG.items():
        yield Case("Clusters", name, create, {"cluster.yaml": _text_of_model(cluster)})
    for name, (_path, cluster) in table_of("clusters/test_deployments.py").WRONG.items():
        words = ("cluster", "synth", "-f", "cluster.yaml")
        yield Case("Deployment of clusters", name, words, {"cluster.yaml": _text_of_model(cluster)})


def _text_of_model(cluster: Any) -> str:
    return text_of(json.loads(cluster.model_dump_json(exclude_unset=True)))


def _merged(base: Document, fields: Document) -> Document:
    """The base with other fields; {} empties a section, None removes a field."""
    found = dict(base)
    for name, value in fields.items():
        both = isinstance(found.get(name), dict) and isinstance(value, dict) and value
        found[name] = _merged(found[name], value) if both else value
    return {name: value for name, value in found.items() if value is not None or name not in base}

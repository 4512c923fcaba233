"""Any JobConfig: strategies for hypothesis. What they draw is valid field by field; rules may still refuse it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from hyperpod_ext.config.job.job import JobConfig

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NASTY = st.sampled_from(
    [
        "",
        " ",
        "y",
        "no",
        "null",
        "~",
        "1e3",
        "1.",
        "+1",
        "0o17",
        "0x1f",
        "1:30",
        "2026-11-21",
        ".5",
        "- a",
        "a: b",
        "#",
        "# spec: {}",
        "\u2028# spec: {}",
        "=",
        "<<",
        "$(A)",
        "$$(A)",
        "$$$",
        "'",
        '"',
        "`id`",
        "\\",
        "two\nlines",
        "tail\n",
        "\ttab",
        "{{ x }}",
        "{% if %}",
        "%",
        "&a",
        "*a",
        "!tag",
        "ünï☃",
        "🙂",
    ]
)
ANY_TEXT = NASTY | TEXT
LABEL = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
KEY = st.from_regex(r"([a-z]{1,5}\.[a-z]{2,3}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?", fullmatch=True)
VALUE = st.from_regex(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?)?", fullmatch=True) | st.sampled_from(
    ["y", "1e3", "null"]
)
ENV = st.from_regex(r"[A-GI-Z_][A-Z0-9_]{0,8}", fullmatch=True)
PATH = st.from_regex(r"/[a-z]{1,6}(/[a-z .]{1,5}[a-z])?", fullmatch=True)
COUNT = st.integers(1, 10_000)
INSTANCES = st.sampled_from(["ml.p5.48xlarge", "ml.p4d.24xlarge", "ml.g5.xlarge", "ml.trn1.32xlarge", "ml.c5.4xlarge"])


def fields(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


VOLUMES = st.one_of(
    fields({"kind": st.just("claim"), "path": PATH, "claim": LABEL}, {"sub_path": LABEL, "read_only": st.booleans()}),
    fields({"kind": st.just("host"), "path": PATH, "host_path": PATH}, {"read_only": st.booleans()}),
    fields({"kind": st.just("scratch"), "path": PATH}, {"size_mib": st.integers(1, 64), "in_memory": st.booleans()}),
    fields({"kind": st.just("config"), "path": PATH, "config_map": LABEL}, {}),
    fields({"kind": st.just("secret"), "path": PATH, "secret": LABEL}, {}),
)
EFFECT = st.sampled_from(["NoSchedule", "PreferNoSchedule", "NoExecute"])
TOLERATIONS = st.one_of(
    fields({}, {"key": KEY, "effect": EFFECT}),
    fields({"key": KEY, "operator": st.just("Equal"), "value": VALUE}, {"effect": EFFECT}),
    fields({"effect": st.just("NoExecute"), "seconds": COUNT}, {}),
)
LOG_RULES = st.one_of(
    fields(
        {"name": LABEL, "pattern": st.sampled_from([".*", "loss: (.*)", "(?i)x'\"$(A)"]), "every_s": COUNT},
        {"fault_on_match": st.booleans()},
    ),
    fields(
        {
            "name": LABEL,
            "pattern": st.just("(.*)"),
            "threshold": st.floats(-9, 9),
            "operator": st.sampled_from(["gt", "eq"]),
        },
        {"data_points": COUNT},
    ),
)
TIERS = st.sampled_from(
    [
        [],
        [{"kind": "memory"}],
        [{"kind": "memory", "every_steps": 2}, {"kind": "file", "path": "/fsx/'$(A)"}],
        [{"kind": "memory"}, {"kind": "s3", "uri": "s3://bucket/a b", "every_seconds": 60.0}],
    ]
)
SCHEDULING = fields(
    {"queue": LABEL},
    {
        "priority": LABEL,
        "pod_priority_class": LABEL,
        "topology": fields({"level": st.just("topology.k8s.aws/network-node-layer-3")}, {"required": st.booleans()}),
        "tolerations": st.lists(TOLERATIONS, max_size=2),
        "node_selector": st.dictionaries(KEY, VALUE, max_size=2),
        "healthy_only": st.booleans(),
        "spread": st.booleans(),
    },
)
KUBERNETES = fields(
    {},
    {
        "namespace": LABEL,
        "kubeflow_api": st.sampled_from(["pytorchjob", "trainjob"]),
        "service_account": LABEL,
        "secret_env": st.lists(fields({"name": ENV, "secret": LABEL, "key": LABEL}, {}), max_size=1),
        "pull_policy": st.sampled_from(["Always", "IfNotPresent"]),
        "pull_secrets": st.lists(LABEL, max_size=2),
        "job_secret": LABEL,
        "privileged": st.booleans(),
        "host_network": st.booleans(),
        "network_policy": st.booleans(),
        "clean_pods": st.sampled_from(["all", "completed", "none"]),
        "suspend": st.booleans(),
        "termination_grace_s": st.integers(30, 600),
    },
)
RESOURCES = fields(
    {}, {"instance_type": INSTANCES, "efa": st.just(1), "cpus": st.floats(0.1, 2), "memory_mib": st.integers(64, 999)}
)
TIMEOUTS = fields(
    {},
    {"run_s": st.integers(1000, 9999), "start_s": st.integers(1, 999), "fault_s": st.integers(1, 999), "keep_s": COUNT},
)
RELAUNCH = fields(
    {}, {"max_times": st.integers(1, 9), "window_s": COUNT, "avoid_nodes": COUNT, "scale_up_pause_s": COUNT}
)
OVERLAY = fields(
    {},
    {
        "kubernetes": fields(
            {},
            {
                "container": fields(
                    {"env": st.lists(fields({"name": st.just("OVER"), "value": ANY_TEXT}, {}), max_size=1)}, {}
                )
            },
        ),
        "slurm": fields(
            {},
            {
                "srun": st.sampled_from([{}, {"mpi": "pmix"}, {"label": "", "mem-bind": "a b"}]),
                "sbatch": st.sampled_from([[], ["licenses=fem:4", 'wckey="two words"']]),
                "before": st.sampled_from([[], ["true '1e3' # spec: {}", "false || true"]]),
            },
        ),
    },
)

ALL: dict[str, Any] = {
    "overlay": OVERLAY,
    "rendezvous": fields({}, {"port": st.integers(1024, 65535)}),
    "restart": fields(
        {}, {"max_restarts": st.integers(0, 9), "lease_s": st.floats(1, 9), "warm_spares": st.booleans()}
    ),
    "network": fields({}, {"interface": st.sampled_from(["ens5", "1e3"]), "tls": st.booleans()}),
    "args": st.lists(ANY_TEXT, max_size=3),
    "env": st.dictionaries(ENV, ANY_TEXT, max_size=3),
    "working_dir": PATH,
    "mode": st.sampled_from(["ours", "plain", "aws-managed-tier", "aws-checkpointless"]),
    "workers_per_node": st.integers(1, 8),
    "spares": st.integers(0, 2),
    "seed": st.integers(0, 99),
    "shared_memory_mib": st.integers(1, 64),
    "resources": RESOURCES,
    "libraries": fields({}, {"ofi_nccl": st.sampled_from(["1.5", "1.6.0", "1.16.0"])}),
    "scheduling": SCHEDULING,
    "volumes": st.lists(VOLUMES, max_size=2, unique_by=lambda one: one["path"]),
    "checkpoint": fields({"tiers": TIERS}, {"when_busy": st.sampled_from(["wait", "skip"])}),
    "relaunch": RELAUNCH,
    "timeouts": TIMEOUTS,
    "log_rules": st.lists(LOG_RULES, max_size=2, unique_by=lambda one: one["name"]),
    "labels": st.dictionaries(KEY, VALUE, max_size=2),
    "annotations": st.dictionaries(KEY, ANY_TEXT, max_size=2),
    "kubernetes": KUBERNETES,
}


@st.composite
def jobs(draw: st.DrawFn) -> JobConfig:
    """Any job; elastic ones and ones with groups of nodes among them."""
    required = {"name": LABEL, "script": st.sampled_from(["train.py", "a b/it's.py"]), "image": st.just("repo/train:1")}
    document = draw(fields(required, ALL))
    document["nodes"] = nodes = draw(st.integers(1, 9))
    if draw(st.integers(0, 4)) == 0:
        document["elastic"] = {
            "min_nodes": 1,
            "max_nodes": nodes + 1,
            "scaling_timeout_s": 60,
            "graceful_shutdown_s": 9,
        }
        document["mode"] = "plain"
    if draw(st.integers(0, 4)) == 0:
        most = nodes + 1 if "elastic" in document else None
        document["node_groups"] = [{"name": "g", "nodes": nodes, "max_nodes": most, "pod_priority_class": draw(LABEL)}]
    tiers = document.get("checkpoint", {}).get("tiers", [])
    if any(tier["kind"] == "file" for tier in tiers):  # what pods see under this path outlives them
        shared = {"kind": "host", "path": "/fsx", "host_path": "/fsx"}
        document["volumes"] = [*document.get("volumes", []), shared]
    return JobConfig.model_validate_json(json.dumps(document))
